"""A scenario on a system, and its plan; the layouts of a model, ranked by prediction."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import ValidationError

from cloudai_mbridge import pipeline
from cloudai_mbridge.api.results import Progress, Run, Table, Tabular, drive, path_of
from cloudai_mbridge.errors import BadInput, counted, shown
from cloudai_mbridge.estimate.hardware import Price, price_of
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.launch.script import REHEARSAL_LEVELS
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading import load_system, load_test_definition
from cloudai_mbridge.models.scenario import RunnerConfig
from cloudai_mbridge.plan import RejectedPoint, RunPlan
from cloudai_mbridge.plan.run_plan import LeftOut
from cloudai_mbridge.rehearsal import Rehearsal, Step
from cloudai_mbridge.report.rows import axis_types, axis_values
from cloudai_mbridge.tune.ranking import Candidate, Ranking, rank
from cloudai_mbridge.tune.space import SearchRequest, search_request, search_scenario

_COLUMNS = {"test": str, "point": str, "status": str}
_DECIDED = {
    **{"runs": int, "num_nodes": int, "world_size": int},
    **{"step_time_s": float, "tflops_per_gpu": float, "peak_memory_gib": float, "rules": str, "why": str},
}


def load(
    scenario: str | PathLike[str], *, system: str | PathLike[str], tests_dir: str | PathLike[str] | None = None
) -> "Scenario":
    """Read and check a scenario's TOML file, its tests and the system's file; nothing is run or written.

    tests_dir: directory of the scenario's tests; not needed if the scenario contains them.
    BadInput: a file is wrong, with its line, the key, the value and the remedy.
    """
    tests = None if tests_dir is None else Path(tests_dir)
    return Scenario(pipeline.load(pipeline.Request(Path(system), Path(scenario), tests, None)))


@dataclass(frozen=True, repr=False)
class Scenario:
    """A checked scenario on its system. loaded: the content of its files."""

    loaded: pipeline.Loaded

    @property
    def name(self) -> str:
        return self.loaded.scenario.scenario.name

    @property
    def tests(self) -> tuple[str, ...]:
        """The ids of its tests."""
        return tuple(test.run.id for test in self.loaded.scenario.tests)

    def plan(
        self,
        *,
        only: str | Sequence[str] = (),
        failed_of: Run | str | PathLike[str] | None = None,
        max_parallel: int | None = None,
        max_gpu_hours: float | None = None,
        fail_fast: bool | None = None,
    ) -> "Plan":
        """Decide about every point; nothing is run or written.

        only: the points to run, as expressions of `mbridge run --only`, of which one must match. failed_of: a run, of
        which only those points are run that failed there, or did not run.
        max_parallel: runs active at a time. max_gpu_hours: of all runs. fail_fast: stop everything at the first run
        that fails. Default of all: the scenario's [runner].
        BadInput: a request that cannot be met. NothingFailed, a BadInput: no point of that run failed.
        """
        given = {"max_parallel": max_parallel, "max_gpu_hours": max_gpu_hours, "fail_fast": fail_fast}
        given = {name: value for name, value in given.items() if value is not None}
        try:
            RunnerConfig.model_validate(given)
        except ValidationError as error:
            first = error.errors()[0]
            raise BadInput(f"{first['loc'][0]}: {shown(first['input'])}: {first['msg']}") from None
        chosen = (only,) if isinstance(only, str) else tuple(only)
        past = None if failed_of is None else path_of(failed_of)
        request = replace(self.loaded.request, only=chosen, failed_of=past)
        return Plan(**vars(pipeline.plan_loaded(replace(self.loaded, request=request), given)))

    def __repr__(self) -> str:
        return f"<Scenario {self.name!r} on {self.loaded.system.name!r}: {counted(len(self.tests), 'test')}>"


@dataclass(frozen=True, repr=False)
class Plan(pipeline.Prepared, Tabular):
    """Plan of a scenario. Its table has a row for each point, with its predictions."""

    @property
    def runs(self) -> tuple[RunPlan, ...]:
        """The runs of accepted points, in order; repeats of a point are runs of their own."""
        return self.plan.runs

    @property
    def rejected(self) -> tuple[RejectedPoint, ...]:
        """The points that break rules, with their `violations`; at most the first thousand of a test."""
        return self.plan.rejected

    @property
    def left_out(self) -> tuple[LeftOut, ...]:
        """The accepted points that were not chosen, each with its `test_id`, `label` and `reason`."""
        return self.plan.left_out

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes, such as points beyond a limit."""
        return self.plan.notes

    def rehearse(
        self, *, on_slurm: bool = False, level: str = REHEARSAL_LEVELS[0], progress: Progress | None = None
    ) -> Rehearsal:
        """Build every distinct rank of each accepted point without a GPU, and return what came of it, by point.

        Nothing is submitted or written. on_slurm: on one core of a node of the cluster, in the image of the jobs.
        level: "states", or "step": each rank takes a step, too, and what the ranks communicate is matched.
        progress: called with a line of text once a point is done.
        BadInput: the system has no Slurm. ToolFailure: the program cannot be started.
        """

        def tell(step: Step) -> None:
            if progress is not None and step.is_done:
                progress(step.point.line)

        return pipeline.rehearse(self, on_slurm=on_slurm, level=level, progress=tell)

    def rehearsed(self, rehearsal: Rehearsal) -> "Plan":
        """Return the plan without the points that a rehearsal has refused: rule R01 rejects them."""
        return Plan(**vars(pipeline.rehearsed(self, rehearsal)))

    def run(self, *, output_dir: str | PathLike[str] | None = None, progress: Progress | None = None) -> Run:
        """Submit all runs, wait for their ends, write the report, and return the run, whatever its points came to.

        output_dir: of the run's new directory; default: the system's output_path. progress: called with a line of text
        at every change, and once a minute; it may be `print`.
        A signal, or the interruption of a notebook's cell, cancels what was submitted and raises `Interrupted`, an
        MBridgeError; outside the main thread there are no signals. After any error, `open_run("latest").resume()`
        goes on.

        BadInput, ToolFailure: nothing was submitted. Paused: the scheduler has been silent for too long.
        """
        prepared = self if output_dir is None else replace(self, output_dir=Path(output_dir))
        pipeline.preflight(prepared)
        lines = pipeline.check_limits(prepared)
        if progress is not None:
            for line in lines:
                progress(line)
        root = pipeline.write(prepared)
        drive(prepared, root, progress)
        return Run(root)

    @property
    def table(self) -> Table:
        points = [run.coordinates for run in self.runs] + [point.coordinates for point in self.rejected]
        columns = {**_COLUMNS, **axis_types(points, _COLUMNS | _DECIDED), **_DECIDED}
        return Table(columns, tuple(self._rows()))

    def _rows(self) -> Iterator[dict[str, Any]]:
        by_point: dict[tuple[str, str], list[RunPlan]] = {}
        for run in self.runs:
            if not run.is_again:
                by_point.setdefault((run.test_id, run.label), []).append(run)
        for run, *others in by_point.values():
            predicted = {name: value for name, value in (run.predicted or {}).items() if name in _DECIDED}
            sizes = {"runs": 1 + len(others), "num_nodes": run.num_nodes, "world_size": run.world_size}
            yield _row(run, "accepted") | sizes | predicted
        for point in self.rejected:
            rules = " ".join(sorted({violation.rule_id for violation in point.violations}))
            yield _row(point, "rejected") | {"rules": rules, "why": "; ".join(map(str, point.violations))}

    def __repr__(self) -> str:
        points = len({(run.test_id, run.label) for run in self.runs})
        rejected = counted(self.plan.num_rejected, "point")
        return f"<Plan of {self.plan.scenario!r} on {self.system.name!r}: {points} accepted, {rejected} rejected>"


