"""What is said of mistakes: one line each, with file, line, key, value and remedy, and never a secret."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import find_test_files, load_scenario, load_system, load_test_definition
from cloudai_mbridge.models.toml_source import suggest
from tests.cases import every
from tests.golden import Sentence

HEAD = 'name = "t"\ndescription = "d"\n'
INLINE = 'name = "n"\ndescription = "d"\ntest_template_name = "MegatronBridge"\n'


def _file(tmp_path: Path, text: str, name: str = "x.toml") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _mistakes(load: Callable[[Path], Any], path: Path) -> list[str]:
    with pytest.raises(BadInput) as caught:
        load(path)
    return str(caught.value).split("\n")


def _load_alone(path: Path) -> Any:
    return load_scenario(path, None)


@every(
    ("body", "line"),
    [
        ("[cmd_args]\ntpp = 1\n", 4),
        ("[cmd_args]\ntensor_model_parallel_size = 1\n", 4),
        ("[cmd_args]\ntensor_parallel = 1\n", 4),
        ("[cmd_args]\npipeline_parallel_size = 1\n", 4),
        ("[cmd_args]\nexpert_parallel = 1\n", 4),
        ("[cmd_args]\nbatch_size = 1\n", 4),
        ("[cmd_args]\ncp_size = 1\n", 4),
        ('[cmd_args]\nmodel_size = "8b"\n', 4),
        ("[cmd_args]\nmicro_batch_size = 1\n", 4),
        ("[metrics]\nwarmup_step = 1\n", 4),
        ('[[git_repos]]\nurl = "u"\ncommit = "c"\nmount = "m"\n', 6),
        ('[cmd_args]\ntp = "two"\n', 4),
        ("[cmd_args]\ntp = 1.5\n", 4),
        ('[cmd_args]\ntp = [1, "x"]\n', 4),
        ("[cmd_args]\ntp = []\n", 4),
        ('[cmd_args]\nlauncher = "slurm"\n', 4),
        ("[metrics]\nwarmup_steps = -1\n", 4),
        ("[extra_env_vars]\nA = 1\n", 4),
        ('[extra_env_vars]\n"A B" = "x"\n', 4),
        ('[extra_cmd_args]\n"=b" = "x"\n', 4),
        ('cmd_args = "tp=1"\n', 3),
        ('test_template_name = "NcclTest"\n', 1),
        *((f"[cmd_args]\nmax_steps = [1, {number}]\n", 4) for number in (2**63, -(2**63) - 1, 10**400)),
        # no process can receive a NUL character, so a value with one may not reach the sweep
        *(
            (f"[cmd_args]\n{key} = {value}\n", 4)
            for key in ("gpu_type", "wandb_project_name")
            for value in (r'"a\u0000b"', r'["ok", "a\u0000b"]')
        ),
    ],
)
def test_a_mistake_in_a_test_definition(tmp_path: Path, sentence: Sentence, body: str, line: int) -> None:
    path = _file(tmp_path, HEAD + body)
    (message,) = _mistakes(load_test_definition, path)
    assert message.startswith(f"{path}:{line}: " if line > 1 else f"{path}: ")
    sentence(message)


def test_a_missing_key_is_named(tmp_path: Path, sentence: Sentence) -> None:
    path = _file(tmp_path, 'name = "t"\n')
    (message,) = _mistakes(load_test_definition, path)
    assert message.startswith(f"{path}: description: ")
    sentence(message)


def test_every_mistake_gets_one_line(tmp_path: Path) -> None:
    path = _file(tmp_path, 'name = "t"\nfoo = 1\n[cmd_args]\ntp = "x"\npp = "y"\nnum_gpu = 3\n')
    messages = _mistakes(load_test_definition, path)
    assert sorted(message.removeprefix(str(path)).partition(": ")[2].split(":")[0] for message in messages) == [
        *("cmd_args.num_gpu", "cmd_args.pp", "cmd_args.tp", "description", "foo")
    ]


@every(
    "body",
    [
        *("[cmd_args]\nhf_token = {a = 'S3CRET'}\n", "[cmd_args]\nhf_token = ['S3CRET', 5]\n"),
        *("[cmd_args]\nwandb_key = ['S3CRET', 5]\n", "[extra_env_vars]\nHF_TOKEN = ['S3CRET', 5]\n"),
        *("[extra_env_vars]\nAWS_SECRET_ACCESS_KEY = {a = 'S3CRET'}\n", "[[cmd_args]]\nhf_token = 'S3CRET'\n"),
        *("extra_env_vars = [{HF_TOKEN = 'S3CRET'}]\n", "[extra_env_vars]\n'API-KEY' = 'S3CRET'\n"),
    ],
)
def test_a_secret_is_never_shown(tmp_path: Path, body: str) -> None:
    assert "S3CRET" not in "\n".join(_mistakes(load_test_definition, _file(tmp_path, HEAD + body)))
    inline = body.replace("[cmd_args]", "[Tests.cmd_args]").replace("[extra_env_vars]", "[Tests.extra_env_vars]")
    scenario = f'name = "s"\n[[Tests]]\nid = "a"\n{INLINE}{inline}'
    assert "S3CRET" not in "\n".join(_mistakes(_load_alone, _file(tmp_path, scenario, "s.toml")))


def test_suggestions(sentence: Sentence) -> None:
    sentence(suggest("gpt_tinny", ["gpt_tiny", "llama3_8b"]))
    sentence(suggest("zzz", ["tp", "pp"]))


# Scenarios


def test_an_inline_test_needs_no_tests_directory(tmp_path: Path) -> None:
    path = _file(tmp_path, f'name = "s"\n[[Tests]]\nid = "a"\n{INLINE}num_nodes = "2"\n[Tests.cmd_args]\ntp = [1, 2]\n')
    (test,) = load_scenario(path, None).tests
    assert (test.run.num_nodes, test.definition.name, test.definition.cmd_args.tp) == (2, "n", [1, 2])


SCENARIO = 'name = "s"\n[[Tests]]\nid = "a"\n'
OF_T = f'{SCENARIO}test_name = "t"\n'


def test_overrides_merge_table_by_table(tmp_path: Path) -> None:
    _file(tmp_path, HEAD + '[cmd_args]\ntp = 2\npp = 1\n[extra_env_vars]\nA = "1"\nB = "2"\n', "tests/t.toml")
    path = _file(tmp_path, OF_T + '[Tests.cmd_args]\npp = [1, 2]\n[Tests.extra_env_vars]\nB = "3"\n')
    (test,) = load_scenario(path, tmp_path / "tests").tests
    assert (test.definition.cmd_args.tp, test.definition.cmd_args.pp) == (2, [1, 2])
    assert test.definition.extra_env_vars == {"A": "1", "B": "3"}
    assert test.definition.cmd_args.model_fields_set == {"tp", "pp"}


def test_a_mistake_in_an_override_points_into_the_scenario(tmp_path: Path, sentence: Sentence) -> None:
    _file(tmp_path, HEAD, "tests/t.toml")
    path = _file(tmp_path, OF_T + "[Tests.cmd_args]\ntpp = 2\n")
    (message,) = _mistakes(lambda p: load_scenario(p, tmp_path / "tests"), path)
    assert f"{path}:6: Tests[0].cmd_args.tpp:" in message
    sentence(message)


def test_an_unknown_test_name_suggests_the_nearest(tmp_path: Path, sentence: Sentence) -> None:
    _file(tmp_path, HEAD.replace('"t"', '"gpt_tiny"'), "tests/t.toml")
    path = _file(tmp_path, 'name = "s"\n[[Tests]]\nid = "a"\ntest_name = "gpt_tinny"\n')
    (message,) = _mistakes(lambda p: load_scenario(p, tmp_path / "tests"), path)
    assert f"{path}:4: Tests[0].test_name:" in message
    sentence(message)
    (message,) = _mistakes(_load_alone, path)
    assert "--tests-dir" in message


@every(
    ("body", "line"),
    [
        ("", 2),
        ('test_name = "t"\niterations = 0\n', 5),
        ('test_name = "t"\ntime_limit = "soon"\n', 5),
        ('test_name = "t"\nnum_node = 2\n', 5),
        ('test_name = "t"\n[[Tests.dependencies]]\ntype = "after"\nid = "a"\n', 6),
        ('test_name = "t"\ntest_template_name = "MegatronBridge"\n', 2),
    ],
)
def test_a_mistake_in_a_scenario(tmp_path: Path, sentence: Sentence, body: str, line: int) -> None:
    path = _file(tmp_path, SCENARIO + body)
    (message,) = _mistakes(_load_alone, path)
    assert message.startswith(f"{path}:{line}: ")
    sentence(message)


# Directories of tests


def test_a_tests_directory_may_hold_other_templates(tmp_path: Path, sentence: Sentence) -> None:
    """CloudAI's own directory mixes templates; only the one that is named must be ours."""
    _file(tmp_path, HEAD, "tests/a.toml")
    _file(
        tmp_path,
        'name = "nccl"\ndescription = "d"\ntest_template_name = "NcclTest"\n[cmd_args]\nsubtest_name = "all_reduce"\n',
        "tests/deep/er/nccl.toml",
    )
    (tmp_path / "tests/readme.md").write_text("no TOML")
    assert set(find_test_files(tmp_path / "tests").by_name) == {"t", "nccl"}

    ours = _file(tmp_path, OF_T, "ours.toml")
    assert load_scenario(ours, tmp_path / "tests").tests[0].definition.name == "t"

    theirs = _file(tmp_path, 'name = "s"\n[[Tests]]\nid = "a"\ntest_name = "nccl"\n', "theirs.toml")
    (message,) = _mistakes(lambda p: load_scenario(p, tmp_path / "tests"), theirs)
    sentence(message)


