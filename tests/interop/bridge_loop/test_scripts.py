"""Upstream's own tests and scripts of training, after the renaming of their imports that docs/training.md describes.

Sizes are reduced by the tables of `tests.interop.renamed`. The files are read from the source of Megatron-Bridge 0.6.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import ForkServer
from tests.interop.conftest import BRIDGE_0_6, REPOSITORY, tree
from tests.interop.renamed import FUNCTIONAL_TESTS, reduced, rename, write_functional_tests

_RANKS = ForkServer("ranks")
_PROGRAM = Path(__file__).with_name("run_upstream.py")
_IMPORTS = REPOSITORY / "tests/interop/imports_of_scripts.py"
_CONFTEST = """
import pytest


@pytest.fixture
def tmp_checkpoint_dir(tmp_path):
    return str(tmp_path)
"""
# Folder, or file of test -> ranks, tests
_ON_ONE = (
    *(f"test_pretrain.py::TestPretrain::test_pretrain_with_{name}" for name in ("checkpoint", "mup")),
    "test_pretrain.py::TestPretrain::test_pretrain_with_independent_eval_batch_size",
    "test_pretrain_resume.py::TestPretrainResume::test_pretrain_save_load[False]",
    "test_callbacks.py::TestCallbacksEndToEnd::test_callbacks[False]",
    "test_sample_based_training.py",
    "test_finetune_lora.py::TestLoRAFinetune::test_pretrain_then_lora_finetune",
)
_ON_TWO = ("test_pretrain.py::TestPretrain::test_pretrain_vpp",)
_ABSENT = re.compile(r"(?:ImportError|ModuleNotFoundError): cloudai_mbridge\.\S+ is absent on purpose: .+\Z")


@pytest.fixture(scope="module")
def upstream() -> Path:
    """Return the sources of Megatron-Bridge 0.6 with its tests, which not every archive of them has."""
    found = tree(BRIDGE_0_6)
    if not (found / FUNCTIONAL_TESTS).is_dir():
        pytest.skip(f"{found} is without {FUNCTIONAL_TESTS}")
    return found


@pytest.mark.process
@pytest.mark.parametrize(("ranks", "names"), [(1, _ON_ONE), (2, _ON_TWO)], ids=["one rank", "two ranks"])
def test_functional_tests_pass(ranks: int, names: tuple[str, ...], upstream: Path, tmp_path: Path) -> None:
    write_functional_tests(upstream, tmp_path)
    (tmp_path / "conftest.py").write_text(_CONFTEST)
    (tmp_path / "pytest.ini").touch()
    program = [str(_PROGRAM), *(f"{FUNCTIONAL_TESTS}/{name}" for name in names)]
    done = _RANKS.run(program, tmp_path, {**os.environ, "OMP_NUM_THREADS": "1"}, processes=ranks, timeout=1400)
    assert done is not None
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(names)} passed" in done.stdout
    assert "skipped" not in done.stdout


@pytest.mark.process
def test_every_import_is_served_or_ends_in_one_line(upstream: Path) -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        [sys.executable, str(_IMPORTS), str(upstream)], env=env, capture_output=True, text=True, timeout=600, check=True
    )
    found: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 80
    wrong = [
        (file, error)
        for file, statements in found.items()
        for error in statements.values()
        if error and not _ABSENT.match(error)
    ]
    assert not wrong


# Script -> ranks, what is replaced in it, arguments; and the name that ends it, "" where it trains
_SMALL = (("llama32_1b_pretrain_config", "gpt_tiny_pretrain_config"), ("train_iters = 10", "train_iters = 2"))
_SIMPLE = (
    *(("qwen3_4b", "gpt_tiny"), ("= 100", "= 2"), ("warmup_iters = 10", "warmup_iters = 1"), ("= 1024", "= 32")),
    ("tensor_model_parallel_size = 2", "tensor_model_parallel_size = 1"),
)
_SHORT = ("train.train_iters=2", "train.eval_iters=1", "model.seq_length=32", "dataset.seq_length=32")
_LLAMA, _FEATURES = "tutorials/recipes/llama", "examples/training_features"
_TRAINED = {
    f"{_LLAMA}/00_quickstart_pretrain.py": (1, _SMALL, ()),
    f"{_LLAMA}/02_pretrain_with_yaml.py": (1, _SMALL, _SHORT),
    f"{_FEATURES}/decentralized_pg/pretrain_qwen3_simple.py": (2, _SIMPLE, ()),
}
_ENDED = {
    f"{_LLAMA}/01_quickstart_finetune.py": "recipes.llama.llama32_1b_peft_config",
    f"{_LLAMA}/03_finetune_with_yaml.py": "recipes.llama.llama32_1b_peft_config",
    f"{_FEATURES}/pure_eval.py": "data.utils",
    f"{_FEATURES}/decentralized_pg/pretrain_qwen3_with_decentralized_pg.py": "data.loaders",
    f"{_FEATURES}/resiliency/straggler_detection/straggler_detection_example.py": "models.AutoBridge",
    f"{_FEATURES}/resiliency/fault_tolerance/fault_tolerance_example.py": "models.AutoBridge",
    "examples/peft/merge_lora.py": "models.conversion",
}


@pytest.mark.process
@pytest.mark.parametrize("script", _TRAINED)
def test_a_script_trains(script: str, upstream: Path, tmp_path: Path) -> None:
    ranks, changes, arguments = _TRAINED[script]
    done = _run(script, upstream, tmp_path, ranks, changes, arguments)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "[after training is done]" in done.stdout


@pytest.mark.process
@pytest.mark.parametrize("script", _ENDED)
def test_a_script_ends_in_one_line(script: str, upstream: Path, tmp_path: Path) -> None:
    done = _run(script, upstream, tmp_path)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert _ABSENT.match(last), last
    assert f"cloudai_mbridge.{_ENDED[script]}" in last


def _run(
    script: str,
    upstream: Path,
    directory: Path,
    ranks: int = 1,
    changes: tuple[tuple[str, str], ...] = (),
    arguments: tuple[str, ...] = (),
) -> "subprocess.CompletedProcess[str]":
    """Run a script beside the files of its folder, on a CPU."""
    (directory / "conf").mkdir()
    for file in (upstream / script).parent.glob("conf/*.yaml"):
        (directory / "conf" / file.name).write_text(file.read_text())
    (directory / "script.py").write_text(reduced(rename((upstream / script).read_text()), changes))
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = _RANKS.run([str(directory / "script.py"), *arguments], directory, env, processes=ranks, timeout=1400)
    assert done is not None
    return done
