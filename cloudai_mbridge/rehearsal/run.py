"""Rehearse the accepted points of a plan: which, with what software, and what follows from what it says."""

import contextlib
import json
import os
import re
import secrets
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cloudai_mbridge.errors import BadInput, ToolFailure, counted
from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.launch.script import (
    PYTHON_VARIABLE,
    REHEARSAL_LEVELS,
    REHEARSAL_MINUTES,
    render_rehearsal_job,
    render_rehearsal_script,
)
from cloudai_mbridge.launch.write import refuse_output_dir
from cloudai_mbridge.models.system import System, slurm_of
from cloudai_mbridge.plan import POINT_FILES, RunPlan, ScenarioPlan
from cloudai_mbridge.plan.launchers import EMBEDDED
from cloudai_mbridge.rehearsal.program import Ended, Event, run_program
from cloudai_mbridge.rehearsal.record import Refusal, Rehearsal, RehearsalVerdict, RehearsedPoint
from cloudai_mbridge.schedulers.slurm.commands import run_command, without_slurm_variables
from cloudai_mbridge.training.compat.stack import Stack, stack_of
from cloudai_mbridge.training.credentials.scrub import redacted_in

LIMIT_S = 60.0 * REHEARSAL_MINUTES  # of one point
_KNOWN = ("start", "configured", "built", "refused", "unusable", "tiled", "hang")
_SHARDS = "shards"  # of a built rank: not carried, as they are as many as its tensors
# Of refusals that say something of the rehearsal or of this machine, and nothing of the point
_OWN_STAGES = ("crash", "rehearsal")
_OWN_WORDS = re.compile(
    r"\bmeta (?:tensor|device)|'Meta' backend|\bfake (?:pg|process group)\b|\bFakeProcessGroup\b"
    r"|\blib(?:cuda|nvidia-ml)\.so|\b(?:NVIDIA|CUDA) driver\b|not compiled with CUDA"
)
_PATH = "PYTHONPATH"
_BEFORE_PACKAGE = re.compile(r"^/.*/(?=cloudai_mbridge/)")  # of a checkout
PREFIX = ".mbridge-rehearsal-"


@dataclass(frozen=True)
class Step:
    """How far a rehearsal is: built ranks of one point of so many. is_done: the point has its result."""

    point: RehearsedPoint
    number: int
    points: int
    built: int = 0
    ranks: int = 0
    is_done: bool = False


Progress = Callable[[Step], None]


@dataclass(frozen=True)
class _Software:
    """An interpreter to ask. is_jobs: the job has the same. whose: whose software the job has, if not."""

    python: str
    is_jobs: bool
    whose: str = ""


def rehearse(
    plan: ScenarioPlan,
    system: System,
    output_dir: Path,
    *,
    on_slurm: bool = False,
    level: str = REHEARSAL_LEVELS[0],
    progress: Progress = lambda step: None,
    limit_s: float | None = None,
) -> Rehearsal:
    """Rehearse each accepted point; nothing stays in `output_dir`.

    on_slurm: on one core of one node of the cluster, in the image of the job. level: one of REHEARSAL_LEVELS.
    limit_s: of a point.
    BadInput: the system has no Slurm. ToolFailure: bash cannot be started.
    """
    if on_slurm and system.is_one_machine:
        raise BadInput(f"--on-slurm: system {system.name!r} has no Slurm; leave it out")
    firsts = list({(run.test_id, run.label): run for run in reversed(plan.runs)}.values())[::-1]
    known: dict[tuple[str, str], RehearsedPoint] = {}
    points = []
    for number, run in enumerate(firsts, 1):
        blank = _blank(run)
        step = Step(blank, number, len(firsts))
        point = _judged(run, system, output_dir, known, on_slurm, level, progress, step, limit_s or LIMIT_S)
        points.append(point)
        progress(replace(step, point=point, built=len(point.built), ranks=len(point.ranks), is_done=True))
    return Rehearsal(plan.scenario, system.name, on_slurm, tuple(points))


def _blank(run: RunPlan) -> RehearsedPoint:
    return RehearsedPoint(run.test_id, run.label, run.coordinates, run.world_size, RehearsalVerdict.NOT_EVALUATED)


