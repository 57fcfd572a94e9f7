import math
import statistics
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Precision, gpu_named, gpus
from cloudai_mbridge.estimate.memory.layout import Granularity, ParallelLayout, Recompute
from cloudai_mbridge.estimate.time.calibration import GPU, Setting, load_calibration
from cloudai_mbridge.estimate.time.model import TimeModel, time_model, why_no_time
from cloudai_mbridge.estimate.time.parts import bubble, device_of
from cloudai_mbridge.recipes import load_recipe, recipe_names
from tests.cases import every
from tests.golden import Sentence

GB200, BF16 = gpu_named("gb200"), Precision.BF16
RECIPES = ("llama3_70b", "qwen3_235b_a22b", "deepseek_v3", "gpt_oss_120b", "nemotron_3_super", "deepseek_v4_flash")


def seconds(model: Architecture, layout: ParallelLayout, gpu: str = "gb200", precision: Precision = BF16) -> float:
    return time_model(model, gpu_named(gpu), precision).step_time_s(layout)


def terms_of(model: Architecture, layout: ParallelLayout, gpu: str = "gb200", precision: Precision = BF16) -> Any:
    return time_model(model, gpu_named(gpu), precision).step_time(layout)


@every("recipe", recipe_names())
def test_terms_add_up(recipe: str) -> None:
    model = architecture(load_recipe(recipe))
    layout = ParallelLayout(num_gpus=32, tp=2, pp=2, cp=2, ep=4, etp=1, vp=2, mbs=1, gbs=32)
    terms = terms_of(model, layout)
    assert seconds(model, layout) == pytest.approx(sum(terms.values()))
    assert all(value >= 0 for value in terms.values())
    assert terms["matmul_output"] > 0


def test_bubble_is_a_share_of_all_before_the_end_of_the_step(dense: Architecture, layout: ParallelLayout) -> None:
    terms = terms_of(dense, layout)
    busy = seconds(dense, layout) - terms["bubble"] - terms["dp_comm"] - terms["optimizer"]
    assert terms["bubble"] == pytest.approx(busy * bubble(4, 5, 32))


def test_more_microbatches_have_a_smaller_share_of_bubble(dense: Architecture, layout: ParallelLayout) -> None:
    shares = []
    for gbs in (64, 128, 256, 1024):
        sized = replace(layout, gbs=gbs)
        shares.append(terms_of(dense, sized)["bubble"] / seconds(dense, sized))
    assert shares == sorted(shares, reverse=True)


layouts = st.builds(
    lambda tp, pp, cp, vp, ep, mbs, microbatches: ParallelLayout(
        num_gpus=256,
        tp=tp,
        pp=pp,
        cp=cp,
        vp=vp if pp > 1 else 1,
        ep=ep,
        etp=1,
        mbs=mbs,
        gbs=mbs * microbatches * 256 // (tp * pp * cp),
    ),
    *(st.sampled_from((1, 2, 4)) for _ in range(4)),
    st.sampled_from((1, 8, 64)),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((1, 8, 64)),
)
_FASTER = ("memory_bandwidth_gb_s", "nvlink_gb_s", "nic_gb_s", "nvlink_domain", "exp_per_s", "power_w")


@given(layouts, st.sampled_from(RECIPES), st.sampled_from(_FASTER), st.sampled_from(("h100", "b200", "gb200")))
@settings(max_examples=150, deadline=None)
def test_better_hardware_is_never_slower(layout: ParallelLayout, recipe: str, figure: str, name: str) -> None:
    model, gpu = architecture(load_recipe(recipe)), gpu_named(name)
    better = replace(gpu, **{figure: 2 * getattr(gpu, figure)})
    times = []
    for each in (gpu, better):
        device = device_of(each, BF16)
        assert device is not None
        times.append(TimeModel(Setting(model, each, BF16), device, load_calibration()).step_time_s(layout))
    assert times[1] <= times[0] * (1 + 1e-9)


@given(layouts, st.sampled_from(RECIPES))
@settings(max_examples=50, deadline=None)
def test_more_work_takes_longer(layout: ParallelLayout, recipe: str) -> None:
    model = architecture(load_recipe(recipe))
    base = seconds(model, layout)
    assert seconds(model, replace(layout, gbs=2 * (layout.gbs or 0))) > base
    assert seconds(model, replace(layout, seq_length=2 * model.seq_length)) > base
    full = Recompute(Granularity.FULL)
    assert base < seconds(model, replace(layout, recompute=full)) < 4 / 3 * base


def test_sequence_length_of_the_layout_is_that_of_the_model(dense: Architecture, layout: ParallelLayout) -> None:
    longer = replace(dense, seq_length=16384)
    assert seconds(longer, layout) == pytest.approx(seconds(dense, replace(layout, seq_length=16384)))


def test_newer_gpus_and_fewer_bits_are_faster(dense: Architecture, layout: ParallelLayout) -> None:
    by_gpu = [seconds(dense, layout, gpu) for gpu in ("a100", "h100", "b200", "gb200", "gb300")]
    assert by_gpu == sorted(by_gpu, reverse=True)
    by_precision = [
        seconds(dense, layout, "gb200", precision) for precision in (BF16, Precision.FP8_CS, Precision.NVFP4)
    ]
    assert by_precision == sorted(by_precision, reverse=True)


