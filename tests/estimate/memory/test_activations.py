"""Activation memory equals what a real Megatron-Core step keeps: saved-tensor hooks, forward and backward, on the CPU.

Tensor- and context-parallel ranks run over torch's fake process group: shapes are real, what other ranks would send is
not. The pipeline schedules and expert parallelism run on real ranks with gloo (test_schedules.py).
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.memory.activations import activations_per_stage
from cloudai_mbridge.estimate.memory.layout import Granularity, Implementation, ParallelLayout, Recompute
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.recipes.container import container_data
from tests.figures import note

torch = pytest.importorskip("torch")

_spec = importlib.util.spec_from_file_location("saved_tensors", Path(__file__).with_name("saved_tensors.py"))
assert _spec is not None
assert _spec.loader is not None
_saved_tensors = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_saved_tensors)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.process]

DENSE: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 128,
    "ffn_hidden_size": 352,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "kv_channels": 16,
    "vocab_size": 1024,
    "seq_length": 64,
}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96}
SHARED = {**EXPERTS, "moe_shared_expert_intermediate_size": 160, "moe_aux_loss_coeff": 0.001}
LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": 8,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "qk_layernorm": True,
}
PLAIN = {"normalization": "LayerNorm", "gated_linear_unit": False, "activation": "gelu", "add_bias_linear": True}


@dataclass(frozen=True)
class Case:
    """A model, its layout and what is recomputed."""

    name: str
    model: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bf16"
    tp: int = 1
    cp: int = 1
    sp: bool = False
    mbs: int = 1
    recompute: Recompute = field(default_factory=Recompute)
    implementation: Implementation = Implementation.TORCH

    @property
    def sections(self) -> dict[str, dict[str, Any]]:
        return {
            "model": {**DENSE, **self.model, "dtype": self.dtype},
            "train": {"train_iters": 1, "micro_batch_size": self.mbs, "global_batch_size": self.mbs},
            "optimizer": {"lr": 1e-3},
        }

    @property
    def architecture(self) -> Architecture:
        recipe = Recipe("case", "", "", "", self.sections)
        return architecture(recipe, mtp_num_layers=self.model.get("mtp_num_layers", 0))

    @property
    def layout(self) -> ParallelLayout:
        return ParallelLayout(
            num_gpus=self.tp * self.cp,
            tp=self.tp,
            cp=self.cp,
            sequence_parallel=self.sp,
            mbs=self.mbs,
            recompute=self.recompute,
            precision=Precision(self.dtype),
            implementation=self.implementation,
        )


def selective(*modules: str) -> Recompute:
    return Recompute(Granularity.SELECTIVE, frozenset(modules))


def full(method: str, layers: int) -> Recompute:
    return Recompute(Granularity.FULL, method=method, num_layers=layers)


RECOMPUTE = {
    "none": Recompute(),
    "core_attn": selective("core_attn"),
    "mlp": selective("mlp"),
    "core_attn+mlp": selective("core_attn", "mlp"),
    "uniform 1": full("uniform", 1),
    "uniform 3": full("uniform", 3),
    "block 1": full("block", 1),
    "block 2": full("block", 2),
}


def grid() -> Iterator[Any]:
    """Yield recompute x (tp, sequence parallelism) x (sequence length, micro-batch size), for the dense gated model.

    A third of them, which has every pair of values, is tested always.
    """
    for i, (name, recompute) in enumerate(RECOMPUTE.items()):
        for j, (tp, sp) in enumerate([(1, False), (2, False), (2, True)]):
            for k, (seq_length, mbs) in enumerate([(32, 1), (32, 4), (128, 1), (128, 2)]):
                label = f"{name}, tp{tp}{'+sp' * sp}, s{seq_length}, mbs{mbs}"
                case = Case(label, {"seq_length": seq_length}, tp=tp, sp=sp, mbs=mbs, recompute=recompute)
                yield pytest.param(case, id=label, marks=[] if (i + j + k) % 3 == 0 else [pytest.mark.long])


def others() -> Iterator[Case]:
    """Yield other models, number formats, context parallelism, and Megatron-Core's own core attention."""
    tp2: dict[str, Any] = {"tp": 2, "sp": True}
    for dtype in ("bf16", "fp32"):
        yield Case(f"{dtype}", dtype=dtype, mbs=2)
        yield Case(f"{dtype} tp2", dtype=dtype, **tp2)
        yield Case(f"{dtype} cp2", dtype=dtype, cp=2, mbs=2)
        yield Case(f"{dtype} window", {"window_size": [16, 0]}, dtype)
        yield Case(f"{dtype} norms and gate", {"qk_layernorm": True, "attention_output_gate": True}, dtype)
        yield Case(f"{dtype} LayerNorm, biases, no gate", PLAIN, dtype, mbs=2)
        yield Case(f"{dtype} learned positions", {"position_embedding_type": "learned_absolute"}, dtype)
        yield Case(f"{dtype} one more token", {"mtp_num_layers": 1}, dtype, mbs=2)
        yield Case(f"{dtype} experts", EXPERTS, dtype, mbs=2)
        yield Case(f"{dtype} shared experts", SHARED, dtype)
        yield Case(f"{dtype} every second layer", {**EXPERTS, "moe_layer_freq": 2}, dtype)
        yield Case(f"{dtype} latent", LATENT, dtype, mbs=2)
        yield Case(f"{dtype} latent tp2", LATENT, dtype, **tp2)
        yield Case(f"{dtype} latent experts", {**LATENT, **SHARED}, dtype)
        yield Case(f"{dtype} uniform", dtype=dtype, mbs=2, recompute=full("uniform", 2), model={"num_layers": 4})
        yield Case(f"{dtype} moe again", EXPERTS, dtype, mbs=2, recompute=selective("moe"))
        yield Case(f"{dtype} shared again", SHARED, dtype, mbs=2, recompute=selective("shared_experts"))
        yield Case(f"{dtype} latent core again", LATENT, dtype, mbs=2, recompute=selective("core_attn"))
        yield Case(f"{dtype} latent up again", LATENT, dtype, mbs=2, recompute=selective("mla_up_proj"))
        yield Case(f"{dtype} latent full", {**LATENT, **SHARED}, dtype, recompute=full("uniform", 1))


