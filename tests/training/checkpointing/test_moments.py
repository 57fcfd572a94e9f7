"""The moments of Transformer Engine's Adam are not held twice while a checkpoint is loaded; a fake stands for it."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from cloudai_mbridge.training.checkpointing import optimizer_state  # noqa: E402
from tests.cases import every  # noqa: E402


class FusedAdam(torch.optim.Optimizer):  # type: ignore[misc, name-defined]
    """As much of it as loading touches: it makes every state once more."""

    master_weights = store_param_remainders = False

    def __init__(self, params: list[Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.name_to_dtype_map = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.float32)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for state in self.state.values():
            state.update({name: value.clone() for name, value in state.items()})


def _part(dtype: Any = torch.float32, **changes: Any) -> Any:
    inner = FusedAdam([torch.nn.Parameter(torch.zeros(4, dtype=dtype)) for _ in range(2)])
    part = SimpleNamespace(
        optimizer=inner,
        shard_fp32_from_float16_groups=[],
        config=SimpleNamespace(use_precision_aware_optimizer=False, optimizer_cpu_offload=False),
        ddp_config=SimpleNamespace(use_megatron_fsdp=False),
    )
    for path, value in changes.items():
        owner, _, name = path.rpartition("__")
        setattr(getattr(part, owner) if owner else part, name, value)
    return part


def _load(part: Any, dtype: Any = torch.float32, *names: str) -> bool:
    """Load moments as Megatron-Core made them; return whether these very tensors are the state then."""
    made = {i: {name: torch.ones(4, dtype=dtype) for name in ("exp_avg", "exp_avg_sq", *names)} for i in range(2)}
    groups = part.optimizer.state_dict()["param_groups"]
    with optimizer_state.adopting_moments(part):
        part.optimizer.load_state_dict({"state": made, "param_groups": groups})
    assert "load_state_dict" not in vars(part.optimizer)
    held = [state["exp_avg"] for state in part.optimizer.state.values()]
    assert all(bool((moment == 1).all()) for moment in held)
    return all(moment is made[i]["exp_avg"] for i, moment in enumerate(held))


@every(
    ("part", "load", "adopts"),
    [
        ({}, (), True),
        ({}, (torch.bfloat16,), False),
        ({}, (torch.float32, "master_param"), False),
        ({"dtype": torch.bfloat16}, (), False),
        ({"config__use_precision_aware_optimizer": True}, (), False),
        ({"config__optimizer_cpu_offload": True}, (), False),
        ({"ddp_config__use_megatron_fsdp": True}, (), False),
        ({"optimizer__master_weights": True}, (), False),
        ({"optimizer__name_to_dtype_map": {"exp_avg": torch.float32, "exp_avg_sq": torch.uint8}}, (), False),
    ],
)
def test_moments_are_taken_over(
    part: dict[str, Any], load: tuple[Any, ...], adopts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizer_state, "fused_adam", lambda: FusedAdam)
    assert _load(_part(**part), *load) is adopts


def test_another_adam_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for found in (None, torch.optim.Adam):
        monkeypatch.setattr(optimizer_state, "fused_adam", lambda found=found: found)
        assert not _load(_part())
