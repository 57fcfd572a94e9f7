"""The GPU's parts without a GPU: their TOML is planned for an H100, and a stand-in's report is judged.

Only the training is a stand-in: what `mbridge run` would submit is written by the real `mbridge dry-run`.
"""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.estimate.memory.estimate import GIB, Assumptions
from cloudai_mbridge.gpu_check import proxy, tiny
from cloudai_mbridge.gpu_check.kit import Kit, PartFailed, PartSkipped, largest_difference, train, training
from cloudai_mbridge.gpu_check.run import ENDING_S, PARTS, TOTAL_S, needs_muon
from tests.forked import run_mbridge
from tests.golden import Sentence

RUN = {part.name: part.run for part in PARTS}
STEP_S, TFLOPS, MEMORY_GIB = 0.5, 400.0, 40.0
Loss = Callable[[str, int], float]


def falling(test: str, step: int) -> float:
    return 10.0 - step / 10


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Loss], None]:
    """Let `mbridge run` plan for real, and report made-up steps; trains: how many points until the deadline."""

    def real(kit: Kit, *arguments: Any, log: str, codes: Any = (0,), **env: str) -> int:
        done = run_mbridge(*arguments, cwd=Path.cwd(), env=env)
        (kit.work / f"{log}.stdout").write_text(done.stdout)
        (kit.work / f"{log}.stderr").write_text(done.stderr)
        if done.returncode not in codes:
            raise PartFailed(f"exit code {done.returncode}: {kit.tail(log)}")
        return done.returncode

    def install(loss: Loss, trains: int | None = None, **changes: Any) -> None:
        def mbridge(self: Kit, *arguments: Any, log: str, codes: Any = (0,), **env: str) -> int:
            if arguments[0] != "run":
                return real(self, *arguments, log=log, codes=codes, **env)
            real(self, "dry-run", *arguments[1:], log=log, **env)
            (path,) = Path(arguments[arguments.index("--output-dir") + 1]).glob("*/plan.json")
            plan = json.loads(path.read_text())
            assert not plan["rejected"], plan["rejected"]
            assert not plan.get("held_back"), plan["held_back"]
            points = [report(run, loss) | changes for run in plan["runs"][:trains]]
            (path.parent / "report.json").write_text(json.dumps({"points": points}))
            if trains is not None:
                raise PartFailed("still running", is_late=True)
            return 0

        monkeypatch.setattr(Kit, "mbridge", mbridge)

    return install


def report(run: dict[str, Any], loss: Loss) -> dict[str, Any]:
    losses = [loss(run["test_id"], step) for step in range(run["num_steps"])]
    return {
        "key": run["key"],
        "test_id": run["test_id"],
        "verdict": "success" if all(map(math.isfinite, losses)) else "failed",
        "reasons": [],
        "failure": {"cause": "the loss is not finite"},
        "steps": [{"step": step + 1, "loss": loss} for step, loss in enumerate(losses)],
        "metrics": {
            "step_time_s": {"capped_mean": STEP_S},
            "tflops_per_gpu": {"capped_mean": TFLOPS},
            "peak_memory_gib": MEMORY_GIB,
            "first_loss": losses[0],
            "last_loss": losses[-1],
        },
        "run": {"transformer_engine": True},
        "predicted": run["predicted"],
    }


