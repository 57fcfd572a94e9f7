"""Files that Megatron-Bridge's real to_yaml() writes: which load, and that what is loaded is what was written."""

import json
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema.foreign import ARCHITECTURES
from tests.figures import Figure

WRITER = Path(__file__).with_name("real_files.py")
# The Megatron-Core of 0.6 beside that of the environment, as in test_presets
CORE_0_6 = Path(sys.prefix) / "megatron-core-0.19"
# What Megatron-Core computes for the frequencies of Llama 3.1
TRANSLATED = ("rope_scaling", "rope_scaling_factor")
# Besides, what these are called here: the others of 0.6 have layers or a `provide` of their own
OURS = {"megatron.bridge.models.gpt_provider.GPTModelProvider", "megatron.bridge.models.mla_provider.MLAModelProvider"}


@pytest.fixture(params=["0.3", "0.6"])
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """A release, and the directory with its files."""
    clone = request.getfixturevalue(f"launcher_{request.param.replace('.', '_')}")
    paths = [str(WRITER.parent)]
    if request.param == "0.6":
        if not (CORE_0_6 / "megatron/core").is_dir():
            pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
        paths.insert(0, str(CORE_0_6))
    done = subprocess.run(
        [sys.executable, str(WRITER), str(clone), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return request.param, tmp_path


def test_files_load_as_they_were_written(written: tuple[str, Path], figure: Figure) -> None:
    release, directory = written
    facts = json.loads((directory / "facts.json").read_text())
    expected = {name for name in facts if name in ARCHITECTURES or name in OURS}
    loaded = {name: model for name in facts if (model := _load(directory / f"{name}.yaml"))}
    assert set(loaded) == expected
    assert len(loaded) == (70 if release == "0.3" else 3)
    for name, model in loaded.items():
        given = facts[name]["fields"]
        translated = TRANSLATED if "inv_freq" in facts[name] else ()
        held = {key: getattr(model, key) for key in given if hasattr(model, key) and key not in translated}
        assert len(held) > 150
        assert {key: value for key, value in held.items() if value != given[key]} == {}, name
    figure(f"Megatron-Bridge {release}: {len(loaded)} of {len(facts)} providers' files load")


def test_frequencies_of_llama_31_are_megatron_cores(written: tuple[str, Path]) -> None:
    import torch
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    release, directory = written
    facts = json.loads((directory / "facts.json").read_text())
    names = [name for name in facts if "inv_freq" in facts[name] and name in ARCHITECTURES]
    assert len(names) == (8 if release == "0.3" else 0)
    for name in names:
        model = _load(directory / f"{name}.yaml")
        base = {"rotary_base": model.rotary_base, "use_cpu_initialization": True}
        scaling = {"rope_scaling": model.rope_scaling, "rope_scaling_factor": model.rope_scaling_factor}
        made = RotaryEmbedding(kv_channels=128, rotary_percent=1.0, **base, **scaling).inv_freq
        torch.testing.assert_close(made, torch.tensor(facts[name]["inv_freq"]))


def _load(path: Path) -> Any:
    """Return the model, None where the class is refused with what is read instead."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return ConfigContainer.from_yaml(path).model
        except ConfigError as error:
            refusal = str(error)
    assert re.search(r"model\._target_: .*docs/training\.md.*GPTModelProvider", refusal), refusal
    assert "\n" not in refusal
    return None