def _row(point: RunPlan | RejectedPoint, status: str) -> dict[str, Any]:
    names = {"test": point.test_id, "point": point.label, "status": status}
    return names | axis_values(point.coordinates, _COLUMNS | _DECIDED)


_RANK = {"rank": int}
_PREDICTED = {
    **{"step_time_s": float, "step_time_low_s": float, "step_time_high_s": float, "tflops_per_gpu": float},
    **{"peak_memory_gib": float, "gpu_memory_gib": float, "fits": float, "gpu_hours": float, "cost": float},
}


def rank_layouts(
    recipe: str,
    *,
    num_gpus: int,
    gpu: str | None = None,
    system: str | PathLike[str] | None = None,
    precisions: Sequence[str] = ("bf16",),
    gbs: int | None = None,
    seq_length: int | None = None,
    launcher: str = Launcher.MEGATRON_BRIDGE,
    max_steps: int = 10,
    top: int = 10,
) -> "Layouts":
    """Rank the layouts of a recipe's model by their predicted step time; nothing is run.

    gpu: such as "gb200"; default: the system's gpu_type. system: TOML file with gpu_type, [prices] and calibration.
    gbs: sequences per step; default: the preset's, or the recipe's. seq_length: default: the recipe's. max_steps: for
    the cost and the tests. top: how many to return.
    BadInput: an unknown name, or nothing can be predicted for it.
    """
    sizes = {"num_gpus": num_gpus, "gbs": gbs, "seq_length": seq_length, "max_steps": max_steps, "top": top}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise BadInput(f"{name}: {shown(value)} is below 1")
    if launcher not in list(Launcher):
        raise BadInput(f"launcher: {shown(launcher)} is unknown; use one of {', '.join(Launcher)}")
    loaded = None if system is None else load_system(Path(system))
    request = search_request(
        loaded,
        recipe=recipe,
        gpu=gpu,
        num_gpus=num_gpus,
        precisions=tuple(precisions),
        gbs=gbs,
        seq_length=seq_length,
        launcher=launcher,
        max_steps=max_steps,
    )
    return Layouts(request, rank(request, top), price_of(loaded, request.gpu.name)[0])