def _judged(
    run: RunPlan,
    system: System,
    output_dir: Path,
    known: dict[tuple[str, str], RehearsedPoint],
    on_slurm: bool,
    level: str,
    progress: Progress,
    step: Step,
    limit_s: float,
) -> RehearsedPoint:
    """Return the result on a run's point. known: of points with the same scripts, by these."""
    blank = step.point
    if run.launcher is not EMBEDDED:
        return replace(blank, reason="the upstream launcher makes its configuration inside the job")
    gpu, why_not = _gpu_of(run, system)
    if why_not:
        return replace(blank, reason=why_not)
    software = _Software("", is_jobs=True) if on_slurm else software_of(run, system)
    name = f"mbridge-rehearsal-{secrets.token_hex(8)}" if on_slurm else ""

    def script_of(job: str) -> str:
        if on_slurm:
            return render_rehearsal_job(run, slurm_of(system), gpu, job, level)
        return render_rehearsal_script(run, gpu, software.python, level)

    files = (script_of("NAME"), json.dumps(run.training_config, indent=2) + "\n")
    if (same := known.get(files)) is None:
        events: list[Event] = []

        def take(event: Event) -> None:
            events.append({name: value for name, value in event.items() if name != _SHARDS})
            told = _Told.of(events)
            progress(replace(step, built=len(told.built), ranks=len(told.ranks)))

        with _directory(output_dir, run, system, on_slurm=on_slurm) as directory:
            (directory / POINT_FILES.training_config).write_text(files[1], encoding="utf-8")
            (directory / POINT_FILES.rehearsal_script).write_text(script_of(name), encoding="utf-8")
            with _job(name):
                ended = run_program(
                    directory,
                    POINT_FILES.rehearsal_script,
                    _environment(on_slurm=on_slurm),
                    take,
                    limit_s=limit_s,
                    waits=on_slurm,
                )
        same = known[files] = verdict_of(replace(blank, gpu=gpu), events, ended, software, limit_s)
    own_names = ("test_id", "label", "coordinates", "world_size")
    return replace(same, **{each: getattr(blank, each) for each in own_names})


def _gpu_of(run: RunPlan, system: System) -> tuple[str, str]:
    """Return the kind of a run's GPUs, or why it cannot be rehearsed."""
    name = str(run.args.get("gpu_type") or system.gpu_type or "")
    if not name and system.is_one_machine:
        return "", (
            f"system {system.name!r} names no GPU and trains on this machine's CPU; run it, or set gpu_type if there"
            " is a GPU"
        )
    if not name:
        return "", f"system {system.name!r} names no GPU; set gpu_type, such as 'h100', in its file"
    gpu = find_gpu(name)
    if gpu is None:
        return "", f"gpu_type {name!r} is unknown; use one of `mbridge estimate --gpu`"
    return ("", f"it trains on a CPU (gpu_type {name!r}); run it") if gpu.name == "cpu" else (gpu.name, "")


def software_of(run: RunPlan, system: System) -> _Software:
    """Return the interpreter of this machine to ask: the job's if it can be run here, else this one."""
    named = system.python_executable
    path = run.env.get(_PATH)
    found = stack_of(named, {} if path is None else {_PATH: path}) if named is not None else None
    if run.container_image:
        has_core = isinstance(found, Stack) and found.core is not None
        return _Software(named if named and has_core else sys.executable, is_jobs=False, whose="the image's")
    if named is None:
        return _Software(sys.executable, is_jobs=True)
    if found is None:
        return _Software(sys.executable, is_jobs=False, whose=f"that of {named}, which this machine cannot ask")
    return _Software(named, is_jobs=True)


def _environment(*, on_slurm: bool) -> dict[str, str]:
    """Return the variables of this process as a job of its own would have them."""
    return {**without_slurm_variables(os.environ), **({PYTHON_VARIABLE: sys.executable} if on_slurm else {})}


@contextlib.contextmanager
def _directory(output_dir: Path, run: RunPlan, system: System, *, on_slurm: bool) -> Iterator[Path]:
    """Yield a temporary directory: on the file system of the runs if a node has to read it."""
    if not on_slurm:
        with tempfile.TemporaryDirectory(prefix="mbridge-rehearsal-") as name:
            yield Path(name)
        return
    refuse_output_dir(output_dir, system, [run])
    made = [each for each in (output_dir, *output_dir.absolute().parents) if not each.exists()]
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        directory = tempfile.TemporaryDirectory(prefix=PREFIX, dir=output_dir.resolve())
    except OSError as error:
        raise BadInput(f"{output_dir}: cannot be written ({error.strerror}); choose another --output-dir") from None
    try:
        with directory as name:
            yield Path(name)
    finally:
        for each in made:
            with contextlib.suppress(OSError):  # another process has written there
                each.rmdir()


@contextlib.contextmanager
def _job(name: str) -> Iterator[None]:
    """Cancel the job of this name if it is left early, which srun may not have done. name: "" for no job."""
    try:
        yield
    except BaseException:
        if name:
            with contextlib.suppress(ToolFailure):
                run_command("scancel", f"--name={name}")
        raise


@dataclass
class _Told:
    """Events by their kinds."""

    start: Mapping[str, Any] = field(default_factory=dict)
    configured: Mapping[str, Any] = field(default_factory=dict)
    built: list[Mapping[str, Any]] = field(default_factory=list)
    refused: list[Mapping[str, Any]] = field(default_factory=list)
    unusable: str | None = None
    tiled: Mapping[str, Any] = field(default_factory=dict)
    others: list[Mapping[str, Any]] = field(default_factory=list)

    @classmethod
    def of(cls, events: Sequence[Event]) -> "_Told":
        told = cls()
        for event in events:
            kind = event["event"]
            if kind == "built":
                told.built.append({name: value for name, value in event.items() if name != "event"})
            elif kind == "refused":
                told.refused.append(event)
            elif kind == "hang":
                told.refused.append(_hang(event))
            elif kind == "unusable":
                told.unusable = str(event.get("message", ""))
            elif kind in _KNOWN:
                setattr(told, kind, event)
            else:
                told.others.append(event)
        return told

    @property
    def ranks(self) -> tuple[int, ...]:
        found = self.configured.get("ranks")
        return tuple(each for each in found if isinstance(each, int)) if isinstance(found, list) else ()


