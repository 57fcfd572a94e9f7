"""Results of a rehearsal, and its file in the directory of a run."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from cloudai_mbridge.errors import Damaged, counted
from cloudai_mbridge.files.documents import parse_json
from cloudai_mbridge.files.regular import NotRegular, read_regular
from cloudai_mbridge.files.replace import write_text
from cloudai_mbridge.files.run_files import ROOT_FILES
from cloudai_mbridge.files.text import clipped, visible


class RehearsalVerdict(StrEnum):
    """Verdict of a rehearsal on a point."""

    STARTS = "starts"
    REFUSED = "refused"
    NOT_EVALUATED = "not evaluated"


@dataclass(frozen=True)
class Refusal:
    """Why a rank was not built, in the words of the package that refused.

    stage: not finished: configuration, tokenizer, groups, model, optimizer or checkpoint. rank: None for any. where:
    places in the source, the innermost last. keys: settings that the words, or that line of source, name.
    """

    stage: str
    kind: str
    message: str
    rank: int | None = None
    where: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()

    def __str__(self) -> str:
        rank = "" if self.rank is None else f", rank {self.rank}"
        keys = f" ({', '.join(self.keys)})" if self.keys else ""
        return f"{self.stage}{rank}: {self.kind}{f': {self.message}' if self.message else ''}{keys}"


@dataclass(frozen=True)
class RehearsedPoint:
    """Result on a point.

    reason: why it is refused or not evaluated; of one that starts, a remark; "" without. python, megatron_core,
    transformer_engine: the software that was asked, None if none was. is_job_stack: it is the one that trains.
    layout: sizes. adapted: settings that this software replaces. ranks: those that differ in what they build.
    built: what each of them holds, as the program wrote it. others: its events of other kinds.
    """

    test_id: str
    label: str
    coordinates: Mapping[str, Any]
    world_size: int
    verdict: RehearsalVerdict
    reason: str = ""
    gpu: str | None = None
    python: str | None = None
    megatron_core: str | None = None
    transformer_engine: bool | None = None
    is_job_stack: bool = False
    layout: Mapping[str, int] = field(default_factory=dict)
    adapted: Mapping[str, Any] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()
    built: tuple[Mapping[str, Any], ...] = ()
    refusals: tuple[Refusal, ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        return f"{self.test_id}/{self.label}"

    @property
    def stack(self) -> str:
        """The software that was asked, "" if none was."""
        if self.megatron_core is None:
            return ""
        engine = {None: "", True: ", Transformer Engine", False: ", without Transformer Engine"}
        return f"Megatron-Core {self.megatron_core}{engine[self.transformer_engine]}"

    @property
    def line(self) -> str:
        """The result in one line."""
        text = f"{self.verdict} {self.name}"
        if self.verdict is RehearsalVerdict.STARTS:
            states = self.states
            parts = {"weights": "parameter", "gradients": "gradient", "moments": "moment"}
            held = ", ".join(f"{_size(states[f'{part}_bytes'])} of {name}" for name, part in parts.items())
            text += f": {counted(len(self.ranks), 'distinct rank')} of {self.world_size} built;"
            text += f" the largest has {states['parameters']:,} parameters, {held}"
            for each in filter(_matches, self.others):
                text += f"; {each.get('calls')} calls of a step match (micro-batches: {each.get('micro_batches')})"
            return visible(f"{text}; {self.reason}" if self.reason else text)
        return visible(f"{text}: {clipped(self.reason)}")

    @property
    def states(self) -> dict[str, int]:
        """What the rank with the most parameters holds: their number, and bytes by kind; {} if none was built."""
        if not self.built:
            return {}
        largest = max(self.built, key=lambda each: _number(each, "parameters", "count"))
        return {
            "parameters": _number(largest, "parameters", "count"),
            "parameter_bytes": _number(largest, "weights" if "weights" in largest else "parameters", "bytes"),
            "gradient_bytes": _number(largest, "gradients", "bytes"),
            "main_bytes": _number(largest, "optimizer", "main_bytes"),
            "moment_bytes": _number(largest, "optimizer", "moment_bytes"),
        }


def _matches(event: Mapping[str, Any]) -> bool:
    return event.get("event") == "matched"


def _size(count: int) -> str:
    return f"{count / 2**30:.2f} GiB" if count >= 2**30 else f"{count / 2**20:.2f} MiB"


def _number(built: Mapping[str, Any], part: str, name: str) -> int:
    values = built.get(part)
    value = values.get(name) if isinstance(values, Mapping) else None
    return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Rehearsal:
    """Rehearsal of the accepted points of a scenario. is_on_slurm: it ran in the jobs' images, on the cluster."""

    scenario: str
    system: str
    is_on_slurm: bool
    points: tuple[RehearsedPoint, ...]

    def of(self, verdict: RehearsalVerdict) -> tuple[RehearsedPoint, ...]:
        return tuple(point for point in self.points if point.verdict is verdict)

    @property
    def counts(self) -> dict[str, int]:
        """The points by verdict."""
        return {str(verdict): len(self.of(verdict)) for verdict in RehearsalVerdict}

    @property
    def succeeded(self) -> bool:
        """Whether a point was evaluated, and none is refused."""
        return bool(self.of(RehearsalVerdict.STARTS)) and not self.of(RehearsalVerdict.REFUSED)


def write_rehearsal(rehearsal: Rehearsal, root: Path) -> None:
    """Write the file of a rehearsal into a run's directory."""
    write_text(root / ROOT_FILES.rehearsal, json.dumps(asdict(rehearsal), indent=1) + "\n")


def read_rehearsal(root: Path) -> Rehearsal | None:
    """Return the rehearsal of a run, None without one. Damaged: its file cannot be read."""
    path = root / ROOT_FILES.rehearsal
    try:
        return TypeAdapter(Rehearsal).validate_python(parse_json(read_regular(path)))
    except FileNotFoundError:
        return None
    except (NotRegular, ValidationError, ValueError, RecursionError) as error:
        what = "not a regular file" if isinstance(error, NotRegular) else next(iter(str(error).splitlines()), "")
        raise Damaged(f"{path}: is damaged ({what}); restore the file, or remove it") from None


def lines_of(rehearsal: Rehearsal) -> Iterator[str]:
    """Yield a summary: counts, and the software that was asked."""
    words = {**rehearsal.counts, "start": rehearsal.counts["starts"]}
    counts = ", ".join(f"{words[each]} {each}" for each in ("start", "refused", "not evaluated") if words[each])
    stacks = dict.fromkeys(point.stack for point in rehearsal.points if point.stack)
    software = f" ({'; '.join(stacks)})" if stacks else ""
    yield f"rehearsed: {counts or 'no point'}{software}"
