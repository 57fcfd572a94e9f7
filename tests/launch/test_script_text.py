"""The scripts as whole texts, and what must hold for every one of them."""

import json
import subprocess
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.launch import render
from cloudai_mbridge.launch.script import exports, render_local_script, render_slurm_script
from cloudai_mbridge.launch.write import create_root, write_plan, write_runs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from tests.cases import every
from tests.golden import Sentence
from tests.runs import planned_run, slurm_system

LOCAL = LocalSystem(name="here", scheduler="local")
NASTY = [
    *("$(touch pwned)", "`touch pwned`", "'; touch pwned; '", '"; touch pwned; "', "a\nb", "\\", "!!", "*", "~", "-n"),
    *("", " ", "é\u2028😀", "${HOME}", "a'b\"c", "#", "\t\r"),
]


def _run(**keys: Any) -> RunPlan:
    config = {"training_config": {"train": {"train_iters": 10}}, "definition": {"name": "t"}}
    return planned_run("sweep", **{"key": "sweep/tp2-mb1/0", **config, **keys})


@pytest.mark.process
@every(("env", "outer", "expected"), [({}, {}, "1"), ({}, {"Q": "9"}, "9"), ({"Q": "5"}, {"Q": "9"}, "5")])
def test_a_variable_of_the_recipe_is_set_where_there_is_none(
    env: dict[str, str], outer: dict[str, str], expected: str, tmp_path: Path
) -> None:
    """A real bash: the test's and the system's win, then the job's own."""
    run = _run(env=env, recipe_env={"Q": "1", "R": "a $(id)"})
    lines = "\n".join(["set -u", *exports(run), 'printf "%s|%s" "$Q" "$R"'])
    done = subprocess.run(["bash", "-c", lines], env={"PATH": "/usr/bin:/bin", **outer}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"{expected}|a $(id)", "")


def test_a_local_script() -> None:
    run = _run(env={"B": "two words", "A": "it's $(id)"}, time_limit="5", container_image="")
    assert (
        render_local_script(run, LOCAL)
        == """\
#!/bin/bash
# mbridge run sweep/tp2-mb1/0
_mbridge_token="${MBRIDGE_LOCAL_JOB:-}"
if [[ "$_mbridge_token" =~ ^[0-9a-f]{16}$ ]]; then
  ln -sT "job=$$.$_mbridge_token" "claim.$_mbridge_token" 2> /dev/null
  _mbridge_holder=$(readlink "claim.$_mbridge_token")
  if [ "$_mbridge_holder" != "job=$$.$_mbridge_token" ]; then
    echo "job=$$.$_mbridge_token token=$_mbridge_token holder=$_mbridge_holder" >> not_counted.txt
    if [ -n "$_mbridge_holder" ]; then exit 79; fi
    echo "mbridge: cannot write $PWD/claim.$_mbridge_token; the job ends without training" >&2
    exit 74
  fi
fi
rm -f exit_code.txt; echo "job=$$.$_mbridge_token nodes=$(uname -n)" >> started.txt
set -u
export A="it's \\$(id)"
export B="two words"
_mbridge_python="${MBRIDGE_PYTHON:-python3}"
"$_mbridge_python" -m cloudai_mbridge.training.one_machine \\
  --nproc-per-node 2 -m cloudai_mbridge.training --config training.json
_mbridge_exit=$?
echo "$_mbridge_exit" > exit_code.txt
exit "$_mbridge_exit"
"""
    )


