#!/bin/sh
""":"
exec "${STAND_IN_PYTHON:-python3}" -I -S "$0" "$@"

A stand-in for the training program: it prints what training prints and costs nothing. Called as the interpreter.
STAND_IN_PYTHON: the interpreter itself, where `python3` is a script that looks for it (tests/conftest.py).

It takes torchrun's place on a node (`-m torch.distributed.run ... -m cloudai_mbridge.training --config FILE`), and does
what the variable STAND_IN says, a JSON object:

    step_s      seconds per step
    says_s      seconds per step that it prints
    varies      relative standard deviation of that, between runs and between steps
    file        a file whose content, if it exists, replaces this object
    at          step after which the rest happens (default: before the first)
    say         text for stderr
    unstarted   say and exit before the record of the start: no rank has begun
    exit        exit code; without it, the run goes on
    signal      number of a signal that it sends itself
    signal_job  number of a signal that the job's batch script gets
    use_mb      memory to use
    hang        seconds to do nothing
    wait_for    a file that it waits for
    only_first  do all that in the first start of the job only: in the attempt that finds no such file here
    bad_nodes   do all that on these nodes only
    ledger      file to which it adds a line "DIRECTORY JOB" when it has trained to its end
    late_s      seconds from the job's end to when others see what it has written here; null: they never do
"""

import json
import os
import random
import sys
import time
from pathlib import Path


def main() -> int:
    told = json.loads(os.environ.get("STAND_IN", "{}"))
    if "file" in told and Path(told["file"]).exists():
        told = json.loads(Path(told["file"]).read_text())
    if os.environ.get("SLURMD_NODENAME", "") not in told.get("bad_nodes", [os.environ.get("SLURMD_NODENAME", "")]):
        told = {"step_s": told.get("step_s", 0), "varies": told.get("varies", 0)}
    if "late_s" in told and os.environ.get("PET_NODE_RANK", "0") == "0":
        hide(told["late_s"])
    if told.get("unstarted"):
        print(told["say"], file=sys.stderr, flush=True)
        return int(told["exit"])
    level = random.gauss(1, told.get("varies", 0))
    if os.environ.get("PET_NODE_RANK", "0") != "0":
        time.sleep(told.get("step_s", 0) * steps() + 0.2)
        return 0
    print("MBRIDGE_RUN", json.dumps({"version": 1, "world_size": 1}), flush=True)
    if told.get("only_first"):
        if Path(told["only_first"]).exists():
            told = {"step_s": told.get("step_s", 0)}
        else:
            Path(told["only_first"]).touch()
    for step in range(steps() + 1):
        if step:
            time.sleep(told.get("step_s", 0))
            print(
                "MBRIDGE_STEP",
                json.dumps(record(step, told.get("says_s", 0.5) * random.gauss(level, told.get("varies", 0)))),
                flush=True,
            )
        if step == told.get("at", 0):
            if "say" in told:
                print(told["say"], file=sys.stderr, flush=True)
            used = b"x" * (int(told.get("use_mb", 0)) << 20)
            if "signal" in told:
                os.kill(os.getpid(), told["signal"])
            if "signal_job" in told:
                os.kill(batch_script(), told["signal_job"])
            time.sleep(told.get("hang", 0))
            while "wait_for" in told and not Path(told["wait_for"]).exists():
                time.sleep(0.05)
            del used
            if "exit" in told:
                return int(told["exit"])
    if "ledger" in told:
        task = "_".join(filter(None, map(os.environ.get, ("SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"))))
        with Path(told["ledger"]).open("a") as ledger:
            ledger.write(f"{Path.cwd()} {task or os.environ['SLURM_JOB_ID']}\n")
    return 0


def batch_script() -> int:
    """Return the process of the job's batch script, which is not an ancestor: slurmstepd starts both."""
    for entry in Path("/proc").iterdir():
        try:
            here = Path(os.readlink(entry / "cwd")) == Path.cwd()
            if here and b"slurm_script" in (entry / "cmdline").read_bytes():
                return int(entry.name)
        except OSError:
            continue
    raise RuntimeError("no batch script is here")


def hide(late_s: float | None) -> None:
    """Write on in a directory elsewhere, to which this one's processes have been moved, and move it back later.

    Left in its place: the files of before the job, as on another machine whose cache is old.
    """
    import shutil

    here = Path.cwd()
    there = here.parents[4] / f"hidden-{os.getpid()}"
    shutil.copytree(here, there, symlinks=True, ignore=shutil.ignore_patterns("claim*", "st*", "exit_code*"))
    exchange(here, there)
    if late_s is None or os.fork():
        return
    os.setsid()
    if os.fork():  # nobody of the job's
        os._exit(0)
    os.closerange(0, 64)
    while not (there / "exit_code.txt").exists():
        time.sleep(0.05)
    time.sleep(late_s)
    exchange(here, there)
    os._exit(0)


def exchange(one: Path, other: Path) -> None:
    """Exchange two directories in one step (Linux)."""
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(-100, os.fsencode(one), -100, os.fsencode(other), 2):
        raise OSError(ctypes.get_errno(), "renameat2")


def steps() -> int:
    config = json.loads(Path(sys.argv[sys.argv.index("--config") + 1]).read_text())
    return int(config["train"]["train_iters"])


def record(step: int, step_time_s: float) -> dict[str, object]:
    return {
        "version": 1,
        "step": step,
        "step_time_s": step_time_s,
        "tflops_per_gpu": 0.5 / step_time_s,  # the same work in every step
        "losses": {"lm loss": 5.0 - step / 100},
    }


if __name__ == "__main__":
    sys.exit(main())
