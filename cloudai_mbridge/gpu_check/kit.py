"""Context of every part: the machine's facts, a directory, a deadline, and processes that end with it; trainings by
`mbridge run` on this machine, and points of its report."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
TERM_WAIT_S = 15.0  # mbridge cancels its ranks and writes its report in this time
KILL_WAIT_S = 5.0  # longer only for a process that a driver holds: it is left
MUON = "emerging-optimizers"  # the package
_TAIL_CHARACTERS = 400
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
_POINT_FAILED = 1  # exit code of `mbridge run`; its report lists the points


class PartSkipped(Exception):
    """A part cannot run here; the message contains the reason."""


class PartFailed(Exception):
    """A part has failed; figures: found before the failure. is_late: at the part's deadline."""

    def __init__(self, reason: str, figures: Figures | None = None, *, is_late: bool = False) -> None:
        super().__init__(reason)
        self.figures, self.is_late = figures or {}, is_late


@dataclass(frozen=True)
class Device:
    """The machine. gpu: the device's name, None without one; gpu_type: its name in mbridge's table of hardware.

    no_gpu, no_transformer_engine: why it cannot be used; empty if it can. has_nvidia_smi: a GPU is expected.
    packages: name -> version.
    """

    gpu: str | None = None
    no_gpu: str = "no GPU that torch can use"
    has_nvidia_smi: bool = False
    gpu_type: str | None = None
    memory_gib: float | None = None
    no_transformer_engine: str = "not probed"
    packages: Mapping[str, str | None] = field(default_factory=dict)


@dataclass
class Kit:
    """deadline: on the monotonic clock, set for each part. shared: results for later parts."""

    work: Path
    device: Device
    deadline: float = float("inf")
    shared: dict[str, Any] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        """The number format of tiny models."""
        return "fp32" if self.device.gpu is None else "bf16"

    def run(
        self, argv: Sequence[str], *, log: str, env: Mapping[str, str] | None = None, codes: Sequence[int] = (0,)
    ) -> int:
        """Run a command until the part's deadline and return its exit code; its streams are kept in `work`.

        PartFailed: another exit code than `codes`, or the deadline has ended it; nothing is started after that.
        """
        if time.monotonic() >= self.deadline:
            raise PartFailed(f"{_name(argv)}: not started: the part's time was used up", is_late=True)
        out, err = self.work / f"{log}.stdout", self.work / f"{log}.stderr"
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(
                list(argv),
                env={**os.environ, **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        try:
            code = process.wait(max(0.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            why = f"{_name(argv)}: still running when the part's time was used up"
            raise PartFailed(why, is_late=True) from None
        finally:
            end(process)
        if code not in codes:
            raise PartFailed(f"{_name(argv)}: exit code {code}: {self.tail(log)}")
        return code

    def mbridge(self, *arguments: str | Path, log: str, codes: Sequence[int] = (0,), **env: str) -> int:
        """Run a command of mbridge; return its exit code."""
        argv = [sys.executable, "-m", "cloudai_mbridge", *map(str, arguments)]
        return self.run(argv, log=log, env=env, codes=codes)

    def worker(self, module: str, *arguments: str | Path, log: str, **env: str) -> Figures:
        """Run a module of this package that prints one JSON object as its last line; return that."""
        argv = [sys.executable, "-m", f"cloudai_mbridge.gpu_check.{module}", *map(str, arguments)]
        self.run(argv, log=log, env=env)
        lines = (self.work / f"{log}.stdout").read_text(encoding="utf-8", errors="replace").splitlines()
        if not lines:
            raise PartFailed(f"{module}: printed nothing")
        return dict(json.loads(lines[-1]))

    def tail(self, log: str) -> str:
        """Return the end of a command's output, stderr before stdout."""
        for stream in ("stderr", "stdout"):
            text = (self.work / f"{log}.{stream}").read_text(encoding="utf-8", errors="replace").strip()
            if text:
                return text[-_TAIL_CHARACTERS:]
        return "no output"


def end(process: "subprocess.Popen[bytes]") -> None:
    """End a command's remaining processes: SIGTERM, which mbridge passes on to its ranks, then SIGKILL to its group."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(TERM_WAIT_S)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(KILL_WAIT_S)


def _name(argv: Sequence[str]) -> str:
    words = list(argv[argv.index("-m") + 1 :]) if "-m" in argv else list(argv)
    return " ".join(words[:2])


def training(
    test: str,
    recipe: str,
    args: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
    steps: int = 10,
    *,
    warmup_steps: int = 3,
    iterations: int = 1,
) -> dict[str, Any]:
    """Return a test of one point as a table of a scenario.

    test: its id. extra: further fields of the training configuration, as TOML values.
    """
    cmd_args = {"launcher": "embedded", "model_recipe_name": recipe, "num_gpus": 1, "max_steps": steps}
    return {
        "id": test,
        "name": test,
        "description": "of the GPU check",
        "test_template_name": "MegatronBridge",
        "iterations": iterations,
        "cmd_args": {**cmd_args, **args},
        "extra_cmd_args": {key: json.dumps(value) for key, value in (extra or {}).items()},
        "metrics": {"warmup_steps": warmup_steps},
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
        return self.root / str(self.good(test)["key"])


def write_sweep(kit: Kit, name: str, tests: Sequence[Mapping[str, Any]]) -> list[str]:
    """Write system and scenario; return the options that name them."""
    from cloudai_mbridge.files.documents import render_toml

    hardware = {"gpu_type": kit.device.gpu_type} if kit.device.gpu_type else {}
    system: dict[str, Any] = {"name": "gpu_check", "scheduler": "local", **hardware}
    scenario: dict[str, Any] = {"name": name, "Tests": list(tests)}
    files = {"--system-config": kit.work / f"{name}.system.toml", "--test-scenario": kit.work / f"{name}.toml"}
    for path, data in zip(files.values(), (system, scenario), strict=True):
        path.write_text(render_toml(data), encoding="utf-8")
    return [word for option, path in files.items() for word in (option, str(path))]


def train(kit: Kit, name: str, tests: Sequence[Mapping[str, Any]], *, again: str = "", **env: str) -> Trained:
    """Run them one after the other; a failed point is in the result. again: names a further run of the same.

    A run that is ended at the deadline still writes its report: points trained by then are in the result.
    """
    options, cut, log = write_sweep(kit, name, tests), "", f"{name}{again}"
    out = kit.work / "results" / log
    try:
        kit.mbridge("run", *options, "--output-dir", out, log=log, codes=(0, _POINT_FAILED), **env)
    except PartFailed as error:
        if not error.is_late:
            raise
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
    return [float(step["loss"]) for step in point["steps"]]


def speed(point: Figures) -> Figures:
    """Return a summary of a point's measurements in a report."""
    metrics = point["metrics"]
    return {
        "step_time_s": metrics["step_time_s"]["capped_mean"],
        "tflops_per_gpu": (metrics["tflops_per_gpu"] or {}).get("capped_mean"),
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
