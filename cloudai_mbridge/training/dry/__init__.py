"""Rehearsal: any rank of a world of any size, built on torch's meta device by one process without a GPU.

The same `prepare`, `initialize`, `build_model` and `build_optimizer` as in training; only the machine is another one.
torch's process group "fake" stands for the other ranks. `python -m cloudai_mbridge.training.dry` is the program.
"""
