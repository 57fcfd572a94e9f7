"""A point's own arguments, then the upstream recipe's for its GPU, then defaults."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision, find_gpu
from cloudai_mbridge.estimate.memory.arguments import layout_of
from cloudai_mbridge.estimate.memory.layout import Adapters, Granularity, ParallelLayout
from cloudai_mbridge.estimate.request import trained_question
from cloudai_mbridge.megatron_bridge.presets import find_preset
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from tests.golden import Sentence


def layout(recipe: str, **args: Any) -> ParallelLayout:
    mtp = args.pop("mtp_num_layers", 0)
    return layout_of(ResolvedCmdArgs(**args), load_recipe(recipe), mtp_num_layers=mtp)


def test_the_upstream_recipe_fills_in_what_is_open() -> None:
    got = layout("gpt_oss_120b", gpu_type="H100", num_gpus=64, pp=4, ep=8, gb=1280, mb=1)
    assert got.recompute.modules == {"layernorm", "moe_act"}
    assert (got.expert_tp, got.grad_reduce_in_fp32, got.fp32_logits, got.precision) == (1, False, False, Precision.BF16)
    assert layout("gpt_oss_120b", gpu_type="gb300", num_gpus=64, ep=64).recompute.granularity is Granularity.NONE
    sharded = {"gpu_type": "gb200", "num_gpus": 64, "use_megatron_fsdp": True, "compute_dtype": "fp8_cs"}
    assert layout("llama3_70b", **sharded).activation_offload_layers == 40
    assert layout("llama3_70b", **sharded, activation_offload_layers=3).activation_offload_layers == 3
    assert layout("llama3_70b", **sharded | {"use_megatron_fsdp": False}).activation_offload_layers == 0
    assert layout("nemotron_3_ultra", gpu_type="gb300", num_gpus=256, ep=64).use_megatron_fsdp


def test_graphs_and_dispatchers_of_experts_are_those_of_the_point() -> None:
    sized = {"gpu_type": "gb200", "num_gpus": 64, "ep": 64}
    graphs = {**sized, "cuda_graph_impl": "transformer_engine"}
    assert not layout("qwen3_235b_a22b", **graphs, cuda_graph_scope=["attn"]).captures_router
    assert layout("qwen3_235b_a22b", **graphs, cuda_graph_scope="attn,moe_router").captures_router
    assert not layout("qwen3_235b_a22b", **sized, cuda_graph_scope=["moe_router"]).captures_router
    for backend, is_once in ((None, False), ("None", False), ("deepep", True), ("hybridep", True)):
        assert layout("qwen3_235b_a22b", **sized, moe_flex_dispatcher_backend=backend).dispatches_once == is_once


@pytest.mark.parametrize("release", ["0.4.2", "0.6.0"])
def test_a_preset_names_the_dispatcher_of_experts(release: str) -> None:
    args = ResolvedCmdArgs(
        model_family_name="qwen", model_recipe_name="qwen3_30b_a3b", gpu_type="gb200", num_gpus=8, compute_dtype="bf16"
    )
    preset, recipe = find_preset(args, Release(release, "a test")), load_recipe("qwen3_30b_a3b")
    for own, is_once in ((None, True), ("None", False)):
        asked = args.model_copy(update={"moe_flex_dispatcher_backend": own})
        request = trained_question(recipe, asked, preset, "", find_gpu("gb200"), "", {})
        assert request.layout_of(request.architecture).dispatches_once == is_once


def test_the_point_has_the_last_word() -> None:
    got = layout("deepseek_v3", gpu_type="h100", num_gpus=128, recompute_modules="[moe_act, 'core_attn']", ep=8)
    assert got.recompute.modules == {"moe_act", "core_attn"}
    full = layout("llama3_8b", num_gpus=8, recompute_num_layers=4).recompute
    assert (full.granularity, full.method, full.num_layers) == (Granularity.FULL, "block", 4)
    assert layout("deepseek_v3", num_gpus=128, ep=8, et=2).expert_tp == 2
    for task in ("lora", "peft"):
        assert layout("llama3_8b", num_gpus=8, task=task).adapters == Adapters(dim=8)
    assert layout("llama3_8b", num_gpus=8, task="sft").adapters is None
    captured = {"local": "full", "transformer_engine": "attention", "none": "none"}
    for impl, scope in captured.items():
        assert layout("llama3_8b", num_gpus=8, cuda_graph_impl=impl).cuda_graph == scope


def test_the_embedded_loop_has_defaults_of_its_own() -> None:
    got = layout("moe_tiny", launcher="embedded", num_gpus=4, tp=2, gb=8, compute_dtype="fp32")
    assert (got.expert_tp, got.use_distributed_optimizer, got.grad_reduce_in_fp32) == (2, False, False)
    assert got.precision is Precision.FP32


@pytest.mark.parametrize("gpu", ["h100", "gb200"])
@pytest.mark.parametrize("precision", Precision)
def test_both_launchers_keep_the_weights_of_a_format_alike(precision: Precision, gpu: str) -> None:
    both = [
        layout("llama3_8b", launcher=launcher, num_gpus=8, gpu_type=gpu, compute_dtype=str(precision))
        for launcher in ("embedded", "megatron_bridge")
    ]
    ours, theirs = ((each.fp8_param_gather, each.has_fp8_transposes, each.optimizer_bytes) for each in both)
    assert ours == theirs
    gathered = (Precision.FP8_CS, Precision.FP8_DS, Precision.FP8_MX, Precision.NVFP4)
    assert ours[0] is (precision in gathered)


@pytest.mark.parametrize(
    ("args", "stages"),
    [
        ({"pp": 4, "vp": 4, "mtp_num_layers": 1}, "Et*4|(t*4|)*14tmL"),
        ({"pp": 16}, "Et*4|(t*4|)*14tL"),
        ({"pp": 16, "num_layers": 32}, None),  # the recipe's layout is for all of its layers
        ({"pp": 1}, None),
    ],
)
def test_the_recipe_knows_its_pipeline(args: dict[str, Any], stages: str | None) -> None:
    assert layout("deepseek_v3", num_gpus=256, ep=8, **args).pipeline_layout == stages


def test_an_explicit_layout_decides_about_virtual_stages() -> None:
    got = layout("llama3_8b", num_gpus=8, pp=2, pipeline_model_parallel_layout="Et*8|t*8|t*8|t*8L")
    assert (got.pp, got.vp) == (2, 2)


def test_an_unknown_number_format(sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"cmd_args\.compute_dtype:") as caught:
        layout("llama3_8b", compute_dtype="int8")
    sentence(caught)
