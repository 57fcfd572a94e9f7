"""`python -m cloudai_mbridge.training.dry --config FILE --world N --gpu KIND`: rehearse a job, a line of JSON an event.

Each rank is built in a fork of this process, so that none inherits the groups of another, and a crash costs one rank.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.versions import installed_version, why_unusable
from cloudai_mbridge.training.dry.log import Issue, Log
from cloudai_mbridge.training.dry.match import match
from cloudai_mbridge.training.dry.picture import idle, schedule
from cloudai_mbridge.training.dry.places import Layout
from cloudai_mbridge.training.dry.tiling import problems_of
from cloudai_mbridge.training.startup.variables import set_variables_of_file

GPU_KINDS = ("a100", "h100", "h200", "b200", "gb200", "b300", "gb300")
LEVELS = ("states", "step")
Emit = Callable[..., None]
MOST_SAVING = 16  # ranks that save shards; of more, whether these tile every tensor is not checked


@dataclass(frozen=True)
class DryJob:
    """A job to rehearse. id: of its events. ranks: those to build; None: those that differ in what they build.

    env: its variables, as far as they are not read by an import; those are this program's own.
    """

    id: str
    config: Path
    world: int
    gpus_per_node: int
    ranks: tuple[int, ...] | None
    env: Mapping[str, str] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cloudai_mbridge.training.dry", description=__doc__)
    parser.add_argument("--config", type=Path, help="YAML or JSON file with a ConfigContainer")
    parser.add_argument("--world", type=int, help="number of ranks of the job")
    parser.add_argument("--gpu", required=True, choices=GPU_KINDS, help="the kind of GPU that the job is for")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--ranks", help="comma-separated; by default those that differ in what they build")
    parser.add_argument(
        "--jobs",
        type=Path,
        help="instead of one job: a file with {id, config, world, gpus_per_node, ranks, env} a line",
    )
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="states",
        help="step: let each rank take a step, too, and match what they communicate",
    )
    parser.add_argument("--in-full", action="store_true", help="run all micro-batches, where a few tell the rest")
    parser.add_argument("--logs", type=Path, help="with --level step: write each rank's log into this directory")
    args = parser.parse_args()
    if (args.jobs is None) != (args.config is not None and args.world is not None):
        parser.error("either --jobs, or --config with --world")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine must not answer
    if args.jobs is None:
        set_variables_of_file(args.config, [])
    emit = _emitter()
    if reason := why_unusable():
        emit("unusable", message=reason)
        return 2
    started = time.process_time()
    from cloudai_mbridge.training.dry import machine

    machine.install(args.gpu)
    from cloudai_mbridge.training.dry import rank  # noqa: F401 - before the forks

    emit("start", megatron_core=installed_version(), python=sys.executable, import_s=time.process_time() - started)
    return max([_rehearse(job, args, emit) for job in _jobs(args)], default=0)


def _jobs(args: argparse.Namespace) -> Iterator[DryJob]:
    if args.jobs is None:
        ranks = tuple(map(int, args.ranks.split(","))) if args.ranks else None
        yield DryJob("", args.config, args.world, args.gpus_per_node, ranks)
        return
    for line in args.jobs.read_text(encoding="utf-8").splitlines():
        job = json.loads(line)
        chosen = job.get("ranks")
        nodes = job.get("gpus_per_node", args.gpus_per_node)
        ranks = None if chosen is None else tuple(chosen)
        yield DryJob(job["id"], Path(job["config"]), job["world"], nodes, ranks, job.get("env", {}))


def _rehearse(job: DryJob, args: argparse.Namespace, emit: Emit) -> int:
    """Build the ranks of a job; return 1 if one cannot be built."""
    from cloudai_mbridge.training.dry import rank

    world = (job.world, job.gpus_per_node)
    first = _in_fork(partial(rank.configured, job.config, *world), job)
    emit("refused" if "stage" in first else "configured", job=job.id, **first)
    if "stage" in first:
        return 1
    failed, shards = 0, list[Any]()
    logs, timelines, batches = dict[int, Log](), dict[int, list[Any]](), (0, 0)
    saving = first["saving"] if job.ranks is None and len(first["saving"]) <= MOST_SAVING else []
    chosen = first["ranks"] if job.ranks is None else job.ranks
    for each in sorted({*chosen, *saving}):
        build = partial(rank.build, job.config, each, *world)
        found = _in_fork(build, job)
        failed += "stage" in found
        shards += found.pop("shards", ())
        emit("refused" if "stage" in found else "built", **({"job": job.id, "rank": each} | found))
        if args.level != "step" or "stage" in found or each not in chosen:
            continue
        stepped = _in_fork(partial(build, with_step=True, in_full=args.in_full), job)
        taken, log = stepped.get("step"), stepped.get("log")
        if taken is None:  # which is the rehearsal's own limit: the rank was built
            emit("not_stepped", **({"job": job.id, "rank": each} | stepped))
        if taken is not None and log is not None:
            logs[each] = Log.of_document(log)
            timelines.setdefault(found["place"]["pp"], taken["timeline"])
            batches = (taken["micro_batches_run"][-1], taken["micro_batches"])
            emit("step", job=job.id, rank=each, **taken, peak_mib=stepped["peak_mib"])
            if args.logs is not None:
                (args.logs / f"{job.id.replace('/', '-')}rank{each}.json").write_text(json.dumps(log), encoding="utf-8")
    if saving and shards and not failed:
        emit("tiled", job=job.id, keys=len({each[0] for each in shards}), problems=problems_of(shards))
    if logs and len(logs) == len(chosen):
        layout = Layout(**first["layout"], order=tuple(first["order"]))
        emit(
            "pipeline", job=job.id, **_pipeline([timelines[stage] for stage in sorted(timelines)], layout.pp, *batches)
        )
        if (hang := match(logs, layout)) is not None:
            emit("hang", job=job.id, **hang.document())
            return 1
        calls = sum(isinstance(each, Issue) for log in logs.values() for each in log)
        emit("matched", job=job.id, ranks=len(logs), calls=calls, micro_batches=batches[0])
    return 1 if failed else 0


def _pipeline(timelines: list[Any], stages: int, taken: int, every: int) -> dict[str, Any]:
    """Return the passes of every stage in order, of a step of `taken` micro-batches, and the share of time without any.

    The share is that of a step of `every` micro-batches: further ones fill time, and leave the rest as it is. It is
    None if it isn't known: of some stages alone, or of schedules that overlap the passes.
    """
    chunks = 1 + max((each[1] for timeline in timelines for each in timeline), default=0)
    bubble = None
    if len(timelines) == stages and all(timelines):
        with suppress(ValueError):
            share = idle(schedule(timelines, chunks))
            bubble = round(share * taken / (share * taken + (1 - share) * every), 4)
    return {"timeline": timelines, "micro_batches": taken, "chunks": chunks, "idle": bubble}


def _emitter() -> Emit:
    """Return a function that writes events to standard output, which nothing else does from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **data: Any) -> None:
        out.write(json.dumps({"event": event, **data}, default=str) + "\n")
        out.flush()

    return emit


def _in_fork(work: Callable[[], dict[str, Any]], job: DryJob) -> dict[str, Any]:
    """Return what `work` returns in a fork, or the document of the refusal or crash that ended it."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
        os.environ.update(job.env)
        set_variables_of_file(job.config, [])
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            json.dump(_answer(work), pipe, default=str)
        sys.stderr.flush()
        os._exit(0)
    os.close(write)
    with os.fdopen(read, encoding="utf-8") as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if text and status == 0:
        return dict(json.loads(text))
    return {"stage": "crash", "kind": "crash", "message": f"exit code {status}", "where": [], "keys": []}


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    from cloudai_mbridge.training.dry.rank import NotBuilt

    try:
        return work()
    except NotBuilt as refused:
        return refused.document()
    except BaseException as error:  # whatever it is, the other ranks are built
        return NotBuilt("rehearsal", error, None).document()


if __name__ == "__main__":
    sys.exit(main())