def verdict_of(
    blank: RehearsedPoint, events: Sequence[Event], ended: Ended, software: _Software, limit_s: float
) -> RehearsedPoint:
    """Return the result that the events of the program, and its end, amount to."""
    told = _Told.of(redacted_in(list(events)))
    core, python = told.start.get("megatron_core"), told.start.get("python")
    layout, engine = told.configured.get("layout"), told.configured.get("transformer_engine")
    adapted = told.configured.get("adapted")
    refusals = tuple(sorted(map(_refusal, told.refused), key=_is_own))
    point = replace(
        blank,
        python=str(python or software.python) or None,
        megatron_core=None if core is None else str(core),
        transformer_engine=engine if isinstance(engine, bool) else None,
        is_job_stack=software.is_jobs,
        layout=layout if isinstance(layout, dict) else {},
        adapted=adapted if isinstance(adapted, dict) else {},
        ranks=told.ranks,
        built=tuple(told.built),
        refusals=refusals,
        others=tuple(told.others),
    )
    if told.unusable is not None:
        return replace(point, reason=f"{point.python} cannot rehearse: {told.unusable}")
    real = [each for each in refusals if not _is_own(each)]
    if real:
        more = f" (and {counted(len(real) - 1, 'other rank')})" if len(real) > 1 else ""
        if software.is_jobs:
            return replace(point, verdict=RehearsalVerdict.REFUSED, reason=f"{real[0]}{more}")
        asked = f"this Python's {point.stack or 'software'}, not {software.whose}"
        return replace(point, reason=f"{asked}, refuses it: {real[0]}{more}; --on-slurm asks the job's own")
    if refusals:
        return replace(point, reason=f"a limit of the rehearsal, not of the point: {refusals[0]}")
    if ended.is_late:
        built = f"{len(point.built)} of {counted(len(point.ranks), 'rank')} built" if point.ranks else "no rank built"
        return replace(point, reason=f"not ended within {limit_s / 60:g} minutes ({built})")
    said = f": {redacted_in(ended.said)}" if ended.said else ""
    if ended.code != 0:
        how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with exit code {ended.code}"
        return replace(point, reason=f"the program of the rehearsal {how}{said}")
    if not point.ranks or not {*point.ranks} <= {each.get("rank") for each in point.built}:
        built = f"{len(point.built)} of {counted(len(point.ranks), 'rank')}"
        return replace(point, reason=f"the program of the rehearsal ended after {built}{said}")
    remarks = [] if software.is_jobs else [f"on this Python's {point.stack}, not {software.whose}"]
    if left := [each for each in told.others if each.get("event") == "not_stepped"]:
        more = f" (nor {counted(len(left) - 1, 'other rank')})" if len(left) > 1 else ""
        remarks.append(
            f"rank {left[0].get('rank')} took no step{more}, so that none is matched: {left[0].get('message')}"
        )
    problems = told.tiled.get("problems")
    if isinstance(problems, list) and problems:
        remarks.append(f"its checkpoint cannot be read under another layout: {problems[0]}")
    return replace(point, verdict=RehearsalVerdict.STARTS, reason="; ".join(remarks))


def _refusal(event: Mapping[str, Any]) -> Refusal:
    """Return a refusal; what an event lacks is empty."""

    def texts(name: str) -> tuple[str, ...]:
        value = event.get(name)
        return tuple(map(str, value)) if isinstance(value, list) else ()

    rank = event.get("rank")
    stage, kind, message = (str(event.get(name) or "") for name in ("stage", "kind", "message"))
    where = tuple(_BEFORE_PACKAGE.sub("", each) for each in texts("where"))
    return Refusal(stage, kind, message, rank if isinstance(rank, int) else None, where, texts("keys"))


def _hang(event: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a hang as a refusal: the two ranks, the micro-batch, and what each of them calls."""
    ranks, calls = event.get("ranks"), event.get("calls")
    pairs = zip(ranks, calls, strict=False) if isinstance(ranks, list) and isinstance(calls, list) else ()
    own = "; ".join(f"rank {rank}: {call or 'makes no further call'}" for rank, call in pairs)
    batch = event.get("micro_batch")
    place = "" if batch is None else f" in micro-batch {batch}"
    first = ranks[0] if isinstance(ranks, list) and ranks else None
    return {"stage": "step", "kind": "Hang", "message": f"{event.get('reason', '')}{place}: {own}", "rank": first}


def _is_own(refusal: Refusal) -> bool:
    """Return whether a refusal says nothing of the point."""
    return refusal.stage in _OWN_STAGES or _OWN_WORDS.search(refusal.message) is not None
