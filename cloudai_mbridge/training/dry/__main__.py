"""`python -m cloudai_mbridge.training.dry --config FILE --world N --gpu KIND`: rehearse a job, a line of JSON an event.

Each rank is built in a fork of this process, so that none inherits the groups of another, and a crash costs one rank.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.compat.versions import installed_version, why_unusable
from cloudai_mbridge.training.dry.log import Issue, Log
from cloudai_mbridge.training.dry.match import match
from cloudai_mbridge.training.dry.picture import idle, schedule
from cloudai_mbridge.training.dry.places import Layout
from cloudai_mbridge.training.startup.variables import set_variables_of_file

GPU_KINDS = ("a100", "h100", "h200", "b200", "gb200", "b300", "gb300")
LEVELS = ("states", "step")
Emit = Callable[..., None]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cloudai_mbridge.training.dry", description=__doc__)
    parser.add_argument("--config", type=Path, required=True, help="YAML or JSON file with a ConfigContainer")
    parser.add_argument("--world", type=int, required=True, help="number of ranks of the job")
    parser.add_argument("--gpu", required=True, choices=GPU_KINDS, help="the kind of GPU that the job is for")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--ranks", help="comma-separated; by default those that differ in what they build")
    parser.add_argument(
        "--level",
        choices=LEVELS,
        default="states",
        help="step: let each rank take a step, too, and match what they communicate",
    )
    parser.add_argument("--in-full", action="store_true", help="run all micro-batches, where a few tell the rest")
    parser.add_argument("--logs", type=Path, help="with --level step: write each rank's log into this directory")
    args = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a GPU of this machine must not answer
    set_variables_of_file(args.config, [])
    emit = _emitter()
    if reason := why_unusable():
        emit("unusable", message=reason)
        return 2
    started = time.process_time()
    from cloudai_mbridge.training.dry import machine

    machine.install(machine.GPUS[args.gpu])
    from cloudai_mbridge.training.dry import rank

    world = (args.world, args.gpus_per_node)
    emit("start", megatron_core=installed_version(), python=sys.executable, import_s=time.process_time() - started)
    first = _in_fork(lambda: rank.configured(args.config, *world))
    emit("refused" if "stage" in first else "configured", **first)
    if "stage" in first:
        return 1
    ranks = [int(each) for each in args.ranks.split(",")] if args.ranks else first["ranks"]
    with_step = args.level == "step"
    failed, logs, timelines = 0, dict[int, Log](), dict[int, list[Any]]()
    for each in ranks:
        build = partial(rank.build, args.config, each, *world)
        found = _in_fork(build)
        failed += "stage" in found
        emit("refused" if "stage" in found else "built", **({"rank": each} | found))
        if not with_step or "stage" in found:
            continue
        stepped = _in_fork(partial(build, with_step=True, in_full=args.in_full))
        taken, log = stepped.get("step"), stepped.get("log")
        if taken is None:  # which is the rehearsal's own limit: the rank was built
            emit("not_stepped", rank=each, **stepped)
        if taken is not None and log is not None:
            logs[each] = Log.of_document(log)
            timelines.setdefault(found["place"]["pp"], taken["timeline"])
            emit("step", rank=each, **taken, peak_mib=stepped["peak_mib"])
            if args.logs is not None:
                (args.logs / f"rank{each}.json").write_text(json.dumps(log), encoding="utf-8")
    if with_step and len(logs) == len(ranks):
        layout = Layout(**first["layout"], order=tuple(first["order"]))
        emit("pipeline", **_pipeline([timelines[stage] for stage in sorted(timelines)]))
        if (hang := match(logs, layout)) is not None:
            emit("hang", **hang.document())
            return 1
        emit("matched", ranks=len(logs), calls=sum(isinstance(each, Issue) for log in logs.values() for each in log))
    return 1 if failed else 0


def _pipeline(timelines: list[Any]) -> dict[str, Any]:
    """Return the passes of every stage in order, and the share of time without any, if their order can be drawn."""
    chunks = 1 + max((each[1] for timeline in timelines for each in timeline), default=0)
    try:
        bubble: float | None = round(idle(schedule(timelines, chunks)), 4)
    except ValueError:
        bubble = None
    return {"timeline": timelines, "chunks": chunks, "idle": bubble}


def _emitter() -> Emit:
    """Return a function that writes events to standard output, which nothing else does from now on."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def emit(event: str, **data: Any) -> None:
        out.write(json.dumps({"event": event, **data}, default=str) + "\n")
        out.flush()

    return emit


def _in_fork(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return what `work` returns in a fork, or the document of the refusal or crash that ended it."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(read)
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
    from cloudai_mbridge.training.dry.rank import Refused

    try:
        return work()
    except Refused as refused:
        return refused.document()
    except BaseException as error:  # whatever it is, the other ranks are built
        return Refused("rehearsal", error, None).document()


if __name__ == "__main__":
    sys.exit(main())
