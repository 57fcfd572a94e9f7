"""Reduction of gradients over data-parallel ranks."""

import logging
from dataclasses import dataclass

from megatron.core.distributed import DistributedDataParallelConfig as MCoreDistributedDataParallelConfig

logger = logging.getLogger(__name__)

_PATTERNS = "param_name_patterns_for_fp32_local_accumulation"


@dataclass
class DistributedDataParallelConfig(MCoreDistributedDataParallelConfig):  # type: ignore[misc]
    """Megatron-Core's data-parallel settings, checked when they are complete instead of when they are made."""

    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()  # fnmatch patterns; "all": every parameter

    def __post_init__(self) -> None:
        """Leave the checks to `finalize`: fields may change until then."""

    def finalize(self) -> None:
        """Apply Megatron-Core's checks to the fields as they are now.

        AssertionError: `reuse_grad_buf_for_mxfp8_param_ag` without `fp8_param_gather`, or patterns for fp32
            accumulation although the gradients are reduced in fp32 anyway.
        ValueError: `nccl_ub` while PYTORCH_CUDA_ALLOC_CONF enables expandable segments; since Megatron-Core
            0.18 only with a torch before 2.11.
        """
        patterns = self.param_name_patterns_for_fp32_local_accumulation
        assert not (patterns and self.grad_reduce_in_fp32), (
            f"{_PATTERNS} needs grad_reduce_in_fp32=False: all is fp32 already"
        )
        super().__post_init__()
        if patterns and not hasattr(MCoreDistributedDataParallelConfig, _PATTERNS):
            logger.warning("%s has no effect: the installed Megatron-Core does not know it", _PATTERNS)
