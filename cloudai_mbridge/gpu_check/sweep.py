"""Trainings of the kit: tests as TOML, `mbridge run` on this machine, points of its report."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudai_mbridge.gpu_check.kit import Figures, Kit, OutOfTime, PartFailed

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_POINT_FAILED = 1  # exit code of `mbridge run`; its report lists the points


@dataclass(frozen=True)
class Training:
    """A test of one point. extra: further fields of the training configuration, as TOML values."""

    id: str
    recipe: str
    args: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 10
    warmup_steps: int = 3
    iterations: int = 1

    @property
    def table(self) -> dict[str, Any]:
        """Return it as a table of a scenario."""
        cmd_args = {"launcher": "embedded", "model_recipe_name": self.recipe, "num_gpus": 1, "max_steps": self.steps}
        return {
            "id": self.id,
            "name": self.id,
            "description": "of the GPU check",
            "test_template_name": "MegatronBridge",
            "iterations": self.iterations,
            "cmd_args": {**cmd_args, **self.args},
            "extra_cmd_args": {key: json.dumps(value) for key, value in self.extra.items()},
            "metrics": {"warmup_steps": self.warmup_steps},
        }


@dataclass(frozen=True)
class Trained:
    """A sweep that has run. points: test id -> its iterations, as in report.json. cut: why it ended early."""

    root: Path
    points: Mapping[str, list[Figures]]
    cut: str = ""

    def good(self, test: str) -> Figures:
        """Return the first point of a test. Raises PartFailed: it did not succeed; the reason is the report's."""
        (point, *_) = self.points.get(test) or [{"verdict": "missing", "reasons": ["it is not in the report"]}]
        if point["verdict"] != "success":
            failure = (point.get("failure") or {}).get("cause") or ""
            why = "; ".join(filter(None, [self.cut, failure, *point["reasons"], *point.get("evidence", [])[-1:]]))
            raise PartFailed(f"{test}: {point['verdict']}: {why}")
        return point

    def each(self, tests: Sequence[str], judge: Callable[[str, Figures], Figures]) -> tuple[dict[str, Figures], str]:
        """Return the figures of `judge` for the first point of each test, and the reasons of tests without figures."""
        found: dict[str, Figures] = {}
        missing = []
        for test in tests:
            try:
                found[test] = judge(test, self.good(test))
            except PartFailed as error:
                missing.append(str(error))
        return found, "; ".join(missing)

    def directory(self, test: str) -> Path:
        """Return the run directory of a test's first point."""
        return self.root / str(self.good(test)["key"])


def write_sweep(kit: Kit, name: str, trainings: Sequence[Training]) -> list[str]:
    """Write system and scenario; return the options that name them."""
    from cloudai_mbridge.files.documents import render_toml

    hardware = {"gpu_type": kit.device.gpu_type} if kit.device.gpu_type else {}
    system: dict[str, Any] = {"name": "gpu_check", "scheduler": "local", **hardware}
    scenario: dict[str, Any] = {"name": name, "Tests": [training.table for training in trainings]}
    files = {"--system-config": kit.work / f"{name}.system.toml", "--test-scenario": kit.work / f"{name}.toml"}
    for path, data in zip(files.values(), (system, scenario), strict=True):
        path.write_text(render_toml(data), encoding="utf-8")
    return [word for option, path in files.items() for word in (option, str(path))]


def train(kit: Kit, name: str, trainings: Sequence[Training], *, again: str = "", **env: str) -> Trained:
    """Run them one after the other; a failed point is in the result. again: names a further run of the same.

    A run that is ended at the deadline still writes its report: points trained by then are in the result.
    """
    options, cut, log = write_sweep(kit, name, trainings), "", f"{name}{again}"
    out = kit.work / "results" / log
    try:
        kit.mbridge("run", *options, "--output-dir", out, log=log, codes=(0, _POINT_FAILED), **env)
    except OutOfTime as error:
        cut = str(error)
    roots = [path.parent for path in out.glob("*/report.json")]
    if len(roots) != 1:
        raise PartFailed(cut or f"mbridge run wrote no report: {kit.tail(log)}")
    report = json.loads((roots[0] / "report.json").read_text(encoding="utf-8"))
    points: dict[str, list[Figures]] = {}
    for point in report["points"]:
        points.setdefault(point["test_id"], []).append(point)
    return Trained(roots[0], points, cut)


def hide_transformer_engine(kit: Kit) -> dict[str, str]:
    """Return the variable that hides Transformer Engine."""
    directory = kit.work / "hidden"
    path = directory / "transformer_engine/__init__.py"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('raise ModuleNotFoundError("hidden by the GPU check")\n', encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))}


def losses(point: Figures) -> list[float]:
    """Return the loss of every step."""
    return [float(step["loss"]) for step in point["steps"]]


def speed(point: Figures) -> Figures:
    """Return a summary of a point's measurements in a report."""
    metrics = point["metrics"]
    return {
        "step_time_s": metrics["step_time_s"]["median"],
        "tflops_per_gpu": (metrics["tflops_per_gpu"] or {}).get("median"),
        "peak_memory_gib": metrics["peak_memory_gib"],
        "first_loss": metrics["first_loss"],
        "last_loss": metrics["last_loss"],
        "transformer_engine": point["run"].get("transformer_engine"),
        "device": point["run"].get("device"),
    }


def largest_difference(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the largest relative difference of two curves of the same steps.

    PartFailed: they have other steps, or a value is not finite.
    """
    if len(a) != len(b) or not a:
        raise PartFailed(f"curves of {len(a)} and {len(b)} steps cannot be compared")
    if not all(map(math.isfinite, (*a, *b))):
        raise PartFailed("curves with values that are not finite cannot be compared")
    return max(abs(x - y) / max(abs(y), 1e-12) for x, y in zip(a, b, strict=True))
