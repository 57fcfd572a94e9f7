"""What a replay plays against: points whose step times are known, of a table or of the results of a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Gpu, gpu_named
from cloudai_mbridge.estimate.headline import headline_estimator
from cloudai_mbridge.estimate.memory.estimate import GIB, memory_per_stage, worst_stage
from cloudai_mbridge.estimate.point import STAND_IN, assumptions_for, groups_of
from cloudai_mbridge.estimate.request import gpu_on
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.estimate.time.parts import StepGroups
from cloudai_mbridge.gate.runs import RunResult, read_results
from cloudai_mbridge.models.system import System
from cloudai_mbridge.report.model import OUT_OF_MEMORY
from cloudai_mbridge.report.read import find_report
from cloudai_mbridge.tune.measured import Space, device_of, question_of, read_table

_SIZES = ("tp", "pp", "cp", "vp", "ep", "expert_tp", "mbs")


@dataclass(frozen=True)
class Case:
    """The points of one space. coordinates: of each. times: seconds of a step, None where it ran out of memory.

    groups, shares: what is predicted of each point's step and memory; None where it is not, of one point at least.
    is_calibrated: the predictions were fitted to the cluster. is_guess: they are another GPU's.
    """

    name: str
    coordinates: tuple[Mapping[str, Any], ...]
    times: tuple[float | None, ...]
    groups: tuple[StepGroups, ...] | None
    shares: tuple[float, ...] | None
    is_calibrated: bool = False
    is_guess: bool = False

    @cached_property
    def best_s(self) -> float | None:
        """The fastest step; None where no layout fits."""
        return min((seconds for seconds in self.times if seconds is not None), default=None)


def read_cases(path: Path, system: System | None) -> list[Case]:
    """Return the spaces of a table (.csv), or the tests of a run's directory or report.json.

    system: whose calibration is part of the predictions. BadInput: it cannot be read, or nothing in it was measured.
    """
    if path.suffix.lower() == ".csv":
        return [_case_in(path, space, system) for space in read_table(path)]
    return list(_cases_of_runs(path, system))


def _case_in(path: Path, space: Space, system: System | None) -> Case:
    try:
        return case_of(space, gpu_on(space.gpu, system))
    except BadInput as error:
        raise BadInput(f"{path}: {space.name}, {space.precision}: {error}") from None


def case_of(space: Space, gpu: Gpu) -> Case:
    """Return the space of a table with its predictions. gpu: as it is calibrated."""
    layouts = [layout for layout, _ in space.rows]
    models = [space.model_of(layout.tp) for layout in layouts]
    groups = [
        time_model(model, gpu, space.precision).groups(layout) for model, layout in zip(models, layouts, strict=True)
    ]
    shares = None
    if gpu.memory_gib is not None:
        try:
            stages = [
                memory_per_stage(model, layout, assumptions_for(gpu))
                for model, layout in zip(models, layouts, strict=True)
            ]
            shares = tuple(worst_stage(each).total / GIB / gpu.memory_gib for each in stages)
        except BadInput:
            pass
    coordinates = tuple({name: getattr(layout, name) for name in _SIZES} for layout in layouts)
    times = tuple(seconds for _, seconds in space.rows)
    return Case(space.name, coordinates, times, tuple(groups), shares, gpu.measured is not None)


def _cases_of_runs(path: Path, system: System | None) -> Iterator[Case]:
    results = read_results(path)
    points = _points(path)
    by_test: dict[str, list[list[RunResult]]] = {}
    for runs in _by_point(results).values():
        by_test.setdefault(points[runs[0].point]["test_id"], []).append(runs)
    for test, measured in by_test.items():
        times = {runs[0].point: _seconds(runs, points[runs[0].point]) for runs in measured}
        kept = [runs for runs in measured if times[runs[0].point] != 0]
        if not kept:
            raise BadInput(f"{path}: test {test!r}: no point was measured; name the results of a run that was")
        yield Case(
            f"{kept[0][0].scenario}: {test}",
            tuple(points[runs[0].point]["coordinates"] for runs in kept),
            tuple(times[runs[0].point] for runs in kept),
            **_predicted(kept, system),
        )


def _points(path: Path) -> dict[str, dict[str, Any]]:
    """Return the points of a report by test and label."""
    report = json.loads(find_report(path).read_text(encoding="utf-8"))
    return {f"{point['test_id']}/{point['label']}": point for point in report["points"]}


def _by_point(runs: list[RunResult]) -> dict[str, list[RunResult]]:
    found: dict[str, list[RunResult]] = {}
    for run in runs:
        found.setdefault(run.point, []).append(run)
    return found


def _seconds(runs: list[RunResult], point: Mapping[str, Any]) -> float | None:
    """Return a point's step time; None if it ran out of memory; 0 if nothing is known of it."""
    good = [run for run in runs if run.is_success]
    times = [step.step_time_s for run in good for step in run.counted_steps if step.step_time_s]
    if times:
        return median(times)
    return None if (point.get("failure") or {}).get("id") == OUT_OF_MEMORY else 0


def _predicted(measured: list[list[RunResult]], system: System | None) -> dict[str, Any]:
    """Return what a case says of predictions: nothing if one of the points cannot be predicted."""
    headline_of, groups, shares = headline_estimator(), [], []
    is_guess, is_calibrated = device_of(measured[0][0]) is None, False
    try:
        for runs in measured:
            question = question_of(runs[0], system, gpu_named(STAND_IN))
            groups.append(groups_of(question))
            found = headline_of(question)
            shares.append((found.peak_memory_gib or 0.0) / (found.gpu_memory_gib or 1.0))
            is_calibrated = question.gpu is not None and question.gpu.measured is not None
    except BadInput:
        return {"groups": None, "shares": None}
    return {
        "groups": tuple(groups),
        "shares": tuple(shares) if all(shares) and not is_guess else None,
        "is_calibrated": is_calibrated,
        "is_guess": is_guess,
    }
