"""Values of another type than the field's in Megatron-Bridge's own recipes, read with their meaning there.

Megatron-Bridge checks no types, so its files contain such values.
"""

from typing import Any


def as_meant(path: str, field: str, value: Any) -> Any:
    """Return the value of the class at `path` in the field's own type; any other value as it is."""
    match path.rpartition(".")[2], field, value:
        case "TrainingConfig", "manual_gc_eval", int():
            return value != 0
        case "PipelineOverlapCfg", "fp8_buf", [False]:  # a comma too many in the class's default
            return False
        case _, "moe_router_dtype", {"_target_": "torch.float32"}:
            return "fp32"
        case _, "moe_router_dtype", "bf16":  # Megatron-Core treats unknown values as the type of the layer
            return None
    return value