def test_a_scenario_of_several_templates_runs_ours_and_names_the_others(tmp_path: Path, sentence: Sentence) -> None:
    _file(tmp_path, HEAD, "tests/a.toml")
    _file(tmp_path, 'name = "nccl"\ntest_template_name = "NcclTest"\n', "tests/nccl.toml")
    mixed = OF_T + '[[Tests]]\nid = "b"\ntest_name = "nccl"\n'
    inline = '[[Tests]]\nid = "c"\nname = "s"\ndescription = "d"\ntest_template_name = "Sleep"\ncmd_args = {s = 1}\n'
    loaded = load_scenario(_file(tmp_path, mixed + inline, "mixed.toml"), tmp_path / "tests")
    assert [test.run.id for test in loaded.tests] == ["a"]
    assert loaded.foreign == (("b", "NcclTest"), ("c", "Sleep"))
    sentence(loaded.notes[0])

    waits = mixed.replace('"t"\n', '"t"\ndependencies = [{type = "start_post_comp", id = "b"}]\n', 1)
    (message,) = _mistakes(lambda p: load_scenario(p, tmp_path / "tests"), _file(tmp_path, waits, "waits.toml"))
    sentence(message)


def test_tests_of_one_name_are_refused_only_where_the_name_is_used(tmp_path: Path, sentence: Sentence) -> None:
    _file(tmp_path, HEAD, "tests/sub/a.toml")
    _file(tmp_path, HEAD, "tests/sub/b.toml")
    _file(tmp_path, HEAD.replace('"t"', '"other"'), "tests/c.toml")
    _file(tmp_path, 'description = "nameless"\n', "tests/d.toml")
    scenario = OF_T
    assert load_scenario(_file(tmp_path, scenario.replace('"t"', '"other"')), tmp_path / "tests").tests
    path = _file(tmp_path, scenario)
    (message,) = _mistakes(lambda p: load_scenario(p, tmp_path / "tests"), path)
    assert f"{path}:4: Tests[0].test_name:" in message
    sentence(message)

    top = _file(tmp_path, HEAD, "tests/t.toml")  # CloudAI does not look into subdirectories
    assert find_test_files(tmp_path / "tests").find("t", "").path == top


