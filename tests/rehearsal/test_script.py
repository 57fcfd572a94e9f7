"""The script of a rehearsal: the variables of the job, its image, mounts and Python, on one core of one node."""

import subprocess
from pathlib import Path

import pytest

from cloudai_mbridge import pipeline
from cloudai_mbridge.launch import render
from cloudai_mbridge.launch.script import render_rehearsal_job
from cloudai_mbridge.models.system import slurm_of
from tests.rehearsal.conftest import Write
from tests.rehearsal.test_commands import request

pytestmark = pytest.mark.process
SLURM = """scheduler = "slurm"
default_partition = "p"
partitions = [{ name = "p" }]
account = "a"
mpi = "pmix"
gpus_per_node = 4
container_mount_home = true
extra_srun_args = "--export=ALL"
extra_sbatch_args = ["--qos=fast", "--reservation=r", "--exclusive", "--mem=0"]"""
IN_CONTAINER = 'container_image = "nvcr.io#nvidia/nemo:25.09"\ncustom_mounts = "/data:/data"'


def lines_of(scenario: Write, test: str) -> tuple[list[str], list[str]]:
    """Return the lines of a rehearsal's script, and those of the job's."""
    prepared = pipeline.plan(request(scenario({"a": {}}, scheduler=SLURM, test=test)))
    run = prepared.plan.runs[0]
    script = render_rehearsal_job(run, slurm_of(prepared.system), "h100", "mbridge-rehearsal-1", "states")
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    return script.splitlines(), render(run, prepared.system)["job.sbatch"].splitlines()


def test_in_the_image_as_the_job_is(scenario: Write) -> None:
    own, job = lines_of(scenario, IN_CONTAINER)
    same = [line for line in job if line.startswith(("export ", "[ ", "_mbridge_python=", "  --container-mounts"))]
    same = [line for line in same if "MBRIDGE" not in line]
    assert len(same) >= 3
    assert [line for line in same if line not in own] == []
    (srun,) = (line.split() for line in own if line.startswith("exec srun"))
    wanted = {
        *(
            "--job-name=mbridge-rehearsal-1",
            "--partition=p",
            "--account=a",
            "--time=30",
            "--qos=fast",
            "--reservation=r",
        ),
        *("--nodes=1", "--ntasks=1", "--cpus-per-task=1", "--container-image=nvcr.io#nvidia/nemo:25.09"),
        *("--container-mount-home", "--mpi=pmix", "--export=ALL"),
    }
    unquoted = {word.strip("'") for word in srun}
    assert wanted <= unquoted, wanted - unquoted
    assert not {"--exclusive", "--mem=0"} & unquoted
    assert not [word for word in srun if "gpus" in word]
    assert own[-1].split()[:3] == ['"$_mbridge_python"', "-m", "cloudai_mbridge.training.dry"]


def test_without_an_image(scenario: Write, tmp_path: Path) -> None:
    own, _ = lines_of(scenario, "")
    assert f"_mbridge_python={tmp_path}/python" in own
    assert not [line for line in own if "container" in line]