def test_a_plain_slurm_script() -> None:
    assert (
        render_slurm_script(_run(num_nodes=2, ranks_per_node=4), slurm_system())
        == """\
#!/bin/bash
#SBATCH --job-name=mbridge-sweep-tp2-mb1-0
#SBATCH --partition=main
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --output=stdout.txt
#SBATCH --error=stderr.txt
#SBATCH --open-mode=append
#SBATCH --no-requeue
# mbridge run sweep/tp2-mb1/0
_mbridge_job="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
_mbridge_job="${_mbridge_job:-$SLURM_JOB_ID}"
# one job of an attempt trains, whatever became of the sbatch that submitted it
# of the name, for which a site may have several values: then the value given to sbatch
[[ "$SLURM_JOB_NAME" == *".${MBRIDGE_JOB_TOKEN:-no token}"* ]] ||
  if [[ "$SLURM_JOB_NAME" =~ .*\\.([0-9a-f]{16}) ]]; then MBRIDGE_JOB_TOKEN="${BASH_REMATCH[1]}"; fi
export MBRIDGE_JOB_TOKEN="${MBRIDGE_JOB_TOKEN:-}"
_mbridge_token="$MBRIDGE_JOB_TOKEN"
if [[ "$_mbridge_token" =~ ^[0-9a-f]{16}$ ]]; then
  ln -sT "job=$_mbridge_job" "claim.$_mbridge_token" 2> /dev/null
  _mbridge_holder=$(readlink "claim.$_mbridge_token")
  if [ "$_mbridge_holder" != "job=$_mbridge_job" ]; then
    echo "job=$_mbridge_job token=$_mbridge_token holder=$_mbridge_holder" >> not_counted.txt
    if [ -n "$_mbridge_holder" ]; then exit 79; fi
    echo "mbridge: cannot write $PWD/claim.$_mbridge_token; the job ends without training" >&2
    exit 74
  fi
fi
_mbridge_start="job=$_mbridge_job token=$_mbridge_token name=$SLURM_JOB_NAME restarts=${SLURM_RESTART_COUNT:-0}"
# a controller that was killed may have forgotten that a job has ended, and run it again; an administrator may
# requeue a success
_mbridge_end=$(cat exit_code.txt 2> /dev/null)
_mbridge_same="$_mbridge_start "
if [ "$_mbridge_end" = 0 ]; then _mbridge_same="${_mbridge_start%restarts=*}"; fi
if [ -n "$_mbridge_end" ] && grep -qsF "$_mbridge_same" started.txt; then exit "$_mbridge_end"; fi
rm -f exit_code.txt; echo "$_mbridge_start nodes=$SLURM_JOB_NODELIST" >> started.txt
set -u
_mbridge_python="${MBRIDGE_PYTHON:-python3}"
_mbridge_head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# two jobs may share a node: the port is the job's own, below the ephemeral range
_mbridge_port=$((15000 + SLURM_JOB_ID % 15000))
_mbridge_cpus=$(tr , "\\n" <<< "${SLURM_JOB_CPUS_PER_NODE:-$SLURM_CPUS_ON_NODE}" | sed 's/(.*//' | sort -n | head -n 1)
srun --cpus-per-task="$_mbridge_cpus" --kill-on-bad-exit=1 --nodes=2 --ntasks=2 --ntasks-per-node=1 \\
  bash -c 'export PET_NODE_RANK="$SLURM_NODEID"; exec "$@"' node \\
  "$_mbridge_python" -m torch.distributed.run \\
  --master-addr "$_mbridge_head_node" --master-port "$_mbridge_port" \\
  --nnodes 2 --nproc-per-node 4 -m cloudai_mbridge.training --config training.json
_mbridge_exit=$?
echo "$_mbridge_exit" > exit_code.txt
exit "$_mbridge_exit"
"""
    )


def test_a_slurm_script_with_all_options() -> None:
    run = _run(
        env={"A": "x y"},
        ranks_per_node=4,
        time_limit="00:10:00",
        nodes=("n1", "n2"),
        exclude_nodes=("n9",),
        container_image="nvcr.io#nvidia/nemo:26.02.00",
        container_mounts=("/a:/b", "/c d:/e"),
    )
    system = slurm_system(
        gpus_per_node=4,
        account="my team",
        mpi="pmix",
        distribution="block",
        extra_srun_args="--label --comment='a b'",
        extra_sbatch_args=["--exclusive", "--comment=x y"],
        container_mount_home=True,
        python_executable="/opt/my python/bin/python",
    )
    text = render_slurm_script(run, system)
    directives = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]
    assert directives == [
        *("--job-name=mbridge-sweep-tp2-mb1-0", "--partition=main", "--account='my team'", "--nodes=1"),
        *("--ntasks-per-node=4", "--gpus-per-node=4", "--time=00:10:00", "--nodelist=n1,n2", "--exclude=n9"),
        *("--distribution=block", "--output=stdout.txt", "--error=stderr.txt", "--open-mode=append", "--no-requeue"),
        *("--exclusive", "--comment='x y'"),
    ]
    assert 'export A="x y"\n' in text
    assert "_mbridge_python='/opt/my python/bin/python'\n" in text
    (srun,) = [line for line in text.splitlines() if line.startswith("srun ")]
    for option in (
        "--mpi=pmix",
        "'--container-image=nvcr.io#nvidia/nemo:26.02.00'",
        "--container-mount-home",
        "--label '--comment=a b'",
    ):
        assert f" {option} " in srun
    own = """  --container-mounts="$PWD:$PWD",/a:/b,"/c d:/e" --container-workdir="$PWD" \\"""
    assert own in text.splitlines()


