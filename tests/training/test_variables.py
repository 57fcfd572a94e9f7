"""`env_vars`: set before anything reads them, and never over what the environment has."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.config import ConfigContainer, runtime_config_update
from cloudai_mbridge.training.config.text.serialization import resolved_yaml
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.startup.prepare import adapt_to_device
from cloudai_mbridge.training.startup.variables import set_variables
from tests.cases import every

NAMES = ("MB_TEXT", "MB_NUMBER", "MB_FLAG")

# What torch would see, were it to read the variables while it is imported
WATCH = """
import os, runpy, sys

class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "megatron"):
            print(name, *(os.environ.get(each) for each in ("MB_TEXT", "MB_NUMBER", "MB_FLAG")), flush=True)

sys.meta_path.insert(0, Watch())
sys.argv = ["training", "--config", sys.argv[1], "env_vars.MB_FLAG=true", "train.micro_batch_size=0"]
runpy.run_module("cloudai_mbridge.training", run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "HF_TOKEN"):
        monkeypatch.setenv(name, "to be restored")
        monkeypatch.delenv(name)


def test_the_environment_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MB_TEXT", "mine")
    set_variables({"MB_TEXT": "recipe's", "MB_NUMBER": 1, "MB_FLAG": True})
    assert [os.environ[name] for name in NAMES] == ["mine", "1", "True"]


@every("variables", [{"": "x"}, {"A=B": "x"}, {"A": None}, {"A": ["x"]}, {1: "x"}])
def test_what_is_no_variable(variables: Any) -> None:
    with pytest.raises(ConfigError, match="env_vars"):
        set_variables(variables)


@pytest.mark.process
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_they_are_set_before_torch_is_imported(tiny: Any, tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"config{suffix}").write_text(json.dumps({**tiny(), "env_vars": {"MB_TEXT": "a", "MB_NUMBER": 32}}))
    (tmp_path / "watch.py").write_text(WATCH)
    program = [sys.executable, "watch.py", f"config{suffix}"]
    env = {**os.environ, "MB_TEXT": "mine"}
    done = subprocess.run(program, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert "train.micro_batch_size = 0" in done.stderr, done.stderr
    seen = [line for line in done.stdout.splitlines() if line.startswith(("torch ", "megatron "))]
    assert len(seen) >= 2
    assert {line.partition(" ")[2] for line in seen} == {"mine 32 True"}


def test_a_script_sets_them_too(tiny: Any) -> None:
    config = ConfigContainer.from_dict(tiny())
    adapt_to_device(config, has_gpu=False)
    config.env_vars = {"MB_TEXT": "a", "HF_TOKEN": "hf_secret"}
    runtime_config_update(config)
    assert os.environ["MB_TEXT"] == "a"
    assert "MB_TEXT: a" in (text := resolved_yaml(config))
    assert "hf_secret" not in text
