"""Whatever sbatch prints, however late the controller takes a job: every point is trained once, and counted.

The sandbox is a real Slurm. In front of its sbatch stands a script that damages one side of the conversation. What was
trained is counted by the lines that the jobs' scripts write, and by Slurm's own list.
"""

import shutil
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.launch.claim import LOST_CLAIM

pytestmark = pytest.mark.slurm

FIELDS = "JobArrayID:|,State:|,exit_code:|,Name:|,WorkDir:|"
RUNNER = "settle_s = 3\nunknown_s = 5\nretries = 3"
REFUSED = "sbatch: error: Batch job submission failed:"
# In each, {real} is Slurm's sbatch, and {later} runs it in a while, with nothing open but its own output
FAULTS = {
    "accepted, and says that it was not": f'{{real}} "$@" > /dev/null; echo "{REFUSED} Unspecified error" >&2; rc=1',
    "accepted, and the answer is damaged": f'{{real}} "$@" > /dev/null; echo "{REFUSED} No error" >&2; rc=1',
    "accepted, and in words of the site": '{real} "$@" > /dev/null; echo "the filter does not like you" >&2; rc=1',
    "accepted, and no output": '{real} "$@" > /dev/null; rc=0',
    "accepted, and fails without output": '{real} "$@" > /dev/null; rc=1',
    "accepted, and is killed": '{real} "$@" > /dev/null; rc=killed',
    "accepted, and times out": '{real} "$@" > /dev/null; echo "sbatch: error: Socket timed out" >&2; rc=1',
    "the id of another job": '{real} "$@" > /dev/null; echo 1; rc=0',
    "an id that is cut": 'id=$({real} "$@"); echo "${{id%?}}"; rc=0',
    "an id that does not exist": '{real} "$@" > /dev/null; echo 4000000000; rc=0',
    "times out, and accepted late": '{later} "$@"; echo "sbatch: error: Socket timed out on send/recv" >&2; rc=1',
    "fails, and accepted late": f'{{later}} "$@"; echo "{REFUSED} Message receive failure" >&2; rc=1',
    "accepted twice": '{real} "$@" > /dev/null; {real} "$@"; rc=$?',
    "an array in part": '{real} "${{@/--array=*/--array=0-1}}"; rc=$?',
    "not submitted, and times out": 'echo "sbatch: error: Unable to contact slurm controller" >&2; rc=1',
    "not submitted, and killed": "rc=killed",
}
ARRAY = "gb = 8\nmb = [1, 2, 4, 8]"
NUM_POINTS = 5


@pytest.fixture(scope="module")
def sandbox(new_cluster: Any) -> Any:
    return new_cluster(nodes=3)


def bad_sbatch(directory: Path, sandbox: Any, faults: dict[int, str], *, kills: bool) -> str:
    """Make an sbatch that fails in some of its calls; return the directory for PATH. kills: and its driver with it."""
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    late = directory / "late"
    late.write_text(
        f"#!{sys.executable}\n"
        "import os, subprocess, sys\n"
        f"command = 'sleep 9; {real} \"$@\"; echo >> {late}.done'\n"
        "with open(os.devnull, 'r+b') as null:\n"
        "    argv = ['bash', '-c', command, 'bash', *sys.argv[1:]]\n"
        "    subprocess.Popen(argv, stdin=null, stdout=null, stderr=null, start_new_session=True, close_fds=True)\n"
    )
    cases = "".join(
        f"{number})\n{FAULTS[fault].format(real=real, later=late)}\n;;\n" for number, fault in faults.items()
    )
    program = directory / "sbatch"
    program.write_text(
        f"""#!/bin/bash
echo "$*" >> {directory}/calls
case $(wc -l < {directory}/calls) in
{cases}
*) exec {real} "$@" ;;
esac
{"kill -9 $PPID" if kills else ""}
if [ $rc = killed ]; then kill -9 $$; fi
exit $rc
"""
    )
    for path in (late, program):
        path.chmod(0o755)
    return str(directory)


