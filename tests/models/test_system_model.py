"""Systems: CloudAI's keys load, and what would break a job is refused."""

import json
from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from tests.cases import every
from tests.golden import Sentence

CLOUDAI_LIKE = """\
name = "example-cluster"
scheduler = "slurm"

install_path = "./install"
output_path = "./results"
default_partition = "batch"
account = "team"
distribution = "block"
mpi = "pmix"
gpus_per_node = 8
ntasks_per_node = 8
cache_docker_images_locally = true
container_mount_home = false
monitor_interval = 60
extra_srun_args = "--label --exclusive"
extra_sbatch_args = ["--exclusive", "--qos=high"]
extra_transient_status_errors = ["try again"]
status_retry_pause_seconds = 5

[[partitions]]
name = "batch"

  [[partitions.groups]]
  name = "group_1"
  nodes = ["node-[001-025]", "node-030"]

[[partitions]]
name = "interactive"  # older files list a partition's nodes directly
nodes = ["node-[031-040]"]

[data_repository]
endpoint = "MY_ENDPOINT"
verify_certs = false

[reports.example]
enable = true

[global_env_vars]
NCCL_IB_TIMEOUT = "20"
NCCL_DEBUG_FLAG = true
NCCL_NVLS_ENABLE = 0
"""
SLURM = 'name = "s"\nscheduler = "slurm"\ndefault_partition = "p"\n'
PARTITION = '[[partitions]]\nname = "p"\n'


def _load(tmp_path: Path, text: str) -> System:
    path = tmp_path / "system.toml"
    path.write_text(text, encoding="utf-8")
    return load_system(path)


def test_all_common_keys_of_cloudai_load(tmp_path: Path) -> None:
    system = _load(tmp_path, CLOUDAI_LIKE)
    assert isinstance(system, SlurmSystem)
    found = system.default_partition, system.account, system.mpi, system.distribution
    assert found == ("batch", "team", "pmix", "block")
    assert system.partitions[0].groups[0].nodes == ["node-[001-025]", "node-030"]
    assert system.partitions[1].nodes == ["node-[031-040]"]
    assert system.global_env_vars == {"NCCL_IB_TIMEOUT": "20", "NCCL_DEBUG_FLAG": True, "NCCL_NVLS_ENABLE": 0}
    assert system.extra_sbatch_args == ["--exclusive", "--qos=high"]


def test_cloudais_standalone_is_this_machine(tmp_path: Path) -> None:
    system = _load(tmp_path, 'name = "s"\nscheduler = "standalone"\noutput_path = "out"\ninstall_path = "in"\n')
    assert isinstance(system, LocalSystem)
    assert system.output_path == "out"


def test_a_partition_need_not_be_listed(tmp_path: Path) -> None:
    """Slurm is asked for it before a run."""
    system = _load(tmp_path, SLURM + '[[partitions]]\nname = "q"\n')
    assert isinstance(system, SlurmSystem)
    assert system.default_partition == "p"


def test_what_cloudai_takes_for_nothing(tmp_path: Path) -> None:
    lines = 'hf_home_path = "h"\ngpus_per_node = 0\nntasks_per_node = 0\nmonitor_interval = 0\n'
    variables = 'global_env_vars = {A = {default = "x"}, B = 2024-01-02}\n'
    system = _load(tmp_path, SLURM + lines + variables + PARTITION)
    assert isinstance(system, SlurmSystem)
    assert (system.gpus_per_node, system.ntasks_per_node, system.monitor_interval) == (None, None, None)
    assert system.global_env_vars == {"A": "x", "B": "2024-01-02"}


@every(
    ("text", "mistake"),
    [
        (SLURM, "partitions:"),
        (SLURM.replace('default_partition = "p"\n', "") + PARTITION, "default_partition:"),
        (f"{SLURM}gpu_per_node = 8\n{PARTITION}", r"system\.toml:4: gpu_per_node:"),
        ('name = "s"\nscheduler = "local"\ndefault_partition = "p"\n', "default_partition:"),
        # split as a shell would: an open quote must be found when loading, not as a traceback later
        (f'{SLURM}extra_srun_args = "--comment=\'open"\n{PARTITION}', "extra_srun_args"),
    ],
)
def test_a_mistake_in_a_system(tmp_path: Path, sentence: Sentence, text: str, mistake: str) -> None:
    with pytest.raises(BadInput, match=mistake) as caught:
        _load(tmp_path, text)
    sentence(caught)


@every(
    "line",
    [
        *('account = "a\\n#SBATCH --wrap=id"', 'extra_sbatch_args = ["--comment=x\\n#SBATCH --wrap=id"]'),
        *('mpi = "pmix\\r"', "gpus_per_node = -1", "ntasks_per_node = -1", "monitor_interval = -1"),
        *("global_env_vars = {A = [1]}", "monitor_interval = nan", 'global_env_vars = {"A B" = "x"}'),
        'global_env_vars = {A = "x\\u0000"}',
    ],
)
def test_what_would_break_a_job_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(BadInput, match=r"system\.toml:4: "):
        _load(tmp_path, f"{SLURM}{line}\n{PARTITION}")


UNUSABLE_WITH_SBATCH = (
    *("--clusters=b", "-M b", "-Mb", "--clust=b", "--test-only", "--array=0-3", "-a 0-3", "--wait", "-W", "--wrap=id"),
    *("--output=o.txt", "-o o.txt", "--out=o.txt", "--error=e.txt", "--help", "--usage", "--version", "-V"),
    *("--export=NONE", "--export=NIL", "--export=HOME,USER"),
)
UNUSABLE_WITH_SRUN = ("--clusters=b", "-o x", "--output x", "--error=x", "--jobid=7", "--test-only", "--export=NONE")


@every(
    ("key", "option"),
    [
        *(("extra_sbatch_args", option) for option in UNUSABLE_WITH_SBATCH),
        *(("extra_srun_args", option) for option in UNUSABLE_WITH_SRUN),
    ],
)
def test_an_option_that_hides_a_job_is_refused(tmp_path: Path, sentence: Sentence, key: str, option: str) -> None:
    value = ["--exclusive", option] if key == "extra_sbatch_args" else f"--label {option}"
    with pytest.raises(BadInput, match=rf"system\.toml:4: {key}:") as caught:
        _load(tmp_path, f"{SLURM}{key} = {json.dumps(value)}\n{PARTITION}")
    sentence(caught)


def test_other_options_pass(tmp_path: Path) -> None:
    sbatch = (
        *("--wait-all-nodes=1", "--export=ALL", "--export=ALL,A=b", "--exclude=n1", "-C h100", "-A lab", "--hold"),
        *("--array-x", "--comment=--output=x", "--mem=0", "-N 2", "--open-mode=append", "--requeue", "--exclusive"),
    )
    srun = "-l -u -W 60 --export=ALL,NCCL_DEBUG=INFO --container-writable --overlap --mpi=pmix -c 8"
    text = f'extra_sbatch_args = {json.dumps(sbatch)}\nextra_srun_args = "{srun}"\n'
    assert _load(tmp_path, SLURM + text + PARTITION).extra_sbatch_args == list(sbatch)
