"""Every TOML that is shipped loads, expands, renders, and gives a training config that the loop accepts."""

from pathlib import Path
from typing import Any

from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.presets import newest_release
from cloudai_mbridge.models.toml_source import read_toml
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from tests.cases import every

REPOSITORY = Path(__file__).parents[2]
SCENARIOS = sorted((REPOSITORY / "conf/scenarios").glob("*.toml"))
SYSTEM_OF = {"nightly": "h100", "gpt_tiny_sweep": "local", "local_models": "local", "formats_gb200": "gb200"}
SYSTEM_OF |= {"fine_tuning": "local", "deepseek_v3_h100_upstream": "h100", "deepseek_v3_gb200_upstream": "gb200"}
UPSTREAM = {"deepseek_v3_h100_upstream", "deepseek_v3_gb200_upstream"}


@every("directory", ["systems", "test_defs", "conf/scenarios", "conf/gates"])
def test_all_files_verify(mbridge: Any, directory: str) -> None:
    done = mbridge("verify-configs", REPOSITORY / directory, "--tests-dir", REPOSITORY / "test_defs")
    assert done.returncode == 0, done.stderr
    files = list(REPOSITORY.glob(f"{directory}/**/*.toml"))
    assert done.stdout.count("ok  ") == len(files) >= 2


@every("scenario", SCENARIOS)
def test_every_scenario_plans_and_renders(mbridge: Any, scenario: Path, tmp_path: Path) -> None:
    system = SYSTEM_OF.get(scenario.stem, scenario.stem)
    done = mbridge(
        "dry-run",
        *("--system-config", REPOSITORY / f"systems/{system}.toml"),
        *("--tests-dir", REPOSITORY / "test_defs", "--test-scenario", scenario, "--output-dir", tmp_path),
    )
    assert done.returncode == 0, done.stderr
    if scenario.stem in UPSTREAM:
        (script,) = tmp_path.rglob("launcher.sh")
        assert "-mr deepseek_v3" in script.read_text()
        assert not list(tmp_path.rglob("training.json"))
        return
    configs = list(tmp_path.rglob("training.json"))
    assert configs
    for path in configs:
        try:
            assert ConfigContainer.from_yaml(path).train.train_iters > 0
        except ConfigError as error:  # a preset is written for the newest release that it needs
            assert "needs Megatron-Core 0.18" in str(error), error  # noqa: PT017


def test_every_test_definition_is_used_by_a_scenario() -> None:
    used = {test.get("test_name") for path in SCENARIOS for test in read_toml(path).data["Tests"]}
    defined = {read_toml(path).data["name"] for path in (REPOSITORY / "test_defs").glob("*.toml")}
    assert used == defined


def test_every_system_has_a_scenario() -> None:
    systems = {path.stem for path in (REPOSITORY / "systems").glob("*.toml")}
    assert systems == {"local", "sandbox", "h100", "gb200", "gb300"}


def test_no_system_sets_what_recipes_set() -> None:
    presets = catalog(newest_release())
    assert presets
    theirs = {text.partition("=")[0] for row in presets.rows for text in row.values["env_vars"]}
    for path in (REPOSITORY / "systems").glob("*.toml"):
        assert not theirs & read_toml(path).data.get("global_env_vars", {}).keys(), path
