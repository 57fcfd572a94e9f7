"""Checks with tiny recipes: losses on the GPU against the CPU's; checkpoints, a profile, a memory snapshot; and the
commands as a user runs them, from verify to gate."""

import json
from pathlib import Path

from cloudai_mbridge.gpu_check.kit import (
    NO_GPU,
    Figures,
    Kit,
    PartFailed,
    hide_transformer_engine,
    largest_difference,
    losses,
    speed,
    train,
    training,
    write_sweep,
)

RECIPES = ("gpt_tiny", "gpt_small", "moe_tiny")
STEPS = 10
REFERENCE = "cpu_reference"
# Relative, of the loss at any of ten steps. fp32 differs by the order of sums alone; experts may change for a token.
TOLERANCE = {"fp32": 2e-3, "bf16": 3e-2}
# Transformer Engine multiplies fp32 as TF32, with 10 bits of mantissa, unless cuBLAS is configured otherwise
FULL_FP32 = {"NVIDIA_TF32_OVERRIDE": "0"}
# Weights drawn on the CPU are the same on every device
SAME_WEIGHTS = {"model.use_cpu_initialization": True}
_RECIPE = "gpt_tiny"
_STEPS, _SAVED_AT = 6, 3
# A GPU's backward passes, and the products of cuBLAS, are reproducible only with these settings
_DETERMINISTIC = {"model.deterministic_mode": True, "model.cross_entropy_loss_fusion": False}
_DETERMINISTIC_ENV = {
    "NCCL_ALGO": "Ring",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}
_WINDOW = {"profiling.profile_step_start": 3, "profiling.profile_step_end": 5}
# Exit codes of `mbridge gate` with a verdict; others mean that it could not judge
_JUDGED = {0: "pass", 10: "regression", 13: "inconclusive", 14: "improvement"}
_REFUSED = 15  # of `mbridge baseline promote`
_POLICY = """name = "gpu_check"
baseline = "baseline.toml"
min_runs = 2
[[metrics]]
name = "step_time_s"
"""


def cpu_reference(kit: Kit) -> Figures:
    """Train in fp32 on the CPU of any machine: without a GPU, Transformer Engine cannot run."""
    tests = [training(recipe, recipe, {"compute_dtype": "fp32"}, SAME_WEIGHTS, STEPS) for recipe in RECIPES]
    trained = train(kit, REFERENCE, tests, **NO_GPU, **hide_transformer_engine(kit))
    figures, missing = trained.each(RECIPES, lambda _, point: speed(point))
    kit.shared[REFERENCE] = {recipe: losses(trained.good(recipe)) for recipe in figures}
    if missing:
        raise PartFailed(missing, figures)
    return figures


def tiny_fp32(kit: Kit) -> Figures:
    return _compare(kit, "fp32", **FULL_FP32)


def tiny_bf16(kit: Kit) -> Figures:
    return _compare(kit, "bf16")


def _compare(kit: Kit, dtype: str, **env: str) -> Figures:
    reference = kit.shared.get(REFERENCE)
    if not reference:
        raise PartFailed(f"part {REFERENCE} left no losses to compare with")

    def judge(recipe: str, point: Figures) -> Figures:
        if recipe not in reference:
            raise PartFailed(f"{recipe}: part {REFERENCE} left no losses to compare with")
        return {**speed(point), "largest_relative_difference": largest_difference(losses(point), reference[recipe])}

    tests = [training(recipe, recipe, {"compute_dtype": dtype}, SAME_WEIGHTS, STEPS) for recipe in RECIPES]
    rows, missing = train(kit, f"tiny_{dtype}", tests, **env).each(RECIPES, judge)
    off = {recipe: row["largest_relative_difference"] for recipe, row in rows.items()}
    off = {recipe: difference for recipe, difference in off.items() if difference > TOLERANCE[dtype]}
    figures: Figures = {"tolerance": TOLERANCE[dtype], **rows}
    if off:
        found = ", ".join(f"{recipe} by {difference:.2g}" for recipe, difference in off.items())
        why = f"losses differ from the CPU's: {found}; at most {TOLERANCE[dtype]:g} is expected"
        missing = "; ".join(filter(None, [why, missing]))
    if missing:
        raise PartFailed(missing, figures)
    return figures