def test_experts_within_a_node_beat_experts_across_nodes(experts: Architecture, expert_layout: ParallelLayout) -> None:
    far = replace(expert_layout, ep=32)
    assert seconds(experts, expert_layout, "b200") < seconds(experts, far, "b200")
    assert seconds(experts, far, "gb200") < seconds(experts, far, "b200")


def test_small_microbatches_of_experts_cost_launches(experts: Architecture, expert_layout: ParallelLayout) -> None:
    few = terms_of(experts, replace(expert_layout, mbs=4), precision=Precision.FP8_MX)
    many = terms_of(experts, expert_layout, precision=Precision.FP8_MX)
    assert many["overhead"] == pytest.approx(4 * few["overhead"], rel=1e-3)


def test_a_tiny_model_waits_for_the_host() -> None:
    tiny = architecture(load_recipe("gpt_tiny"))
    layout = ParallelLayout(num_gpus=1, mbs=1, gbs=4)
    terms, total = terms_of(tiny, layout, "h100"), seconds(tiny, layout, "h100")
    assert terms["overhead"] > 0.5 * total
    launches = 2 * tiny.num_layers * 4 * 300e-6
    assert total - terms["optimizer"] == pytest.approx(launches)
    assert seconds(tiny, replace(layout, cuda_graph="full"), "h100") < total


def test_adapters_train_faster_than_all_weights(dense: Architecture, layout: ParallelLayout) -> None:
    everything = time_model(dense, GB200, BF16).step_time_s(layout)
    adapters = time_model(dense, GB200, BF16, is_frozen=True).step_time(layout)
    assert 2 / 3 * everything < sum(adapters.values()) < everything
    assert (adapters["dp_comm"], adapters["optimizer"]) == (0, 0)
    error = time_model(dense, GB200, BF16, is_frozen=True).error()
    assert (error.is_known, str(error)) == (False, "unknown: one published row is of adapters (5 % off)")


def test_newest_software_is_the_default(experts: Architecture, expert_layout: ParallelLayout) -> None:
    times = [
        time_model(experts, GB200, Precision.FP8_MX, container).step_time_s(expert_layout)
        for container in ("25.11", "26.04.01", "26.06", None)
    ]
    assert times == sorted(times, reverse=True)


def test_says_how_wrong_it_was(dense: Architecture) -> None:
    times = time_model(dense, GB200, Precision.FP8_CS)
    error = times.error()
    assert error == load_calibration().error_of("llama3_70b", "gb200", Precision.FP8_CS)
    assert str(error).startswith("median error ")
    assert " published rows of this recipe or gb200 in fp8_cs (2 of both), each held out with " in str(error)
    assert times.error(is_in_fit=True) != error


def test_another_model_of_the_same_name_is_not_the_recipes(dense: Architecture) -> None:
    error = time_model(replace(dense, num_layers=4), GB200, Precision.FP8_CS).error()
    assert not error.is_known
    assert str(error).startswith("unknown: the published rows of llama3_70b on gb200 in fp8_cs are of other sizes; of ")
    shorter = time_model(replace(dense, seq_length=4096), GB200, Precision.FP8_CS).error()
    assert shorter.is_known


def test_where_nothing_was_published_the_error_is_unknown(dense: Architecture) -> None:
    """Of H100 in BF16 there are three rows, of other models; in NVFP4 none, nor of any H200."""
    error = time_model(dense, gpu_named("h100"), BF16).error()
    assert not error.is_known
    assert error.interval_s(1.0) is None
    assert str(error).startswith("unknown: no published row is of llama3_70b on h100 in bf16; of ")
    none = load_calibration().error_of("llama3_70b", "h200", BF16)
    assert str(none).startswith("unknown: no published row is of h200 in bf16; of ")
    hopper = [row for row in load_calibration().held_out if row.gpu == "h100"]
    assert none.median >= statistics.median(abs(math.expm1(row.errors[GPU])) for row in hopper)


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("cpu", BF16), ("h100", Precision.NVFP4), ("a100", Precision.FP8_CS)],
    ids=["unknown peak of cpu", "h100 has no nvfp4 tensor", "a100 has no fp8 cs"],
)
def test_says_why_there_is_no_time(
    dense: Architecture, layout: ParallelLayout, sentence: Sentence, gpu: str, precision: Precision
) -> None:
    sentence(why_no_time(gpu_named(gpu), precision))
    with pytest.raises(BadInput) as caught:
        seconds(dense, layout, gpu, precision)
    sentence(caught)


def test_there_is_a_time_where_there_are_figures() -> None:
    assert all(why_no_time(gpu, BF16) is None for gpu in gpus().values() if gpu.name != "cpu")


def test_an_unknown_container_is_named(dense: Architecture, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match="container:") as caught:
        time_model(dense, GB200, BF16, "newest")
    sentence(caught)


def test_a_step_needs_a_microbatch(dense: Architecture, sentence: Sentence) -> None:
    with pytest.raises(BadInput, match=r"^gb:") as caught:
        seconds(dense, ParallelLayout(num_gpus=8, mbs=1, gbs=0))
    sentence(caught)
