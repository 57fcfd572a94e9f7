"""Whatever a TOML holds reaches processes as data, never as shell."""

import json
import os
import shutil
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

NASTY = "\"; touch pwned; $(touch pwned) `touch pwned` ' && touch pwned #"
RECORDER = """#!{python}
import json, os, sys
json.dump({{"argv": sys.argv[1:], "env": dict(os.environ)}}, open("recorded.json", "w"))
"""

TEST_FIELDS = ("name", "description")
TEXT_ARGS = ("model_family_name", "gpu_type", "nemo_home")


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """Stands for Python on the compute node: writes down what reaches it, instead of training."""
    path = tmp_path / "recorder"
    path.write_text(RECORDER.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def quote(text: str) -> str:
    return json.dumps(text)


def write_case(
    directory: Path, system: str, test: str = "", args: str = "", run: str = "", name: str = "t"
) -> list[str]:
    directory.mkdir(exist_ok=True)
    (directory / "system.toml").write_text(system)
    (directory / "scenario.toml").write_text(
        f"name = {quote(NASTY)}\n[runner]\nsettle_s = 3\n"
        f"[[Tests]]\nid = {quote('id ' + NASTY)}\ntest_template_name = 'MegatronBridge'\n"
        f"name = {quote(name)}\ndescription = {quote(NASTY)}\n{run}\n"
        f"[Tests.cmd_args]\nlauncher = 'embedded'\nmodel_recipe_name = 'gpt_tiny'\nmax_steps = 5\nnum_gpus = 1\n"
        f"{args}\n[Tests.extra_env_vars]\nMBRIDGE_NASTY = {quote(NASTY)}\n"
    )
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml"]
    return ["run", *files, f"--output-dir={directory}/out"]


def nothing_was_touched(*directories: Path) -> bool:
    return not [path for directory in directories for path in directory.rglob("pwned")] and not Path("pwned").exists()


def the_run(directory: Path) -> Path:
    """Return the directory of the only run."""
    (script,) = [*directory.glob("out/*/*/*/0/run.sh"), *directory.glob("out/*/*/*/0/job.sbatch")]
    return script.parent


LOCAL = f"name = {quote(NASTY)}\nscheduler = 'local'\n[global_env_vars]\nMBRIDGE_GLOBAL = {quote(NASTY)}\n"


def test_local(tmp_path: Path, mbridge: Any, recorder: Path) -> None:
    args = "\n".join(f"{name} = {quote(NASTY)}" for name in ("model_family_name", "gpu_type"))
    system = f"python_executable = {quote(str(recorder))}\n" + LOCAL
    done = mbridge(*write_case(tmp_path / "case", system, args=args, name=NASTY))
    assert done.returncode == 1, done.stderr  # the recorder trains nothing
    recorded = json.loads((the_run(tmp_path / "case") / "recorded.json").read_text())
    assert recorded["env"]["MBRIDGE_NASTY"] == NASTY
    assert recorded["env"]["MBRIDGE_GLOBAL"] == NASTY
    assert recorded["argv"][-4:] == ["-m", "cloudai_mbridge.training", "--config", "training.json"]
    assert nothing_was_touched(tmp_path)


@pytest.mark.parametrize("key", ["output_path", "install_path", "python_executable"])
def test_local_system_strings(tmp_path: Path, mbridge: Any, recorder: Path, key: str) -> None:
    system = {"python_executable": str(recorder), key: NASTY}
    lines = "".join(f"{name} = {quote(text)}\n" for name, text in system.items())
    done = mbridge(*write_case(tmp_path / "case", lines + LOCAL))
    assert done.returncode == 1, done.stderr  # neither trains
    assert "Traceback" not in done.stderr
    run = the_run(tmp_path / "case")
    if key == "python_executable":
        assert NASTY in (run / "stderr.txt").read_text()  # bash looked for that very file
    else:
        assert (run / "recorded.json").is_file()
    assert nothing_was_touched(tmp_path)


def test_an_output_directory_with_a_nasty_name(tmp_path: Path, mbridge: Any, recorder: Path) -> None:
    argv = write_case(tmp_path / "case", f"python_executable = {quote(str(recorder))}\n" + LOCAL)
    out = tmp_path / NASTY.replace("/", "_")
    done = mbridge(*argv[:-1], "--output-dir", out)
    assert done.returncode == 1, done.stderr
    assert len(list(out.rglob("recorded.json"))) == 1
    assert nothing_was_touched(tmp_path)


@pytest.mark.long
def test_every_other_string_argument_is_refused_or_harmless(tmp_path: Path, mbridge: Any, recorder: Path) -> None:
    """Each string argument by itself: the recorder sees the text whole, or a rule or check names it."""
    from cloudai_mbridge.models import ResolvedCmdArgs

    names = [
        n for n, f in ResolvedCmdArgs.model_fields.items() if "str" in str(f.annotation) and n not in ("launcher",)
    ]
    assert len(names) > 30
    case = tmp_path / "case"
    for name in names:
        shutil.rmtree(case, ignore_errors=True)
        argv = write_case(
            case, f"python_executable = {quote(str(recorder))}\n" + LOCAL, args=f"{name} = {quote(NASTY)}"
        )
        if name == "model_recipe_name":
            path = case / "scenario.toml"
            path.write_text(path.read_text().replace("model_recipe_name = 'gpt_tiny'\n", ""))
        done = mbridge(*argv)
        assert done.returncode in (1, 2), (name, done.stderr)
        assert "Traceback" not in done.stderr, name
        assert nothing_was_touched(tmp_path), name


SLURM = """
name = {nasty}
scheduler = "slurm"
default_partition = "main"
python_executable = {python}
monitor_interval = 0.3
{extra}
[[partitions]]
name = "main"
[global_env_vars]
MBRIDGE_GLOBAL = {nasty}
"""


def slurm_system(python: Path, extra: str = "") -> str:
    return SLURM.format(nasty=quote(NASTY), python=quote(str(python)), extra=extra)


@pytest.mark.slurm
def test_slurm(tmp_path: Path, mbridge: Any, recorder: Path, cluster: Any) -> None:
    comment = "--comment=" + NASTY
    extra = f"extra_sbatch_args = [{quote(comment)}]\naccount = {quote(NASTY)}"
    done = mbridge(*write_case(tmp_path / "case", slurm_system(recorder, extra), name=NASTY), env=cluster.env)
    assert done.returncode == 1, done.stderr
    run = the_run(tmp_path / "case")
    recorded = json.loads((run / "recorded.json").read_text())
    assert recorded["env"]["MBRIDGE_NASTY"] == NASTY
    assert recorded["env"]["MBRIDGE_GLOBAL"] == NASTY
    (report,) = (tmp_path / "case/out").glob("*/report.json")
    (point,) = json.loads(report.read_text())["points"]
    shown = cluster.run("scontrol", "show", "job", point["job"]["job_id"]).stdout
    assert f"Comment={NASTY}" in shown
    assert f"Account={NASTY}".lower() in shown.lower()
    assert nothing_was_touched(tmp_path, cluster.directory)


@pytest.mark.slurm
@pytest.mark.parametrize(
    ("system_extra", "args", "run"),
    [
        ("extra_srun_args = '''--comment=\"; touch pwned; $(touch pwned)\"'''", "", ""),
        ("", f"container_image = {quote(NASTY)}", ""),
        ("", "", f"nodes = [{quote(NASTY)}]"),
        ("", "", f"exclude_nodes = [{quote(NASTY)}]"),
        (f"mpi = {quote(NASTY)}", "", ""),
        (f"distribution = {quote(NASTY)}", "", ""),
    ],
)
def test_slurm_refusals_touch_nothing(
    tmp_path: Path, mbridge: Any, recorder: Path, cluster: Any, system_extra: str, args: str, run: str
) -> None:
    argv = write_case(tmp_path / "case", slurm_system(recorder, system_extra), args=args, run=run)
    done = mbridge(*argv, env=cluster.env)
    assert done.returncode == (2 if "container_image" in args else 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert nothing_was_touched(tmp_path, cluster.directory)


@pytest.mark.parametrize("value", ["a\ntouch pwned", "a\r", "a\x7f"])
def test_a_line_break_cannot_leave_a_directive(
    tmp_path: Path, mbridge: Any, recorder: Path, sentence: Sentence, value: str
) -> None:
    done = mbridge(*write_case(tmp_path / "case", slurm_system(recorder, f"account = {quote(value)}")))
    assert done.returncode == 2
    sentence(done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_secrets_reach_the_job_and_no_file(tmp_path: Path, mbridge: Any, recorder: Path) -> None:
    token = "hf_" + "s3cr3t" * 5
    argv = write_case(
        tmp_path / "case", f"python_executable = {quote(str(recorder))}\n" + LOCAL, args=f"hf_token = {quote(token)}"
    )
    scenario = tmp_path / "case/scenario.toml"
    scenario.write_text(scenario.read_text() + f"MY_API_KEY = {quote(token)}\n")
    done = mbridge(*argv)
    recorded = the_run(tmp_path / "case") / "recorded.json"
    env = json.loads(recorded.read_text())["env"]
    assert env["HF_TOKEN"] == token
    assert env["MY_API_KEY"] == token
    recorded.unlink()
    files = [path for path in (tmp_path / "case/out").rglob("*") if path.is_file()]
    assert len(files) > 5
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert token not in done.stdout + done.stderr
    assert os.environ.get("HF_TOKEN") != token
