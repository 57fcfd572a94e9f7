"""Mounts, images, paths and names that a program behind bash would run, and those that only look so.

A stand-in for srun does with its options what pyxis 0.24 and enroot 4.1 do: it splits the mounts, writes them into a
script and has bash source it. Where `MBRIDGE_ENROOT_PREFIX` names an installed enroot (`bin/enroot`) with a
`plugstack.conf` of pyxis, and `MBRIDGE_ENROOT_IMAGE` an image of its, real containers are started, too.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every
from tests.sandbox.cluster import SlurmSandbox

PREFIX, IMAGE = os.environ.get("MBRIDGE_ENROOT_PREFIX"), os.environ.get("MBRIDGE_ENROOT_IMAGE", "")
SYSTEM = """name = "c"
scheduler = "slurm"
install_path = "{install}"
default_partition = "main"
supports_gpu_directives_cache = false
monitor_interval = 0.3
{system}
[[partitions]]
name = "main"
"""
EMBEDDED = """[[Tests]]
id = {id}
name = "t"
description = "d"
test_template_name = "MegatronBridge"
{test}
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 3
{args}
"""
UPSTREAM = """[[Tests]]
id = {id}
name = "t"
description = "d"
test_template_name = "MegatronBridge"
{test}
[[Tests.git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.6.0"
[Tests.cmd_args]
model_family_name = "qwen"
model_recipe_name = "qwen3_30b_a3b"
gpu_type = "gb200"
num_gpus = 8
gpus_per_node = 4
offline = true
{args}
"""
SQSH = 'container_image = "/images/a.sqsh"'
RUN = "$(>PWNED)"  # without a blank, which pyxis escapes


def mounts(*values: str) -> str:
    return f"extra_container_mounts = {json.dumps(values)}"


def variables(**values: str) -> str:
    return "extra_env_vars = { " + ", ".join(f"{name} = {json.dumps(value)}" for name, value in values.items()) + " }"


# key -> the test's own keys, its arguments
NASTY = {
    "command": (mounts(f"/data:/z{RUN}"), SQSH),
    "backtick": (mounts("/data`>PWNED`:/z"), SQSH),
    "quote": (mounts('/data"; touch PWNED; ":/z'), SQSH),
    "flags": (mounts(f"/data:/z:ro{RUN}"), SQSH),
    "tmpfs": (mounts(f"tmpfs:/z{RUN}"), SQSH),
    "arithmetic": (mounts("/data$((x[`>PWNED`])):/z"), SQSH),
    "default": (mounts("/data${x:-$(>PWNED)}:/z"), SQSH),
    "escaped": (mounts(r"/data\$(>PWNED):/z"), SQSH),
    "line": (mounts("/data:/z\n}\ntouch PWNED\nx() {"), SQSH),
    "custom": ("", f"{SQSH}\ncustom_mounts = {json.dumps(f'/a:/b,/c{RUN}:/d')}"),
    "home": ("", f"{SQSH}\nnemo_home = {json.dumps(f'/h{RUN}')}"),
    "reached": (f"{mounts('$D/x:/z')}\n{variables(D='$E', E=f'/d{RUN}')}", SQSH),
    "file": ("", f"container_image = {json.dumps(chr(39).join(['/i/', ';touch PWNED;', '.sqsh']))}"),
    "image": ("", f"container_image = {json.dumps(f'a{RUN}')}"),
    "axis": ("", f'container_image = ["/images/a.sqsh", {json.dumps(f"a;{RUN}")}]'),
    "srun": (f"extra_srun_args = {json.dumps(f'--container-mounts={chr(39)}/a{RUN}:/b{chr(39)}')}", SQSH),
    "names": (f"extra_srun_args = {json.dumps(f'{chr(39)}--container-env=HOME-{RUN}{chr(39)}')}", SQSH),
    "bash": (variables(BASH_ENV=RUN), ""),
    "pyxis": (variables(PYXIS_CONTAINER_IMAGE="/images/a.sqsh", PYXIS_CONTAINER_MOUNTS=f"/a:/b{RUN}"), ""),
    "include": ("", f"{SQSH}\n[Tests.sweep]\ninclude = [{{ nemo_home = {json.dumps(f'/h{RUN}')} }}]"),
}
NASTY_UPSTREAM = {
    "shell": (mounts("/data;touch PWNED;:/z"), ""),
    "enroot": (mounts(f"/data{RUN}:/z"), ""),
    "image": ("", 'container_image = "/i/a;touch PWNED;.sqsh"'),
    "saved": ("", 'save_dir = "/ckpt/`>PWNED`"'),
    "logs": ("", 'log_dir = "/logs;touch PWNED"'),
    "experiment": ("", f"wandb_project_name = 'p'\nwandb_experiment_name = {json.dumps(f'a{RUN}')}"),
    "recipe": ("", f"use_recipes = true\nconfig_variant = {json.dumps(f'a{RUN}')}"),
    "argument": ("", 'dataset_root = "/d; touch PWNED"'),
    "override": (f'extra_cmd_args = {{ "model.x" = {json.dumps(f"1 & {RUN}")} }}', ""),
    "place": (mounts("/a:/b"), 'dataset_paths = "/d | touch PWNED"'),
}


def write_files(place: Path, template: str, tests: dict[str, tuple[str, str]], system: str = "") -> list[str]:
    (place / "system.toml").write_text(SYSTEM.format(install=place / "install", system=system))
    texts = (template.format(id=json.dumps(key), test=test, args=args) for key, (test, args) in tests.items())
    (place / "scenario.toml").write_text('name = "s"\n' + "".join(texts))
    return [f"--system-config={place / 'system.toml'}", f"--test-scenario={place / 'scenario.toml'}"]


def touched(place: Path) -> list[Path]:
    return [*place.rglob("PWNED*"), *Path().glob("PWNED*")]


@every(("template", "nasty"), [(EMBEDDED, NASTY), (UPSTREAM, NASTY_UPSTREAM)])
def test_none_is_planned(template: str, nasty: dict[str, tuple[str, str]], tmp_path: Path, mbridge: Any) -> None:
    """Each of them alone, so that none hides behind another."""
    for key, values in nasty.items():
        files = write_files(tmp_path, template, {key: values})
        for command in (["verify-configs", tmp_path / "scenario.toml"], ["dry-run", *files]):
            done = mbridge(*command, "--output-dir", tmp_path / "out") if command[0] == "dry-run" else mbridge(*command)
            assert done.returncode == 2, (key, command[0], done.stdout, done.stderr)
            assert "Traceback" not in done.stderr
            assert f"test {key!r}: " in done.stderr, done.stderr
            assert len(done.stderr.splitlines()) <= 2, done.stderr
    assert not (tmp_path / "out").exists()
    assert not touched(tmp_path)


@every("key", ["extra_srun_args", "extra_sbatch_args"])
def test_options_of_a_system(key: str, tmp_path: Path, mbridge: Any) -> None:
    option = f"--container-mounts=/a{RUN}:/b"
    value = [option] if key == "extra_sbatch_args" else f"'{option}'"
    files = write_files(tmp_path, EMBEDDED, {"t": ("", "")}, f"{key} = {json.dumps(value)}")
    done = mbridge("dry-run", *files, "--output-dir", tmp_path / "out")
    assert done.returncode == 2
    assert f"system 'c': {key}: --container-mounts=" in done.stderr


@every("name", [f"a{RUN}", "a`>PWNED`", 'a"b', "a'b", "$HOME", "a,b", "a:b", "a b", "a\nb", r"a\b"])
def test_an_output_directory_that_no_container_can_mount(name: str, tmp_path: Path, mbridge: Any) -> None:
    files = write_files(tmp_path, EMBEDDED, {"t": ("", SQSH)})
    for command in ("dry-run", "run"):
        done = mbridge(command, *files, "--output-dir", tmp_path / name)
        assert done.returncode == 2, (done.stdout, done.stderr)
        assert "--output-dir" in done.stderr
    assert not (tmp_path / name).exists(), "nothing is written before it is refused"
    assert not touched(tmp_path)
    if "\\" in name:  # Slurm expands it
        return
    plain = write_files(tmp_path, EMBEDDED, {"t": ("", "")})
    assert mbridge("dry-run", *plain, "--output-dir", tmp_path / name).returncode == 0, "without a container it is good"


@every("name", ["a=b", "a+b@c", "~a%", "ünï", "a#b", "a;b", "a[b](c)"])
def test_an_output_directory_that_is_good_in_a_container(name: str, tmp_path: Path, mbridge: Any) -> None:
    files = write_files(tmp_path, EMBEDDED, {"t": ("", SQSH)})
    done = mbridge("dry-run", *files, "--output-dir", tmp_path / name)
    assert done.returncode == 0, done.stderr


# What pyxis and enroot do with srun's options
SRUN = """#!{python}
import os, subprocess, sys
words, options = sys.argv[1:], {{}}
while words[0].startswith("--"):
    name, _, value = words.pop(0).partition("=")
    options[name] = value
lines = []
for mount in options["--container-mounts"].split(","):
    source, _, rest = mount.partition(":")
    target, _, flags = rest.partition(":")
    assert source.startswith((".", "/")) or source in ("tmpfs", "umount"), mount
    assert target.startswith((".", "/")), mount
    lines.append(f'echo "{{source}} {{target}} x,{{flags.replace("+", ",")}}"')
with open("config", "w") as file:
    file.write("mounts() {{\\n" + "\\n".join(lines) + "\\n}}\\n")
table = subprocess.run(["bash", "-eu", "-c", "source ./config; mounts"], check=True, capture_output=True, text=True)
shim = f"shim() {{{{ echo \\"$1\\"; }}}}\\nshim '{{options['--container-image']}}'"
subprocess.run(["bash", "-eu"], input=shim, check=True, capture_output=True, text=True)
open("table", "w").write(table.stdout)
"""


@pytest.fixture
def srun(tmp_path: Path) -> dict[str, str]:
    """Return the environment of a job whose srun is the stand-in."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "srun").write_text(SRUN.format(python=sys.executable))
    (tools / "srun").chmod(0o755)
    job = {"SLURM_JOB_NAME": "mbridge-t", "SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_NODELIST": "n1"}
    return {**os.environ, **job, "PATH": f"{tools}:{os.environ['PATH']}", "HOME": "/home/me"}


def run_job(place: Path, env: dict[str, str]) -> tuple[Path, int]:
    """Run the script of the only run as Slurm would; return its directory and exit code."""
    (script,) = place.glob("out/*/*/*/0/job.sbatch")
    return script.parent, subprocess.run(["bash", script.name], cwd=script.parent, env=env, check=False).returncode


def test_mounts_that_are_right_arrive(tmp_path: Path, mbridge: Any, srun: dict[str, str]) -> None:
    given = ("/a=b+c@d%e~:/x:ro+rprivate", "/data/ünï:/u", "tmpfs:/scratch", "umount:/tmp", "$D/y:/y", "~/c:/c", "/w")
    files = write_files(tmp_path, EMBEDDED, {"t": (f"{mounts(*given[:-1], '/w:/w')}\n{variables(D='/d;#&|')}", SQSH)})
    done = mbridge("dry-run", *files, "--output-dir", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    directory, code = run_job(tmp_path, srun)
    assert code == 0
    table = (directory / "table").read_text().splitlines()
    assert table == [
        f"{directory} {directory} x,",
        *("/a=b+c@d%e~ /x x,ro,rprivate", "/data/ünï /u x,", "tmpfs /scratch x,", "umount /tmp x,"),
        *("/d;#&|/y /y x,", "/home/me/c /c x,", "/w /w x,"),
    ]
    assert not touched(tmp_path)


@every("value", [f"/d{RUN}", "/d`>PWNED`", '/d";touch PWNED;"', "/d$x"])
def test_a_variable_that_only_the_job_knows(value: str, tmp_path: Path, mbridge: Any, srun: dict[str, str]) -> None:
    files = write_files(tmp_path, EMBEDDED, {"t": (mounts("$MB_TEST_DATA/y:/y"), SQSH)})
    shutil.rmtree(tmp_path / "out", ignore_errors=True)
    assert mbridge("dry-run", *files, "--output-dir", tmp_path / "out").returncode == 0
    directory, code = run_job(tmp_path, {**srun, "MB_TEST_DATA": value})
    assert code == 1
    assert (directory / "exit_code.txt").read_text() == "1\n"
    assert not (directory / "config").exists()
    assert not touched(tmp_path)


def test_a_directory_that_was_moved(tmp_path: Path, mbridge: Any, srun: dict[str, str]) -> None:
    files = write_files(tmp_path, EMBEDDED, {"t": ("", SQSH)})
    assert mbridge("dry-run", *files, "--output-dir", tmp_path / "out").returncode == 0
    moved = tmp_path / f"moved{RUN}"
    moved.mkdir()
    (tmp_path / "out").rename(moved / "out")
    directory, code = run_job(moved, srun)
    assert code == 1
    assert not (directory / "config").exists()
    assert not touched(moved)


def test_the_spelling_of_an_image(tmp_path: Path, mbridge: Any) -> None:
    given, written = "nvcr.io/nvidia/nemo:26.06", "nvcr.io#nvidia/nemo:26.06"
    for template, name in ((EMBEDDED, "job.sbatch"), (UPSTREAM, "launcher.sh")):
        files = write_files(tmp_path, template, {"t": ("", f'container_image = "{given}"')})
        verified = mbridge("verify-configs", tmp_path / "scenario.toml")
        assert verified.returncode == 0, verified.stderr
        done = mbridge("dry-run", *files, "--output-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        for text in (verified.stdout, done.stdout.replace("\n", " ")):
            assert f"container_image {given!r} is passed on as {written!r}" in text
        (script,) = tmp_path.glob(f"{name}/*/*/*/0/{name}")
        assert written in script.read_text()
        assert given not in script.read_text()


@pytest.fixture
def containers() -> Iterator[SlurmSandbox]:
    """A cluster of one node with enroot and pyxis."""
    if not PREFIX or not Path(PREFIX, "plugstack.conf").is_file() or not Path(IMAGE).is_file():
        pytest.skip("no enroot and pyxis: MBRIDGE_ENROOT_PREFIX, MBRIDGE_ENROOT_IMAGE")
    directory = tempfile.mkdtemp(dir="/tmp", prefix="mb-")
    conf = f"PlugStackConfig={PREFIX}/plugstack.conf"
    before, os.environ["PATH"] = os.environ["PATH"], f"{PREFIX}/bin:{os.environ['PATH']}"
    try:
        with SlurmSandbox(directory, nodes=1, gpus=2, extra_conf=conf, die_with_parent=True) as sandbox:
            yield sandbox
            sandbox.stop(purge=True)
    finally:
        os.environ["PATH"] = before


@pytest.mark.slurm
def test_real_containers(containers: SlurmSandbox, mbridge: Any) -> None:
    """enroot runs a command in a mount, no scenario gets one there, and mounts that are right are mounted."""
    place = Path(tempfile.mkdtemp(dir=containers.directory))  # enroot hides /tmp of the container only
    mount = f"{place}:/z$(>{place}/PWNED)"
    shown = containers.run("srun", f"--container-image={IMAGE}", f"--container-mounts={mount}", "true")
    assert touched(place), f"enroot runs what stands in a mount: {shown}"
    (place / "PWNED").unlink()
    for key, (test, args) in NASTY.items():
        values = tuple(
            text.replace("/images/a.sqsh", IMAGE).replace("PWNED", f"{place}/PWNED") for text in (test, args)
        )
        files = write_files(place, EMBEDDED, {key: values})
        done = mbridge("run", *files, "--output-dir", place / "out", env=containers.env)
        assert done.returncode == 2, (key, done.stdout, done.stderr)
    assert not touched(place)
    odd = place / "dätä=+@~%"
    odd.mkdir()
    (odd / "marker").touch()
    given = mounts(f"{odd}:/d", "tmpfs:/scratch", "umount:/var/lock", "$MB_TEST_DATA:/e:ro", f"{place}:/tools")
    looks = place / "looks.sh"
    looks.write_text('#!/bin/sh\nls /d /e > "$PWD/seen"; cat /proc/mounts > "$PWD/mounts"\n')
    looks.chmod(0o755)
    test = f"{given}\n{variables(MB_TEST_DATA=str(odd))}"
    args = f"container_image = {json.dumps(IMAGE)}"
    files = write_files(place, EMBEDDED, {"t": (test, args)}, 'python_executable = "/tools/looks.sh"')
    done = mbridge("run", *files, "--output-dir", place / "out", env=containers.env)
    assert done.returncode == 1, "the stand-in trains nothing"
    deadline = time.monotonic() + 60
    while not (found := [*place.glob("out/*/t/*/0/mounts")]) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert found, [path.read_text() for path in place.glob("out/*/t/*/0/stderr.txt")]
    assert (found[0].parent / "seen").read_text().count("marker") == 2
    assert " /scratch tmpfs " in found[0].read_text()
    assert not touched(place)
