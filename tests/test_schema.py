"""`mbridge schema`: what editors are told of a TOML file is what `verify-configs` says of it."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from jsonschema import Draft7Validator, FormatChecker, ValidationError

from cloudai_mbridge.cli import cli
from cloudai_mbridge.commands.plan.verify import Finding, verify
from cloudai_mbridge.commands.setup.schema import KINDS
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.models.toml_source import dotted, read_toml
from tests.cases import every
from tests.golden import GoldenFile

REPOSITORY = Path(__file__).parents[1]
SCHEMAS = {kind: REPOSITORY / "docs/schemas" / f"{kind}.json" for kind in KINDS}
FOLDERS = {"test": "test_defs", "scenario": "conf/scenarios", "system": "systems", "policy": "conf/gates"}
SHIPPED = [(kind, path) for kind, folder in FOLDERS.items() for path in sorted((REPOSITORY / folder).glob("*.toml"))]

VALIDATORS = {
    kind: Draft7Validator(json.loads(path.read_text()), format_checker=FormatChecker(["date"]))
    for kind, path in SCHEMAS.items()
}
Mutation = tuple[tuple[str | int, ...], Any]
ARGS = dict(launcher="embedded", model_recipe_name="gpt_tiny", compute_dtype="fp32", num_gpus=1, gb=8)
BASE = {"name": "base", "description": "d", "test_template_name": "MegatronBridge", "cmd_args": ARGS}
REPO = {"url": "https://example.invalid/a.git", "commit": "main"}
# A file of each kind, with every table that it can have
FILES: dict[str, dict[str, Any]] = {
    "test": {
        **BASE,
        "extra_env_vars": {"A": "1", "B": ["1", "2"]},
        "extra_cmd_args": {"optimizer.weight_decay": "0.1"},
        "git_repos": [REPO],
        "nemo_run_repo": REPO,
        "nsys": {"enable": False},
        "metrics": {"warmup_steps": 1},
        "training_report": {"exclude_start_steps": 1},
        "sweep": {"exclude": [{"env.B": "2"}]},
        "predictor": {"any": 1},
        "agent_config": {"any": 1},
    },
    "scenario": {
        "name": "s",
        "Tests": [
            {"id": "named", "test_name": "base", "cmd_args": {"mb": 1}, "sweep": {"repeats": 1}, "git_repos": [REPO]},
            {
                **{"id": "inline", **BASE, "dependencies": [{"type": "start_post_comp", "id": "named"}]},
                **{"extra_env_vars": {"A": "1"}, "nsys": {"enable": False}, "metrics": {"warmup_steps": 1}},
            },
            {"id": "foreign", "name": "f", "description": "d", "test_template_name": "Sleep", "cmd_args": {"s": 1}},
        ],
        "reports": {"any": 1},
        "runner": {"retries": 1, "on_completion": {"command": ["a"], "webhook_env": "A"}},
    },
    "system": {
        "name": "c",
        "scheduler": "slurm",
        "default_partition": "p",
        "partitions": [{"name": "p", "groups": [{"name": "g", "nodes": ["n1"]}]}],
        "global_env_vars": {"A": "1", "B": 2, "C": {"default": "x"}},
        "prices": {"currency": "EUR", "gb200": 10.5, "per_gpu_hour": {"h100": 2}},
        "reports": {"any": 1},
    },
    "policy": {
        "name": "p",
        "history": {"file": "h.sqlite"},
        "metrics": [{"name": "step_time_s"}],
        "waivers": [
            {
                **{"point": "a", "metric": "step_time_s", "up_to": 0.1, "by": "Ada"},
                **{"reason": "driver 570 is slower, ticket 123", "until": date(2020, 1, 1)},
            }
        ],
    },
}
REMOVED = object()
VALUES: tuple[Any, ...] = (
    *("no such value", "3", " -7 ", "1.0", "1e3", "true", "OFF", "", "2026-12-31", "12:00:00"),
    *(0, 1, 7, -3, 0.0, 0.5, 2.0, float("inf"), True, False, date(2026, 1, 31)),
    *([], [1], ["a"], [0.5], [[]], [{}], ["a", 1], [["a"]], {}, {"no_such_key": 1}, {"default": 1}, {"a": "1"}),
)


def as_taplo(value: Any) -> Any:
    """Return TOML as taplo hands it to a schema."""
    if isinstance(value, dict):
        return {key: as_taplo(each) for key, each in value.items()}
    if isinstance(value, list):
        return [as_taplo(each) for each in value]
    if isinstance(value, date):
        return value.isoformat()
    return None if value in (float("inf"), float("-inf")) or value != value else value


def errors(kind: str, data: dict[str, Any]) -> list[ValidationError]:
    return list(VALIDATORS[kind].iter_errors(as_taplo(data)))


def place(error: ValidationError) -> str:
    missing = re.match("'(.*)' is a required property", error.message)
    return dotted([*error.absolute_path, *(missing.groups() if missing else ())])


@pytest.fixture(scope="module")
def tests_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tests")
    (directory / "base.toml").write_text(render_toml(BASE))
    return directory


def verified(path: Path, data: dict[str, Any], tests_dir: Path) -> Finding:
    path.write_text(render_toml(data))
    (finding,) = verify([path], None, tests_dir)
    return finding


def mistakes(finding: Finding) -> set[str]:
    """Return the places of unknown and missing keys, and of wrong types; not of what a validator of ours refuses."""
    mistake = r": (?:\S+:\d+: )?(\S+): (?:unknown key|is missing; add|.*must be (?!greater|less))"
    lines = [line for line in finding.text.splitlines() if "Value error, " not in line]
    return {found[1] for line in lines if (found := re.search(mistake, line))}


@every("kind", KINDS)
def test_the_files_for_editors_are_what_the_command_prints(golden_file: GoldenFile, kind: str) -> None:
    printed = CliRunner().invoke(cli, ["schema", kind]).output
    golden_file(SCHEMAS[kind], printed)
    Draft7Validator.check_schema(json.loads(printed))


def test_another_kind_is_refused() -> None:
    refused = CliRunner().invoke(cli, ["schema", "baseline"])
    assert refused.exit_code == 2
    assert "'baseline' is not one of 'test', 'scenario', 'system', 'policy'" in refused.output


@every(("kind", "path"), SHIPPED)
def test_shipped_files_are_right_and_name_their_schema(kind: str, path: Path) -> None:
    source = read_toml(path)
    assert not errors(kind, source.data)
    directive, _, name = source.text.partition("\n")[0].partition(" ")
    assert (directive, (path.parent / name).resolve()) == ("#:schema", SCHEMAS[kind])


@every("kind", KINDS)
def test_every_key_is_described(kind: str) -> None:
    def undescribed(schema: Any) -> Iterator[str]:
        for name, each in schema.items() if isinstance(schema, dict) else ():
            if name == "properties":
                yield from (key for key, value in each.items() if "description" not in value)
            for part in each if isinstance(each, list) else [each]:
                yield from undescribed(part)

    schema = VALIDATORS[kind].schema
    described = {key: part for key, part in schema.items() if key not in ("if", "allOf", "properties")}
    if kind in ("scenario", "policy"):
        described["properties"] = schema["properties"]
    assert not [name for name in undescribed(described) if name not in ("test_template_name", "default")]


def test_what_another_tool_runs_is_left_alone() -> None:
    foreign = {"name": "n", "test_template_name": "NcclTest", "cmd_args": {"nthreads": 1}, "any_key": 1}
    assert not errors("test", foreign)
    assert not errors("system", {"scheduler": "kubernetes", "any_key": 1})
    assert [place(error) for error in errors("system", {"scheduler": "slrum"})] == ["scheduler"]
    local = {"name": "l", "scheduler": "local"}
    assert not errors("system", local)
    assert [place(error) for error in errors("system", {**local, "account": "a"})] == ["account"]


TAPLO = shutil.which("taplo", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
WRONG = {
    "test": {
        "tpp = 2\n": "unknown key",
        'seq_length = "two"\n': "integer",
        "vp = [1, 2.5]\n": "integer",
        "[sweep]\nrepeat = 3\n": "unknown key",
    },
    "scenario": {
        "num_node = 2\n": "unknown key",
        "[Tests.cmd_args]\nmax_step = 2\n": "unknown key",
        "[runner]\nretries = [1]\n": "integer",
    },
    "system": {"gpu_per_node = 4\n": "unknown key", 'gpus_per_node = "four"\n': "integer"},
    "policy": {"min_run = 3\n": "unknown key", "[[metrics]]\nname = 'step_time_s'\nmargins = 1\n": "unknown key"},
}
HEADS = {
    "test": FOLDERS["test"] + "/gpt_tiny_sweep.toml",
    "scenario": FOLDERS["scenario"] + "/gpt_tiny_sweep.toml",
    "system": FOLDERS["system"] + "/local.toml",
    "policy": FOLDERS["policy"] + "/nightly.toml",
}


@pytest.mark.process
@pytest.mark.skipif(TAPLO is None, reason="TAPLO IS NOT INSTALLED (pip install taplo -c constraints.txt)")
@every(("kind", "lines", "message"), [(kind, *case) for kind, cases in WRONG.items() for case in cases.items()])
def test_taplo_marks_the_line_of_verify_configs(kind: str, lines: str, message: str, tmp_path: Path) -> None:
    """What VS Code's Even Better TOML shows."""
    shipped = (REPOSITORY / HEADS[kind]).read_text()
    head, _, rest = shipped.partition("\n")
    name = (REPOSITORY / HEADS[kind]).parent / head.removeprefix("#:schema ")
    path = tmp_path / "file.toml"
    path.write_text(f"#:schema {os.path.relpath(name, tmp_path)}\n{rest}{lines}")
    (finding,) = verify([path], None, REPOSITORY / FOLDERS["test"])
    assert message in finding.text
    assert TAPLO is not None
    done = subprocess.run([TAPLO, "lint", "--colors=never", "--no-auto-config", path], capture_output=True, text=True)
    marked = set(re.findall(rf"{re.escape(str(path))}:(\d+):", done.stderr))
    assert done.returncode == 1
    assert marked == set(re.findall(rf"{re.escape(str(path))}:(\d+):", finding.text)), done.stderr


