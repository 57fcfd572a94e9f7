"""What Slurm's commands print, in its own words, and what it means for a run."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloudai_mbridge.schedulers.interface import JobClass, JobStatus, Seen
from cloudai_mbridge.schedulers.slurm.commands import (
    SQUEUE_FORMAT,
    array_spec,
    base_state,
    classify,
    merge_components,
    parse_elapsed,
    parse_exit_code,
    parse_sacct,
    parse_squeue,
    parse_started,
    parse_submitted,
    status_from_marker,
    unschedulable_as,
    without_slurm_variables,
)
from tests.cases import every

# squeue(1) and sacct(1), "JOB STATE CODES", of 22.05 to 25.05
DOCUMENTED = {
    JobClass.ACTIVE: """PENDING CONFIGURING RUNNING COMPLETING SIGNALING STAGE_OUT STOPPED SUSPENDED RESIZING REQUEUED
        REQUEUE_FED REQUEUE_HOLD RESV_DEL_HOLD SPECIAL_EXIT POWER_UP_NODE EXPEDITING UPDATE_DB""",
    JobClass.SUCCEEDED: "COMPLETED",
    JobClass.FAILED: "FAILED TIMEOUT OUT_OF_MEMORY DEADLINE",
    JobClass.INFRASTRUCTURE: "NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL PREEMPTED",
    JobClass.CANCELLED: "CANCELLED",
    JobClass.UNKNOWN: "REVOKED",
}
STATES = [(state, job_class) for job_class, states in DOCUMENTED.items() for state in states.split()]


@every(("state", "job_class"), STATES)
def test_every_documented_state_has_its_class(state: str, job_class: JobClass) -> None:
    assert classify(state) is job_class
    assert classify(f" {state.lower()} ") is job_class
    assert classify(f"{state}+") is job_class
    assert classify(f"{state} by 1000") is job_class


@every("state", ["", "+", "UNHEARD_OF", "COMPLETE", "COMPLETI+", "COMPLETEDX", "DONE", "0", "allocation"])
def test_any_other_state_is_unknown(state: str) -> None:
    assert classify(state) is JobClass.UNKNOWN
    assert not JobStatus(state, classify(state)).is_final  # it is asked again, and given up after a deadline


@given(st.text(max_size=20))
@settings(max_examples=200, deadline=None, database=None)
def test_nothing_but_completed_is_a_success(text: str) -> None:
    assert (classify(text) is JobClass.SUCCEEDED) is (base_state(text) == "COMPLETED")


# sbatch


@every(
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


def _line(
    job_id: str = "17",
    state: str = "RUNNING",
    reason: str = "None",
    nodes: str = "node1",
    code: str = "0",
    restarts: str = "0",
    used: str = "1:00",
    name: str = "mbridge-x.cafe",
    directory: str = "/results/x",
) -> str:
    """Return a line as squeue prints it by SQUEUE_FORMAT."""
    fields = (job_id, state, reason, nodes, code, restarts, used)
    return "".join(f"{field}|" for field in fields) + f"{directory}//|{name}|\n"


def _status(**fields: str) -> JobStatus:
    """Return the status of the only job that squeue lists."""
    (listed,) = parse_squeue(_line(**fields)).values()
    return listed.status


def test_the_format_asks_for_the_fields_of_a_line() -> None:
    assert [field.partition(":")[0] for field in SQUEUE_FORMAT.split(",")] == [
        *("JobArrayID", "State", "Reason", "NodeList", "exit_code", "RestartCnt", "TimeUsed", "WorkDir", "Name")
    ]


def test_lines_of_squeue() -> None:
    output = (
        _line("17", "PENDING", "Resources", "", used="0:00")
        + _line("18", nodes="node[1-2]", restarts="2", used="1-02:03:04")
        + _line("19", "PENDING", "(DOWN,_DRAINED_or_reserved)", "(null)")
        + _line("20", "CANCELLED by 1000", nodes="(null)", code="15")
        + _line("21", "COMPLETED")
        + _line("22_3", "FAILED", "NonZeroExitCode", code="768")
        + "\na line of the site\n17|too|short|\n"
    )
    jobs = parse_squeue(output)
    assert list(jobs) == ["17", "18", "19", "20", "21", "22_3"]
    assert jobs["17"].status == JobStatus("PENDING", JobClass.ACTIVE, reason="Resources", run_time_s=0.0)
    assert jobs["18"] == Seen(
        "18",
        JobStatus("RUNNING", JobClass.ACTIVE, nodes="node[1-2]", run_time_s=93784.0, restarts=2),
        name="mbridge-x.cafe",
        directory="/results/x",
    )
    assert (jobs["20"].status.state, jobs["20"].status.job_class) == ("CANCELLED", JobClass.CANCELLED)
    assert (jobs["20"].status.signal, jobs["20"].status.nodes) == (15, "")
    assert jobs["21"].status.job_class is JobClass.SUCCEEDED
    assert jobs["22_3"].job_id == "22_3"
    assert (jobs["22_3"].status.exit_code, jobs["22_3"].status.signal) == (3, None)


@every(
    ("state", "reason", "code", "expected"),
    [
        ("COMPLETED", "None", "0", (JobClass.SUCCEEDED, 0, None, "")),
        ("FAILED", "NonZeroExitCode", "768", (JobClass.FAILED, 3, None, "NonZeroExitCode")),
        ("FAILED", "JobLaunchFailure", "9", (JobClass.FAILED, 0, 9, "JobLaunchFailure")),
        ("FAILED", "RaisedSignal:9(Killed)", "9", (JobClass.FAILED, 0, 9, "RaisedSignal:9(Killed)")),
        ("FAILED", "None", "36608", (JobClass.FAILED, 143, None, "")),
        ("CANCELLED", "None", "15", (JobClass.CANCELLED, 0, 15, "")),
        ("TIMEOUT", "TimeLimit", "15", (JobClass.FAILED, 0, 15, "TimeLimit")),
        ("NODE_FAIL", "NodeDown", "0", (JobClass.INFRASTRUCTURE, 0, None, "NodeDown")),
        ("OUT_OF_MEMORY", "OutOfMemory", "125", (JobClass.FAILED, 0, 125, "OutOfMemory")),
        ("PREEMPTED", "None", "0:15", (JobClass.INFRASTRUCTURE, 0, 15, "")),
        ("RUNNING", "None", "0", (JobClass.ACTIVE, None, None, "")),  # it has no exit code yet
        ("COMPLETING", "None", "768", (JobClass.ACTIVE, None, None, "")),
    ],
)
def test_a_job_that_squeue_shows(
    state: str, reason: str, code: str, expected: tuple[JobClass, int | None, int | None, str]
) -> None:
    status = _status(state=state, reason=reason, code=code)
    assert status.state == state
    assert (status.job_class, status.exit_code, status.signal, status.reason) == expected


def test_a_name_cannot_speak_for_the_job() -> None:
    """Any text may be the name of a job of this user, and it stands last."""
    name = "x|COMPLETED|None|n1|0|0|0:00|/results/y//|y"
    listed = parse_squeue(_line(state="FAILED", name=name, directory="/a|b"))["17"]
    assert (listed.status.state, listed.name, listed.directory) == ("FAILED", name, "/a|b")


@given(st.text(alphabet=st.characters(blacklist_categories=("Cs", "Cc", "Zl", "Zp", "Zs")), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None, database=None)
def test_any_name_comes_back(name: str) -> None:
    listed = parse_squeue(_line(name=name))["17"]
    assert (listed.name, listed.status.state) == (name, "RUNNING")


def test_an_unknown_state_of_squeue_stays_visible() -> None:
    status = _status(state="NEW_STATE", nodes="n1", used="0:00")
    assert status == JobStatus("NEW_STATE", JobClass.UNKNOWN, nodes="n1", run_time_s=0.0)


@every("output", ["", "\n", "slurm_load_jobs error: Invalid job id specified\n", "No jobs in the system\n"])
def test_an_empty_queue(output: str) -> None:
    assert parse_squeue(output) == {}


# Heterogeneous jobs: one job, several lines


@every(
    ("states", "expected"),
    [
        (("RUNNING", "RUNNING"), "RUNNING"),
        (("COMPLETED", "RUNNING"), "RUNNING"),
        (("FAILED", "COMPLETING"), "COMPLETING"),
        (("COMPLETED", "FAILED"), "FAILED"),
        (("FAILED", "NODE_FAIL"), "NODE_FAIL"),
        (("CANCELLED", "COMPLETED"), "CANCELLED"),
        (("CANCELLED", "FAILED"), "FAILED"),
        (("COMPLETED", "COMPLETED"), "COMPLETED"),
        (("UNHEARD_OF", "COMPLETED"), "UNHEARD_OF"),
        (("UNHEARD_OF", "RUNNING"), "UNHEARD_OF"),
    ],
)
def test_a_heterogeneous_job_is_as_bad_as_its_worst_part(states: tuple[str, ...], expected: str) -> None:
    for order in (states, states[::-1]):
        shown = "".join(_line(f"17+{i}", state) for i, state in enumerate(order))
        assert {job_id: job.status.state for job_id, job in parse_squeue(shown).items()} == {"17": expected}
        accounted = "".join(f"17+{i}|{state}|0:0|n{i}|5|x\n" for i, state in enumerate(order))
        assert {row.job_id: row.status.state for row in parse_sacct(accounted)} == {"17": expected}


@given(st.lists(st.sampled_from([state for state, _ in STATES]), min_size=1, max_size=4))
@settings(max_examples=200, deadline=None, database=None)
def test_a_heterogeneous_job_succeeds_only_as_a_whole(states: list[str]) -> None:
    merged = merge_components([JobStatus(state, classify(state)) for state in states])
    assert merged.state in states
    assert (merged.job_class is JobClass.SUCCEEDED) is (set(states) == {"COMPLETED"})
    assert merged.is_final is all(JobStatus(state, classify(state)).is_final for state in states)


# Jobs that wait for something that will not come


HOPELESS = """AccountNotAllowed BadConstraints DependencyNeverSatisfied InvalidAccount InvalidQOS PartitionConfig
    PartitionNodeLimit PartitionTimeLimit QOSNotAllowed AssocMaxNodePerJobLimit QOSMaxWallDurationPerJobLimit QOSMinGRES
    QOSMaxGRESPerNode AssocMaxMemPerJob QOSMinCpuNotSatisfied QOSMaxMemoryPerJob
    ReservationDeleted MaxMemPerLimit DeadLine InvalidBBSpec AssocGrpCPUMinutesLimit AssocGrpGRESMinutes
    AssocGrpBillingMinutes AssocGrpNodeMinutes AssocGrpMemMinutes AssocGrpEnergyMinutes AssocGrpLicenseMinutes
    AssocGrpUnknownMinutes AssocGrpWallLimit QOSGrpCPUMinutesLimit QOSGrpGRESMinutes QOSGrpBillingMinutes
    QOSGrpMemoryMinutes QOSGrpWallLimit"""
# These pass by waiting, or when somebody who is at work ends it.
HOPEFUL = """None QOSMaxNodePerUserLimit QOSMaxGRESPerUser
    Resources Priority Dependency BeginTime Licenses ReqNodeNotAvail
    AssocGrpCPURunMinutesLimit AssocGrpGRESRunMinutes QOSGrpBillingRunMinutes AssocGrpGRES QOSGrpBilling
    QOSMaxJobsPerUserLimit QOSGrpNodeLimit AssocGrpNodeLimit AssocMaxJobsLimit Reservation PartitionDown
    PartitionInactive JobArrayTaskLimit NodeDown"""


@every("reason", HOPELESS.split())
def test_a_job_that_can_never_start_is_hopeless(reason: str) -> None:
    status = _status(state="PENDING", reason=reason)
    assert (status.hopeless, status.job_class) == (JobClass.FAILED, JobClass.ACTIVE)
    assert not status.is_final
    assert _status(state="RUNNING", reason=reason).hopeless is None


@every("reason", HOPEFUL.split())
def test_a_job_that_only_waits_is_not_hopeless(reason: str) -> None:
    assert unschedulable_as("PENDING", reason) is None


@pytest.mark.parametrize("reason", ["launch_failed_requeued_held", "launch failed requeued held"])
def test_what_a_controller_forgot_to_have_launched_is_the_infrastructures(reason: str) -> None:
    assert _status(state="PENDING", reason=reason).hopeless is JobClass.INFRASTRUCTURE


HELD = ("REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT")


@every("state", [state for state, _ in STATES if state not in ("PENDING", *HELD)])
def test_only_a_job_that_waits_is_hopeless(state: str) -> None:
    assert unschedulable_as(state, "BadConstraints") is None


@every(
    ("state", "reason"), [("PENDING", "JobHeldUser"), ("PENDING", "JobHeldAdmin"), *((state, "None") for state in HELD)]
)
def test_a_held_job_counts_as_cancelled(state: str, reason: str) -> None:
    assert unschedulable_as(state, reason) is JobClass.CANCELLED


# sacct


def test_lines_of_sacct() -> None:
    output = """\
