"""Every way in which Slurm ends a job, or keeps it, on a real Slurm: the verdict, the words, the exit code, the id.

What cannot be provoked here is read from recorded lines, at the end of this file.
"""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.logs import LogSummary
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.schedulers.interface import Job, JobClass, JobStatus
from cloudai_mbridge.schedulers.slurm import SlurmClient
from cloudai_mbridge.schedulers.slurm.commands import parse_sacct, parse_squeue
from cloudai_mbridge.verdict import RunOutcome, Verdict, judge, with_failure

DATA = Path(__file__).parents[1] / "data" / "slurm"
PREEMPTION = "PreemptType=preempt/partition_prio\nPreemptMode=CANCEL\nPartitionName=high Nodes=ALL PriorityTier=10\n"
LONG = {"step_s": 0.5}  # ten minutes, unless a test ends it
# /usr/bin/squeue of a Slurm that knows a state which nobody documents
FAKE_SQUEUE = '#!/bin/sh\n{real} "$@" | sed "s/|RUNNING|/|FROBNICATING|/"\n'


@pytest.fixture(scope="module")
def states(new_cluster: Callable[..., Any]) -> Any:
    return new_cluster(nodes=6, extra_conf=PREEMPTION)  # one of four GPUs each: all but two jobs fit on the first four