def test_a_tests_directory_that_is_not_there(tmp_path: Path, sentence: Sentence) -> None:
    (message,) = _mistakes(find_test_files, tmp_path / "gone")
    sentence(message)
    assert find_test_files(None).by_name == {}


def test_a_file_like_cloudais(tmp_path: Path) -> None:
    """The shape of CloudAI's own MegatronBridge tests and scenarios."""
    definition = """\
name = "mb_qwen"
description = "Qwen through the upstream launcher"
test_template_name = "MegatronBridge"
extra_container_mounts = []
[[git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "v0.3.0"
mount_as = "/opt/Megatron-Bridge"
[cmd_args]
container_image = "nvcr.io#nvidia/nemo:26.02.00"
hf_token = ""
enable_vboost = true
cuda_graph_scope = ["attn", "moe_router"]
moe_a2a_overlap = [true, false]
[extra_env_vars]
NCCL_P2P_NET_CHUNKSIZE = ["131072", "262144"]
"""
    scenario = """\
name = "qwen"
job_status_check = false
[[Tests]]
id = "first"
test_name = "mb_qwen"
num_nodes = "2"
time_limit = "01:00:00"
sol = 1.5
weight = 10
[[Tests]]
id = "second"
test_name = "mb_qwen"
nodes = ["node-[001-002]"]
iterations = 3
  [[Tests.dependencies]]
  type = "start_post_comp"
  id = "first"
"""
    _file(tmp_path, definition, "test/qwen.toml")
    first, second = load_scenario(_file(tmp_path, scenario), tmp_path / "test").tests
    assert (first.run.num_nodes, first.run.time_limit) == (2, "01:00:00")
    assert first.definition.cmd_args.launcher == "megatron_bridge"
    assert first.definition.cmd_args.moe_a2a_overlap == [True, False]
    assert second.run.dependencies[0].id == "first"
    assert second.definition.git_repos[0].mount_as == "/opt/Megatron-Bridge"


