"""What is asked of Slurm's commands, and what their answers mean. Fake commands stand in the place of the real ones."""

import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.launch.claim import take_claim
from cloudai_mbridge.plan import RunPlan
from cloudai_mbridge.schedulers.interface import (
    Job,
    JobClass,
    JobStatus,
    Submission,
    SubmitLater,
    SubmitOutcomeUnknown,
    SubmitRefused,
)
from cloudai_mbridge.schedulers.slurm import SlurmClient, commands, jobs
from cloudai_mbridge.schedulers.slurm.client import node_states
from cloudai_mbridge.schedulers.slurm.commands import complaint_of
from tests.cases import every
from tests.golden import Sentence
from tests.runs import planned_run, slurm_system

FAKE = """#!{python} -IS
# A fake: it says what answers.json says, and writes down how it was called
import json, os, sys
name, here = os.path.basename(sys.argv[0]), {here!r}
with open(here + "/calls", "a") as calls:
    starts = "SLURM", "SBATCH", "HF_", "MBRIDGE_PYTHON", "MBRIDGE_JOB"
    env = {{key: os.environ[key] for key in os.environ if key.startswith(starts)}}
    fds = [int(fd) for fd in os.listdir("/proc/self/fd")]
    calls.write(json.dumps([name, sys.argv[1:], os.getcwd(), env, fds, os.getsid(0) == os.getpid()]) + "\\n")
code, out, err = json.load(open(here + "/answers.json")).get(name, [0, "", ""])
sys.stdout.write(out)
sys.stderr.write(err)
sys.exit(code)
"""
TOKEN = "cafe"


class FakeSlurm:
    """Fake commands on the PATH."""

    def __init__(self, here: Path) -> None:
        self._here, self._answers = here, dict[str, tuple[int, str, str]]()
        for name in ("sbatch", "squeue", "sacct", "scancel", "sinfo", "scontrol"):
            (here / name).write_text(FAKE.format(python=sys.executable, here=str(here)))
            (here / name).chmod(0o755)
        self.answer()

    def answer(self, **answers: tuple[int, str, str]) -> None:
        """Set a command's exit code, stdout and stderr."""
        self._answers |= answers
        (self._here / "answers.json").write_text(json.dumps(self._answers))

    def calls(self, name: str) -> list[dict[str, Any]]:
        path = self._here / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        keys = ("name", "argv", "cwd", "env", "fds", "leads")
        calls = [dict(zip(keys, json.loads(line), strict=True)) for line in lines]
        return [call for call in calls if call["name"] == name]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    here = tmp_path / "bin"
    here.mkdir()
    monkeypatch.setenv("PATH", f"{here}:{os.environ['PATH']}")
    return FakeSlurm(here)


@pytest.fixture
def client() -> SlurmClient:
    return SlurmClient(slurm_system(extra_transient_status_errors=["the site's own hiccup"]))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "a root"
    for i in range(4):
        (root / f"a/{i}/0").mkdir(parents=True)
    return root


def _run(point: int = 0, **keys: Any) -> RunPlan:
    return planned_run("a", point, **keys)


def _array(*indices: int, **keys: Any) -> Submission:
    runs = tuple(_run(i, array="arrays/0", array_index=i) for i in indices)
    return Submission(TOKEN, runs, **keys)


def _job(job_id: str, directory: Path = Path(), key: str = "a/0/0", token: str = "", array_index: int = 0) -> Job:
    return Job(key, job_id, token, directory, array_index)


def _squeue(*jobs: tuple[str, str, str]) -> tuple[int, str, str]:
    lines = (f"{job_id}|{state}|None|n1|0|0|1:00|{name}|\n" for job_id, state, name in jobs)
    return 0, "".join(lines), ""


# sbatch


def test_a_single_run(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sbatch=(0, "17\n", ""))
    run = _run(secret_env={"HF_TOKEN": "S3CRET"}, exclude_nodes=("n1",))
    assert client.submit(Submission(TOKEN, (run,)), root) == {"a/0/0": "17"}
    (call,) = slurm.calls("sbatch")
    assert call["argv"] == [
        *("--parsable", "--no-requeue", "--job-name=mbridge-a root-a-0-0.cafe", f"--chdir={root}/a/0/0", "job.sbatch")
    ]
    assert call["cwd"] == f"{root}/a/0/0"
    assert call["env"] == {"HF_TOKEN": "S3CRET", "MBRIDGE_PYTHON": sys.executable, "MBRIDGE_JOB_TOKEN": TOKEN}
    assert call["leads"]  # Ctrl-C does not reach it