def test_parity(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(falling)
    tiny.cpu_reference(h100)
    figures = tiny.tiny_fp32(h100)
    assert figures["moe_tiny"]["largest_relative_difference"] == 0.0
    stand_in(lambda test, step: falling(test, step) * (1.5 if test == "gpt_small" else 1.0))
    with pytest.raises(PartFailed) as caught:
        tiny.tiny_bf16(h100)
    sentence(caught)


def test_no_parity_without_a_reference(h100: Kit, sentence: Sentence) -> None:
    with pytest.raises(PartFailed, match="part cpu_reference") as caught:
        tiny.tiny_fp32(h100)
    sentence(caught)


def test_the_proxy_has_the_share_of_the_measured_peak(h100: Kit, stand_in: Any, monkeypatch: Any) -> None:
    stand_in(falling)
    assert proxy.with_share(h100, {"tflops_per_gpu": TFLOPS})["share_of_bf16_matmul_peak"] is None
    monkeypatch.setattr(Kit, "worker", lambda self, *args, log: {"tflops": 800.0})
    proxy.matmul(h100)
    figures = proxy.proxy(h100)
    assert (figures["step_time_s"], figures["share_of_bf16_matmul_peak"]) == (STEP_S, 0.5)


def test_muon_begins_where_adam_does_and_learns(
    h100: Kit, stand_in: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sentence: Sentence
) -> None:
    """Without its package the part is skipped, and rule E14 stops its run; packages of these names stand in for it."""
    with pytest.raises(PartSkipped) as caught:
        needs_muon(h100)
    sentence(caught)
    stand_in(falling)
    proxy.proxy(h100)
    with pytest.raises(PartFailed, match="mbridge rule E14"):
        proxy.muon(h100)
    version = 'MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ""\n'
    for name, text in {"megatron/core/package_info.py": version, "emerging_optimizers/__init__.py": ""}.items():
        (tmp_path / "packages" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "packages" / name).write_text(text)
    (tmp_path / "packages/megatron/core/__init__.py").touch()
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}/packages")
    again = replace(h100, work=h100.work / "with_muon")
    again.work.mkdir()
    proxy.proxy(again)
    figures = proxy.muon(again)
    assert figures["mean_decrease"] == figures["mean_decrease_of_adam"] > 0
    (path,) = again.work.glob("results/muon/*/muon/*/0/training.json")
    assert json.loads(path.read_text())["optimizer"]["optimizer"] == "dist_muon"
    stand_in(lambda test, step: 10.0 + step)
    rising = replace(h100, work=h100.work / "rising")
    rising.work.mkdir()
    with pytest.raises(PartFailed) as caught:
        proxy.muon(rising)
    sentence(caught)


