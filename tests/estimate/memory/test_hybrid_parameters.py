"""Parameters of every rank of the recipes with layers of several kinds: Nemotron hybrids and GPT-OSS.

Megatron-Core's own MambaModel and GPTModel are built of its local layers on the meta device, with the embedded loop's
torch norms. What needs a GPU's packages has stand-ins: the kernels of mamba_ssm and of Triton (names only), mamba_ssm's
gated RMSNorm (with its one weight), and the linear layer around latent experts, which Megatron-Core takes from
Transformer Engine: `TELinear(parallel_mode="duplicated")`, whole on every tensor-parallel rank.

Left out: multi-token prediction of the hybrids, which MambaModel of Megatron-Core 0.16 does not have, and
deepseek_v4_flash, whose compressed sparse attention is not in Megatron-Core 0.16.
"""

import importlib.util
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.recipes.load import recipe_names
from tests.figures import Figure

torch = pytest.importorskip("torch")

_spec = importlib.util.spec_from_file_location("real_parameters", Path(__file__).with_name("real_parameters.py"))
assert _spec is not None
assert _spec.loader is not None
_shared = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_shared)
Case, SIZES = _shared.Case, _shared.SIZES
arguments, count, predicted, ranks, recipe_of = (
    getattr(_shared, name) for name in ("arguments", "count", "predicted", "ranks", "recipe_of")
)

pytestmark = [pytest.mark.filterwarnings("ignore")]

HYBRID = ("nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra", "nemotron_3_5_lightning")
GPT_OSS = "gpt_oss_120b"
NOT_BUILT = {"deepseek_v4_flash"}
FEW_EXPERTS = {"model.num_moe_experts": "4", "model.mtp_num_layers": "0"}


def test_no_recipe_is_forgotten() -> None:
    not_embedded = {name for name in recipe_names() if load_recipe(name).not_embedded}
    assert not_embedded == NOT_BUILT
    families = {name for name in recipe_names() if load_recipe(name).family in ("nemotronh", "gpt_oss")}
    assert families == {*HYBRID, GPT_OSS}


class GatedRMSNormStandIn(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Stands for mamba_ssm's gated RMSNorm, and has its only parameter."""

    def __init__(self, hidden_size: int, device: Any = None, dtype: Any = None, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))


class DuplicatedLinearStandIn(torch.nn.Linear):  # type: ignore[misc, name-defined]
    """Stands for Transformer Engine's linear layer, whole on every tensor-parallel rank."""

    def __init__(self, input_size: int, output_size: int, *, parallel_mode: str, bias: bool, **_: Any) -> None:
        assert parallel_mode == "duplicated"
        super().__init__(input_size, output_size, bias=bias)


def _never_called() -> None:
    """Stand for a kernel, of which later releases ask the arguments' names."""


KERNELS: dict[str, dict[str, Any]] = {
    "mamba_ssm.ops.triton.layernorm_gated": {"RMSNorm": GatedRMSNormStandIn},
    "mamba_ssm.ops.triton.ssd_combined": dict.fromkeys(
        ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"), _never_called
    ),
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops": dict.fromkeys(
        ("tensor_get_slice_after", "tensor_masked_update", "tensor_merge"), _never_called
    ),
}


def _mamba_mixer() -> Any:
    """Run the source of Megatron-Core's mixer with the stand-ins; no other import sees this module or them."""
    spec = importlib.util.find_spec("megatron.core.ssm.mamba_mixer")
    assert spec is not None
    assert spec.loader is not None
    mixer = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as stand_ins:
        for name, kernels in KERNELS.items():
            module = ModuleType(name)
            vars(module).update(kernels)
            stand_ins.setitem(sys.modules, name, module)
        spec.loader.exec_module(mixer)
    return mixer