def test_excluded_nodes_come_on_top_of_the_runs_own(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sbatch=(0, "17\n", ""))
    client.submit(Submission(TOKEN, (_run(exclude_nodes=("n1",)),), ("n9", "n2")), root)
    assert "--exclude=n1,n2,n9" in slurm.calls("sbatch")[0]["argv"]


def test_an_array(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sbatch=(0, "17;cluster\n", ""))
    ids = client.submit(_array(0, 1, 3, parallel=2), root)
    assert ids == {"a/0/0": "17_0", "a/1/0": "17_1", "a/3/0": "17_3"}
    (call,) = slurm.calls("sbatch")
    assert call["argv"][2:] == [
        *("--job-name=mbridge-a root-a-array-0.cafe", f"--chdir={root}", "--array=0-1,3%2", "arrays/0/array.sbatch")
    ]
    assert call["cwd"] == str(root)


def test_a_single_task_is_no_array(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sbatch=(0, "17\n", ""))
    assert client.submit(_array(3), root) == {"a/3/0": "17"}
    assert "job.sbatch" in slurm.calls("sbatch")[0]["argv"]


def test_the_lock_travels_with_sbatch(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sbatch=(0, "17\n", ""))
    with (root / "lock").open("w") as lock:
        client.submit(Submission(TOKEN, (_run(),), keep_open=lock.fileno()), root)
        assert lock.fileno() in slurm.calls("sbatch")[0]["fds"]


