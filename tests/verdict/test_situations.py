"""What whole logs of failed jobs come to: the cause below its headers, and whether and where the run is tried again."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.logs import LogSummary
from cloudai_mbridge.metrics import measure
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.verdict import Judgement, judge, judgement_of, with_failure
from tests.cases import every
from tests.conftest import REPOSITORY

# A retry: never; wherever it may run; or not on the node on which it could not start
NEVER, ANYWHERE, ELSEWHERE = "never", "anywhere", "elsewhere"
NOT_STARTED = (
    "slurmstepd: error: pyxis: couldn't start container\n"
    "slurmstepd: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1\n"
)
TASK = "srun: error: n2: task 1: Exited with exit code 1\n"


def _situations() -> list[Any]:
    """Return the logs of tests/data with their failures and retries."""
    blocks = (REPOSITORY / "tests" / "data" / "failed_jobs.txt").read_text().split("=== ")[1:]
    cases = [(text, *head.split()) for head, _, text in (block.partition("\n") for block in blocks)]
    return [pytest.param(*case, id=f"{case[1]}: {case[0].splitlines()[0]}") for case in cases]


def _judged(tmp_path: Path, text: str, nodes: str, log: LogSummary) -> Judgement:
    status = JobStatus("FAILED", JobClass.FAILED, exit_code=1, nodes=nodes)
    stderr = tmp_path / "stderr.txt"
    stderr.write_text(text)
    outcome = judge(status, log, measure((), 0, None), 5, [])
    return judgement_of(
        with_failure(outcome, status, log, [stderr], tmp_path / "stacks", 5), status, measure((), 0, None)
    )


def _retry(judgement: Judgement) -> str:
    return ELSEWHERE if judgement.are_suspects else ANYWHERE if judgement.is_infrastructure else NEVER


@every(("text", "failure", "retry"), _situations())
def test_of_one_nodes_job_that_wrote_no_record(tmp_path: Path, text: str, failure: str, retry: str) -> None:
    judgement = _judged(tmp_path, text, "n2", LogSummary())
    assert (judgement.failure, _retry(judgement)) == (failure, retry)
    assert judgement.nodes == ("n2",) or retry != ELSEWHERE


@every(("text", "failure", "retry"), _situations())
def test_ranks_that_began_could_start(tmp_path: Path, text: str, failure: str, retry: str) -> None:
    judgement = _judged(tmp_path, text, "n2", LogSummary(run={"version": 1}))
    assert (judgement.failure, judgement.are_suspects) == (failure, False)


@every(
    ("text", "nodes"),
    [
        (NOT_STARTED + TASK, ("n2",)),  # srun names the node
        (
            "slurmstepd-n2: error: pyxis: --container-mounts: source path does not exist: /a\n",
            ("n2",),
        ),  # the daemon names itself
        (NOT_STARTED, ()),
        ("/var/spool/slurm/job7/slurm_script: line 9: srun: command not found\n", ("n1",)),  # the first runs the script
        ("OSError: [Errno 28] No space left on device\n" + TASK, ()),  # every agent ends when one does
    ],
)
def test_of_several_nodes_the_evidence_has_to_name_one(tmp_path: Path, text: str, nodes: tuple[str, ...]) -> None:
    judgement = _judged(tmp_path, text, "n[1-3]", LogSummary())
    assert (judgement.nodes, judgement.are_suspects) == (nodes, bool(nodes))


@pytest.mark.parametrize(("has_records", "are_suspects"), [(True, True), (False, False)])
def test_a_launcher_without_records_proves_no_start(tmp_path: Path, has_records: bool, are_suspects: bool) -> None:
    """Its ranks may have trained for hours; only what starts them tells that they have not begun."""
    status = JobStatus("FAILED", JobClass.FAILED, exit_code=1, nodes="n2")
    stderr, log = tmp_path / "stderr.txt", LogSummary()
    outcome = judge(status, log, measure((), 0, None), 5, [])
    for text, expected in (("RuntimeError: No CUDA GPUs are available\n", are_suspects), (NOT_STARTED, True)):
        stderr.write_text(text)
        found = with_failure(outcome, status, log, [stderr], tmp_path / "stacks", 5, has_records=has_records)
        assert found.is_unstarted is expected
