"""What Slurm's commands print, in its own words, and what it means for a run."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.jobs import JobClass, JobStatus
from cloudai_mbridge.slurm.parsing import (
    parse_exit_code,
    parse_show_job,
    parse_squeue,
    parse_submitted,
    status_from_marker,
    without_slurm_variables,
)
from cloudai_mbridge.slurm.states import base_state, classify

# squeue(1) and sacct(1), "JOB STATE CODES", of 22.05 to 25.05
DOCUMENTED = {
    JobClass.ACTIVE: """PENDING CONFIGURING RUNNING COMPLETING SIGNALING STAGE_OUT STOPPED SUSPENDED RESIZING REQUEUED
        REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT""",
    JobClass.SUCCEEDED: "COMPLETED",
    JobClass.FAILED: "FAILED TIMEOUT OUT_OF_MEMORY DEADLINE",
    JobClass.INFRASTRUCTURE: "NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL PREEMPTED",
    JobClass.CANCELLED: "CANCELLED REVOKED",
}
STATES = [(state, job_class) for job_class, states in DOCUMENTED.items() for state in states.split()]


@pytest.mark.parametrize(("state", "job_class"), STATES)
def test_every_documented_state_has_its_class(state: str, job_class: JobClass) -> None:
    assert classify(state) is job_class
    assert classify(f" {state.lower()} ") is job_class
    assert classify(f"{state}+") is job_class
    assert classify(f"{state} by 1000") is job_class


@pytest.mark.parametrize("state", ["", "+", "UNHEARD_OF", "COMPLETE", "COMPLETEDX", "DONE", "0", "allocation"])
def test_any_other_state_is_unknown(state: str) -> None:
    assert classify(state) is JobClass.UNKNOWN
    assert JobStatus(state, classify(state)).is_final


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None, database=None)
def test_nothing_but_completed_is_a_success(text: str) -> None:
    assert (classify(text) is JobClass.SUCCEEDED) is (base_state(text) == "COMPLETED")


@pytest.mark.parametrize("state", ["OUT_OF_ME+", "COMPLETI+", "NODE_FAI+"])
def test_a_state_that_is_cut_off_is_no_success(state: str) -> None:
    assert classify(state) is not JobClass.SUCCEEDED


@pytest.mark.parametrize(
    ("text", "expected"),
    [("CANCELLED by 1000", "CANCELLED"), ("COMPLETED+", "COMPLETED"), ("out_of_memory", "OUT_OF_MEMORY"), ("", "")],
)
def test_the_base_of_a_state(text: str, expected: str) -> None:
    assert base_state(text) == expected


# sbatch


@pytest.mark.parametrize(
    ("output", "job_id"),
    [
        ("17\n", "17"),
        ("17;cluster-1\n", "17"),
        ("Welcome to the site!\nMaintenance on 2026-01-02\n\n17\n", "17"),
        ("sbatch: your project has 12 hours left\n17\nThank you.\n", "17"),
        ("  17  \r\n", "17"),
        ("", None),
        ("Submitted batch job 17\n", None),
        ("sbatch: error: invalid partition specified: 17\n", None),
        ("17 18\n", None),
        ("-17\n", None),
    ],
)
def test_the_job_id_that_sbatch_prints(output: str, job_id: str | None) -> None:
    assert parse_submitted(output) == job_id


# squeue


def test_lines_of_squeue() -> None:
    output = """\
17|PENDING|Resources|
18|RUNNING|None|node[1-2]
19|PENDING|(DOWN,_DRAINED_or_reserved)|
20|CANCELLED by 1000|None|(null)
21|COMPLETED|None|node1