def test_transformer_engine_is_hidden_or_is_not_there(h100: Kit, kit: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(falling)
    proxy.proxy(h100)
    with pytest.raises(PartFailed) as caught:
        proxy.without_transformer_engine(h100)
    sentence(caught)
    with pytest.raises(PartSkipped) as caught:
        proxy.without_transformer_engine(kit)
    sentence(caught)


def test_the_distributed_optimizer_trains_the_same(h100: Kit, stand_in: Any) -> None:
    stand_in(falling)
    assert proxy.distributed_optimizer(h100)["largest_relative_difference"] == 0.0
    for name, is_used in (("with", True), ("without", False)):
        (path,) = h100.work.glob(f"results/distributed_optimizer/*/{name}/*/0/training.json")
        assert json.loads(path.read_text())["ddp"]["use_distributed_optimizer"] is is_used


def test_predictions(h100: Kit, stand_in: Any) -> None:
    stand_in(falling)
    figures = proxy.predictions(h100)
    assert [row["point"] for row in figures["points"]] == list(proxy.POINTS)
    assert len(figures["points"]) == 10
    for row in figures["points"]:
        for measure in ("peak_memory_gib", "step_time_s"):
            assert row[measure]["error"] == row[measure]["predicted"] / row[measure]["measured"] - 1
        assert row["peak_memory_gib"]["predicted"] < 70, "it must fit an H100"
    (path,) = h100.work.glob("results/predictions/*/plan.json")
    planned = {run["test_id"]: run["predicted"]["peak_memory_gib"] for run in json.loads(path.read_text())["runs"]}
    context = Assumptions().cuda_context / GIB
    assert figures["points"][0]["peak_memory_gib"]["predicted"] == planned["base"] - context


def test_a_point_that_did_not_train_is_named_and_the_others_kept(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(lambda test, step: math.nan if test == "mb2" else falling(test, step))
    with pytest.raises(PartFailed, match="mb2:") as caught:
        proxy.predictions(h100)
    sentence(caught)
    assert len(caught.value.figures["points"]) == 9


def test_a_point_without_a_prediction_is_named(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(falling, predicted={"step_time_s": 0.4, "peak_memory_gib": None})
    with pytest.raises(PartFailed, match="base: peak_memory_gib") as caught:
        proxy.predictions(h100)
    sentence(caught)
    point = caught.value.figures["points"][0]
    assert point["peak_memory_gib"] == {"predicted": None, "measured": MEMORY_GIB, "error": None}
    assert point["step_time_s"]["error"] == pytest.approx(-0.2)


def test_points_that_trained_before_the_deadline_are_kept(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(falling, trains=9)
    with pytest.raises(PartFailed, match=r"^recompute:") as caught:
        proxy.predictions(h100)
    sentence(caught)
    assert len(caught.value.figures["points"]) == 9
    assert caught.value.figures["median_absolute_error"]["step_time_s"] > 0


def test_losses_from_before_the_deadline_are_compared(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(falling, trains=2)
    with pytest.raises(PartFailed, match=r"^moe_tiny:") as caught:
        tiny.cpu_reference(h100)
    sentence(caught)
    stand_in(falling)
    with pytest.raises(PartFailed, match=r"^moe_tiny:") as caught:
        tiny.tiny_fp32(h100)
    sentence(caught)
    assert caught.value.figures["gpt_small"]["largest_relative_difference"] == 0.0


def test_the_ten_predictions_have_their_time() -> None:
    names = [part.name for part in PARTS]
    first = PARTS[: names.index(proxy.PREDICTIONS) + 1]
    assert sum(part.budget_s for part in first) + 30 <= TOTAL_S - ENDING_S, "the probe takes some seconds too"
    assert first[-1].budget_s / len(proxy.POINTS) >= 25, "seconds to start and to train one"


@pytest.mark.parametrize("curve", [[math.nan, 1.0], [1.0, math.nan], [1.0, math.inf]])
def test_curves_that_are_not_finite(sentence: Sentence, curve: list[float]) -> None:
    for pair in ((curve, [1.0, 1.0]), ([1.0, 1.0], curve)):
        with pytest.raises(PartFailed) as caught:
            largest_difference(*pair)
        sentence(caught)


def test_both_runs_with_a_checkpoint_are_deterministic(
    h100: Kit, stand_in: Any, monkeypatch: Any, sentence: Sentence
) -> None:
    stand_in(falling)
    variables = []
    stood_in = Kit.mbridge

    def mbridge(self: Kit, *arguments: Any, **options: Any) -> int:
        variables.append(options.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO"))
        return stood_in(self, *arguments, **options)

    monkeypatch.setattr(Kit, "mbridge", mbridge)
    with pytest.raises(PartFailed) as caught:  # the stand-in starts at the first step
        tiny.checkpoint(h100)
    sentence(caught)
    models = [json.loads(path.read_text())["model"] for path in h100.work.glob("results/*/*/*/*/0/training.json")]
    assert [model["deterministic_mode"] for model in models] == [True, True]
    assert variables == ["0", "0"]


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_recomputation_saves_memory_and_changes_no_loss(
    h100: Kit, stand_in: Any, sentence: Sentence, factor: float
) -> None:
    stand_in(lambda test, step: falling(test, step) * (factor if test != "proxy" else 1.0))
    proxy.proxy(h100)
    with pytest.raises(PartFailed) as caught:
        proxy.recomputation(h100)
    sentence(caught)


def test_experts_of_a_fixed_size(h100: Kit, stand_in: Any, sentence: Sentence) -> None:
    stand_in(lambda test, step: falling(test, step) * (1.5 if test == "with_room" else 1.0))
    with pytest.raises(PartFailed) as caught:
        proxy.expert_capacity(h100)
    sentence(caught)


@pytest.mark.parametrize("trial", ["fp8_delayed", "graphs_engine"])
def test_a_trial_of_what_was_not_used(
    h100: Kit, stand_in: Any, monkeypatch: Any, sentence: Sentence, trial: str
) -> None:
    stand_in(falling)
    proxy.proxy(h100)
    figures = {"losses": [falling("", step) for step in range(10)], "captured": False}
    monkeypatch.setattr(proxy, "run_trial", lambda *args: figures)
    with pytest.raises(PartFailed) as caught:
        RUN[trial](h100)
    sentence(caught)


@pytest.mark.parametrize("trial", ["fp8_blockwise", "graphs_iteration", "op_fuser"])
def test_a_trial_is_compared_with_the_proxy(
    h100: Kit, stand_in: Any, monkeypatch: Any, sentence: Sentence, trial: str
) -> None:
    with pytest.raises(PartFailed) as caught:
        RUN[trial](h100)
    sentence(caught)
    stand_in(falling)
    proxy.proxy(h100)
    configs = []

    def run_trial(kit: Kit, name: str, config: Path, *args: Any) -> dict[str, Any]:
        configs.append(json.loads(config.read_text()))
        return {"losses": [falling("", step) * 1.2 for step in range(10)], "tflops_per_gpu": TFLOPS}

    monkeypatch.setattr(proxy, "run_trial", run_trial)
    with pytest.raises(PartFailed) as caught:
        RUN[trial](h100)
    sentence(caught)
    assert configs[0]["model"]["num_layers"] == 4
    is_fp8 = trial == "fp8_blockwise"
    assert configs[0]["mixed_precision"].get("fp8_recipe") == ("blockwise" if is_fp8 else None)
    assert configs[0]["optimizer"]["use_precision_aware_optimizer"] is not is_fp8


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([10.0 - 0.098 * step for step in range(10)], ""),
        ([10.1 - 0.1 * step for step in range(10)], "the first loss differs from part proxy by 0.01"),
        # Within 2 % of bf16 at every step, but it learns nothing: the optimizer has other weights
        ([10.0, *[9.8] * 9], "the losses fall by 0.2 in the mean, those of part proxy by 0.5"),
        ([10.0, *[math.nan] * 9], "not finite"),
    ],
)
def test_fp8_has_to_learn_what_bf16_learns(
    h100: Kit, stand_in: Any, monkeypatch: Any, sentence: Sentence, losses: list[float], why: str
) -> None:
    stand_in(falling)
    proxy.proxy(h100)
    monkeypatch.setattr(proxy, "run_trial", lambda *args: {"losses": losses})
    if not why:
        figures = RUN["fp8_current"](h100)
        assert figures["mean_decrease"] == pytest.approx(0.49)
        assert (figures["step_time_s_of_bf16"], figures["peak_memory_gib_of_bf16"]) == (STEP_S, MEMORY_GIB)
        return
    with pytest.raises(PartFailed) as caught:
        RUN["fp8_current"](h100)
    sentence(caught)


@pytest.mark.long
def test_a_trial_trains_with_overrides(kit: Kit, stand_in: Any) -> None:
    pytest.importorskip("torch")
    test = training("tiny", "gpt_tiny", {"compute_dtype": "fp32", "num_gpus": 1}, steps=7)
    stand_in(falling)
    path = train(kit, "tiny", [test]).directory("tiny") / proxy.CONFIG
    with pytest.raises(PartFailed, match="the training loop does not do this"):
        proxy.run_trial(kit, "refused", path, ["logger.log_device_memory_used=true"])
    figures = proxy.run_trial(kit, "tried", path, ["optimizer.lr=0.002"])
    assert len(figures["losses"]) == 7
    assert figures["losses"][-1] < figures["losses"][0]