@pytest.mark.process
@every("value", NASTY)
def test_bash_can_parse_every_script(tmp_path: Path, value: str) -> None:
    run = _run(env={"A": value}, container_image=value.replace("\n", " ") or "x", container_mounts=(value,))
    system = slurm_system(python_executable=value, account=value.replace("\n", "").replace("\t\r", "") or None)
    for name, text in {
        "run.sh": render_local_script(run, LOCAL.model_copy(update={"python_executable": value})),
        "job.sbatch": render_slurm_script(run, system),
    }.items():
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_directives_come_before_any_command() -> None:
    """sbatch stops reading directives at the first line that is neither empty nor a comment."""
    lines = render_slurm_script(_run(env={"A": "#SBATCH --wrap=id\n#SBATCH --nodes=9"}), slurm_system()).splitlines()
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert [line for line in lines[first:] if line.startswith("#SBATCH")] == ['#SBATCH --nodes=9"']
    assert lines[first].startswith("_mbridge_job=")


def test_gpus_are_asked_for_only_where_the_system_has_some() -> None:
    assert "--gpus-per-node" not in render_slurm_script(_run(), slurm_system())
    assert "#SBATCH --gpus-per-node=2\n" in render_slurm_script(_run(), slurm_system(gpus_per_node=8))


def test_render_gives_the_files_of_a_run() -> None:
    local, slurm = render(_run(), LOCAL), render(_run(), slurm_system())
    assert set(local) == {"training.json", "test.toml", "run.sh"}
    assert set(slurm) == {"training.json", "test.toml", "job.sbatch"}
    assert json.loads(local["training.json"]) == {"train": {"train_iters": 10}}


@pytest.mark.parametrize("system", [LOCAL, slurm_system()], ids=["local", "slurm"])
def test_a_script_does_not_know_where_it_lies(tmp_path: Path, system: LocalSystem | SlurmSystem) -> None:
    """`dry-run` and `run` write to different directories and must give the same bytes."""
    plan = ScenarioPlan("s", system.name, (_run(), _run(key="sweep/tp2-mb1/1", iteration=1)), ())
    roots = [create_root(tmp_path / name, "s", datetime(2026, 1, 2, 3, 4, 5)) for name in ("one", "other")]
    for root in roots:
        write_runs(plan, system, root)
        write_plan(plan, root)
    files = [{p.relative_to(root): p.read_bytes() for p in root.rglob("*") if p.is_file()} for root in roots]
    assert files[0] == files[1]
    assert len(files[0]) == 2 + 2 * 3
    for name, content in files[0].items():
        assert str(tmp_path).encode() not in content, name


# The root of a run


def test_a_root_is_always_new(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, 5)
    roots = [create_root(tmp_path / "deep" / "er", "my scenario", now) for _ in range(3)]
    assert [root.parent for root in roots] == [tmp_path / "deep" / "er"] * 3
    assert len(set(roots)) == 3
    assert roots[0].name.endswith("_2026-01-02_03-04-05")
    assert roots[1].name == roots[0].name + "_1"
    assert " " not in roots[0].name


def test_an_output_directory_that_is_a_file_is_bad_input(tmp_path: Path, sentence: Sentence) -> None:
    (tmp_path / "file").write_text("")
    for directory in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput) as caught:
            create_root(directory, "s", datetime(2026, 1, 2))
        sentence(caught)


def test_clocks_are_set_before_the_training_and_a_failure_ends_the_job() -> None:
    run = _run(node_commands=("sudo nvidia-smi -lgc 1500",), preempt_time_s=60, num_nodes=2, container_image="x")
    text = render_slurm_script(run, slurm_system(gpus_per_node=2))
    assert "#SBATCH --signal=TERM@60\n" in text
    clocks = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 sudo nvidia-smi -lgc 1500 || {\n"
    assert text.index(clocks) < text.index("--container-image=x")
    after = text[text.index(clocks) :].split("\n")[1:4]
    assert after[1] == '  echo "$_mbridge_exit" > exit_code.txt; exit "$_mbridge_exit"'
    assert "-lgc" not in render_local_script(run, LOCAL)


def test_a_link_in_place_of_a_file_of_the_run_is_not_followed(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.write_text("mine")
    root.mkdir()
    for name in ("plan.json.new", "plan.json", "system.toml"):
        (root / name).symlink_to(victim)
    plan = ScenarioPlan("s", "c", (_run(),), ())
    write_runs(plan, LocalSystem(name="l", scheduler="local"), root)
    write_plan(plan, root)
    assert victim.read_text() == "mine"
    assert not (root / "plan.json").is_symlink()
    assert json.loads((root / "plan.json").read_text())["scenario"] == "s"