def jobs_of(run: Any, sandbox: Any) -> list[tuple[str, str, str, int]]:
    """Return (run key, job id, state, exit code) of everything that Slurm has ever had from a run's directory."""
    found = []
    shown = sandbox.run("squeue", "--noheader", "--array", "--states=all", "--Format", FIELDS).stdout
    for line in shown.splitlines():
        job_id, state, code, name, directory = (field.strip() for field in line.strip().rstrip("|").split("|"))
        path = Path(directory)
        if "_" in job_id:
            array = name.partition(".")[0].rpartition("-array-")[2]
            path = path / "arrays" / array / job_id.partition("_")[2]
        if path.resolve().is_relative_to(run.root):
            found.append((str(path.resolve().relative_to(run.root)), job_id, state, int(code) >> 8))
    return found


def check_once(run: Any, sandbox: Any, num_points: int) -> None:
    """Check that every point was trained by one job, which is the one that counts, and that no other one trained."""
    points = run.points()
    assert {key: point["verdict"] for key, point in points.items()} == dict.fromkeys(points, "success")
    assert len(points) == num_points
    jobs = jobs_of(run, sandbox)
    completed = sorted((key, job_id) for key, job_id, state, _ in jobs if state == "COMPLETED")
    assert completed == sorted((key, point["job"]["job_id"]) for key, point in points.items())
    others = [job for job in jobs if job[2] != "COMPLETED"]
    assert all(state == "CANCELLED" or code == LOST_CLAIM for _, _, state, code in others), others
    for key in points:
        starts = [path.read_text().splitlines() for path in (run.root / key).rglob("started.txt")]
        assert sum(map(len, starts)) == 1, starts


def play(
    start_run: Any,
    stand_in_test: Any,
    sandbox: Any,
    until: Any,
    directory: Path,
    faults: dict[int, str],
    *,
    kills: bool,
) -> None:
    """Run an array of four points and a single one behind a bad sbatch to their end, and check."""
    tests = [stand_in_test("array", {"step_s": 0.1}, args=ARRAY), stand_in_test("single", run='time_limit = "1:00:00"')]
    path = bad_sbatch(directory, sandbox, faults, kills=kills)
    run = start_run(sandbox, tests, path=path, runner=RUNNER)
    for _ in faults if kills else ():
        run.process.wait(300)
        if run.process.returncode != -signal.SIGKILL:
            break  # it has needed fewer calls of sbatch
        run = run.resume()
    run.finish(0)
    num_late = sum("late" in fault for fault in faults.values())
    done = directory / "late.done"
    until("the late jobs", lambda: not num_late or (done.exists() and len(done.read_text()) >= num_late))
    until("an empty queue", lambda: not sandbox.run("squeue", "--noheader").stdout.strip())
    check_once(run, sandbox, NUM_POINTS)


def test_faults_one_after_the_other(
    start_run: Any, stand_in_test: Any, sandbox: Any, until: Any, tmp_path: Path
) -> None:
    """The first calls of sbatch fail, each in its way; the array and the single point are submitted until they run."""
    chosen = ("an id that is cut", "accepted, and says that it was not")
    play(start_run, stand_in_test, sandbox, until, tmp_path, dict(enumerate(chosen, 1)), kills=False)


@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("fault", ["accepted twice", "fails, and accepted late"])
def test_a_fault(
    start_run: Any, stand_in_test: Any, sandbox: Any, until: Any, tmp_path: Path, fault: str, kills: bool
) -> None:
    play(start_run, stand_in_test, sandbox, until, tmp_path, {1: fault}, kills=kills)


def test_a_refusal_in_words_that_nobody_knows(start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path) -> None:
    real = shutil.which("sbatch", path=sandbox.env["PATH"])
    refuse = 'case "$*" in *-single-single-0.*) echo "the site has no room" >&2; exit 3;; esac'
    (tmp_path / "sbatch").write_text(f'#!/bin/bash\n{refuse}\nexec {real} "$@"\n')
    (tmp_path / "sbatch").chmod(0o755)
    tests = [stand_in_test("single"), stand_in_test("other", run='time_limit = "1:00:00"')]
    run = start_run(sandbox, tests, path=str(tmp_path), runner=RUNNER).finish(1)
    point = run.point("single")
    assert (point["verdict"], point["job"]["state"]) == ("failed", "REFUSED")
    assert "the site has no room" in run.words
    assert run.point("other")["verdict"] == "success"