def _stack_spec(norm: type) -> Any:
    """Return the layers of Megatron-Core's `mamba_stack_spec`, each fused norm and linear layer as two local ones."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.ssm import mamba_block
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer import ModuleSpec, TransformerLayer, TransformerLayerSubmodules
    from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.transformer_layer import MoETransformerLayer

    mixer = _mamba_mixer()
    mamba = ModuleSpec(mixer.MambaMixer, submodules=mixer.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear))
    attention = ModuleSpec(
        SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(ColumnParallelLinear, DotProductAttention, RowParallelLinear),
    )
    mlp = ModuleSpec(MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear))
    experts = get_moe_module_spec(use_te=False, num_experts=8, moe_grouped_gemm=False)
    add = get_bias_dropout_add

    def transformer(module: type, **parts: Any) -> Any:
        return ModuleSpec(module, submodules=TransformerLayerSubmodules(**parts))

    return ModuleSpec(
        mamba_block.MambaStack,
        submodules=mamba_block.MambaStackSubmodules(
            mamba_layer=ModuleSpec(MambaLayer, submodules=MambaLayerSubmodules(norm, mamba, add)),
            attention_layer=transformer(
                TransformerLayer, input_layernorm=norm, self_attention=attention, self_attn_bda=add
            ),
            mlp_layer=transformer(MLPLayer, pre_mlp_layernorm=norm, mlp=mlp, mlp_bda=add),
            moe_layer=transformer(MoETransformerLayer, pre_mlp_layernorm=norm, mlp=experts, mlp_bda=add),
        ),
    )


@pytest.fixture(scope="module")
def stack_spec(megatron: Any) -> Iterator[Any]:
    """Yield the layers of a hybrid model, while the stand-ins are in place."""
    from megatron.core.ssm import mamba_block
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.moe import moe_layer

    from cloudai_mbridge.training.models import layer_specs
    from cloudai_mbridge.training.models.attention import TorchNorm

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[mamba_block.MambaStack.__module__], "TENorm", TorchNorm)
        patch.setattr(moe_layer, "HAVE_TE", True)
        patch.setattr(moe_layer, "TELinear", DuplicatedLinearStandIn, raising=False)
        patch.setattr(layer_specs, "SDPACoreAttention", DotProductAttention)  # it has the learned sinks of GPT-OSS
        yield _stack_spec(TorchNorm)


def grid() -> Iterator[Case]:
    """Yield the recipes in all even layouts, with 4 experts of the recipe's shape; biases forbid to split experts."""
    for recipe in (*HYBRID, GPT_OSS):
        for tp, pp, ep, etp in itertools.product(SIZES, SIZES, SIZES, (1,) if recipe == GPT_OSS else SIZES):
            yield Case(recipe, 4, tp, pp, ep, etp, extra=FEW_EXPERTS)


DENSE_BLOCKS = {"hybrid_layer_pattern": "M-*EM-E*"}
VARIANTS: dict[str, dict[str, Any]] = {
    "tied": {"share_embeddings_and_output_weights": True},
    "LayerNorm": {"normalization": "LayerNorm"},
    "dense blocks": DENSE_BLOCKS,
    "other mixers": {"mamba_state_dim": 64, "mamba_num_groups": 4, "mamba_head_dim": 32, "mamba_num_heads": 96},
    "gated": {"gated_linear_unit": True, "moe_shared_expert_gate": True, "attention_output_gate": True},
    "biases": {**DENSE_BLOCKS, "add_bias_linear": True, "moe_shared_expert_intermediate_size": None},
}


def special() -> Iterator[Case]:
    """Yield other numbers of layers, stages that are not even, and what the recipes do not have."""
    for recipe, layers in itertools.product((*HYBRID, GPT_OSS), (2, 3, 5, 6, 7, 8)):
        yield Case(recipe, layers, 2, 2 if layers % 2 == 0 else 1, 2, 1, extra=FEW_EXPERTS)
    for fields, tp, pp in itertools.product(VARIANTS.values(), SIZES, SIZES):
        yield Case("nemotron_3_super", 8, tp, pp, 2, 1, extra=FEW_EXPERTS, fields=fields)
    for recipe, pp, (first, last) in itertools.product(HYBRID[:2], (2, 4), ((3, None), (None, 1), (1, 1))):
        ends = {"num_layers_in_first_pipeline_stage": first, "num_layers_in_last_pipeline_stage": last}
        middle = 2 * (pp - (first is not None) - (last is not None))
        yield Case(recipe, (first or 0) + (last or 0) + middle, 2, pp, extra=FEW_EXPERTS, fields=ends)
    for pp, vp in ((2, 2), (4, 2)):
        yield Case(GPT_OSS, 8, 2, pp, 2, 1, vp=vp, extra=FEW_EXPERTS)
    for fields in ({"softmax_type": "vanilla"}, {"share_embeddings_and_output_weights": True}):
        for pp in SIZES:
            yield Case(GPT_OSS, 4, 2, pp, 2, 1, extra=FEW_EXPERTS, fields=fields)


