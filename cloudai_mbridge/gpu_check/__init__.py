"""Check a machine with a GPU in under ten minutes, and write the results as one JSON file: docs/gpu-check.md.

Training is done by `mbridge run` and the training program, in processes of their own.
"""
