"""One point's estimate: numbers that agree with each other, None with a reason, and wrong input named."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from cloudai_mbridge.commands.console import render_json
from cloudai_mbridge.constraints import check
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Price, gpu_named, gpus
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, MemoryLimit, headline_estimator
from cloudai_mbridge.estimate.memory.estimate import _microbatches, memory_per_stage
from cloudai_mbridge.estimate.memory.layout import Granularity
from cloudai_mbridge.estimate.point import ESTIMATORS, GIB, Estimate, estimate_point, has_known_error
from cloudai_mbridge.estimate.request import EstimateRequest, trained_question
from cloudai_mbridge.megatron_bridge.presets import find_preset, loop_preset, newest_release
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from cloudai_mbridge.recipes.presets import with_preset_of
from cloudai_mbridge.sweep.checked import with_recipe
from cloudai_mbridge.training.flops import NEW, OLD, flops_per_token
from tests.cases import every
from tests.golden import Sentence


def _request(
    recipe: str = "llama3_70b", gpu: str | None = "gb200", extra: dict[str, str] | None = None, **args: Any
) -> EstimateRequest:
    loaded = load_recipe(recipe)
    sizes = {"num_gpus": 64, "gb": 256, "mb": 1, "tp": 2, "pp": 4, **args}
    if recipe != "llama3_70b":
        sizes = args
    given = ResolvedCmdArgs.model_validate({"model_recipe_name": recipe, "gpu_type": gpu or "gb200", **sizes})
    device = gpu_named(gpu) if gpu else None
    return EstimateRequest(loaded, with_recipe_defaults(given, loaded), device, "no GPU is named", extra or {})


def _estimate(*args: Any, estimator: str = "default", **keys: Any) -> Estimate:
    return estimate_point(_request(*args, **keys), estimator=estimator)


def _peak(**keys: Any) -> float:
    found = _estimate(**keys).memory
    assert found is not None
    return found.peak_memory_gib


def _step(**keys: Any) -> float:
    found = _estimate(**keys).step_time_s
    assert found is not None
    return found


def test_the_numbers_agree_with_each_other() -> None:
    found = estimate_point(_request(max_steps=50), price=Price(10.5, "EUR"))
    assert found.flops_per_token == flops_per_token(_request().architecture, NEW)
    assert found.step_time_terms_s is not None
    assert found.step_time_s == pytest.approx(sum(found.step_time_terms_s.values()))
    assert found.tokens_per_step == 256 * 8192
    assert found.tokens_per_s_per_gpu == pytest.approx(256 * 8192 / found.step_time_s / 64)
    assert found.tflops_per_gpu == pytest.approx(found.tokens_per_s_per_gpu * found.flops_per_token / 1e12)
    assert found.mfu == pytest.approx(found.tflops_per_gpu / gpu_named("gb200").peak_tflops["bf16"])
    assert found.gpu_hours == pytest.approx(64 * found.step_time_s * 50 / 3600)
    assert found.cost == pytest.approx(10.5 * found.gpu_hours)
    memory = found.memory
    assert memory is not None
    assert len(memory.stages) == 4
    worst = max(memory.stages, key=lambda stage: stage.total)
    assert memory.worst_stage == worst.stage
    assert memory.peak_memory_gib == pytest.approx(sum(worst.terms.values()) / GIB)
    most = max(stage.states + stage.activations for stage in memory.stages)
    assert memory.share == pytest.approx(most / GIB / gpu_named("gb200").memory_gib)
    assert (found.missing, found.currency) == ({}, "EUR")


def test_the_formula_changes_flops_and_not_the_time() -> None:
    new, old = (
        estimate_point(
            EstimateRequest(
                load_recipe("gpt_oss_120b"),
                _request("gpt_oss_120b", num_gpus=8, gb=8).args,
                gpu_named("gb200"),
                formula=formula,
            )
        )
        for formula in (NEW, OLD)
    )
    assert new.flops_per_token != old.flops_per_token
    assert new.step_time_s == old.step_time_s


@every("recipe", recipe_names())
def test_every_recipe_has_an_estimate(recipe: str) -> None:
    found = _estimate(recipe, num_gpus=8, gb=32)
    assert found.flops_per_token > 0
    data = json.loads(render_json(found))
    for name in ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu", "gpu_hours"):
        assert data[name] > 0 or name in data["missing"], name
    assert data["memory"] or "memory" in data["missing"]


def test_more_gpus_never_need_more_memory_of_states() -> None:
    peaks = [_peak(num_gpus=gpus, gb=1024) for gpus in (32, 64, 128, 256)]
    assert peaks == sorted(peaks, reverse=True)


def test_longer_sequences_and_larger_batches_need_more() -> None:
    assert _peak(seq_length=4096) < _peak(seq_length=8192) < _peak(seq_length=16384)
    assert _peak(mb=1) < _peak(mb=2)
    assert _step(gb=256) < _step(gb=512)
    assert _step(num_gpus=64) > _step(num_gpus=128)


def test_recomputation_trades_time_for_memory() -> None:
    full = {"model.recompute_granularity": "full"}
    assert _peak(extra=full) < _peak(recompute_modules="mlp") < _peak()
    assert _step(extra=full) > _step()
    assert _request(extra=full).layout_of(_request().architecture).recompute.granularity is Granularity.FULL


@every("estimator", ESTIMATORS)
def test_the_reference_estimators_have_their_names(estimator: str) -> None:
    found = _estimate(estimator=estimator)
    assert found.memory is not None
    assert found.memory.estimator == estimator
    assert bool(found.memory.stages) == (estimator == "default")


def test_an_unknown_estimator_is_bad_input(sentence: Sentence) -> None:
    with pytest.raises(BadInput) as caught:
        _estimate(estimator="mine")
    sentence(caught)


def test_a_processor_has_memory_but_no_time() -> None:
    found = _estimate("llama3_8b", "cpu", num_gpus=1, gb=1, compute_dtype="fp32")
    assert found.memory is not None
    assert found.memory.share is found.step_time_s is found.mfu is found.gpu_hours is None
    assert set(found.missing) == {
        "step_time_s",
        "tokens_per_s_per_gpu",
        "tflops_per_gpu",
        "mfu",
        "gpu_hours",
        "memory_share",
        "cost",
    }
    assert "cpu" in found.missing["mfu"]


def test_without_a_gpu_there_are_flops_parameters_and_memory(sentence: Sentence) -> None:
    found = _estimate(gpu=None)
    assert found.memory is not None
    assert found.parameters is not None
    assert found.missing["step_time_s"] == found.missing["memory_share"]
    sentence(found.missing["step_time_s"])


def test_a_precision_that_the_gpu_lacks_has_no_time(sentence: Sentence) -> None:
    found = _estimate(gpu="h100", compute_dtype="nvfp4")
    assert found.step_time_s is None
    sentence(found.missing["step_time_s"])


@every(
    "args",
    [
        {"num_gpus": 60},
        {"gb": 100},
        {"compute_dtype": "int4"},
        {"extra": {"model.num_attention_heads": "0"}},
        {"extra": {"ddp.grad_reduce_in_fp32": "maybe"}},
        {"extra": {"model.recompute_granularity": "some"}},
        {"extra": {"model.hidden_size": "-1"}},
    ],
)
def test_what_is_wrong_is_named(sentence: Sentence, args: dict[str, Any]) -> None:
    with pytest.raises(BadInput) as caught:
        _estimate(**args)
    sentence(caught)


def test_overrides_reach_the_layout() -> None:
    request = _request(extra={"+ddp.grad_reduce_in_fp32": "true", "optimizer.optimizer_cpu_offload": "true"})
    layout = request.layout_of(request.architecture)
    assert layout.grad_reduce_in_fp32
    assert layout.optimizer_offload_fraction == 1.0
    half = _request(extra={"optimizer.optimizer_offload_fraction": "0.5"})
    assert half.layout_of(half.architecture).optimizer_offload_fraction == 0.0  # the offload is not on


def test_further_micro_batches_need_no_more_memory() -> None:
    """What `headline_estimator` keeps one answer for has one answer."""
    seen: dict[tuple[int, int, int], float] = {}
    for pp, vp, count in (
        (pp, vp, count) for pp, vp in ((1, 1), (2, 1), (4, 1), (4, 5), (2, 4)) for count in range(1, 40)
    ):
        request = _request(tp=8, pp=pp, vp=vp, gb=count, num_gpus=8 * pp)
        model = request.architecture
        layout = request.layout_of(model)
        total = max(stage.total for stage in memory_per_stage(model, layout))
        assert seen.setdefault((pp, vp, _microbatches(layout)), total) == total, (pp, vp, count)


def test_a_point_that_passes_the_rules_never_fails_to_be_estimated() -> None:
    headline_of, estimated = headline_estimator(), 0
    for recipe in recipe_names():
        loaded = load_recipe(recipe)
        for tp, pp, ep, seq in ((1, 1, 1, 64), (2, 1, 2, 4096), (1, 2, 1, 128), (4, 2, 4, 2048), (8, 4, 8, 8192)):
            for dtype in ("bf16", "fp8_mx", "fp32"):
                sizes = {"tp": tp, "pp": pp, "ep": ep, "seq_length": seq, "gb": 64, "mb": 1, "num_gpus": 64}
                request = _request(recipe, "gb200", compute_dtype=dtype, **sizes)
                if check(request.args, None, loaded).violations:
                    continue
                head = headline_of(request)
                estimated += 1
                assert head.step_time_s is None or (math.isfinite(head.step_time_s) and head.step_time_s > 0)
                assert (head.step_time_s is None or head.peak_memory_gib is None) == bool(head.why), head
    assert estimated > 60


def test_every_gpu_gives_numbers_or_reasons() -> None:
    for name in gpus():
        found = _estimate(gpu=name)
        assert (found.step_time_s is None) == ("step_time_s" in found.missing)


@every(
    ("given", "bound", "words"),
    [
        ({}, "", ""),
        ({"extra": {"optimizer.lr": "1e-4", "optimizer.adam_beta1": "0.95"}}, "", ""),
        (
            {"extra": {"model.fine_grained_activation_offloading": "true"}},
            "at most",
            "fine_grained_activation_offloading",
        ),
        ({"extra": {"+model.cpu_offloading_weights": "true"}}, "at most", "model.cpu_offloading_weights saves"),
        ({"extra": {"model.cpu_offloading_weights": "false"}}, "", ""),
        ({"extra": {"optimizer.exp_avg_dtype": "torch.bfloat16"}}, "at most", "optimizer.exp_avg_dtype saves"),
        ({"extra": {"optimizer.exp_avg_dtype": "torch.float32"}}, "", ""),
        ({"recompute_modules": "mhc"}, "at most", "recomputing mhc saves"),
        ({"extra": {"model.hidden_dropout": "0.1"}}, "at least", "model.hidden_dropout costs"),
        ({"extra": {"model.some_new_field": "2"}}, "about", "model.some_new_field may change"),
        (
            {"extra": {"model.hidden_dropout": "0.1", "model.memory_efficient_layer_norm": "true"}},
            "about",
            "saves memory, which is not modelled; model.hidden_dropout costs",
        ),
    ],
)
def test_a_setting_without_a_model_makes_the_memory_a_bound(given: dict[str, Any], bound: str, words: str) -> None:
    """On a GPU that is too small, a saving leaves it open whether the point fits; a cost does not."""
    small, large = (_estimate(tp=tp, pp=pp, **given) for tp, pp in ((1, 1), (4, 4)))
    assert small.memory is not None
    assert small.memory.bound == bound
    assert words in small.memory.why_bound
    may_fit = "saves" in small.memory.why_bound or "may change" in small.memory.why_bound
    assert small.fits is (None if may_fit else False)
    assert large.fits is True


def test_a_point_that_may_fit_is_not_held_back() -> None:
    """By default; a limit that is asked for holds back what it does not know."""
    extra = {"model.fine_grained_activation_offloading": "true"}
    may, cannot = (headline_estimator()(_request(tp=1, pp=1, extra=one)) for one in (extra, {}))
    assert (may.exceeds(DEFAULT_LIMIT), cannot.exceeds(DEFAULT_LIMIT)) == (False, True)
    assert may.exceeds(MemoryLimit(0.9))
    assert "fine_grained_activation_offloading" in may.why_less


def test_growing_segments_lose_nothing_between_tensors() -> None:
    """As the variables of presets have it; without a preset, the allocator keeps a share of what comes and goes."""
    args = ResolvedCmdArgs(
        model_family_name="llama",
        model_recipe_name="llama31_405b",
        gpu_type="gb200",
        num_gpus=256,
        compute_dtype="bf16",
    )
    preset, gpu = find_preset(args, newest_release()), gpu_named("gb200")
    request = trained_question(load_recipe("llama31_405b"), args, preset, "", gpu, "", {})
    assert request.expands_segments
    lost, kept = (estimate_point(replace(request, expands_segments=expands)).memory for expands in (False, True))
    assert lost is not None
    assert kept is not None
    for one, other in zip(lost.stages, kept.stages, strict=True):
        assert one.terms["fragmentation"] > 0
        assert other.terms["fragmentation"] == 0
        assert one.total - other.total == pytest.approx(one.terms["fragmentation"])


def test_the_moments_of_a_preset_count_with_either_launcher() -> None:
    """The recipe keeps them in 16 bits on an H100: 4 bytes per weight less."""
    peaks = {}
    for launcher in Launcher:
        args = ResolvedCmdArgs.model_validate(
            {
                **{"launcher": launcher, "gpu_type": "h100", "num_gpus": 16, "compute_dtype": "bf16"},
                **{"model_recipe_name": "nemotron_3_5_lightning", "model_family_name": "nemotron3"},
            }
        )
        recipe, gpu = load_recipe("nemotron_3_5_lightning"), gpu_named("h100")
        if launcher is Launcher.EMBEDDED:
            preset = loop_preset(args, "h100")
            recipe = with_preset_of(recipe, preset)
            args = with_recipe(args, recipe, preset=preset)
            request = EstimateRequest(recipe, args, gpu)
        else:
            request = trained_question(recipe, args, find_preset(args, newest_release()), "", gpu, "", {})
        layout = request.layout_of(request.architecture)
        peaks[launcher] = layout.optimizer_bytes
    assert set(peaks.values()) == {8}


@every(
    ("gpu", "recipe", "is_known"),
    [
        ("gb200", "llama3_70b", True),
        ("gb200", "qwen3_30b_a3b", True),  # rows of this GPU and format, of other recipes
        ("h200", "llama3_70b", False),
        ("a100", "llama3_70b", False),
        ("cpu", "llama3_70b", False),
        (None, "llama3_70b", False),
    ],
)
def test_a_device_without_published_rows_has_no_known_error(gpu: str | None, recipe: str, is_known: bool) -> None:
    assert has_known_error(_request(recipe, gpu=gpu)) is is_known
