"""The commands as a user runs them: verify, plan, dry run, run twice, report again, promote, gate."""

from pathlib import Path

from cloudai_mbridge.gpu_check.kit import Figures, Kit, PartFailed
from cloudai_mbridge.gpu_check.sweep import Trained, Training, train, write_sweep

NAME = "line"
# Exit codes of `mbridge gate` with which it has judged; with others it could not
_JUDGED = {0: "pass", 10: "regression", 13: "inconclusive", 14: "improvement"}
_REFUSED = 15  # of `mbridge baseline promote`
_POLICY = """name = "gpu_check"
baseline = "baseline.toml"
min_runs = 2
[[metrics]]
name = "step_time_s"
"""


def line(kit: Kit) -> Figures:
    """Run the commands with a tiny model; the gate compares two sweeps of the same code."""
    dtype = "fp32" if kit.device.gpu is None else "bf16"
    trainings = [Training(NAME, "gpt_tiny", {"compute_dtype": dtype}, iterations=2)]
    options = write_sweep(kit, NAME, trainings)
    kit.mbridge("verify-configs", kit.work / f"{NAME}.toml", log="line_verify")
    kit.mbridge("sweep", "plan", *options, log="line_plan")
    kit.mbridge("dry-run", *options, "--output-dir", kit.work / "results/line_dry", log="line_dry_run")
    first, second = (train(kit, NAME, trainings, again=f"_{number}") for number in (1, 2))
    step_times = [_step_time(sweep) for sweep in (first, second)]
    kit.mbridge("generate-report", "--result-dir", first.root, log="line_report")
    for name in ("report.json", "report.html", "report.md"):
        if not (first.root / name).is_file():
            raise PartFailed(f"{name} is missing in {first.root}")
    return {"step_time_s": step_times, "gate": _gate(kit, first.root, second.root)}


def _step_time(sweep: Trained) -> float:
    return float(sweep.good(NAME)["metrics"]["step_time_s"]["median"])


def _gate(kit: Kit, first: Path, second: Path) -> str:
    """Promote the first sweep and judge the second. What the gate says of so few runs of a tiny model is a figure."""
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
