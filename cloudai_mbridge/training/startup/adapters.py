"""Features that cannot be combined with adapters."""

from collections.abc import Iterator
from typing import Any

from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.peft.config import LoRA


def asked_of_adapters(config: ConfigContainer) -> Iterator[str]:
    """Yield a message for each invalid combination."""
    if config.peft is None:
        return
    if isinstance(config.peft, LoRA):
        for name, harmless in _NOT_DONE.items():
            if (value := getattr(config.peft, name)) != harmless:
                yield f"peft.{name} = {value!r} (use {harmless!r})"
    model: Any = config.model
    combined = (
        ("ddp.use_megatron_fsdp", config.ddp.use_megatron_fsdp, False),
        ("dist.use_megatron_fsdp", config.dist.use_megatron_fsdp, False),
        ("dist.use_torch_fsdp2", config.dist.use_torch_fsdp2, False),
        ("model.qk_clip", getattr(model, "qk_clip", False), False),  # it changes weights that are not saved
        # Their products do not go through the layers that have adapters
        ("model.use_transformer_engine_op_fuser", getattr(model, "use_transformer_engine_op_fuser", False), False),
        # A checkpoint of adapters lacks the quantizers of the weights, so no run can resume from it
        ("model.restore_modelopt_state", getattr(model, "restore_modelopt_state", False), False),
        # A frozen weight has no gradient to compute later
        ("model.delay_wgrad_compute", getattr(model, "delay_wgrad_compute", False), False),
    )
    for field, value, harmless in combined:
        if value and value != harmless:
            yield f"{field} = {value!r} with peft (use {harmless!r})"


_NOT_DONE = {"lora_dtype": None, "experts_shared_outer_loras": False}
