"""Every rule: the last value that is legal, the first that is not, and what it says without an input."""

import dataclasses
from typing import Any

import pytest

from cloudai_mbridge.constraints import check
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.megatron_sizes import place
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.constraints.rule_docs import document
from cloudai_mbridge.constraints.upstream import rule_id
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.recipes.apply import settings_of, with_recipe_defaults
from tests.cases import every
from tests.golden import Sentence

LOCAL = LocalSystem(name="here", scheduler="local")
SLURM = SlurmSystem(name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}])
ELSEWHERE = SLURM.model_copy(update={"python_executable": "/nodes/python"})
SLURM4 = SLURM.model_copy(update={"gpus_per_node": 4})


SIZES = {"num_layers": 32, "num_attention_heads": 8, "num_query_groups": 4, "ffn_hidden_size": 64}
MODEL = Recipe("m", "", "", "", {"model": SIZES})
ADAPTED = load_recipe("gpt_tiny")
MAMBA = {"hidden_size": 2688, "mamba_num_heads": 64, "mamba_num_groups": 8, "hybrid_layer_pattern": "M*ME"}
HYBRID = Recipe("h", "", "", "", {"model": {**SIZES, **MAMBA}})
DELTA = Recipe("d", "", "", "", {"model": {**SIZES, "experimental_attention_variant": "gated_delta_net"}})
WINDOWS = Recipe("w", "", "", "", {"model": {**SIZES, "window_size": [127, 0], "cp_comm_type": "all_gather"}})
RINGS = Recipe("r", "", "", "", {"model": {**SIZES, "window_size": [127, 0]}})
EXCHANGED = Recipe("x", "", "", "", {"model": {**SIZES, "cp_comm_type": "a2a"}})
EXPERTS = Recipe("e", "", "", "", {"model": {**SIZES, "num_moe_experts": 4, "moe_ffn_hidden_size": 64}})


def _point(
    system: System | None = None,
    nodes: int | None = None,
    recipe: Recipe | None = None,
    release: str | None = None,
    core: str | None = None,
    env: dict[str, str] | None = None,
    extra: dict[str, str] | None = None,
    **args: Any,
) -> Point:
    pinned = Release(release, "here") if release else None
    return Point(
        ResolvedCmdArgs.model_validate(args),
        system,
        recipe,
        nodes,
        pinned,
        settings=settings_of(extra or {}),
        core=core,
        variable=(env or {}).get,
    )


def _loop(system: System | None = None, **given: Any) -> Point:
    return _point(system, launcher="embedded", **given)


BY_ID = {rule_id(rule): rule for rule in RULES}

