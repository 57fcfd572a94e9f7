"""An emulation of Transformer Engine's C++ and CUDA functions, for tests only: plain PyTorch, in fp32, on the CPU.

With it the real Python layers, quantizers and optimizers of Transformer Engine run without a GPU. It shows that the
loop, Megatron-Core and Transformer Engine fit together and compute the right thing; nothing about a GPU's kernels,
their rounding, speed or memory.
"""

from tests.transformer_engine.emulation.install import emulated

__all__ = ["emulated"]