def parts(kind: str, schema: Any) -> Iterator[dict[str, Any]]:
    """Yield where an editor looks for keys: in a schema, and in what its anyOf refers to."""
    for each in (schema, *schema.get("anyOf", ())):
        if isinstance(each, dict):
            reference = each.get("$ref", "").rpartition("/")[2]
            yield VALIDATORS[kind].schema["definitions"][reference] if reference else each


def mutations(
    kind: str, schema: Any, data: Any, path: tuple[str | int, ...] = (), *, every: bool
) -> Iterator[Mutation]:
    """Yield values for the keys that the schema or the data has, no value, and an unknown key in every table.

    every: all of them for every key, not half of them for one key of each type in a table.
    """
    if isinstance(data, list):
        for i, each in enumerate(data):
            yield from mutations(kind, schema.get("items", {}), each, (*path, i), every=every)
    if not isinstance(data, dict):
        return
    yield (*path, "no_such_key"), 1
    known = {key: value for part in parts(kind, schema) for key, value in part.get("properties", {}).items()}
    yield from (((*path, key), REMOVED) for key in data)
    seen = set()
    for key in {**known, **data}:
        kind_of = {name: value for name, value in known.get(key, {}).items() if name not in ("description", "default")}
        if every or (text := json.dumps(kind_of)) not in seen:
            seen.add("" if every else text)
            values = VALUES if every else VALUES[len(seen) % 2 :: 2]
            yield from (((*path, key), value) for value in values)
        yield from mutations(kind, known.get(key, {}), data.get(key), (*path, key), every=every)


