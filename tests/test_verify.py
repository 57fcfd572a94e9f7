"""`mbridge verify-configs` on a file that other tools take."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from cloudai_mbridge.cli import cli
from tests.golden import Sentence

ARGS = 'launcher = "embedded"\nmodel_recipe_name = "gpt_tiny"\ncompute_dtype = "fp32"\nnum_gpus = 1\ngb = 8\n'
TEST = f'name = "t"\ndescription = ""\ntest_template_name = "MegatronBridge"\n[cmd_args]\n{ARGS}'
SYSTEM = 'name = "s"\nscheduler = "slurm"\ndefault_partition = "mian"\n[[partitions]]\nname = "main"\n'
SCENARIO = 'name = "s"\n[[Tests]]\nid = "a"\ntest_name = "t"\n'


@pytest.mark.parametrize(
    ("name", "text", "place"),
    [
        ("t", TEST + "mb = [3, 5]\n", "t.toml: test 't': "),
        ("t", TEST.replace("Bridge", "Brige"), "t.toml:3: test_template_name: "),
        ("t", TEST.replace("MegatronBridge", "megatron-bridge"), "t.toml:3: test_template_name: "),
        ("t", TEST.replace("gpt_tiny", "gpt_tyni"), "t.toml: cmd_args.model_recipe_name: "),
        ("t", TEST + "tp = [1, 2]\n[sweep]\nzip = [['tp', 'pp']]", "t.toml: test 't': sweep.zip"),
        ("t", TEST + '[extra_cmd_args]\n"train.train_iters" = "many"', "t.toml: "),
        ("s", SYSTEM, "s.toml:3: default_partition: "),
    ],
    ids=["rejected", "misspelt template", "template in kebab case", "recipe", "zip", "length", "partition"],
)
def test_what_cannot_run_is_not_ok_and_names_its_file(
    sentence: Sentence, name: str, text: str, place: str, tmp_path: Path
) -> None:
    path = tmp_path / f"{name}.toml"
    path.write_text(text)
    result = CliRunner().invoke(cli, ["verify-configs", str(tmp_path)], standalone_mode=False)
    assert result.return_value == 2
    assert f"error: {tmp_path}" in result.output
    assert place in result.output
    assert "ok " not in result.output
    sentence(result.output)


def test_what_is_wrong_with_a_test_of_a_scenario_names_the_tests_file(tmp_path: Path) -> None:
    for name, text in {"t": TEST.replace("gpt_tiny", "gpt_tyni"), "s": SCENARIO}.items():
        (tmp_path / f"{name}.toml").write_text(text)
    system = tmp_path / "system"
    system.write_text('name = "here"\nscheduler = "local"\n')
    files = [f"--test-scenario={tmp_path}/s.toml", f"--tests-dir={tmp_path}", f"--system-config={system}"]
    for command in (["dry-run"], ["sweep", "plan"]):
        result = CliRunner().invoke(cli, [*command, *files], standalone_mode=False)
        assert str(result.exception).startswith(f"{tmp_path}/t.toml: cmd_args.model_recipe_name: "), command
    checked = CliRunner().invoke(cli, ["verify-configs", f"{tmp_path}/s.toml", f"--tests-dir={tmp_path}"])
    assert f"error: {tmp_path}/t.toml: cmd_args" in checked.output


def test_a_test_may_have_an_empty_name(tmp_path: Path) -> None:
    path = tmp_path / "test.toml"
    args = 'launcher = "embedded"\nmodel_recipe_name = "gpt_tiny"\ncompute_dtype = "fp32"\nnum_gpus = 1\ngb = 8\n'
    path.write_text(f'name = ""\ndescription = ""\ntest_template_name = "MegatronBridge"\n[cmd_args]\n{args}')
    result = CliRunner().invoke(cli, ["verify-configs", str(path)], standalone_mode=False)
    assert result.exception is None, result.output
    assert "1 point, 0 of them rejected" in result.output


def test_several_paths_and_no_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run's directory has copies of tests, and links; given by itself it is checked."""
    monkeypatch.chdir(tmp_path)
    for name, text in {"t.toml": TEST, "s.toml": SCENARIO, "system.toml": SYSTEM.replace("mian", "main")}.items():
        Path(name).write_text(text)
    root = Path("results/s_2026-11-01_02-00-00")
    (root / "a/single/0").mkdir(parents=True)
    for name, text in {"plan.json": "{}", "system.toml": "broken", "a/single/0/test.toml": TEST}.items():
        (root / name).write_text(text)
    (root / "link").symlink_to(tmp_path)

    def verify(*paths: str) -> tuple[int, list[str]]:
        result = CliRunner().invoke(cli, ["verify-configs", *paths], standalone_mode=False)
        return result.return_value, [
            line.split(": ")[0].removeprefix("ok").strip() for line in result.output.splitlines()
        ]

    assert verify(".") == (0, ["s.toml", "system.toml", "t.toml"])
    assert verify("s.toml", "t.toml") == (0, ["s.toml", "t.toml"])
    assert verify("s.toml", ".", "t.toml") == (0, ["s.toml", "system.toml", "t.toml"])
    assert verify("results/s_2026-11-01_02-00-00")[0] == 2
    assert CliRunner().invoke(cli, ["verify-configs"], standalone_mode=False).exit_code != 0
    assert verify("s.toml", "nothing.toml")[0] == 2