a line of the site
"""
    jobs = parse_squeue(output)
    assert list(jobs) == ["17", "18", "19", "20", "21"]
    assert jobs["17"] == JobStatus("PENDING", JobClass.ACTIVE, reason="Resources")
    assert jobs["18"] == JobStatus("RUNNING", JobClass.ACTIVE, nodes="node[1-2]")
    assert jobs["20"].state == "CANCELLED"
    assert jobs["20"].job_class is JobClass.CANCELLED
    assert jobs["21"].job_class is JobClass.SUCCEEDED


def test_an_unknown_state_of_squeue_stays_visible() -> None:
    assert parse_squeue("17|NEW_STATE|None|n1\n")["17"] == JobStatus("NEW_STATE", JobClass.UNKNOWN, nodes="n1")


def test_an_empty_queue() -> None:
    assert parse_squeue("") == {}


# scontrol

SHOWN = (
    "JobId={id} JobName=mbridge-x UserId=u(1000) GroupId=u(1000) Priority=1 Nice=0 Account=a QOS=normal"
    " JobState={state} Reason={reason} Dependency=(null) Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode={code}"
    " DerivedExitCode={derived} RunTime=00:00:01 ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes}"
    " BatchHost=node1 Command=job.sbatch WorkDir={directory} StdErr=stderr.txt StdOut=stdout.txt\n"
)


def _shown(state: str, reason: str = "None", code: str = "0:0", nodes: str = "node1", **more: str) -> JobStatus:
    text = SHOWN.format(
        id=17, state=state, reason=reason, code=code, nodes=nodes, **{"derived": "0:0", "directory": "/x", **more}
    )
    status = parse_show_job(text)
    assert status is not None
    return status


@pytest.mark.parametrize(
    ("state", "reason", "code", "expected"),
    [
        ("COMPLETED", "None", "0:0", JobStatus("COMPLETED", JobClass.SUCCEEDED, 0, None, "", "node1")),
        ("FAILED", "NonZeroExitCode", "3:0", JobStatus("FAILED", JobClass.FAILED, 3, None, "NonZeroExitCode", "node1")),
        ("FAILED", "JobLaunchFailure", "0:9", JobStatus("FAILED", JobClass.FAILED, 0, 9, "JobLaunchFailure", "node1")),
        (
            "FAILED",
            "RaisedSignal:9(Killed)",
            "0:9",
            JobStatus("FAILED", JobClass.FAILED, 0, 9, "RaisedSignal:9(Killed)", "node1"),
        ),
        ("FAILED", "None", "143:0", JobStatus("FAILED", JobClass.FAILED, 143, None, "", "node1")),
        ("CANCELLED", "None", "0:15", JobStatus("CANCELLED", JobClass.CANCELLED, 0, 15, "", "node1")),
        ("TIMEOUT", "TimeLimit", "0:15", JobStatus("TIMEOUT", JobClass.FAILED, 0, 15, "TimeLimit", "node1")),
        ("NODE_FAIL", "NodeDown", "0:0", JobStatus("NODE_FAIL", JobClass.INFRASTRUCTURE, 0, None, "NodeDown", "node1")),
        (
            "OUT_OF_MEMORY",
            "OutOfMemory",
            "0:125",
            JobStatus("OUT_OF_MEMORY", JobClass.FAILED, 0, 125, "OutOfMemory", "node1"),
        ),
        ("PENDING", "BeginTime", "0:0", JobStatus("PENDING", JobClass.ACTIVE, 0, None, "BeginTime", "node1")),
    ],
)
def test_a_job_that_scontrol_shows(state: str, reason: str, code: str, expected: JobStatus) -> None:
    assert _shown(state, reason, code) == expected


def test_other_fields_that_end_alike_are_not_taken() -> None:
    status = _shown("FAILED", code="1:0", derived="0:125", nodes="(null)")
    assert (status.exit_code, status.signal, status.nodes) == (1, None, "")


def test_a_path_cannot_speak_for_the_job() -> None:
    """A directory may have spaces in its name."""
    status = _shown("FAILED", code="1:0", directory="/x JobState=COMPLETED ExitCode=0:0 y")
    assert (status.state, status.exit_code) == ("FAILED", 1)


@pytest.mark.parametrize(
    "output", ["", "\n", "slurm_load_jobs error: Invalid job id specified\n", "No jobs in the system\n"]
)
def test_a_job_that_slurm_has_forgotten(output: str) -> None:
    assert parse_show_job(output) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0:0", (0, None)),
        ("3:0", (3, None)),
        ("0:9", (0, 9)),
        (" 1:15 ", (1, 15)),
        ("", (None, None)),
        ("3", (None, None)),
        ("a:b", (None, None)),
        ("-1:0", (None, None)),
    ],
)
def test_exit_codes(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_exit_code(text) == expected


# The marker that a script leaves


@pytest.mark.parametrize(
    ("text", "state", "job_class", "code"),
    [
        ("0\n", "COMPLETED", JobClass.SUCCEEDED, 0),
        ("0", "COMPLETED", JobClass.SUCCEEDED, 0),
        ("1\n", "FAILED", JobClass.FAILED, 1),
        ("137\n", "FAILED", JobClass.FAILED, 137),
    ],
)
def test_a_marker_settles_a_forgotten_job(text: str, state: str, job_class: JobClass, code: int) -> None:
    status = status_from_marker(text)
    assert (status.state, status.job_class, status.exit_code) == (state, job_class, code)
    assert "marker" in status.reason


@pytest.mark.parametrize("text", [None, "", "\n", "-1\n", "0x0", "0 0", "nan", "\x00", "²"])
def test_without_a_readable_marker_nothing_is_known(text: str | None) -> None:
    status = status_from_marker(text)
    assert (status.state, status.job_class, status.exit_code) == ("FORGOTTEN", JobClass.UNKNOWN, None)


# The environment of Slurm's commands


def test_the_environment_of_another_job_is_not_inherited() -> None:
    foreign = {
        "SLURM_JOB_ID": "1",
        "SLURM_NTASKS": "8",
        "SLURM_CPU_BIND": "x",
        "SBATCH_PARTITION": "other",
        "SBATCH_EXPORT": "NONE",
        "SRUN_DEBUG": "1",
        "SALLOC_PARTITION": "x",
        "SQUEUE_FORMAT": "%i",
        "SQUEUE_STATES": "PENDING",
        "SINFO_FORMAT": "%N",
        "SCANCEL_INTERACTIVE": "1",
        "PMI_RANK": "0",
        "PMIX_RANK": "0",
    }
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h", "MY_SLURM_X": "1", "NCCL_DEBUG": "INFO"}
    assert without_slurm_variables({**foreign, **kept}) == kept


def test_what_names_and_opens_the_cluster_is_kept() -> None:
    """SLURM_JWT is how a user proves who he is where munge is not used: without it no command is answered."""
    env = {"SLURM_CONF": "/c", "SLURM_JWT": "token"}
    assert without_slurm_variables(env) == env