CASES = [*grid(), *special()]
# what the embedded loop's sections do not take; TransformerConfig does
_UNKNOWN = (
    *("activation", "softmax_type", "window_size", "window_attn_skip_freq", "hybrid_layer_pattern"),
    *("use_fused_weighted_squared_relu", "mtp_use_repeated_layer", "attention_backend"),
)


def _configuration(case: Case) -> tuple[dict[str, Any], dict[str, Any], str | None]:
    """Return the sections that the loop takes, the fields that it does not, and the pattern of a hybrid's blocks."""
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    recipe = recipe_of(case)
    model = recipe.sections["model"]
    taken = {name: value for name, value in model.items() if name not in _UNKNOWN}
    args, extra = arguments(case)
    sections = training_config(
        replace(recipe, sections={**recipe.sections, "model": taken}),
        args,
        {**extra, "model.perform_initialization": "false"},
    )
    changes = {name: model[name] for name in ("softmax_type", "window_attn_skip_freq") if name in model}
    changes["activation_func"] = {"squared_relu": squared_relu, "quick_gelu": quick_gelu}[model["activation"]]
    if "window_size" in model:
        changes["window_size"] = tuple(model["window_size"])
    pattern = model.get("hybrid_layer_pattern")
    return sections, {**changes, "is_hybrid_model": pattern is not None}, pattern and pattern.split("/")[0]


def _hybrid(config: Any, stack_spec: Any, pattern: str) -> Any:
    """Build this rank's part of Megatron-Core's MambaModel, on the meta device."""
    from megatron.core import parallel_state
    from megatron.core.models.mamba import MambaModel

    from cloudai_mbridge.training.cpu import megatron_device

    model = config.model
    with megatron_device(), torch.device("meta"):
        return MambaModel(
            config=model,
            mamba_stack_spec=stack_spec,
            vocab_size=model.padded_vocab_size,
            max_sequence_length=model.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            hybrid_override_pattern=pattern,
            share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        )


def _layout(case: Case) -> tuple[int, ...]:
    return case.tp, case.pp, case.vp, case.ep, case.etp or case.tp


def real(megatron: Any, cases: list[Case], stack_spec: Any) -> list[list[tuple[int, int]]]:
    """Return for every case, all of one layout, stage and number of parameters of every rank."""
    configurations = [_configuration(case) for case in cases]
    found: list[list[tuple[int, int]]] = [[] for _ in cases]
    for rank in ranks(cases[0]):
        for index, (sections, changes, pattern) in enumerate(configurations):
            if index == 0:
                config = megatron.enter(sections, rank, cases[0].world_size, changes)
            else:
                config = megatron.configure(sections, changes)
            chunks = [_hybrid(config, stack_spec, pattern)] if pattern else megatron.chunks(config, "meta")
            found[index].append(count(chunks))
    return found


_SHARES = (9, pytest.param(1, marks=pytest.mark.drill))


@pytest.mark.parametrize("share", _SHARES, ids=["a ninth", "all"])
def test_every_rank_holds_what_megatron_core_builds(share: int, megatron: Any, stack_spec: Any, figure: Figure) -> None:
    wrong: list[str] = []
    counts: Counter[str] = Counter()
    for _, group in itertools.groupby(sorted(CASES[::share], key=_layout), key=_layout):
        cases = list(group)
        for case, held in zip(cases, real(megatron, cases, stack_spec), strict=True):
            stages = predicted(case)
            counts.update({"layouts": 1, "ranks": len(held), case.recipe: 1})
            if different := {(stage, there, stages[stage]) for stage, there in held if there != stages[stage]}:
                wrong.append(f"{case}: stage, real, predicted: {sorted(different)}")
            assert {stage for stage, _ in held} == set(range(case.pp))
    figure(f"parameters: {dict(counts)}, different: {len(wrong)}")
    assert wrong == []
    assert counts["layouts"] >= 450 // share
    assert {*HYBRID, GPT_OSS} <= counts.keys()