@pytest.fixture(scope="module")
def odd_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory with a squeue that calls RUNNING something else."""
    directory = tmp_path_factory.mktemp("bin")
    (directory / "squeue").write_text(FAKE_SQUEUE.format(real=shutil.which("squeue")))
    (directory / "squeue").chmod(0o755)
    return str(directory)


@pytest.fixture(scope="module")
def ended(
    states: Any, start_shared_run: Any, stand_in_test: Any, odd_path: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """One `mbridge run` per way to end, all at once, since some of them take Slurm half a minute."""
    told = tmp_path_factory.mktemp("told")
    short, suspended_now, requeued_now = (told / name for name in ("short", "suspended", "requeued"))

    def start(id: str, told: Any = LONG, steps: int = 1200, run: str = "", runner: str = "", **options: Any) -> Any:
        return start_shared_run(
            states, [stand_in_test(id, told, steps=steps, run=run)], runner=runner or "retries = 0", **options
        )

    tasks = [("good", {}), ("bad", {"at": 2, "exit": 5}), ("unwanted", LONG), ("slow", LONG)]
    many = [stand_in_test(id, told, steps=5 if id == "good" else 1200) for id, told in tasks]
    patient = "hang_timeout_s = 20\nunknown_s = 4"
    runs = {
        "timeout": start("timeout"),
        "array": start_shared_run(states, many),
        "held": start("held", {}, 5, runner=patient, system='extra_sbatch_args = ["--hold"]'),
    }
    held_at = time.monotonic()
    states.run("scontrol", "update", f"jobid={runs['timeout'].wait_for_step('timeout')}", "EndTime=now+1")
    states.run("scontrol", "update", f"jobid={runs['array'].wait_for_step('slow')}", "EndTime=now+1")
    states.run("scancel", runs["array"].wait_for_step("unwanted"))
    runs |= {
        "suspended": start("suspended", {"at": 2, "wait_for": str(suspended_now)}, 5, runner=patient),
        "requeued": start("requeued", {"at": 3, "wait_for": str(requeued_now)}, 6),
        "unknown": start("unknown", LONG, path=odd_path, runner="unknown_s = 3"),
        "completed": start("completed", {}, 5),
        "failed": start("failed", {"at": 2, "exit": 3}),
        "killed": start("killed", {"at": 2, "signal": 9}),
        "script_killed": start("script_killed", {"at": 2, "signal_job": 9, "hang": 5}),
        "deadline": start("deadline", run='time_limit = "1"', system='extra_sbatch_args = ["--deadline=now+5"]'),
        "cancelled": start("cancelled", runner="retries = 2"),
        "node_fail": start("node_fail", run='nodes = ["gb200-6"]'),
        "preempted": start("preempted", run='nodes = ["gb200-5"]'),
        "again": start("again", LONG | {"file": str(short)}, run='nodes = ["gb200-5"]', runner="retries = 1"),
    }
    suspended = runs["suspended"].wait_for_step("suspended", 2)
    states.run("scontrol", "suspend", suspended)
    suspended_at = time.monotonic()
    suspended_now.touch()
    requeued = runs["requeued"].wait_for_step("requeued", 3)
    states.run("scontrol", "update", f"jobid={requeued}", "requeue=1")  # mbridge itself submits with --no-requeue
    states.run("scontrol", "requeue", requeued)
    states.run("scancel", runs["cancelled"].wait_for_step("cancelled"))
    runs["node_fail"].wait_for_step("node_fail")
    states.run("scontrol", "update", "nodename=gb200-6", "state=down", "reason=planted")
    runs["preempted"].wait_for_step("preempted")
    runs["again"].wait_for_step("again")
    short.write_text("{}")
    states.run("sbatch", "--partition=high", "--nodelist=gb200-5", "--exclusive", "--wrap=sleep 1")
    time.sleep(max(0.0, suspended_at + 23 - time.monotonic()))  # longer than its hang_timeout_s
    states.run("scontrol", "resume", suspended)
    requeued_now.touch()  # long after Slurm has ended the job's first process
    time.sleep(max(0.0, held_at + 14 - time.monotonic()))  # longer than what is hopeless may wait
    waits = runs["held"].query("SELECT status FROM attempts")[0][0]
    assert "JobHeldUser" in waits, "for `mbridge status`, which says why it waits"
    states.run("scontrol", "release", runs["held"].job("held"))
    for run in runs.values():
        run.finish(timeout_s=90)
    states.resume("gb200-6")
    return runs


# way to end -> state, failure id, what the reasons say
FAILURES = {
    "failed": ("FAILED", "rank_failed", "the job ended as FAILED (exit code 3; NonZeroExitCode)"),
    "killed": ("FAILED", "rank_killed", "the job ended as FAILED (exit code 137; NonZeroExitCode)"),
    "script_killed": ("FAILED", None, "signal 9, SIGKILL"),
    "timeout": ("TIMEOUT", "job_timeout", "the job ended as TIMEOUT ("),  # by the signal, or with bash's code for it
    "deadline": ("DEADLINE", "job_deadline", "the job ended as DEADLINE"),
    "cancelled": ("CANCELLED", "job_cancelled", "the job ended as CANCELLED (signal 15, SIGTERM)"),
    "node_fail": ("NODE_FAIL", "job_node_fail", "the job ended as NODE_FAIL"),
    "preempted": ("PREEMPTED", "job_preempted", "the job ended as PREEMPTED"),
}


@pytest.mark.slurm
@pytest.mark.parametrize("way", FAILURES)
def test_a_job_that_does_not_succeed(ended: dict[str, Any], way: str) -> None:
    run, (state, failure, words) = ended[way], FAILURES[way]
    point = run.point(way)
    assert run.returncode == 1
    assert (point["verdict"], point["job"]["state"]) == ("failed", state)
    assert words in " / ".join(point["reasons"])
    assert (point["failure"] or {"id": None})["id"] == failure
    assert len(point["attempts"]) == 1
    assert f"ended as {state}" in run.words
    assert f"ended as {state}" in run.report_text


@pytest.mark.slurm
def test_the_first_reason_names_the_cause(ended: dict[str, Any]) -> None:
    firsts = {way: ended[way].point(way)["reasons"][0] for way, (_, failure, _) in FAILURES.items() if failure}
    assert firsts["timeout"].startswith("The job did not end within its time limit (job_timeout); raise the time limit")
    assert firsts["cancelled"].startswith("The job was cancelled (job_cancelled)")
    assert firsts["node_fail"].startswith("A node failed under the job (job_node_fail)")
    assert firsts["preempted"].startswith("The job was preempted (job_preempted)")
    assert firsts["killed"].startswith("A rank was killed (SIGKILL) (rank_killed)")


@pytest.mark.slurm
def test_a_job_that_succeeds(ended: dict[str, Any], states: Any, nothing_left: Any) -> None:
    point = ended["completed"].point("completed")
    assert ended["completed"].returncode == 0
    assert (point["verdict"], point["job"]["state"], point["failure"]) == ("success", "COMPLETED", None)
    assert point["job"]["exit_code"] == 0
    nothing_left(states)


@pytest.mark.slurm
def test_a_preempted_job_is_repeated(ended: dict[str, Any]) -> None:
    run = ended["again"]
    first, second = run.point("again")["attempts"]
    assert run.returncode == 0, run.words
    assert (first["state"], first["failure"]) == ("PREEMPTED", "job_preempted")
    assert (second["state"], second["nodes"]) == ("COMPLETED", "gb200-5"), "the node is not to blame"
    assert first["job_id"] != second["job_id"]
    assert run.report["excluded_nodes"] == {}


@pytest.mark.slurm
def test_every_task_of_an_array_has_its_own_end(ended: dict[str, Any]) -> None:
    run = ended["array"]
    points = {id_: run.point(id_) for id_ in ("good", "bad", "unwanted", "slow")}
    assert run.returncode == 1
    ids = {point["job"]["job_id"] for point in points.values()}
    assert {id_.partition("_")[2] for id_ in ids} == {"0", "1", "2", "3"}, "one array"
    assert len({id_.partition("_")[0] for id_ in ids}) == 1, "one array"
    assert {id_: (point["verdict"], point["job"]["state"]) for id_, point in points.items()} == {
        "good": ("success", "COMPLETED"),
        "bad": ("failed", "FAILED"),
        "unwanted": ("failed", "CANCELLED"),
        "slow": ("failed", "TIMEOUT"),
    }
    assert "exit code 5" in " ".join(points["bad"]["reasons"])
    assert points["unwanted"]["failure"]["id"] == "job_cancelled"
    assert points["slow"]["failure"]["id"] == "job_timeout"


@pytest.mark.slurm
def test_a_job_that_slurm_requeues_is_one_attempt_and_its_steps_count_once(ended: dict[str, Any]) -> None:
    run = ended["requeued"]
    point = run.point("requeued")
    assert run.returncode == 0, run.words
    assert point["verdict"] == "success"
    assert [step["step"] for step in point["steps"]] == [1, 2, 3, 4, 5, 6]
    assert len(point["attempts"]) == 1
    assert point["job"]["restarts"] == 1
    started = (run.root / point["key"] / "started.txt").read_text().splitlines()
    assert [line.split("restarts=")[1].split()[0] for line in started] == ["0", "1"]


@pytest.mark.slurm
def test_a_held_job_is_waited_for(ended: dict[str, Any]) -> None:
    run = ended["held"]
    assert run.returncode == 0, run.words
    assert run.point("held")["verdict"] == "success"


@pytest.mark.slurm
def test_a_suspended_job_does_not_hang(ended: dict[str, Any]) -> None:
    run = ended["suspended"]
    assert run.returncode == 0, run.words
    assert run.point("suspended")["verdict"] == "success"
    assert "SUSPENDED" in run.words


@pytest.mark.slurm
def test_a_state_that_nobody_documents_is_never_a_success(ended: dict[str, Any]) -> None:
    run = ended["unknown"]
    point = run.point("unknown")
    assert run.returncode == 1
    assert (point["verdict"], point["job"]["state"]) == ("failed", "FROBNICATING")
    assert "FROBNICATING (a state that its scheduler does not document)" in run.words, "a loud notice"
    assert "given up after 3 s" in " / ".join(point["reasons"])
    assert "state that proves nothing" in " / ".join(point["reasons"])
    assert point["reasons"][0].startswith("How the job ended is unknown (job_lost)")
    assert point["failure"]["id"] == "job_lost"
    assert len(point["attempts"]) == 1


# ---- what Slurm has forgotten when mbridge looks


@pytest.fixture(scope="module")
def forgotten(
    new_cluster: Any, start_shared_run: Any, stand_in_test: Any, until: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, Any]:
    """By accounting yes or no: a run whose driver stood still until Slurm had forgotten its jobs."""
    sandboxes = {
        accounting: new_cluster(accounting=accounting, extra_conf="MinJobAge=2") for accounting in (False, True)
    }
    go = tmp_path_factory.mktemp("forgotten") / "go"
    waits = {"at": 3, "wait_for": str(go)}
    tests = [
        stand_in_test("good", waits),
        stand_in_test("bad", {**waits, "exit": 4}),
        stand_in_test("shot", LONG, steps=1200),
    ]
    runs = {
        accounting: start_shared_run(sandboxes[accounting], tests, runner="unknown_s = 3") for accounting in sandboxes
    }
    for accounting, run in runs.items():
        shot = [run.wait_for_step(id_) for id_ in ("good", "bad", "shot")][-1]
        run.send(signal.SIGSTOP)
        sandboxes[accounting].run("scancel", shot)
    go.touch()
    all_jobs = ("squeue", "--noheader", "--states=all")
    for accounting, run in runs.items():
        until("Slurm has forgotten the jobs", lambda a=accounting: not sandboxes[a].run(*all_jobs).stdout.strip(), 90)
        run.send(signal.SIGCONT)
    for run in runs.values():
        run.finish(1)
    return runs


@pytest.mark.slurm
def test_without_accounting_the_jobs_own_markers_settle_what_slurm_has_forgotten(forgotten: dict[bool, Any]) -> None:
    run = forgotten[False]
    good, bad, shot = (run.point(id_) for id_ in ("good", "bad", "shot"))
    assert (good["verdict"], good["job"]["state"]) == ("success", "COMPLETED")
    assert "Slurm has forgotten the job" in good["job"]["reason"]
    assert (bad["verdict"], bad["job"]["state"], bad["job"]["exit_code"]) == ("failed", "FAILED", 4)
    assert "from the job's own marker" in " ".join(bad["reasons"])
    assert (shot["verdict"], shot["job"]["state"]) == ("failed", "FORGOTTEN"), "no marker proves nothing"
    assert "Slurm no longer knows the job and it left no exit code" in " ".join(shot["reasons"])
    assert "given up after 3 s" in " ".join(shot["reasons"])
    assert shot["failure"]["id"] == "job_lost"


@pytest.mark.slurm
def test_with_accounting_sacct_settles_what_the_controller_has_forgotten(forgotten: dict[bool, Any]) -> None:
    run = forgotten[True]
    states = {id_: (run.point(id_)["verdict"], run.point(id_)["job"]["state"]) for id_ in ("good", "bad", "shot")}
    assert states == {"good": ("success", "COMPLETED"), "bad": ("failed", "FAILED"), "shot": ("failed", "CANCELLED")}
    assert "exit code 4" in " ".join(run.point("bad")["reasons"])
    assert run.point("shot")["failure"]["id"] == "job_cancelled"
    assert "marker" not in run.words


# ---- memory, and a node that cannot start a job


@pytest.mark.slurm
def test_out_of_memory(
    new_cluster: Any, start_run: Any, stand_in_test: Any, until: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    """The kernel kills for cgroups: a rank, after which Slurm calls only the step so, and a batch script."""
    sandbox = new_cluster(nodes=1, mem_mb=1600, cgroup=True)
    run = start_run(sandbox, [stand_in_test("fat", {"at": 1, "use_mb": 600, "hang": 30})]).finish(1)
    point = run.point("fat")
    assert (point["verdict"], point["job"]["state"], point["failure"]["id"]) == (
        "failed",
        "FAILED",
        "host_out_of_memory",
    )
    assert any("oom-kill event" in line for line in point["evidence"])
    assert "A node ran out of main memory (host_out_of_memory)" in run.words
    assert len(point["attempts"]) == 1, "it would run out of memory again"

    monkeypatch.setenv("SLURM_CONF", sandbox.env["SLURM_CONF"])
    use = "python3 -c 'x = bytes(600 << 20).replace(bytes(1), b\"x\")'"
    job_id = sandbox.run("sbatch", "--parsable", f"--wrap={use}").stdout.strip()
    client = SlurmClient(
        SlurmSystem(name="c", scheduler="slurm", default_partition="main", partitions=[{"name": "main"}])
    )
    job = Job("fat", job_id, "", tmp_path)
    status = until("its end", lambda: (seen := client.poll([job])["fat"].status).is_final and seen, 20)
    assert (status.state, status.job_class) == ("OUT_OF_MEMORY", JobClass.FAILED)
    outcome = judged(status)
    assert outcome.failure.id == "job_out_of_memory"
    assert outcome.reasons[0].startswith("The job used more main memory than it asked for (job_out_of_memory)")


@pytest.mark.slurm
def test_a_node_whose_prolog_fails(new_cluster: Any, start_run: Any, stand_in_test: Any, tmp_path: Path) -> None:
    """Slurm drains the node and cancels the job, as nothing may requeue it: cancelled, and still to be repeated."""
    prolog = tmp_path / "prolog"
    prolog.write_text('#!/bin/sh\n[ "$SLURMD_NODENAME" != gb200-1 ]\n')
    prolog.chmod(0o755)
    sandbox = new_cluster(nodes=2, extra_conf=f"Prolog={prolog}")
    run = start_run(sandbox, [stand_in_test("t")]).finish(0)
    first, second = run.point("t")["attempts"]
    assert (first["state"], first["failure"], first["nodes"]) == ("CANCELLED", "prolog_failed", "gb200-1")
    assert (second["state"], second["nodes"]) == ("COMPLETED", "gb200-2")
    assert "Prolog error" in run.report["excluded_nodes"]["gb200-1"]


# ---- what cannot be provoked here


def judged(status: JobStatus) -> RunOutcome:
    """Judge a job that has left no log."""
    nothing = LogSummary()
    outcome = judge(status, nothing, measure((), 0, None), 5, ())
    return with_failure(outcome, status, nothing, (), Path("/nowhere"))


# Documented in squeue(1) and sacct(1) of Slurm 22.05; the lines are laid out as the sandbox's are
DOCUMENTED = {
    "BOOT_FAIL": (JobClass.INFRASTRUCTURE, "job_boot_fail"),
    "LAUNCH_FAILED": (JobClass.INFRASTRUCTURE, "job_launch_failed"),
    "RECONFIG_FAIL": (JobClass.INFRASTRUCTURE, "job_reconfig_fail"),
    "NODE_FAIL": (JobClass.INFRASTRUCTURE, "job_node_fail"),
    "PREEMPTED": (JobClass.INFRASTRUCTURE, "job_preempted"),
    "OUT_OF_MEMORY": (JobClass.FAILED, "job_out_of_memory"),
    "TIMEOUT": (JobClass.FAILED, "job_timeout"),
    "DEADLINE": (JobClass.FAILED, "job_deadline"),
    "CANCELLED": (JobClass.CANCELLED, "job_cancelled"),
    "FAILED": (JobClass.FAILED, None),
}


@pytest.mark.parametrize("state", DOCUMENTED)
def test_a_documented_state_as_squeue_and_sacct_print_it(state: str) -> None:
    job_class, failure = DOCUMENTED[state]
    squeue = {each.status.state: each.status for each in parse_squeue((DATA / "squeue.txt").read_text()).values()}
    sacct = {each.status.state: each.status for each in parse_sacct((DATA / "sacct.txt").read_text())}
    for status in (squeue[state], sacct[state]):
        assert (status.job_class, status.is_final) == (job_class, True)
        outcome = judged(status)
        assert outcome.verdict is Verdict.FAILED
        assert any(f"the job ended as {state}" in reason for reason in outcome.reasons)
        assert (outcome.failure and outcome.failure.id) == failure


def test_what_only_waits_as_squeue_prints_it() -> None:
    listed = parse_squeue((DATA / "squeue.txt").read_text())
    for job_id in ("112", "113", "114", "115"):
        assert listed[job_id].status.job_class is JobClass.ACTIVE
        assert listed[job_id].status.hopeless is (JobClass.CANCELLED if job_id == "113" else None), "113 is held"
    assert listed["116"].status.hopeless is JobClass.INFRASTRUCTURE, "what a killed controller has forgotten to start"
    assert listed["117"].status.hopeless is JobClass.FAILED