# id -> (last legal, first illegal, not evaluated or None if the rule always has its inputs)
DEEPSEEK_V3 = {"model_recipe_name": "deepseek_v3", "gpu_type": "gb200", "compute_dtype": "fp8_mx", "num_gpus": 256}
BOUNDARIES: dict[str, tuple[Point, Point, Point | None]] = {
    "C01": (_point(num_gpus=8, tp=8), _point(num_gpus=9, tp=8), None),
    "C03": (_point(num_gpus=8, tp=8), _point(num_gpus=7, tp=8), None),
    "C04": (_point(num_gpus=8, mb=2, gb=16), _point(num_gpus=8, mb=2, gb=17), _point(num_gpus=8, gb=17)),
    "C02": (_point(num_layers=61, pp=1), _point(num_layers=61, pp=4), _point(pp=4)),
    "C05": (
        _point(use_megatron_fsdp=True, cuda_graph_impl="local"),
        _point(use_megatron_fsdp=True, cuda_graph_impl="local", cuda_graph_scope="full_iteration"),
        None,
    ),
    "C06": (_point(use_megatron_fsdp=True, vp=1), _point(use_megatron_fsdp=True, vp=2), None),
    "C07": (_point(num_gpus=16, et=1, ep=8, pp=2), _point(num_gpus=16, et=1, ep=12), None),
    "C08": (_point(num_layers=32, pp=4, vp=8), _point(num_layers=32, pp=4, vp=9), _point(pp=4, vp=8)),
    "C09": (_point(num_distributed_optimizer_instances=1), _point(num_distributed_optimizer_instances=2), None),
    "C10": (_point(pp=1, activation_offload_layers=1), _point(pp=2, activation_offload_layers=1), None),
    "C11": (
        _point(moe_a2a_overlap=True, cuda_graph_impl="None"),
        _point(moe_a2a_overlap=True, cuda_graph_impl="local"),
        None,
    ),
    "C12": (
        _point(cuda_graph_impl="transformer_engine", activation_offload_layers=2),
        _point(cuda_graph_impl="transformer_engine", cuda_graph_scope="attn", activation_offload_layers=2),
        None,
    ),
    "C13": (_point(cuda_graph_impl=" Local "), _point(cuda_graph_impl="te"), None),
    "C14": (
        _point(cuda_graph_impl="transformer_engine", cuda_graph_scope="['attn','moe_router']"),
        _point(cuda_graph_impl="transformer_engine", cuda_graph_scope="full_iteration"),
        None,
    ),
    "C15": (_point(cuda_graph_scope="moe"), _point(cuda_graph_scope="moe,moe_router"), None),
    "C16": (_point(cuda_graph_scope="moe_router,moe_preprocess"), _point(cuda_graph_scope="moe_preprocess"), None),
    "C17": (
        _point(cuda_graph_scope="moe_router", recompute_modules="moe_act"),
        _point(cuda_graph_scope="attn", recompute_modules="core_attn"),
        None,
    ),
    "C18": (
        _point(model_recipe_name="deepseek_v3", pp=4, vp=4),
        _point(model_recipe_name="deepseek_v3", pp=4, vp=5),
        None,
    ),
    "M02": (_point(tp=1), _point(tp=0), None),
    "M03": (_point(pp=2, vp=2), _point(pp=1, vp=2), None),
    "M04": (
        _point(num_gpus=2, pp=2, vp=2, mb=1, gb=8),
        _point(num_gpus=2, pp=2, vp=2, mb=1, gb=9),
        _point(num_gpus=2, pp=2, vp=2),
    ),
    "M05": (_point(seq_length=4096, cp=2), _point(seq_length=4098, cp=2), _point(cp=2)),
    "M06": (_point(seq_length=4096, tp=2), _point(seq_length=4097, tp=2), _point(tp=2)),
    "M07": (_loop(num_gpus=8, tp=4, ep=8), _loop(num_gpus=8, tp=4, ep=16), _point(num_gpus=8, tp=4, ep=4)),
    "M08": (_point(recipe=MODEL, tp=8), _point(recipe=MODEL, tp=16), _point(tp=16)),
    "M09": (_point(recipe=MODEL, tp=4), _point(recipe=MODEL, tp=3), _point(tp=3)),
    "M10": (_point(recipe=MODEL, tp=8), _point(recipe=MODEL, tp=128), _point(tp=128)),
    "M11": (_point(recipe=EXPERTS, ep=4), _point(recipe=EXPERTS, ep=8), _point(ep=8)),
    "M12": (
        _point(num_layers=32, pp=4, recompute_num_layers=8),
        _point(num_layers=32, pp=4, recompute_num_layers=9),
        _point(recompute_num_layers=9),
    ),
    "M13": (
        _point(num_layers=32, activation_offload_layers=31),
        _point(num_layers=32, activation_offload_layers=32),
        _point(activation_offload_layers=32),
    ),
    "M14": (
        _point(recompute_modules="core_attn"),
        _point(recompute_modules="attention"),
        _point(recompute_modules="mla_up_proj"),
    ),
    "M15": (_point(recompute_num_layers=1), _point(recompute_num_layers=1, recompute_modules="mlp"), None),
    "M16": (_point(activation_offload_layers=2), _point(activation_offload_layers=2, recompute_num_layers=1), None),
    "M17": (
        _point(cuda_graph_impl="none", activation_offload_layers=2),
        _point(cuda_graph_impl="local", activation_offload_layers=2),
        None,
    ),
    "M18": (
        _point(recipe=EXPERTS, cuda_graph_impl="transformer_engine", cuda_graph_scope="moe_router"),
        _point(recipe=MODEL, cuda_graph_impl="transformer_engine", cuda_graph_scope="moe_router"),
        _point(cuda_graph_impl="transformer_engine", cuda_graph_scope="moe_router"),
    ),
    "M19": (
        _point(core="0.16", moe_a2a_overlap=True, ep=8, recompute_modules="moe"),
        _point(core="0.17", moe_a2a_overlap=True, ep=8, recompute_modules="moe"),
        _point(moe_a2a_overlap=True, ep=8, recompute_modules="moe"),
    ),
    "M20": (
        _point(gpu_type="gb200", compute_dtype="fp8_mx"),
        _point(gpu_type="h100", compute_dtype="fp8_mx"),
        _point(gpu_type="tpu", compute_dtype="fp8_mx"),
    ),
    "M21": (
        _point(recompute_num_layers=1, cuda_graph_impl="local", cuda_graph_scope="full_iteration"),
        _point(recompute_num_layers=1, cuda_graph_impl="local"),
        None,
    ),
    "M22": (
        _point(release="0.5.1", cuda_graph_impl="local"),
        _point(release="0.6.0", cuda_graph_impl="local"),
        _point(cuda_graph_impl="local"),
    ),
    "M23": (
        _loop(core="0.17", cuda_graph_impl="full_iteration", cuda_graph_scope="attn"),
        _loop(core="0.18", cuda_graph_impl="full_iteration", cuda_graph_scope="attn"),
        None,
    ),
    "M31": (
        _loop(recipe=EXPERTS, extra={"model.moe_router_topk": "4"}),
        _loop(recipe=EXPERTS, extra={"model.moe_router_topk": "5"}),
        _loop(extra={"model.moe_router_topk": "5"}),
    ),
    "M32": (
        _point(num_gpus=16, ep=8, et=1, num_distributed_optimizer_instances=2),
        _point(num_gpus=16, ep=16, et=1, num_distributed_optimizer_instances=2),
        _point(num_gpus=16, tp=3, num_distributed_optimizer_instances=2),
    ),
    "M33": (
        _loop(vocab_size=513, tp=2),
        _loop(vocab_size=513, tp=2, extra={"model.should_pad_vocab": "false"}),
        _loop(tp=2, extra={"model.should_pad_vocab": "false"}),
    ),
    "M24": (
        _point(use_megatron_fsdp=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": "2"}),
        _point(use_megatron_fsdp=True, env={"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
        None,
    ),
    "M25": (
        _point(compute_dtype="fp8_mx", seq_length=4096, mb=1, tp=2),
        _point(compute_dtype="fp8_mx", seq_length=4112, mb=1, tp=2),
        _point(compute_dtype="fp8_mx", mb=1, tp=2),
    ),
    "M26": (
        _point(recipe=MODEL, compute_dtype="fp8_mx", tp=2),
        _point(recipe=MODEL, compute_dtype="fp8_mx", tp=4),
        _point(compute_dtype="fp8_mx", tp=4),
    ),
    "M27": (
        _loop(ELSEWHERE, recipe=WINDOWS, gpu_type="h100", cp=2),
        _loop(ELSEWHERE, recipe=RINGS, gpu_type="h100", cp=2),
        _loop(ELSEWHERE, recipe=RINGS, cp=2),
    ),
    "M28": (
        _loop(ELSEWHERE, recipe=EXCHANGED, gpu_type="h100", cp=4),
        _loop(ELSEWHERE, recipe=EXCHANGED, gpu_type="h100", cp=8),
        _loop(ELSEWHERE, recipe=EXCHANGED, cp=8),
    ),
    "M29": (_point(recipe=HYBRID, tp=8, cp=8), _point(recipe=HYBRID, tp=16, cp=1), _point(tp=16)),
    "M30": (
        _point(recipe=DELTA, core="0.18", tp=8, cp=2),
        _point(recipe=DELTA, core="0.18", tp=8, cp=4),
        _point(recipe=DELTA, tp=8, cp=2),
    ),
    "E09": (
        _loop(recipe=EXPERTS, use_tokendrop=True),
        _loop(recipe=MODEL, use_tokendrop=True),
        _loop(use_tokendrop=True),
    ),
    "E10": (
        _loop(moe_flex_dispatcher_backend="deepep", gpu_type="b300"),
        _loop(moe_flex_dispatcher_backend="deepep", gpu_type="gb200"),
        _loop(moe_flex_dispatcher_backend="deepep"),
    ),
    "E11": (
        _loop(core="0.19", use_megatron_fsdp=True, save_dir="/s"),
        _loop(core="0.18", use_megatron_fsdp=True, save_dir="/s"),
        _loop(use_megatron_fsdp=True, load_dir="/s"),
    ),
    "E12": (
        _loop(core="0.16", use_megatron_fsdp=True, num_gpus=2),
        _loop(core="0.16", use_megatron_fsdp=True, num_gpus=1),
        _loop(use_megatron_fsdp=True, num_gpus=1),
    ),
    "E13": (
        _loop(recipe=ADAPTED, task="lora", tp=2, num_gpus=2),
        _loop(recipe=ADAPTED, task="lora", tp=2, num_gpus=2, extra={"peft.dim": "31"}),
        _loop(task="lora"),
    ),
    "E14": (_loop(SLURM, recipe=MODEL), _loop(SLURM, recipe=HYBRID), _loop(SLURM, recipe=HYBRID, container_image="x")),
    "E06": (
        _loop(recipe=EXPERTS, num_gpus=2, tp=2, ep=1, et=2),
        _loop(recipe=EXPERTS, num_gpus=2, tp=2, ep=1, et=1),
        _loop(num_gpus=2, tp=2, ep=1, et=1),
    ),
    "E05": (_loop(recipe=MODEL), _loop(recipe=dataclasses.replace(MODEL, not_embedded="its Mamba layers")), _loop()),
    "E04": (_loop(SLURM, container_image="x"), _loop(LOCAL, container_image="x"), None),
    "E07": (
        _loop(data="c4", c4_root="/c", index_mapping_dir="/i"),
        _loop(data="c4", index_mapping_dir="/i"),
        _loop(first_k_dense_replace=1),
    ),
    "E08": (
        _loop(**DEEPSEEK_V3, config_variant="large_scale"),
        _loop(**DEEPSEEK_V3, config_variant="huge"),
        _loop(config_variant="large_scale"),
    ),
    "M01": (_point(SLURM4, 2, num_gpus=8), _point(SLURM4, 2, num_gpus=10), _point(num_gpus=8)),
    "E01": (_loop(domain="llm"), _loop(domain="vlm"), None),
    "E02": (_loop(compute_dtype="fp8", fp8_recipe="mx"), _loop(compute_dtype="fp8"), None),
    "E03": (_loop(max_steps=1), _loop(max_steps=0), None),
}


@every(
    ("rule_id", "recipe", "args", "passes"),
    [
        ("E04", None, dict(lock_gpu_freq=1500), False),
        ("E04", None, dict(enable_vboost=False, peak_mem_clk=-1), True),
        ("E04", None, dict(preempt_time=60), False),
        ("E07", None, dict(data="pile"), False),
        ("E07", None, dict(data="rp2", dataset_paths="/a"), False),
        ("E07", None, dict(data="mock", c4_root="/c"), False),
        ("E07", None, dict(data="squad", dataset_root="/s", packed_sequence=True), True),
        ("E07", None, dict(tokenizer_type="HuggingFaceTokenizer"), False),
        ("E07", None, dict(tokenizer_type="NullTokenizer", tokenizer_model="/t"), False),
        ("E07", None, dict(tokenizer_type="TikTokenizer", tokenizer_model="/t"), False),
        ("E07", None, dict(optimizer_type="lion"), False),
        ("E07", None, dict(preempt_time=65536), False),
        ("E07", None, dict(task="dpo"), False),
        ("E07", None, dict(task="lora"), True),
        ("E07", None, dict(task="lora", use_megatron_fsdp=True), False),
        ("E07", None, dict(task="sft", use_megatron_fsdp=True), True),
        ("E07", MODEL, dict(first_k_dense_replace=1), False),
        ("E07", EXPERTS, dict(first_k_dense_replace=1), True),
        ("E07", EXPERTS, dict(first_k_dense_replace=1000), False),
        ("E08", None, dict(config_variant="v2", **DEEPSEEK_V3), True),
        ("E08", None, dict(config_variant="large_scale", use_recipes=True, **DEEPSEEK_V3), False),
        ("E11", None, dict(use_megatron_fsdp=True, save_dir="/s", num_distributed_optimizer_instances=2), False),
        ("E11", None, dict(use_megatron_fsdp=False, save_dir="/s", num_distributed_optimizer_instances=2), True),
    ],
)
def test_arguments_of_the_embedded_loop(
    rule_id: str, recipe: Recipe | None, args: dict[str, Any], passes: bool
) -> None:
    point = _point(LOCAL, recipe=recipe, launcher="embedded", **args)
    assert (not isinstance(BY_ID[rule_id](point), Violation)) is passes


def test_sharded_parameters_as_the_training_refuses_them() -> None:
    """Checkpoints that `extra_cmd_args` set; one rank of an instance, or of an expert, on Megatron-Core 0.16."""
    shared: dict[str, Any] = {"launcher": "embedded", "use_megatron_fsdp": True, "num_gpus": 4}
    saving = dataclasses.replace(_point(core="0.18", **shared), settings={"checkpoint.save": "/s"})
    broken = BY_ID["E11"](saving)
    assert isinstance(broken, Violation)
    assert (broken.where, "remove checkpoint.save," in str(broken)) == ("extra_cmd_args.checkpoint.save", True)
    copies = _point(core="0.19", num_distributed_optimizer_instances=2, **shared)
    assert isinstance(BY_ID["E11"](dataclasses.replace(copies, settings=saving.settings)), Violation)
    cases: tuple[tuple[Recipe, dict[str, Any], bool], ...] = (
        (MODEL, {"num_distributed_optimizer_instances": 4}, True),
        (MODEL, {"num_distributed_optimizer_instances": 2}, False),
        (EXPERTS, {"ep": 4, "et": 1}, True),
        (EXPERTS, {"ep": 2, "et": 1}, False),
    )
    for recipe, args, is_alone in cases:
        for core in ("0.16", "0.17"):
            answer = BY_ID["E12"](_point(recipe=recipe, core=core, **shared, **args))
            assert isinstance(answer, Violation) is (is_alone and core == "0.16")


PIPELINE = {"num_gpus": 2, "pp": 2, "mb": 1, "gb": 8}
FIRST, LAST = "model.num_layers_in_first_pipeline_stage", "model.num_layers_in_last_pipeline_stage"
EMBEDDING, LOSS = "model.account_for_embedding_in_pipeline_split", "model.account_for_loss_in_pipeline_split"


@every(
    ("recipe", "args", "extra", "broken"),
    [
        (
            "gpt_tiny",
            {"tp": 2, "num_gpus": 2},
            {"model.num_attention_heads": "3", "model.num_query_groups": "3"},
            {"M08"},
        ),
        ("gpt_tiny", {"tp": 2, "num_gpus": 2}, {"model.num_attention_heads": "abc"}, set()),
        ("gpt_tiny", {}, {"model.num_query_groups": "3"}, {"M09"}),
        ("gpt_tiny", {}, {"model.kv_channels": "33"}, {"M08"}),
        ("gpt_tiny", {"tp": 2, "num_gpus": 2}, {"model.ffn_hidden_size": "255"}, {"M10"}),
        ("gpt_tiny", {"tp": 2, "num_gpus": 2, "seq_length": 65}, {"model.sequence_parallel": "false"}, set()),
        ("moe_tiny", {"tp": 2, "num_gpus": 2}, {"model.sequence_parallel": "false"}, {"M06"}),
        ("moe_tiny", {}, {"model.moe_router_topk": "1"}, {"M31"}),
        ("moe_tiny", {}, {"model.moe_router_topk": "1", "model.moe_router_pre_softmax": "true"}, set()),
        ("moe_tiny", {}, {"model.moe_router_group_topk": "2", "model.moe_router_num_groups": "3"}, {"M31"}),
        ("moe_tiny", {}, {"model.moe_layer_freq": "[0, 1]"}, {"M31"}),
        ("moe_tiny", {}, {"model.moe_layer_freq": "[0, 1, 0, 1]", "model.ffn_hidden_size": "256"}, set()),
        ("moe_tiny", {"tp": 2, "num_gpus": 2}, {"model.add_bias_linear": "true"}, {"E06"}),
        ("gpt_tiny", {}, {"model.moe_ffn_hidden_size": "64"}, {"M31"}),
        ("gpt_tiny", {**PIPELINE, "num_layers": 5}, {FIRST: "2", LAST: "3"}, set()),
        ("gpt_tiny", {**PIPELINE, "num_layers": 7}, {FIRST: "3"}, set()),
        ("gpt_tiny", {**PIPELINE, "num_layers": 4}, {FIRST: "4"}, {"C02"}),
        ("gpt_tiny", {**PIPELINE, "num_layers": 4}, {EMBEDDING: "true"}, {"C02"}),
        ("gpt_tiny", {**PIPELINE, "num_layers": 3}, {EMBEDDING: "true"}, set()),
        ("gpt_tiny", {**PIPELINE, "num_layers": 6, "vp": 2}, {EMBEDDING: "true", LOSS: "true"}, set()),
        ("gpt_tiny", {**PIPELINE, "num_layers": 6, "vp": 2}, {FIRST: "3"}, {"C08"}),
        ("gpt_tiny", {**PIPELINE, "num_layers": 4, "vp": 2}, {FIRST: "2", LAST: "2"}, {"C08"}),
        ("gpt_tiny", {**PIPELINE, "num_layers": 5}, {FIRST: "2", LOSS: "true"}, {"C02"}),
        ("gpt_tiny", {**PIPELINE, "pipeline_model_parallel_layout": "Ett|ttL"}, {LOSS: "true"}, {"C02"}),
        ("gpt_tiny", {**PIPELINE, "pipeline_model_parallel_layout": "Ett|ttmL"}, {"model.mtp_num_layers": "1"}, set()),
        ("gpt_tiny", {**PIPELINE, "pipeline_model_parallel_layout": "Ett|ttL"}, {"model.mtp_num_layers": "1"}, {"C02"}),
        ("gpt_tiny", {**PIPELINE, "gb": 7, "pipeline_model_parallel_layout": "Et|t|t|tL"}, {}, {"M04"}),
        ("gpt_tiny", {"pipeline_model_parallel_layout": "Ett|ttL"}, {}, {"M03"}),
        ("gpt_tiny", {**PIPELINE, "recompute_num_layers": 3}, {FIRST: "3"}, set()),
        ("gpt_tiny", {"recompute_num_layers": 3}, {"model.recompute_method": "uniform"}, {"M12"}),
        ("gpt_tiny", {}, {"model.recompute_granularity": "full"}, {"M15"}),
        ("gpt_tiny", {**PIPELINE, "vp": 2, "gb": 7}, {"model.microbatch_group_size_per_vp_stage": "5"}, set()),
        ("gpt_tiny", PIPELINE, {"dist.use_megatron_fsdp": "true"}, {"C06"}),
        ("moe_tiny", {"num_gpus": 2, "ep": 2}, {"model.overlap_moe_expert_parallel_comm": "true"}, {"M19"}),
        ("gpt_tiny", {"num_gpus": 2, "num_distributed_optimizer_instances": 2}, {}, {"M32"}),
        (
            "gpt_tiny",
            {"num_gpus": 2, "num_distributed_optimizer_instances": 2},
            {"optimizer.use_distributed_optimizer": "true"},
            set(),
        ),
        (
            "gpt_tiny",
            {"num_gpus": 4, "num_distributed_optimizer_instances": 2, "use_megatron_fsdp": True, "gb": 4},
            {},
            set(),
        ),
        ("nemotron_3_nano", {**PIPELINE, "vp": 2}, {}, {"C08"}),
        ("nemotron_3_nano", {**PIPELINE, "num_layers": 4}, {"model.hybrid_layer_pattern": "ME*EM"}, {"C02"}),
        ("deepseek_v3", {**PIPELINE, "num_layers": 16}, {}, set()),
        ("deepseek_v3", PIPELINE, {}, {"C02"}),
    ],
)
def test_the_embedded_loop_is_judged_by_what_it_trains(
    recipe: str, args: dict[str, Any], extra: dict[str, str], broken: set[str]
) -> None:
    given = ResolvedCmdArgs.model_validate(
        {"launcher": "embedded", "model_recipe_name": recipe, "num_gpus": 1, "mb": 1, "compute_dtype": "fp32", **args}
    )
    made = load_recipe(recipe)
    result = check(with_recipe_defaults(given, made), recipe=made, core="0.19", settings=settings_of(extra))
    assert {each.rule_id for each in result.violations if each.rule_id not in ("E02", "E03")} == broken


def test_a_setting_that_cannot_be_read_is_not_evaluated() -> None:
    made, extra = load_recipe("gpt_tiny"), {"model.num_attention_heads": "abc", "model.mtp_num_layers": "[1]"}
    args = with_recipe_defaults(ResolvedCmdArgs(launcher="embedded", num_gpus=2, pp=2, max_steps=1), made)
    silent = {
        each.rule_id: each.missing for each in check(args, recipe=made, settings=settings_of(extra)).not_evaluated
    }
    assert {"C02", "M08", "M09"} <= silent.keys()
    assert silent["M08"] == "a readable num_attention_heads, which is 'abc',"


def test_every_rule_is_tested_here() -> None:
    assert BY_ID.keys() == BOUNDARIES.keys(), "add new rules to BOUNDARIES"
    assert len(BY_ID) == len(RULES)


@every("rule_id", BY_ID)
def test_a_rule_is_documented(rule_id: str) -> None:
    doc = document(BY_ID[rule_id])
    assert doc.title.endswith("."), "a rule's docstring begins with one sentence: what holds"
    assert doc.passes
    assert doc.fails
    assert doc.source


@every("rule_id", BOUNDARIES)
def test_a_rule_at_its_boundary(rule_id: str) -> None:
    legal, illegal, without_input = BOUNDARIES[rule_id]
    assert BY_ID[rule_id](legal) is None
    answer = BY_ID[rule_id](illegal)
    assert isinstance(answer, Violation)
    assert answer.rule_id == rule_id
    assert answer.operands
    text = str(answer)
    assert text.startswith(f"{rule_id} {answer.where}: ")
    assert all(f"{name}={value}" in text for name, value in answer.operands.items())
    assert answer.remedy in text
    if without_input is not None:
        answer = BY_ID[rule_id](without_input)
        assert isinstance(answer, NotEvaluated)
        assert answer.rule_id == rule_id
        assert answer.missing


def test_the_message_names_every_operand_and_a_remedy(sentence: Sentence) -> None:
    answer = BY_ID["C04"](_point(num_gpus=8, tp=2, mb=2, gb=100))
    sentence(str(answer))


def test_every_broken_rule_is_reported() -> None:
    result = check(
        ResolvedCmdArgs(launcher="embedded", num_gpus=4, tp=8, mb=1, gb=8, compute_dtype="fp8", max_steps=0), LOCAL
    )
    assert [violation.rule_id for violation in result.violations] == ["C01", "C03", "C04", "E02", "E03"]
    assert not result.passed


def test_a_rule_that_lacked_an_input_is_listed() -> None:
    result = check(ResolvedCmdArgs(num_gpus=8))
    assert result.passed
    assert "M01" in [item.rule_id for item in result.not_evaluated]


@every(
    ("rule_id", "launcher", "args", "breaks"),
    [
        ("E01", "megatron_bridge", dict(domain="vlm"), False),
        ("E02", "megatron_bridge", dict(compute_dtype="fp8"), False),
        ("E03", "megatron_bridge", dict(max_steps=0), False),
        ("E03", "embedded", dict(max_steps=None), True),
    ],
)
def test_only_the_embedded_loop_is_bound_by_its_limits(
    rule_id: str, launcher: str, args: dict[str, Any], breaks: bool
) -> None:
    assert isinstance(BY_ID[rule_id](_point(launcher=launcher, **args)), Violation) is breaks


@pytest.mark.parametrize("field", ["wandb_key", "hf_token"])
def test_a_violation_never_shows_a_credential(field: str) -> None:
    result = check(ResolvedCmdArgs.model_validate({"launcher": "embedded", field: "S3CRET"}), LOCAL)
    assert "S3CRET" not in repr(result.violations)
    assert "S3CRET" not in " ".join(str(violation) for violation in result.violations)


# Placement


@every(
    ("system", "nodes", "args", "expected"),
    [
        (LOCAL, None, dict(num_gpus=4), (1, 4)),
        (SLURM4, None, dict(num_gpus=4), (1, 4)),
        (SLURM4, None, dict(num_gpus=8), (2, 4)),
        (SLURM4, None, dict(num_gpus=3), (1, 3)),
        (SLURM4, 4, dict(num_gpus=8), (4, 2)),
        (SLURM4, None, dict(num_gpus=8, gpus_per_node=2), (4, 2)),
        (SLURM, None, dict(num_gpus=8), (1, 8)),
        (LOCAL, None, dict(num_gpus=64), (1, 64)),
    ],
)
def test_ranks_spread_over_as_few_nodes_as_take_them(
    system: System, nodes: int | None, args: dict[str, Any], expected: tuple[int, int]
) -> None:
    point = _point(system, nodes, **args)
    assert BY_ID["M01"](point) is None
    assert place(point) == expected


@every(
    ("system", "nodes", "args"),
    [
        (SLURM4, 1, dict(num_gpus=5)),
        (SLURM4, 3, dict(num_gpus=8)),
        (SLURM4, 0, dict(num_gpus=8)),
        (SLURM4, -1, dict(num_gpus=8)),
        (SLURM4, None, dict(num_gpus=0)),
        (SLURM4, None, dict(num_gpus=5)),  # two nodes, five ranks: not even
        (LOCAL, None, dict(num_gpus=-1)),
        (LOCAL, None, dict(num_gpus=4, gpus_per_node=2)),
    ],
)
def test_what_does_not_fit_is_refused(system: System, nodes: int | None, args: dict[str, Any]) -> None:
    assert isinstance(BY_ID["M01"](_point(system, nodes, **args)), Violation)