17|COMPLETED|0:0|node[1-2]|3600|a name|with a bar
18|CANCELLED by 1000|0:15|node1|12|a name|with a bar
19_4|FAILED|3:0|node2|5|a name|with a bar
20|PENDING|0:0|None assigned|0|a name|with a bar
20.batch|FAILED|9:0|node2|5|a name|with a bar
Welcome to the site!
21|NODE_FAIL|1:0|node1||a name|with a bar
"""
    jobs = {row.job_id: row.status for row in parse_sacct(output)}
    assert list(jobs) == ["17", "18", "19_4", "20", "21"]
    assert jobs["17"] == JobStatus("COMPLETED", JobClass.SUCCEEDED, 0, None, "", "node[1-2]", 3600.0)
    assert jobs["18"] == JobStatus("CANCELLED", JobClass.CANCELLED, 0, 15, "", "node1", 12.0)
    assert jobs["19_4"] == JobStatus("FAILED", JobClass.FAILED, 3, None, "", "node2", 5.0)
    assert (jobs["20"].is_final, jobs["20"].nodes) == (False, "")
    assert (jobs["21"].job_class, jobs["21"].run_time_s) == (JobClass.INFRASTRUCTURE, None)


@every("output", ["", "\n", "Slurm accounting storage is disabled\n", "17|COMPLETED|0:0|n\n"])
def test_an_accounting_that_knows_nothing(output: str) -> None:
    assert parse_sacct(output) == []


@every(
    ("text", "expected"),
    [
        ("0:0", (0, None)),
        ("3:0", (3, None)),
        ("0:9", (0, 9)),
        (" 1:15 ", (1, 15)),
        ("35072", (137, None)),  # a wait status, as squeue prints it
        ("3893", (0, 53)),  # what Slurm shows as 0:53
        ("", (None, None)),
        ("a:b", (None, None)),
        ("-1:0", (None, None)),
        ("-1", (None, None)),
        ("1:2:3", (None, None)),
    ],
)
def test_exit_codes(text: str, expected: tuple[int | None, int | None]) -> None:
    assert parse_exit_code(text) == expected


@given(st.integers(0, 255), st.integers(0, 64), st.booleans())
@settings(max_examples=200, deadline=None, database=None)
def test_a_wait_status_is_read_as_the_system_writes_it(code: int, number: int, has_core: bool) -> None:
    """waitpid(2): the exit code in the second byte, or the signal in the first with 128 for a core dump."""
    status = number | 128 * has_core if number else code << 8
    expected = (0, number) if number else (code, None)
    assert parse_exit_code(str(status)) == expected


@every(
    ("text", "expected"),
    [
        ("0:00", 0.0),
        ("1:02", 62.0),
        ("59:59", 3599.0),
        ("1:00:00", 3600.0),
        ("1-00:00:00", 86400.0),
        ("2-03:04:05", 183845.0),
        ("", None),
        ("INVALID", None),
        ("UNLIMITED", None),
        ("5", None),
    ],
)
def test_elapsed_times(text: str, expected: float | None) -> None:
    assert parse_elapsed(text) == expected


# Arrays


@given(st.sets(st.integers(0, 60), min_size=1), st.none() | st.integers(1, 9))
@settings(max_examples=200, deadline=None, database=None)
def test_the_indices_of_an_array_come_back(indices: set[int], parallel: int | None) -> None:
    spec, _, limit = array_spec(indices, parallel).partition("%")
    assert limit == (str(parallel) if parallel else "")
    bounds = [(part.partition("-")[0], part.rpartition("-")[2]) for part in spec.split(",")]
    found = [index for first, last in bounds for index in range(int(first), int(last) + 1)]
    assert found == sorted(indices)
    assert all(int(after[0]) > int(before[1]) + 1 for before, after in pairwise(bounds))


# The markers that a script leaves


def test_what_a_script_says_when_it_starts() -> None:
    text = "job=17 name=mbridge-x.cafe nodes=n[1-2] restarts=0\njob=17 name=mbridge-x.cafe nodes=n3 restarts=1\n"
    assert parse_started(text) == {"job": "17", "name": "mbridge-x.cafe", "nodes": "n3", "restarts": "1"}
    assert [parse_started(empty) for empty in ("", "\n", "  \n\n")] == [{}] * 3


@every(
    ("text", "state", "job_class", "code"),
    [
        ("0\n", "COMPLETED", JobClass.SUCCEEDED, 0),
        ("1\n", "FAILED", JobClass.FAILED, 1),
        ("137\n", "FAILED", JobClass.FAILED, 137),
    ],
)
def test_a_marker_settles_a_forgotten_job(text: str, state: str, job_class: JobClass, code: int) -> None:
    status = status_from_marker(text)
    assert (status.state, status.job_class, status.exit_code) == (state, job_class, code)
    assert "marker" in status.reason


@every("text", [None, "", "\n", "-1\n", "0x0", "0 0", "nan", "\x00", "²"])
def test_without_a_readable_marker_nothing_is_known(text: str | None) -> None:
    status = status_from_marker(text)
    assert (status.state, status.job_class, status.exit_code) == ("FORGOTTEN", JobClass.UNKNOWN, None)


def test_a_marker_keeps_the_nodes() -> None:
    assert status_from_marker("0\n", "n[1-2]").nodes == "n[1-2]"
    assert status_from_marker(None, "n[1-2]").nodes == "n[1-2]"
    assert not status_from_marker(None).is_final


# The environment of Slurm's commands


def test_the_environment_of_another_job_is_not_inherited() -> None:
    names = """SLURM_JOB_ID SLURM_NTASKS SLURM_CPU_BIND SBATCH_PARTITION SBATCH_EXPORT SRUN_DEBUG SALLOC_PARTITION
        SQUEUE_FORMAT SQUEUE_STATES SINFO_FORMAT SCANCEL_INTERACTIVE PMI_RANK PMIX_RANK"""
    foreign = dict.fromkeys(names.split(), "1")
    # SLURM_JWT proves who a user is where munge is not used: without it no command is answered
    kept = {"PATH": "/bin", "SLURM_CONF": "/etc/slurm.conf", "HOME": "/h", "MY_SLURM_X": "1", "SLURM_JWT": "t"}
    assert without_slurm_variables({**foreign, **kept}) == kept


def test_the_accounting_of_a_requeued_job_ends_with_its_last_row() -> None:
    rows = [
        "5|NODE_FAIL|0:0|n2|30|a.cafe",
        "5|COMPLETED|0:0|n1|60|a.cafe",
        "6+0|COMPLETED|0:0|n1|9|h",
        "6+1|FAILED|1:0|n2|9|h",
    ]
    first, second = parse_sacct("\n".join(rows))
    assert (first.status.state, first.status.nodes) == ("COMPLETED", "n1")
    assert second.status.state == "FAILED"


def test_a_job_that_root_cancelled_says_so() -> None:
    """Slurm cancels as root, an administrator too: nobody who waits for the job has done it."""
    rows = "17|CANCELLED by 0|0:15|node1|12|a\n18|CANCELLED by 1000|0:15|node1|12|b\n19|CANCELLED by 10|0:0|node1|0|c\n"
    assert [seen.status.reason for seen in parse_sacct(rows)] == ["by root", "", ""]