def checkpoint(kit: Kit) -> Figures:
    """Save after half of the steps; a run that resumes there continues with the same losses. Both are deterministic."""
    directory = str(kit.work / "checkpoint")
    same = {**_DETERMINISTIC, "checkpoint.save_interval": _SAVED_AT, "scheduler.lr_decay_iters": _STEPS}
    first = _test_of(kit, "save", {**same, "checkpoint.save": directory})
    resume = {"checkpoint.load": directory, "checkpoint.ckpt_step": _SAVED_AT}
    second = _test_of(kit, "resume", {**same, **resume})
    whole = train(kit, "checkpoint_save", [first], **_DETERMINISTIC_ENV).good("save")
    # Half of the steps are not in its log: the report counts that as a failure, the log contains the cause
    second_run = train(kit, "checkpoint_resume", [second], **_DETERMINISTIC_ENV)
    rest = second_run.points["resume"][0]
    resumed = [step["step"] for step in rest["steps"]]
    if resumed != list(range(_SAVED_AT + 1, _STEPS + 1)):
        why = "; ".join(filter(None, [second_run.cut, *rest["reasons"]]))
        raise PartFailed(f"the resumed run has steps {resumed}: {why}")
    expected, found = losses(whole)[_SAVED_AT:], losses(rest)
    figures: Figures = {"losses": expected, "losses_after_resuming": found}
    if expected != found:
        raise PartFailed("the losses after resuming differ from those of the uninterrupted run", figures)
    return figures


def profile(kit: Kit) -> Figures:
    """Take a trace of torch's profiler, and on a GPU a snapshot of its memory."""
    extra = {**_WINDOW, "profiling.use_pytorch_profiler": True, "profiling.record_memory_history": True}
    trained = train(kit, "profile", [_test_of(kit, "profile", extra)])
    figures, directory = speed(trained.good("profile")), trained.directory("profile")
    traces = [path for path in directory.rglob("*.json*") if "trace" in path.name]
    if not traces:
        raise PartFailed(f"no trace is in {directory}", figures)
    events = json.loads(traces[0].read_text(encoding="utf-8"))["traceEvents"]
    figures["trace_events"] = len(events)
    figures["gpu_kernels"] = sum(event.get("cat") == "kernel" for event in events)
    if kit.device.gpu is not None:
        snapshots = list(directory.glob("snapshot*.pickle"))
        if not snapshots or not figures["gpu_kernels"]:
            raise PartFailed(f"{len(snapshots)} memory snapshots, {figures['gpu_kernels']} kernels traced", figures)
        figures["memory_snapshot_bytes"] = snapshots[0].stat().st_size
    return figures


def _test_of(kit: Kit, name: str, extra: Figures) -> Figures:
    return training(name, _RECIPE, {"compute_dtype": kit.dtype}, extra, _STEPS, warmup_steps=1)


def line(kit: Kit) -> Figures:
    """Run the commands with a tiny model; the gate compares two sweeps of the same code."""
    tests = [training("line", _RECIPE, {"compute_dtype": kit.dtype}, iterations=2)]
    options = write_sweep(kit, "line", tests)
    kit.mbridge("verify-configs", kit.work / "line.toml", log="line_verify")
    kit.mbridge("sweep", "plan", *options, log="line_plan")
    kit.mbridge("dry-run", *options, "--output-dir", kit.work / "results/line_dry", log="line_dry_run")
    first, second = (train(kit, "line", tests, again=f"_{number}") for number in (1, 2))
    step_times = [float(sweep.good("line")["metrics"]["step_time_s"]["capped_mean"]) for sweep in (first, second)]
    kit.mbridge("generate-report", "--result-dir", first.root, log="line_report")
    for name in ("report.json", "report.html", "report.md"):
        if not (first.root / name).is_file():
            raise PartFailed(f"{name} is missing in {first.root}")
    return {"step_time_s": step_times, "gate": _gate(kit, first.root, second.root)}


def _gate(kit: Kit, first: Path, second: Path) -> str:
    """Promote the first sweep and judge the second. The gate's verdict on so few runs of a tiny model is a figure."""
    policy, baseline = kit.work / "policy.toml", kit.work / "baseline.toml"
    policy.write_text(_POLICY, encoding="utf-8")
    options = ["--min-runs", "2", "--max-noise", "1", "--by", "gpu_check", "--reason", "the first sweep", "--yes"]
    codes = (0, _REFUSED)
    if kit.mbridge("baseline", "promote", first, "--baseline", baseline, *options, log="line_promote", codes=codes):
        if "varies by" not in (said := kit.tail("line_promote")):
            raise PartFailed(f"baseline promote: {said}")
        return "not judged: the runs of the first sweep differ too much for a baseline"
    code = kit.mbridge("gate", second, "--policy", policy, log="line_gate", codes=tuple(_JUDGED))
    return _JUDGED[code]
