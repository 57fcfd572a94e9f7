"""The kind of a job's id decides who is asked about the job, and whether another machine may resume its run."""

import pytest

from cloudai_mbridge.launch.claim import ProcessId, process_of


@pytest.mark.parametrize("process", [ProcessId(17, "cafe"), ProcessId(17, "cafe", is_launcher=True)])
def test_a_process_comes_back_from_its_id(process: ProcessId) -> None:
    assert process_of(str(process)) == process


@pytest.mark.parametrize("job_id", ["17", "17_3", ""])
def test_slurms_ids_name_no_process(job_id: str) -> None:
    assert process_of(job_id) is None


@pytest.mark.parametrize("job_id", ["x.cafe", "-5.cafe", "launcher-", "launcher-5 6.cafe", f"{2**40}.cafe"])
def test_a_damaged_id_is_no_id_of_slurms(job_id: str) -> None:
    """Slurm is not asked about it, no process gets its signals, and another machine does not resume it."""
    process = process_of(job_id)
    assert process is not None
    assert process.pid == 0
