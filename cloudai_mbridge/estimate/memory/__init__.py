"""Memory of every pipeline stage, before any GPU second is spent: named terms in bytes that add up.

Read in this order: `layout` and `arguments` (the request), `linears` and `parameters` (who holds which layers; exact),
`activations` (`saved_fused`, `saved_torch`), `estimate` (the answer).
"""
