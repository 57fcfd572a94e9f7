"""The few numbers that a sweep keeps are those of the whole estimate, whatever points they are kept between."""

import random
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit, headline_estimator
from cloudai_mbridge.estimate.point import Estimate, estimate_point
from cloudai_mbridge.estimate.request import EstimateRequest
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from tests.cases import every
from tests.golden import Sentence

NAMES = ("peak_memory_gib", "memory_share", "step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
RECIPES = ("llama3_8b", "llama3_70b", "qwen3_30b_a3b", "deepseek_v3", "nemotron_3_nano", "gpt_oss_120b", "gpt_tiny")
EXTRA: tuple[dict[str, str], ...] = (
    {},
    {"ddp.grad_reduce_in_fp32": "false"},
    {"optimizer.use_distributed_optimizer": "false"},
    {"model.recompute_granularity": "full"},
    {"model.position_embedding_type": "learned_absolute"},
)


def random_question(rng: random.Random) -> EstimateRequest | None:
    """Return a point; None where the sizes cannot be."""
    pick = rng.choice
    tp, pp, cp, mb = pick((1, 2, 4)), pick((1, 2, 4)), pick((1, 2)), pick((1, 2, 3))
    num_gpus = pick((8, 16, 32, 64, 128))
    recipe, gpu = load_recipe(pick(RECIPES)), pick(("h100", "gb200", "cpu"))
    args: dict[str, Any] = {
        **{"tp": tp, "pp": pp, "cp": cp, "mb": mb, "num_gpus": num_gpus},
        "vp": pick((None, None, 2, 4)),
        "ep": pick((1, 4, 8)),
        "et": pick((None, 1, 2)),
        "gb": mb * max(1, num_gpus // (tp * pp * cp)) * pick((1, 2, 3, 5, 8, 9, 16, 17)),
        "seq_length": pick((None, 64, 100, 2048, 4096)),
        "compute_dtype": pick(("bf16", "fp8_cs", "fp8_mx", "nvfp4", "fp32")),
        "use_megatron_fsdp": pick((None, None, True)),
        "num_distributed_optimizer_instances": pick((None, None, 2)),
        "moe_a2a_overlap": pick((None, True)),
        "recompute_modules": pick((None, "core_attn", "moe_act")),
        "recompute_num_layers": pick((None, None, 1)),
        "cuda_graph_impl": pick((None, "local")),
        "task": pick(("pretrain", "lora")),
        "launcher": pick(("embedded", "megatron_bridge")),
        "model_recipe_name": recipe.name,
    }
    try:
        given = ResolvedCmdArgs.model_validate(args)
        request = EstimateRequest(recipe, with_recipe_defaults(given, recipe), gpu_named(gpu), extra=pick(EXTRA))
        request.layout_of(request.architecture)
    except BadInput:
        return None
    return request


def value_of(found: Estimate, name: str) -> Any:
    """Return the value of an estimate that a headline calls so."""
    if name not in ("peak_memory_gib", "memory_share"):
        return getattr(found, name)
    return found.memory and (found.memory.share if name == "memory_share" else found.memory.peak_memory_gib)


@pytest.mark.parametrize("number", [1000, pytest.param(4000, marks=pytest.mark.drill)])
def test_headlines_are_the_estimates_of_random_points(number: int) -> None:
    rng, kept, compared = random.Random(8), headline_estimator(), 0
    for _ in range(number):
        if (request := random_question(rng)) is None:
            continue
        head = kept(request)
        try:
            found = estimate_point(request)
        except BadInput:
            continue
        compared += 1
        for name in NAMES:
            mine, theirs = getattr(head, name), value_of(found, name)
            assert mine == (theirs and pytest.approx(theirs, rel=1e-9)), (name, request)
        if found.memory and found.memory.stages:
            most = found.memory.stages[head.worst_stage or 0].total_gib
            assert most == pytest.approx(found.memory.peak_memory_gib, rel=1e-9)
    assert compared > number / 8


def question_of(
    gpu: str = "gb200", extra: dict[str, str] | None = None, recipe: str = "llama3_8b", **args: Any
) -> EstimateRequest:
    loaded = load_recipe(recipe)
    given = ResolvedCmdArgs.model_validate({"model_recipe_name": recipe, "num_gpus": 8, **args})
    return EstimateRequest(loaded, with_recipe_defaults(given, loaded), gpu_named(gpu), extra=extra or {})


@every("name", ["h100", "H100", "DGX-H100", "NVIDIA H100 80GB HBM3", "gb200"])
def test_the_gpu_that_was_found_decides_and_not_the_name_in_the_arguments(name: str) -> None:
    kept, args = headline_estimator(), {"compute_dtype": "fp8_cs", "tp": 2}
    assert kept(question_of("h100", gpu_type=name, **args)) == kept(question_of("h100", gpu_type="h100", **args))


def test_copies_of_what_is_sharded_need_more() -> None:
    def peak(**args: Any) -> float:
        found = headline_estimator()(question_of(recipe="llama3_70b", use_megatron_fsdp=True, **args)).peak_memory_gib
        assert found is not None
        return found

    few, whole = {"num_gpus": 8, "gb": 8}, {"num_gpus": 64, "gb": 64}
    hybrid = peak(**whole, num_distributed_optimizer_instances=8)
    assert peak(**whole) < hybrid
    assert hybrid == pytest.approx(peak(**few), rel=1e-9)
    outer = {"ddp.outer_dp_sharding_strategy": "optim"}
    assert peak(**whole) < peak(**whole, num_distributed_optimizer_instances=8, extra=outer) < hybrid


@pytest.mark.parametrize("instances", [3, 128])
def test_copies_that_do_not_divide_are_a_reason(instances: int) -> None:
    head = headline_estimator()(question_of(num_distributed_optimizer_instances=instances))
    assert head.peak_memory_gib is None
    assert "num_distributed_optimizer_instances" in head.why[0]


def test_dense_layers_in_front_change_a_model_with_experts() -> None:
    def head(**args: Any) -> Headline:
        return headline_estimator()(question_of(recipe="deepseek_v3", num_gpus=64, ep=64, gb=64, **args))

    assert head(first_k_dense_replace=3) == head()
    dense, usual = head(first_k_dense_replace=61), head()
    assert dense.peak_memory_gib != usual.peak_memory_gib
    assert dense.step_time_s != usual.step_time_s


def test_a_share_of_the_user_holds_for_published_points_too() -> None:
    head = Headline("gb200", 8, peak_memory_gib=95, modelled_gib=92, gpu_memory_gib=100, is_known_to_fit=True)
    assert not head.exceeds(DEFAULT_LIMIT)
    assert head.exceeds(MemoryLimit(0.9))
    assert not head.exceeds(None)
    unknown = Headline("gb200", 8, peak_memory_gib=95, modelled_gib=92, gpu_memory_gib=100)
    assert unknown.exceeds(DEFAULT_LIMIT)
    over = Headline("gb200", 8, peak_memory_gib=101, modelled_gib=92, gpu_memory_gib=100, is_known_to_fit=True)
    assert over.exceeds(DEFAULT_LIMIT)


@every(
    ("changes", "is_known"),
    [
        ({}, True),
        ({"gb": 4096}, True),  # more of the same micro-batches
        ({"num_gpus": 128}, True),  # less optimizer state on each
        ({"num_gpus": 32}, False),
        ({"mb": 3, "gb": 384}, False),
        ({"seq_length": 16384}, False),
        ({"compute_dtype": "bf16"}, False),
    ],
)
def test_what_a_published_point_proves(changes: dict[str, Any], is_known: bool) -> None:
    tight = {"num_gpus": 64, "mb": 2, "gb": 256, "seq_length": 8192, "compute_dtype": "fp8_cs"}
    head = headline_estimator()(question_of(recipe="llama3_70b", use_megatron_fsdp=True, **{**tight, **changes}))
    assert head.exceeds(DEFAULT_LIMIT) != is_known


def test_a_misprinted_row_proves_nothing() -> None:
    sizes = {"num_gpus": 64, "pp": 4, "ep": 8, "mb": 4, "gb": 512, "seq_length": 4096}
    head = headline_estimator()(question_of("h100", recipe="gpt_oss_120b", **sizes))
    assert not head.is_known_to_fit
    assert head.exceeds(DEFAULT_LIMIT)


@every(
    ("key", "text"),
    [
        ("model.share_embeddings_and_output_weights", "perhaps"),
        ("model.moe_ffn_hidden_size", "-768"),
        ("model.hidden_size", "0"),
        ("model.num_attention_heads", "0"),
        ("model.num_layers", "1000000000000"),
        ("model.num_layers_in_first_pipeline_stage", "-8"),
        ("model.num_query_groups", "2.5"),
        ("model.moe_latent_size", "large"),
        ("model.seq_length", "1024"),
        ("+model.tensor_model_parallel_size", "2"),
        ("train.micro_batch_size", "2"),
    ],
)
def test_an_override_that_cannot_be_is_a_reason(sentence: Sentence, key: str, text: str) -> None:
    head = headline_estimator()(question_of(recipe="qwen3_30b_a3b", extra={key: text}))
    assert head.peak_memory_gib is None
    assert head.step_time_s is None
    sentence(head.why[0])


@every("text", ["False", "false", "off", "no"])
def test_a_switch_as_hydra_writes_it(text: str) -> None:
    key = "model.share_embeddings_and_output_weights"
    assert question_of(extra={key: text}).architecture == question_of().architecture
    assert question_of(extra={f"+{key}": "True"}).architecture.share_embeddings_and_output_weights


def test_first_and_last_stages_that_take_more_than_there_is() -> None:
    extra = {"model.num_layers_in_first_pipeline_stage": "40", "model.num_layers_in_last_pipeline_stage": "8"}
    head = headline_estimator()(question_of(pp=4, extra=extra))
    assert head.peak_memory_gib is None
    assert "take 48 of 32 layers" in head.why[0]


def test_what_no_estimate_reads_is_named() -> None:
    extra = {"optimizer.optimizer": "sgd", "model.num_layers": "8", "logger.log_interval": "5", "ddp.bucket_size": "9"}
    found = estimate_point(question_of(extra=extra, fp8_recipe="mxfp8"))
    assert found.not_considered == ("cmd_args.fp8_recipe", "optimizer.optimizer", "ddp.bucket_size")
    assert estimate_point(question_of()).not_considered == ()


@every(
    ("extra", "is_recomputed"),
    [
        ({"model.recompute_modules": "['mlp']"}, False),  # Megatron-Core asks for a granularity
        ({"model.recompute_method": "uniform"}, False),
        ({"model.recompute_modules": "['mlp']", "model.recompute_granularity": "selective"}, True),
    ],
)
def test_recomputation_needs_a_granularity(extra: dict[str, str], is_recomputed: bool) -> None:
    plain, head = headline_estimator()(question_of()), headline_estimator()(question_of(extra=extra))
    assert (head.peak_memory_gib != plain.peak_memory_gib) == is_recomputed
    assert (head.step_time_s != plain.step_time_s) == is_recomputed


@every(
    "extra", [{"model.recompute_method": "foo"}, {"model.recompute_num_layers": "-3"}, {"model.moe_router_topk": "999"}]
)
def test_options_that_cannot_be_are_reasons(extra: dict[str, str]) -> None:
    assert (
        next(iter(extra)).split("_")[-1]
        in headline_estimator()(question_of(recipe="qwen3_30b_a3b", extra=extra)).why[0]
    )
