"""Check a machine with a GPU in under ten minutes, and write what was found as one JSON file.

    python -m cloudai_mbridge.gpu_check --out gpu_check.json

Every part is a function of its own with a time budget. It ends as passed, failed (with a reason) or skipped (by name);
a part that fails does not stop the others. Training is done by `mbridge run`, and by the training program, in processes
of their own: this package writes their TOML files and reads their reports. docs/gpu-check.md.
"""
