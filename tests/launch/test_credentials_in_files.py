"""A credential of recognisable shape, wherever a TOML has room for text, is refused or in none of the files."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import toml
from pydantic import BaseModel

from cloudai_mbridge import pipeline
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models import SlurmSystem, TestDefinition, TestScenario
from cloudai_mbridge.models.scenario import TestRun
from tests.cases import every

VALUE = "n0ttobeseen"
SHAPES = (
    f"http://bob:{VALUE}@proxy:3128",
    f"Authorization: Bearer {VALUE}",
    f"ALL,HF_TOKEN={VALUE}",
    f"--export=NONE,WANDB_API_KEY={VALUE}",
)
CMD_ARGS = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "compute_dtype": "fp32", "num_gpus": 2}
SYSTEM = {
    **{"name": "c", "scheduler": "slurm", "default_partition": "main", "supports_gpu_directives_cache": True},
    "partitions": [{"name": "main", "groups": [{"name": "g"}]}],
    **{"install_path": "/opt/x", "gpus_per_node": 4, "global_env_vars": {"A": "b"}},
}
TEST = {
    **{"id": "t", "name": "t", "description": "d", "test_template_name": "MegatronBridge"},
    "cmd_args": CMD_ARGS,
    "git_repos": [{"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.3.0"}],
    "extra_env_vars": {"A": "b"},
    "nsys": {"enable": True},
}

Place = tuple[str | int, ...]


def text_fields(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Yield every field that takes text, with how the text is put into it."""
    for name, field in model.model_fields.items():
        kind = str(field.annotation)
        if "dict[" in kind and "str" in kind:
            yield field.alias or name, {"NAME": "{}"}
        elif "list[str]" in kind or ("list[" in kind and "Nodes" in kind):
            yield field.alias or name, ["{}"]
        elif "str" in kind:
            yield field.alias or name, "{}"


def places() -> Iterator[tuple[str, Place, Any]]:
    for name, form in text_fields(SlurmSystem):
        yield "system", (name,), form
    yield "system", ("partitions", 0, "groups", 0, "name"), "{}"
    for name, form in text_fields(TestRun):
        yield "test", (name,), form
    cmd_args = TestDefinition.model_fields["cmd_args"].annotation
    assert cmd_args is not None
    for name, form in text_fields(cmd_args):
        yield "test", ("cmd_args", name), form
    for place in (("git_repos", 0, "url"), ("git_repos", 0, "mount_as"), ("nsys", "output"), ("nsys", "task")):
        yield "test", place, "{}"
    yield "test", ("nsys", "extra_args"), ["{}"]
    yield "test", ("sweep", "include"), [{"env.A": "{}"}]
    yield "test", ("extra_env_vars", "SRUN_EXPORT_ENV"), "{}"
    for name, form in text_fields(TestScenario):
        yield "scenario", (name,), form


def put(data: Any, place: Place, value: Any) -> Any:
    """Return a copy of the data with a value at a place."""
    copied = json.loads(json.dumps(data))
    inner = copied
    for part in place[:-1]:
        inner = inner.setdefault(part, {}) if isinstance(part, str) else inner[part]
    inner[place[-1]] = value
    return copied


def write_and_prepare(directory: Path, whole: Mapping[str, Any]) -> Path:
    """Do what `mbridge dry-run` does, and return the directory that was written."""
    for name in ("system", "scenario"):
        (directory / f"{name}.toml").write_text(toml.dumps(whole[name]))
    request = pipeline.Request(directory / "system.toml", directory / "scenario.toml", None, directory / "out")
    return pipeline.write(pipeline.plan(request))


def leaks(directory: Path, whole: Mapping[str, Any]) -> list[str]:
    """Return what holds the credential: files, or the message that refuses it."""
    try:
        root = write_and_prepare(directory, whole)
    except BadInput as error:
        return [str(error)] if VALUE in str(error) else []
    return [path.name for path in root.rglob("*") if path.is_file() and VALUE in path.read_text()]


@every(("kind", "place", "form"), list(places()))
@every("launcher", ["embedded", "megatron_bridge"])
def test_a_credential_is_refused_or_in_no_file(
    kind: str, place: Place, form: Any, launcher: str, tmp_path: Path
) -> None:
    test = put(TEST, ("cmd_args", "launcher"), launcher)
    if launcher == "megatron_bridge":
        test["cmd_args"] |= {"model_family_name": "llama", "compute_dtype": "bf16"}
    for i, shape in enumerate(SHAPES):
        value = json.loads(json.dumps(form).replace("{}", shape))
        whole = {"system": SYSTEM, "scenario": {"name": "s", "Tests": [test]}}
        if kind == "test":
            whole["scenario"] = put(whole["scenario"], ("Tests", 0, *place), value)
        else:
            whole[kind] = put(whole[kind], place, value)
        directory = tmp_path / str(i)
        directory.mkdir()
        assert leaks(directory, whole) == []


KEYS = (
    *(f"http://bob:{VALUE}@proxy:3128", f"Authorization: Bearer {VALUE}", f"Basic {VALUE}A==", f"HF_TOKEN={VALUE}"),
    *(f"logger.wandb_api_key={VALUE}", f"--env=HF_TOKEN={VALUE}", f"hf_{VALUE}{'A' * 20}", f"=hf_{VALUE}{'A' * 20}"),
    f"model.x=http://bob:{VALUE}@proxy:1",
)
TABLES: tuple[tuple[str, Place], ...] = (
    *(("test", (name,)) for name in ("extra_cmd_args", "cmd_args", "extra_env_vars", "sweep", "nsys")),
    *(("test", ()), ("test", ("sweep", "include", 0)), ("test", ("sweep", "exclude", 0))),
    *(("system", (name,)) for name in ("global_env_vars", "prices", "reports")),
    ("system", ()),
)


@every(("kind", "table"), TABLES)
def test_no_message_shows_the_credential_in_a_key(kind: str, table: Place, tmp_path: Path) -> None:
    test = {**TEST, "sweep": {"include": [{}], "exclude": [{}]}} if len(table) > 1 else TEST
    for i, (key, value) in enumerate((key, value) for key in KEYS for value in ("", "x", 5)):
        system = put(SYSTEM, (*table, key), value) if kind == "system" else SYSTEM
        tests = [put(test, (*table, key), value) if kind == "test" else test]
        directory = tmp_path / str(i)
        directory.mkdir()
        assert leaks(directory, {"system": system, "scenario": {"name": "s", "Tests": tests}}) == []


def test_a_proxy_with_a_password_travels_in_the_environment(tmp_path: Path) -> None:
    proxy = f"http://bob:{VALUE}@proxy:3128"
    system = put(SYSTEM, ("global_env_vars", "https_proxy"), proxy)
    scenario = {"name": "s", "Tests": [put(TEST, ("extra_env_vars", "CURL"), f"Authorization: Bearer {VALUE}")]}
    (tmp_path / "system.toml").write_text(toml.dumps(system))
    (tmp_path / "scenario.toml").write_text(toml.dumps(scenario))
    request = pipeline.Request(tmp_path / "system.toml", tmp_path / "scenario.toml", None, tmp_path / "out")
    (run,) = pipeline.plan(request).plan.runs
    assert run.secret_env == {"https_proxy": proxy, "CURL": f"Authorization: Bearer {VALUE}"}
    assert run.env == {"A": "b"}