@pytest.mark.drill
@pytest.mark.parametrize("kills", [False, True], ids=["", "killed"])
@pytest.mark.parametrize("fault", FAULTS)
def test_every_fault_five_times(
    start_run: Any, stand_in_test: Any, sandbox: Any, until: Any, tmp_path: Path, fault: str, kills: bool
) -> None:
    seen: Counter[str] = Counter()
    for number in range(5):
        (directory := tmp_path / str(number)).mkdir()
        play(start_run, stand_in_test, sandbox, until, directory, {1 + number % 2: fault}, kills=kills)
        seen["played"] += 1
    print(f"{fault}, {'driver killed' if kills else 'driver alive'}: {seen['played']} of 5")


# ---- what is lost or held meanwhile


@pytest.mark.parametrize("lost", ["removed", "emptied"])
def test_resume_without_a_journal_adopts_what_runs(
    start_run: Any, stand_in_test: Any, sandbox: Any, tmp_path: Path, lost: str
) -> None:
    """Two points have ended, two run, and the journal is gone."""
    go = tmp_path / "go"
    slow = {"step_s": 0.1, "file": str(go), "at": 2, "hang": 600}
    tests = [stand_in_test("quick", args="gb = 8\nmb = [1, 2]"), stand_in_test("slow", slow, args=ARRAY)]
    run = start_run(sandbox, tests, runner=RUNNER)
    run.wait_for_step("slow", 2)
    run.wait_for_words("[2/6]")
    run.send(signal.SIGKILL)
    run.process.wait()
    for path in run.root.glob("journal.sqlite*"):
        path.unlink()
        if lost == "emptied" and path.suffix == ".sqlite":
            path.touch()
    before = {job[:2] for job in jobs_of(run, sandbox)}
    resumed = run.resume()
    resumed.wait_for_words("not in the journal")
    sandbox.run("scancel", *(job_id for key, job_id in before if key.startswith("slow/")))
    resumed.finish(1)
    points = resumed.points()
    assert {key: point["job"]["job_id"] for key, point in points.items()} == dict(before)
    assert {point["verdict"] for key, point in points.items() if key.startswith("quick/")} == {"success"}
    assert {job[:2] for job in jobs_of(run, sandbox)} == before, "it has submitted again"


def test_resume_refuses_what_nothing_is_known_of(start_run: Any, stand_in_test: Any, sandbox: Any) -> None:
    run = start_run(sandbox, [stand_in_test("a")], runner=RUNNER).finish(0)
    before = jobs_of(run, sandbox)
    for name in ("journal.sqlite", "submissions.jsonl"):
        (run.root / name).unlink()
    resumed = run.resume().finish(7)
    assert "a job of a/single/0 has started" in resumed.words
    assert jobs_of(run, sandbox) == before


def test_a_held_job_is_named_and_given_up(start_run: Any, stand_in_test: Any, sandbox: Any) -> None:
    run = start_run(sandbox, [stand_in_test("a")], runner="patience_s = 3", system='extra_sbatch_args = ["--hold"]')
    run.wait_for_words("is held (JobHeldUser); it will be cancelled unless it is released within 3 s")
    run.finish(1)
    assert run.point("a")["job"]["state"] == "REFUSED"
    assert not sandbox.run("squeue", "--noheader").stdout


def test_a_held_job_that_is_released_runs(start_run: Any, stand_in_test: Any, sandbox: Any) -> None:
    run = start_run(sandbox, [stand_in_test("a")], system='extra_sbatch_args = ["--hold"]')
    run.wait_for_words("is held")
    sandbox.run("scontrol", "release", run.job("a"))
    run.finish(0)