def measured(megatron: Any, case: Case, patch: pytest.MonkeyPatch) -> int:
    """Return the peak of the bytes kept in one step of one micro-batch, through the embedded loop's own model."""
    from megatron.core.transformer.module import Float16Module

    from cloudai_mbridge.training.cpu import megatron_device

    data = container_data(case.sections)
    data["model"] |= {
        "tensor_model_parallel_size": case.tp,
        "context_parallel_size": case.cp,
        "sequence_parallel": case.sp,
        **_recompute_fields(case.recompute),
    }
    config = megatron.enter(data, 0, case.tp * case.cp)
    (model,) = megatron.chunks(config, "cpu")
    if config.model.bf16:
        model = Float16Module(config.model, model)
    length = config.model.seq_length // case.cp
    tokens = torch.randint(0, 1000, (case.mbs, length))
    saved = _saved_tensors.SavedTensors(model.parameters())
    with megatron_device(), saved.hooks():
        loss = model(
            input_ids=tokens,
            position_ids=torch.arange(length).repeat(case.mbs, 1),
            attention_mask=None,
            labels=tokens,
            loss_mask=torch.ones(tokens.shape),
        )
        loss.float().sum().backward()
    assert saved.total() == 0, "the backward pass has freed everything"
    return int(saved.peak)


def _recompute_fields(recompute: Recompute) -> dict[str, Any]:
    if recompute.granularity is Granularity.NONE:
        return {}
    fields: dict[str, Any] = {"recompute_granularity": recompute.granularity.value}
    if recompute.granularity is Granularity.SELECTIVE:
        return fields | {"recompute_modules": sorted(recompute.modules)}
    return fields | {"recompute_method": recompute.method, "recompute_num_layers": recompute.num_layers}


def estimated(case: Case) -> float:
    (stage,) = activations_per_stage(case.architecture, case.layout)
    return sum(stage.values())


@pytest.fixture(scope="module")
def errors(request: pytest.FixtureRequest) -> Iterator[dict[str, float]]:
    """Take the relative error of each case, and note the worst."""
    errors: dict[str, float] = {}
    yield errors
    if errors:
        worst = max(errors, key=lambda name: abs(errors[name]))
        exact = sum(abs(error) < 1e-9 for error in errors.values())
        note(request.node, f"activations: {len(errors)} steps, {exact} exact, worst {errors[worst]:+.2%} ({worst})")


@pytest.mark.parametrize("case", [*grid(), *(pytest.param(case, id=case.name) for case in others())])
def test_estimate_against_saved_tensors(megatron: Any, errors: dict[str, float], case: Case) -> None:
    with pytest.MonkeyPatch.context() as patch:
        error = errors[case.name] = estimated(case) / measured(megatron, case, patch) - 1
    assert abs(error) <= 0.03


def test_recomputed_norms(megatron: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron-Core 0.16 recomputes norms only where Transformer Engine is installed: three names are missing."""
    from contextlib import nullcontext

    from megatron.core.tensor_parallel import random as mrandom

    class Off:
        is_fp8_enabled = staticmethod(lambda: False)

    monkeypatch.setattr(mrandom, "FP8GlobalStateManager", Off, raising=False)
    monkeypatch.setattr(mrandom, "activation_recompute_forward", lambda **_: nullcontext(), raising=False)
    monkeypatch.setattr(mrandom, "fp8_autocast", lambda **_: nullcontext(), raising=False)
    for model, dtype in (({}, "bf16"), (EXPERTS, "bf16"), ({}, "fp32")):
        case = Case("norms", model, dtype, mbs=2, recompute=selective("layernorm"))
        assert estimated(case) == pytest.approx(measured(megatron, case, monkeypatch), rel=0.03)