def changed(data: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    whole = copy.deepcopy(data)
    table: Any = whole
    for part in path[:-1]:
        table = table[part]
    if value is REMOVED:
        table.pop(path[-1], None)
    else:
        table[path[-1]] = value
    return whole


def is_beyond_a_schema(kind: str, place: str, value: Any) -> bool:
    """Return whether JSON has no such difference: 2.0 is an integer, also of minutes, and a date is text."""
    is_strict = kind == "policy" or place.endswith("time_limit")
    return isinstance(value, date) or (is_strict and isinstance(value, float) and value.is_integer())


@pytest.mark.parametrize(
    ("kind", "every"),
    [
        *(("test", False), ("system", False), ("policy", True)),
        *(
            pytest.param(*one, marks=pytest.mark.long)
            for one in (("scenario", False), ("system", True), ("test", True))
        ),
    ],
)
def test_an_editor_marks_what_verify_configs_does(kind: str, every: bool, tmp_path: Path, tests_dir: Path) -> None:
    """With a wrong value, or an unknown key, at the places of a file."""
    path, num_refused, num_accepted, wrong = tmp_path / "file.toml", 0, 0, []
    for place_of, value in mutations(kind, VALIDATORS[kind].schema, FILES[kind], every=every):
        data = changed(FILES[kind], place_of, value)
        finding = verified(path, data, tests_dir)
        if finding.kind != kind:  # without the key by which it is known
            continue
        marked = {place(error) for error in errors(kind, data)}
        if finding.is_good:
            num_accepted += 1
            wrong += [f"accepted, but marked at {marked}: {place_of} = {value!r}"] * bool(marked)
        for mistake in mistakes(finding):
            num_refused += 1
            if not any(re.match(rf"{re.escape(mistake)}($|[.\[])", each) for each in marked) and not is_beyond_a_schema(
                kind, mistake, value
            ):
                wrong.append(f"not marked at {mistake}: {place_of} = {value!r}: {finding.text}")
    assert not wrong, f"{len(wrong)} of {num_refused + num_accepted}\n" + "\n".join(wrong[:40])
    assert num_accepted > 50
    assert num_refused > 100