@every("value", ['"lsf"', '["slurm"]', "{a = 1}", "5"])
def test_a_scheduler_of_others_or_of_the_wrong_type(tmp_path: Path, sentence: Sentence, value: str) -> None:
    path = _file(tmp_path, f'name = "s"\nscheduler = {value}\n')
    (message,) = _mistakes(load_system, path)
    assert message.startswith(f"{path}:2: scheduler: ")
    sentence(message)


def test_an_unknown_argument_is_warned_of_once_where_it_is_written(tmp_path: Path) -> None:
    _file(tmp_path, HEAD + "[cmd_args]\nfoo = 1\n", "t/t.toml")
    path = _file(tmp_path, OF_T + "[Tests.cmd_args]\nbar = 1\ntp = 2\n")
    told: list[str] = []
    (test,) = load_scenario(path, tmp_path / "t", told.append).tests
    assert test.definition.cmd_args.tp == 2
    places = [line.partition(": unknown key")[0] for line in told]
    assert sorted(places) == [f"{tmp_path}/t/t.toml:4: cmd_args.foo", f"{path}:6: Tests[0].cmd_args.bar"]


def test_of_many_mistakes_the_first_are_shown(tmp_path: Path, sentence: Sentence) -> None:
    path = _file(tmp_path, HEAD + "[cmd_args]\n" + "".join(f"unknown_{i} = 1\n" for i in range(8000)))
    messages, warnings = _mistakes(load_test_definition, path), list[str]()
    assert len(messages) == 21
    assert f"{path}:23: cmd_args.unknown_19:" in messages[19]
    sentence(messages[19], known=r"(?<=known: ).*")
    assert f"{path}:" in messages[20]
    sentence(messages[20])
    load_test_definition(path, warnings.append)
    assert (len(warnings), warnings[-1]) == (21, f"{path}:3: cmd_args: 7980 more unknown keys left out")


def test_of_many_missing_tests_the_first_is_named(tmp_path: Path, sentence: Sentence) -> None:
    tests = "".join(f'[[Tests]]\nid = "a{i}"\ntest_name = "missing{i}"\n' for i in range(3000))
    path = _file(tmp_path, f'name = "s"\n{tests}')
    (message,) = _mistakes(_load_alone, path)
    assert "test_name:" in message
    sentence(message)