def test_another_jobs_variables_do_not_reach_sbatch(
    slurm: FakeSlurm, client: SlurmClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SBATCH_PARTITION", "other")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    slurm.answer(sbatch=(0, "17\n", ""))
    client.submit(Submission(TOKEN, (_run(),)), root)
    env = slurm.calls("sbatch")[0]["env"]
    ours = {"MBRIDGE_PYTHON": sys.executable, "MBRIDGE_JOB_TOKEN": TOKEN}
    assert env == {**ours, "SLURM_CONF": "/etc/slurm.conf"}


UNSURE = [
    "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
    "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation",
    "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received",
    "sbatch: error: slurm_receive_msg: Connection reset by peer",
    "sbatch: error: the site's own hiccup",
]
LATER = [
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying\n"
    "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
    "sbatch: error: Batch job submission failed: Resource temporarily unavailable",
]
LIMIT = [
    "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates "
    "accounting/QOS policy (job submit limit, user's size and/or time limits)",
    "sbatch: error: AssocMaxSubmitJobLimit\nsbatch: error: Batch job submission failed: Job violates "
    "accounting/QOS policy (job submit limit, user's size and/or time limits)",
]
REFUSED = [
    "sbatch: error: invalid partition specified: x\n"
    "sbatch: error: Batch job submission failed: Invalid partition name specified",
    "sbatch: error: Invalid --begin specification",
    "sbatch: unrecognized option '--gpuz=1'",
    "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified",
    "sbatch: error: Batch job submission failed: Requested node configuration is not available",
    "sbatch: error: Batch job submission failed: Invalid job array specification",
]
# A damaged answer, or one that nobody has seen before: the job may be there
DOUBTFUL = [
    "sbatch: error: Batch job submission failed: Unspecified error",
    "sbatch: error: Batch job submission failed: Insane message length",
    "sbatch: error: Batch job submission failed: Message receive failure",
    "sbatch: error: Batch job submission failed: Header lengths are longer than data received",
    "sbatch: error: Batch job submission failed: No error",
    "sbatch: error: Batch job submission failed: Invalid Protocol Version 9999",
    "sbatch: error: Batch job submission failed: Duplicate job id",
    "sbatch: error: the site's plug-in does not like it",
    "Requested time limit is invalid",
    "sbatch: error: Slurm temporarily unable to accept job, sleeping and retrying",
    "/usr/local/bin/sbatch: fork: retry: Resource temporarily unavailable",
    "Welcome. MaxJobCount is 10000 here, MaxSubmitJobs 500.\nsbatch: error: slurm_unpack_list: what is this",
    "Welcome. MaxJobCount is 10000 here.\nsbatch: error: Batch job submission failed: Insane message length",
    "",
]


@every(
    ("code", "stdout", "stderr", "kind"),
    [
        *((1, "", text, ToolFailure) for text in UNSURE),
        *((1, "", text, SubmitRefused) for text in (*REFUSED, f"MaxJobCount is 10000 here.\n{REFUSED[3]}")),
        *((1, "", text, SubmitOutcomeUnknown) for text in DOUBTFUL),
        *((1, "", text, SubmitLater) for text in (*LATER, *LIMIT)),
        # such as of a wrapper that submits again, and fails only then
        *((1, "17\n", text, SubmitOutcomeUnknown) for text in (REFUSED[0], LATER[0], LIMIT[0])),
        (0, "thank you\n", "", ToolFailure),
    ],
)
def test_what_sbatch_says(
    slurm: FakeSlurm, client: SlurmClient, root: Path, code: int, stdout: str, stderr: str, kind: type[Exception]
) -> None:
    slurm.answer(sbatch=(code, stdout, stderr + "\n"))
    with pytest.raises(kind) as caught:
        client.submit(Submission(TOKEN, (_run(),)), root)
    assert type(caught.value) is kind
    assert stderr.strip().rpartition("\n")[2] in str(caught.value)
    if isinstance(caught.value, SubmitLater):
        assert caught.value.is_limit is (stderr in LIMIT)


@pytest.mark.usefixtures("slurm")
def test_an_sbatch_that_does_not_answer_is_unsure(
    root: Path, client: SlurmClient, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    path = Path(os.environ["PATH"].split(":")[0]) / "sbatch"
    path.write_text("#!/bin/bash\nexec sleep 60\n")
    kwargs = {**commands.run_command.__kwdefaults__, "timeout_s": 0.2}
    monkeypatch.setattr(commands.run_command, "__kwdefaults__", kwargs)
    with pytest.raises(ToolFailure) as caught:
        client.submit(Submission(TOKEN, (_run(),)), root)
    sentence(caught)


def test_without_slurm_it_is_said(
    client: SlurmClient, root: Path, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolFailure) as caught:
        client.preflight()
    sentence(caught)


def test_what_cannot_be_started_is_not_said_to_be_missing(tmp_path: Path, sentence: Sentence) -> None:
    with pytest.raises(ToolFailure) as caught:
        commands.run_command("true", cwd=tmp_path / "gone")
    sentence(caught, error=r"(?<=started: ).*")
    (tmp_path / "sbatch").write_text("no program")
    (tmp_path / "sbatch").chmod(0o755)
    with pytest.raises(ToolFailure) as caught:
        commands.run_command(str(tmp_path / "sbatch"))
    sentence(caught, error=r"(?<=started: ).*")


def test_the_last_line_is_the_complaint() -> None:
    assert complaint_of(CompletedProcess((), 1, "", "a\nsbatch: error: b\n\n")) == "sbatch: error: b"
    assert complaint_of(CompletedProcess((), 3, "", "\n")) == "exit code 3 and no output"
    assert complaint_of(CompletedProcess((), 0, "a\nqueued as 7\n", "")) == "exit code 0 and the output 'queued as 7'"


@pytest.mark.parametrize("prefix", ["", "project-sub:"])
def test_names_show_the_run_and_the_point_and_carry_the_token(prefix: str) -> None:
    system = slurm_system(job_name_prefix=prefix)
    root = Path("/results/nightly")
    assert jobs.job_name_of(Submission(TOKEN, (_run(),)), root, system) == f"{prefix}mbridge-nightly-a-0-0.cafe"
    assert jobs.job_name_of(_array(0, 1), root, system) == f"{prefix}mbridge-nightly-a-array-0.cafe"


# Which jobs are there


def _started(root: Path, key: str, line: str) -> None:
    (root / key / "started.txt").write_text(line + "\n")


def test_jobs_are_found_by_their_names(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(squeue=_squeue(("17", "RUNNING", "mbridge-a-0-0.cafe"), ("18", "RUNNING", "mbridge-a-1-0.beef")))
    assert client.find([Submission("cafe", (_run(),))], root) == {"a/0/0": "17"}
    assert client.find([Submission("cafe", (_run(),)), Submission("beef", (_run(1),))], root) == {
        "a/0/0": "17",
        "a/1/0": "18",
    }
    assert client.find([Submission("afe", (_run(),))], root) == {}


def test_tasks_of_an_array_are_found(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    jobs = [(f"17_{i}", "PENDING", "mbridge-a-array-0.cafe") for i in (1, 3, 11, 13)]
    slurm.answer(squeue=_squeue(*jobs))
    assert client.find([_array(1, 3)], root) == {"a/1/0": "17_1", "a/3/0": "17_3"}


def test_a_job_that_has_ended_is_found_by_what_it_left(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    _started(root, "a/0/0", "job=17 name=mbridge-a-0-0.cafe nodes=n1 restarts=0")
    _started(root, "a/1/0", "job=18_1 name=mbridge-a-array-0.beef nodes=n1 restarts=0")
    assert client.find([Submission("cafe", (_run(),))], root) == {"a/0/0": "17"}
    assert client.find([Submission("other", (_run(),))], root) == {}
    runs = tuple(_run(i, array="arrays/0", array_index=i) for i in (0, 1))
    assert client.find([Submission("beef", runs)], root) == {"a/1/0": "18_1"}


def test_a_squeue_that_fails_finds_nothing_out(
    slurm: FakeSlurm, client: SlurmClient, root: Path, sentence: Sentence
) -> None:
    slurm.answer(squeue=(1, "", "slurm_load_jobs error: Unable to contact slurm controller\n"))
    with pytest.raises(ToolFailure) as caught:
        client.find([Submission(TOKEN, (_run(),))], root)
    sentence(caught)
    with pytest.raises(ToolFailure) as caught:
        client.poll([_job("17", root)])
    sentence(caught)


# How jobs stand


def test_one_squeue_for_all_jobs(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(squeue=_squeue(*((str(i), "RUNNING", "x") for i in range(50))))
    seen = client.poll([_job(str(i), root, key=str(i)) for i in range(40)])
    assert len(seen) == 40
    assert {job.status.state for job in seen.values()} == {"RUNNING"}
    assert (len(slurm.calls("squeue")), len(slurm.calls("sacct"))) == (1, 0)
    assert client.poll([]) == {}
    assert len(slurm.calls("squeue")) == 1


def test_what_squeue_has_forgotten_the_accounting_knows(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sacct=(0, "17_0|NODE_FAIL|1:0|n1|60|x\n17_1|COMPLETED|0:0|n2|61|x\n", ""))
    seen = client.poll([_job(f"17_{i}", root / f"a/{i}/0", key=str(i)) for i in (0, 1)])
    assert [(job.status.state, job.status.run_time_s) for job in seen.values()] == [
        ("NODE_FAIL", 60.0),
        ("COMPLETED", 61.0),
    ]
    (call,) = slurm.calls("sacct")
    assert call["argv"][-1] == "--jobs=17"


def test_an_accounting_that_has_not_seen_the_end_proves_nothing(
    slurm: FakeSlurm, client: SlurmClient, root: Path
) -> None:
    slurm.answer(sacct=(0, "17|RUNNING|0:0|n1|60|x\n", ""))
    _started(root, "a/0/0", "job=17 name=x nodes=n1 restarts=0")
    (root / "a/0/0/exit_code.txt").write_text("3\n")
    assert client.poll([_job("17", root / "a/0/0")])["a/0/0"].status.exit_code == 3


@pytest.mark.parametrize(
    ("started", "exit_code", "expected"),
    [
        ("job=17 name=x.cafe nodes=n[1-2] restarts=0", "0", ("COMPLETED", JobClass.SUCCEEDED, 0, "n[1-2]")),
        ("job=17 name=x.cafe nodes=n1 restarts=0", "137", ("FAILED", JobClass.FAILED, 137, "n1")),
        ("job=17 name=x.cafe nodes=n1 restarts=0", None, ("FORGOTTEN", JobClass.UNKNOWN, None, "n1")),
        (None, None, ("NEVER_STARTED", JobClass.UNKNOWN, None, "")),
        ("job=16 name=x.beef nodes=n1 restarts=0", "0", ("NEVER_STARTED", JobClass.UNKNOWN, None, "")),  # another one's
        ("job=17_1 name=x.beef nodes=n1 restarts=0", "0", ("NEVER_STARTED", JobClass.UNKNOWN, None, "")),
    ],
)
def test_what_everybody_has_forgotten_its_files_tell(
    slurm: FakeSlurm,
    client: SlurmClient,
    root: Path,
    started: str | None,
    exit_code: str | None,
    expected: tuple[str, JobClass, int | None, str],
) -> None:
    slurm.answer(sacct=(1, "", "Slurm accounting storage is disabled\n"))
    if started is not None:
        _started(root, "a/0/0", started)
    if exit_code is not None:
        (root / "a/0/0/exit_code.txt").write_text(exit_code + "\n")
    status = client.poll([_job("17", root / "a/0/0", token=TOKEN)])["a/0/0"].status
    assert (status.state, status.job_class, status.exit_code, status.nodes) == expected


def test_what_has_a_claim_has_begun(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    """A full disk may have kept it from writing down more."""
    take_claim(root / "a/0/0", TOKEN, "17")
    (root / "a/0/0/exit_code.txt").write_text("0\n")
    assert client.poll([_job("17", root / "a/0/0", token=TOKEN)])["a/0/0"].status.state == "FORGOTTEN"


def test_of_a_job_without_a_token_nothing_tells_that_it_never_started(
    slurm: FakeSlurm, client: SlurmClient, root: Path
) -> None:
    """It is one of Megatron-Bridge's launcher, whose exit code lies there."""
    (root / "a/0/0/exit_code.txt").write_text("0\n")
    assert client.poll([_job("17", root / "a/0/0")])["a/0/0"].status.state == "FORGOTTEN"


def test_an_accounting_that_is_disabled_is_asked_once(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(sacct=(1, "", "Slurm accounting storage is disabled\n"))
    for _ in range(3):
        client.poll([_job("17", root / "a/0/0")])
    assert len(slurm.calls("sacct")) == 1


def test_an_accounting_that_fails_is_no_failure(
    slurm: FakeSlurm, client: SlurmClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    slurm.answer(sacct=(1, "", "sacct: error: Connection refused\n"))
    status = client.poll([_job("17", root / "a/0/0", token=TOKEN)])["a/0/0"].status
    assert (status.state, "Connection refused" in status.reason) == ("NEVER_STARTED", True)
    client.poll([_job("17", root / "a/0/0", token=TOKEN)])
    assert len(slurm.calls("sacct")) == 1
    now[0] += 61.0  # later it is asked again
    slurm.answer(sacct=(0, "17|COMPLETED|0:0|n1|60|x.cafe\n", ""))
    assert client.poll([_job("17", root / "a/0/0", token=TOKEN)])["a/0/0"].status == JobStatus(
        "COMPLETED", JobClass.SUCCEEDED, 0, None, "", "n1", 60.0
    )


# Whose jobs they are


def test_an_id_is_believed_under_its_token_only(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    """sbatch said 12, which is somebody else's; ours is 1234."""
    slurm.answer(squeue=_squeue(("12", "RUNNING", "theirs.beef"), ("1234", "PENDING", "mbridge-a-0-0.cafe")))
    seen = client.poll([_job("12", root / "a/0/0", token="cafe")])["a/0/0"]
    assert (seen.job_id, seen.status.state) == ("1234", "PENDING")


def test_an_id_of_somebody_else_proves_nothing(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    slurm.answer(
        squeue=_squeue(("12", "COMPLETED", "theirs.beef")), sacct=(0, "12|COMPLETED|0:0|n1|60|theirs.beef\n", "")
    )
    (root / "a/0/0/exit_code.txt").write_text("0\n")
    assert client.poll([_job("12", root / "a/0/0", token="cafe")])["a/0/0"].status.state == "NEVER_STARTED"
    _started(root, "a/0/0", "job=12 name=theirs.beef nodes=n1")
    assert client.poll([_job("12", root / "a/0/0", token="cafe")])["a/0/0"].status.state == "NEVER_STARTED"


def test_the_accounting_is_believed_under_the_token_only(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    rows = "12|FAILED|1:0|n1|60|theirs.beef\n12|COMPLETED|0:0|n1|61|mbridge-a-0-0.cafe\n"
    slurm.answer(sacct=(0, rows, ""))
    assert client.poll([_job("12", root / "a/0/0", token="cafe")])["a/0/0"].status.run_time_s == 61.0


def test_of_two_jobs_of_a_token_the_one_with_the_claim_counts(
    slurm: FakeSlurm, client: SlurmClient, root: Path
) -> None:
    name = "mbridge-a-0-0.cafe"
    slurm.answer(squeue=_squeue(("17", "PENDING", name), ("18", "RUNNING", name)))
    seen = client.poll([_job("17", root / "a/0/0", token="cafe")])["a/0/0"]
    assert (seen.job_id, seen.has_rivals) == ("17", True)  # neither has started as far as anybody knows
    take_claim(root / "a/0/0", "cafe", "18")
    assert client.poll([_job("17", root / "a/0/0", token="cafe")])["a/0/0"].job_id == "18"
    slurm.answer(squeue=_squeue(("17", "FAILED", name)))
    assert client.poll([_job("17", root / "a/0/0", token="cafe")])["a/0/0"].job_id == "18"


def test_an_array_without_its_tasks_is_not_a_task(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    """What Slurm 22.05 lists of an array whose waiting tasks were all cancelled."""
    slurm.answer(squeue=_squeue(("17", "CANCELLED", "mbridge-a-array-0.cafe")))
    job = replace(_job("17_3", root / "a/0/0", token="cafe", array_index=3), was_listed=True)
    assert client.poll([job])["a/0/0"].job_id == "17_3"
    client.cancel([job])
    assert not slurm.calls("scancel")


def test_a_waiting_task_has_vanished_if_it_stays_missing(
    slurm: FakeSlurm, client: SlurmClient, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer may be cut behind a line, or leave out what waits, and nothing shows that."""
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rows = _squeue(*((f"17_{i}", "PENDING", "mbridge-a-array-0.cafe") for i in (2, 3)))[1].splitlines(keepends=True)
    job = replace(_job("17_3", root / "a/0/0", token="cafe", array_index=3), was_listed=True)

    def state(*listed: str, after_s: float = 0.0) -> str:
        now[0] += after_s
        slurm.answer(squeue=(0, "".join(listed), ""))
        seen = client.poll([job])["a/0/0"].status
        assert seen.is_final is (seen.state == "CANCELLED")
        return seen.state

    assert [state(rows[0]), state(rows[0], after_s=15.0), state(*rows)] == ["PENDING"] * 3
    assert [state(rows[0], after_s=15.0), state(rows[0], after_s=15.0)] == ["PENDING"] * 2
    assert state(rows[0], after_s=6.0) == "CANCELLED"
    assert state(*rows) == "PENDING"
    client.cancel([job])
    assert state(rows[0]) == "CANCELLED"  # at once: it was asked for


def test_an_answer_that_was_cut_is_none(slurm: FakeSlurm, client: SlurmClient, root: Path, sentence: Sentence) -> None:
    slurm.answer(squeue=(0, _squeue(("17", "RUNNING", "mbridge-a-0-0.cafe"))[1][:-3], ""))
    with pytest.raises(ToolFailure) as caught:
        client.poll([_job("17", root / "a/0/0", token="cafe")])
    sentence(caught)


def test_a_job_that_lost_its_claim_is_not_the_run(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    """17 has ended with the code of a lost claim, 18 has trained and been forgotten."""
    row = f"17|FAILED|NonZeroExitCode|n1|{79 << 8}|0|0:01|mbridge-a-0-0.cafe|\n"
    slurm.answer(squeue=(0, row, ""))
    take_claim(root / "a/0/0", "cafe", "18")
    _started(root, "a/0/0", "job=18 name=mbridge-a-0-0.cafe nodes=n1")
    (root / "a/0/0/exit_code.txt").write_text("0\n")
    seen = client.poll([_job("17", root / "a/0/0", token="cafe")])["a/0/0"]
    assert (seen.job_id, seen.status.state) == ("18", "COMPLETED")


@pytest.mark.parametrize("name", ["project:mbridge-a-0-0.cafe", "mbridge-a-0-0.cafe_4h", "p/mbridge-r-a-0-0.cafe.s"])
def test_a_site_may_write_around_a_name(slurm: FakeSlurm, client: SlurmClient, root: Path, name: str) -> None:
    slurm.answer(squeue=_squeue(("17", "RUNNING", name), ("18", "RUNNING", "theirs")))
    job = _job("17", root / "a/0/0", token="cafe")
    assert client.poll([job])["a/0/0"].status.state == "RUNNING"
    assert client.find([Submission("cafe", (_run(),))], root) == {"a/0/0": "17"}
    client.cancel([job])
    assert [call["argv"] for call in slurm.calls("scancel")] == [["17"]]
    slurm.answer(squeue=(0, "", ""), sacct=(0, f"17|FAILED|3:0|n1|60|{name}\n", ""))
    take_claim(root / "a/0/0", "cafe", "17")
    assert client.poll([job])["a/0/0"].status.exit_code == 3


def test_a_site_may_replace_a_name(slurm: FakeSlurm, client: SlurmClient, root: Path) -> None:
    """The id that sbatch printed counts together with the directory, and neither of them alone."""
    job = _job("17", root / "a/0/0", token="cafe")

    def state(job_id: str, directory: Path, name: str = "batch") -> str:
        slurm.answer(squeue=(0, f"{job_id}|RUNNING|None|n1|0|0|1:00|{directory}//|{name}|\n", ""))
        return client.poll([job])["a/0/0"].status.state

    assert [state("17", root / "a/0/0"), state("17", root)] == ["RUNNING"] * 2  # a point's, and an array's
    assert state("17", root / "a/1/0") == "NEVER_STARTED"
    assert state("17", root.parent) == "NEVER_STARTED"
    assert state("18", root / "a/0/0") == "NEVER_STARTED"
    assert state("17", root / "a/0/0", "x.0123456789abcdef") == "NEVER_STARTED"  # of another submission
    slurm.answer(squeue=(0, "", ""), sacct=(0, "17|COMPLETED|0:0|n1|60|batch\n", ""))
    assert client.poll([job])["a/0/0"].status.state == "NEVER_STARTED"
    take_claim(root / "a/0/0", "cafe", "17")
    assert client.poll([job])["a/0/0"].status.state == "COMPLETED"


@pytest.mark.parametrize(
    ("reason", "code", "has_begun", "expected"),
    [
        ("JobLaunchFailure", "3893", False, ("LAUNCH_FAILED", JobClass.INFRASTRUCTURE)),
        ("JobLaunchFailure", "9", True, ("FAILED", JobClass.FAILED)),  # a signal has killed the script
        ("NonZeroExitCode", str(74 << 8), False, ("LAUNCH_FAILED", JobClass.INFRASTRUCTURE)),  # it could not claim
        ("NonZeroExitCode", "256", True, ("FAILED", JobClass.FAILED)),
    ],
)
def test_a_job_whose_script_never_began_is_the_nodes_failure(
    slurm: FakeSlurm,
    client: SlurmClient,
    root: Path,
    reason: str,
    code: str,
    has_begun: bool,
    expected: tuple[str, JobClass],
) -> None:
    slurm.answer(squeue=(0, f"17|FAILED|{reason}|n1|{code}|0|0:01|{root}/a/0/0//|mbridge-a-0-0.cafe|\n", ""))
    if has_begun:
        take_claim(root / "a/0/0", "cafe", "17")
    status = client.poll([_job("17", root / "a/0/0", token="cafe")])["a/0/0"].status
    assert (status.state, status.job_class) == expected
    assert status.nodes == "n1"


def test_what_bears_the_token_is_cancelled_and_nothing_else(slurm: FakeSlurm, client: SlurmClient) -> None:
    name = "mbridge-a-array-0.cafe"
    jobs = [("12", "RUNNING", "theirs.beef"), ("40_1", "RUNNING", name), ("40_2", "RUNNING", name)]
    slurm.answer(squeue=_squeue(*jobs, ("41_1", "PENDING", name), ("39_1", "CANCELLED", name)))
    client.cancel([_job("12_1", token="cafe", array_index=1)])
    assert [call["argv"] for call in slurm.calls("scancel")] == [["40_1", "41_1"]]


# What is done to them


def test_to_cancel_what_has_ended_is_no_error(slurm: FakeSlurm, client: SlurmClient, sentence: Sentence) -> None:
    slurm.answer(scancel=(1, "", "scancel: error: Kill job error on job id 17: Invalid job id specified\n"))
    client.cancel([_job("17"), _job("18_3")])
    assert slurm.calls("scancel")[0]["argv"] == ["17", "18_3"]
    slurm.answer(scancel=(1, "", "scancel: error: Unable to contact slurm controller\n"))
    with pytest.raises(ToolFailure) as caught:
        client.cancel([_job("17")])
    sentence(caught)


def test_no_command_line_is_too_long(slurm: FakeSlurm, client: SlurmClient) -> None:
    client.cancel(_job(str(i)) for i in range(1200))
    calls = [call["argv"] for call in slurm.calls("scancel")]
    assert [job_id for argv in calls for job_id in argv] == [str(i) for i in range(1200)]
    assert max(map(len, calls)) <= 500
    client.cancel([])
    assert len(slurm.calls("scancel")) == len(calls)


SINFO = """\
main|n1|idle|none
main|n2|down*|Not responding
main|n3|drained|gpu broken | twice
main|n4|mixed|none
main|n5|draining|x
main|n1|idle|none
"""


def test_the_sick_nodes_of_a_job(slurm: FakeSlurm, client: SlurmClient) -> None:
    slurm.answer(sinfo=(0, SINFO, ""))
    assert client.unhealthy_nodes("n[1-5]") == {
        "n2": "down* (Not responding)",
        "n3": "drained (gpu broken | twice)",
        "n5": "draining (x)",
    }
    assert "--nodes=n[1-5]" in slurm.calls("sinfo")[0]["argv"]


@every(("exclude", "count"), [((), 5), (("n1",), 4), (("n1", "n4", "n9"), 3), (("n2",), 4)])
def test_how_many_nodes_are_left(slurm: FakeSlurm, client: SlurmClient, exclude: tuple[str, ...], count: int) -> None:
    """Ones that are out of service may come back."""
    slurm.answer(sinfo=(0, SINFO, ""))
    assert client.num_usable_nodes(exclude) == count


def test_nodes_of_other_partitions_are_not_left(slurm: FakeSlurm, client: SlurmClient) -> None:
    slurm.answer(sinfo=(0, SINFO.replace("main|n4", "other|n4") + "other|n7|idle|none\n", ""))
    assert client.num_usable_nodes(()) == 4
    assert set(node_states("other") or {}) == {"n4", "n7"}
    slurm.answer(sinfo=(1, "", "slurm_load_node error: Unable to contact slurm controller\n"))
    assert client.num_usable_nodes(()) is None


@pytest.mark.parametrize(
    ("reason", "may_start", "exceeded"),
    [
        ("PartitionNodeLimit", {5: True, 6: False}, "6 nodes"),  # three of the five are out of service
        ("PartitionTimeLimit", {5: False, 6: False}, "1:00:00"),
        ("QOSMaxWallDurationPerJobLimit", {5: False, 6: False}, "1:00:00"),
        ("BadConstraints", {5: False, 6: False}, ""),
    ],
)
def test_a_job_without_hope(
    slurm: FakeSlurm, client: SlurmClient, reason: str, may_start: dict[int, bool], exceeded: str
) -> None:
    slurm.answer(sinfo=(0, SINFO, ""))
    status = JobStatus("PENDING", JobClass.ACTIVE, reason=reason, hopeless=JobClass.FAILED)
    assert {nodes: client.may_start(_run(num_nodes=nodes), status) for nodes in may_start} == may_start
    assert client.exceeded(_run(num_nodes=6, time_limit="1:00:00"), status) == exceeded


@pytest.mark.parametrize(("shown", "sizes"), [("MaxArraySize            = 3\n", [3, 1]), ("nothing\n", [4])])
def test_arrays_are_as_large_as_the_cluster_allows(
    slurm: FakeSlurm, client: SlurmClient, shown: str, sizes: list[int]
) -> None:
    slurm.answer(scontrol=(0, f"Configuration data\n{shown}", ""))
    runs = _array(0, 1, 2, 3).runs
    assert [len(batch) for batch in client.batches(runs)] == sizes
    client.batches(runs)
    assert len(slurm.calls("scontrol")) == 1


def test_a_cluster_that_cannot_be_asked_is_asked_again(slurm: FakeSlurm, client: SlurmClient) -> None:
    """It is not taken for one without arrays; later, an index that it does not allow is refused for good."""
    slurm.answer(scontrol=(1, "", "slurm_load_ctl_conf error: Unable to contact slurm controller\n"))
    assert [len(batch) for batch in client.batches(_array(0, 1, 2, 3).runs)] == [4]
    slurm.answer(scontrol=(0, "MaxArraySize            = 3\n", ""))
    assert [len(batch) for batch in client.batches(_array(0, 1, 2, 3).runs)] == [3, 1]


@every(("partitions", "there", "others"), [("main", "main\nother\n", "a\nb\n"), ("a,b", "a\nb\n", "a\n")])
def test_a_partition_that_is_not_there(
    slurm: FakeSlurm, sentence: Sentence, partitions: str, there: str, others: str
) -> None:
    client = SlurmClient(slurm_system(default_partition=partitions))
    slurm.answer(sinfo=(0, there, ""))
    client.preflight()
    slurm.answer(sinfo=(0, others, ""))
    with pytest.raises(BadInput) as caught:
        client.preflight()
    sentence(caught)


def test_hidden_partitions_are_asked_for(slurm: FakeSlurm, client: SlurmClient) -> None:
    """squeue and sinfo leave out what is hidden, or not for the user's groups, unless told otherwise."""
    slurm.answer(sinfo=(0, "main\n", ""), squeue=(0, "", ""))
    client.preflight()
    client.poll([_job("17")])
    client.unhealthy_nodes("n1")
    client.num_usable_nodes(())
    node_states("main")
    calls = [*slurm.calls("sinfo"), *slurm.calls("squeue")]
    assert len(calls) >= 5
    assert all("--all" in call["argv"] for call in calls)
