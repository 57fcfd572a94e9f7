"""Modules that CUDA graphs capture: 0.18 renamed the field, and made full-iteration graphs an implementation.

The old names are taken in every release.
"""

from dataclasses import fields
from typing import Any

from megatron.core.transformer import TransformerConfig

_OLD, _NEW = "cuda_graph_scope", "cuda_graph_modules"
FULL_ITERATION = "full_iteration"
_SWITCHES = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
HAS_NEW_NAMES = any(field.name == _NEW for field in fields(TransformerConfig))
# Name of the field in the installed release
FIELD = _NEW if HAS_NEW_NAMES else _OLD


def captured(model: Any) -> set[str]:
    """Return the names of captured modules, under either name of the field; empty: whole layers."""
    return names_in(getattr(model, _NEW, None)) | names_in(getattr(model, _OLD, None))


def names_in(value: Any) -> set[str]:
    """Return the names in None, "attn,moe", Megatron-Core's enums, or a list of either; "full" is the whole layer."""
    if isinstance(value, str):
        value = value.split(",")
    elif not isinstance(value, list | tuple | set):
        value = [] if value is None else [value]
    return {str(getattr(item, "name", item)).strip().rpartition(".")[2] for item in value}


def captures_full_iteration(model: Any) -> bool:
    """Return whether one graph holds the whole iteration, under the names of any release."""
    implementation = getattr(model, "cuda_graph_impl", None)
    return implementation == FULL_ITERATION or (implementation == "local" and FULL_ITERATION in captured(model))


def implementation(model: Any) -> str:
    """Return the implementation: "local", "transformer_engine", "full_iteration"; "" without graphs."""
    found = getattr(model, "cuda_graph_impl", None) or "none"
    return FULL_ITERATION if captures_full_iteration(model) else "" if found == "none" else str(found)


def captures_attention(model: Any) -> bool:
    """Return whether attention is inside a graph: of the iteration, of whole layers, or of its own."""
    names = captured(model) - {"full"}
    return bool(implementation(model)) and (captures_full_iteration(model) or not names or "attn" in names)


def capture_nothing(model: Any) -> None:
    """Empty the field of a model whose graphs are off."""
    if HAS_NEW_NAMES:
        setattr(model, _OLD, None)
    setattr(model, FIELD, [])


def use_new_names(model: Any) -> None:
    """Move the value of the old field to the new one, if it exists; "full", the old default, is an empty list.

    The switches that `cuda_graph_impl` has replaced are moved, not copied: Megatron-Core refuses both together, and its
    checks are repeated.
    """
    for switch, implementation in _SWITCHES.items():
        if getattr(model, switch, False) and model.cuda_graph_impl == "none":
            model.cuda_graph_impl = implementation
            setattr(model, switch, False)
    asked = getattr(model, _OLD, None) if HAS_NEW_NAMES else None
    if asked is not None:
        names = names_in(asked)
        if FULL_ITERATION in names and model.cuda_graph_impl == "local":
            model.cuda_graph_impl = FULL_ITERATION
        if model.cuda_graph_impl in ("none", FULL_ITERATION):
            names -= {FULL_ITERATION}
        setattr(model, _NEW, sorted(names))
        setattr(model, _OLD, None)
    if names_in(getattr(model, FIELD)) == {"full"}:
        setattr(model, FIELD, [])
