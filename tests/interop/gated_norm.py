"""The gated norm of mamba_ssm, as far as building and stepping a rank without values asks."""

from typing import Any

import torch


class RMSNorm(torch.nn.Module):
    """It has a weight, and returns a tensor like its input."""

    def __init__(self, hidden_size: int, device: Any = None, dtype: Any = None, **others: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, device=device, dtype=dtype))

    def forward(self, hidden: torch.Tensor, z: Any = None) -> torch.Tensor:
        return hidden * self.weight