@dataclass(frozen=True, repr=False)
class Layouts(Tabular):
    """A ranking. price: of the system; None if it has none. `ranking` counts excluded layouts by reason."""

    request: SearchRequest
    ranking: Ranking
    price: Price | None = None

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The layouts that break no rule and are predicted to fit, the fastest first; there may be none."""
        return tuple(self.ranking.best)

    def scenario(
        self,
        *,
        system: str | PathLike[str],
        max_trials: int | None = None,
        time_limit: str | None = None,
        base: str | PathLike[str] | None = None,
    ) -> Scenario:
        """Return a scenario whose search measures the best of these layouts; nothing is run or written.

        max_trials: layouts to run at most. time_limit: of each job. base: a test TOML with the remaining settings,
        such as containers.
        BadInput: no layouts, or a wrong file or limit.
        """
        if not self.best:
            raise BadInput(f"no layout of {self.request.recipe.name} is left; use more GPUs, or a batch they divide")
        found = {} if base is None else load_test_definition(Path(base)).model_dump(mode="json", exclude_unset=True)
        name = f"tune_{self.request.recipe.name}_{self.request.num_gpus}x{self.request.gpu.name}"
        scenario = search_scenario([each.cmd_args for each in self.best], found, name, max_trials)
        scenario["Tests"][0] |= {"time_limit": time_limit} if time_limit else {}
        with TemporaryDirectory() as directory:
            path = Path(directory, "scenario.toml")
            path.write_text(render_toml(scenario), encoding="utf-8")
            return Scenario(pipeline.load(pipeline.Request(Path(system), path, None, None)))

    @property
    def table(self) -> Table:
        taken = _RANK | _PREDICTED
        arguments = axis_types((each.cmd_args for each in self.best), taken)
        return Table({**_RANK, **_PREDICTED, **arguments}, tuple(self._rows(taken)))

    def _rows(self, taken: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, each in enumerate(self.best, 1):
            headline, interval = each.headline, self.ranking.interval_s(each)
            low, high = interval if math.isfinite(interval[1]) else (None, None)
            hours = headline.gpu_hours(self.request.max_steps)
            yield {
                "rank": number,
                **{"step_time_s": each.step_time_s, "step_time_low_s": low, "step_time_high_s": high},
                **{"tflops_per_gpu": headline.tflops_per_gpu, "peak_memory_gib": headline.peak_memory_gib},
                **{"gpu_memory_gib": headline.gpu_memory_gib, "fits": each.fits, "gpu_hours": hours},
                "cost": self.price.per_gpu_hour * hours if self.price and hours is not None else None,
                **axis_values(each.cmd_args, taken),
            }

    def __repr__(self) -> str:
        where = f"{self.request.num_gpus} x {self.request.gpu.name}"
        return f"<Layouts of {self.request.recipe.name!r} on {where}: {counted(len(self.best), 'layout')}>"
