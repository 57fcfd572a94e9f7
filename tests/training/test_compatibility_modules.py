"""Modules that exist for the imports of scripts written for Megatron-Bridge do their work.

That each name of upstream's is there is tested with the real modules: tests/interop/test_names.py.
"""

import importlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.data import packed_batch  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.state import TrainState  # noqa: E402
from cloudai_mbridge.upstream.tables import MODULES  # noqa: E402


def _load(module: str) -> Any:
    return importlib.import_module(f"cloudai_mbridge.training.{module}")


def test_a_file_and_overrides_change_a_configuration(tiny: Any, tmp_path: Path) -> None:
    utils, config = _load("utils.omegaconf_utils"), ConfigContainer.from_dict(tiny())
    file = tmp_path / "changes.yaml"
    file.write_text("model: {window_size: [3, 0], params_dtype: bf16}\ntrain:\n  train_iters: 7\n  manual_gc: true\n")
    assert utils.process_config_with_overrides(config, str(file), ["train.train_iters=9"]) is config
    assert (config.model.params_dtype, config.train.train_iters, config.train.manual_gc) == (torch.bfloat16, 9, True)
    assert list(config.model.window_size) == [3, 0]
    utils.apply_overrides(config, {"train": {"train_iters": 11}, "logger": {"tensorboard_dir": "a 'b\""}}, {})
    assert (config.train.train_iters, config.logger.tensorboard_dir) == (11, "a 'b\"")
    with pytest.raises(utils.OverridesError, match=r"train\.train_itres"):
        utils.process_config_with_overrides(config, None, ["train.train_iters=1", "train.train_itres=2"])
    assert config.train.train_iters == 11
    with pytest.raises(FileNotFoundError):
        utils.process_config_with_overrides(config, tmp_path / "none.yaml")


def test_files_of_a_checkpoint(tmp_path: Path, sentence: Sentence) -> None:
    utils = _load("utils.checkpoint_utils")
    assert utils.get_checkpoint_tracker_filename("ckpt") == "ckpt/latest_checkpointed_iteration.txt"
    utils.ensure_directory_exists(str(tmp_path / "a" / "file"))
    utils.ensure_directory_exists(str(tmp_path / "b" / "c"), check_parent=False)
    assert (utils.file_exists(str(tmp_path / "a")), utils.file_exists(str(tmp_path / "b/c"))) == (True, True)
    assert not utils.file_exists(str(tmp_path / "a" / "file"))
    torch.save(TrainState(step=4, consumed_train_samples=32).state_dict(), tmp_path / utils.TRAIN_STATE_FILE)
    assert utils.read_train_state(utils.get_checkpoint_train_state_filename(str(tmp_path))).step == 4
    (tmp_path / utils.CONFIG_FILE).write_text("train: {train_iters: 3}")
    read = utils.read_run_config(utils.get_checkpoint_run_config_filename(str(tmp_path)))
    assert read == {"train": {"train_iters": 3}}
    (tmp_path / utils.CONFIG_FILE).write_bytes(b"caf\xe9: 1")
    with pytest.raises(ConfigError) as caught:
        utils.read_run_config(utils.get_checkpoint_run_config_filename(str(tmp_path)))
    sentence(caught)


def test_model_flops_grow_with_the_batch(tiny: Any) -> None:
    config, count = ConfigContainer.from_dict(tiny()), _load("utils.flop_utils").num_floating_point_operations
    assert count(config, batch_size=8) == 8 * count(config) > 0
    length = config.model.seq_length
    halves = count(config, batch_size=8, seqlen_sum=8 * length, seqlen_squared_sum=16 * (length // 2) ** 2)
    assert count(config, 8, 8 * length, 8 * length**2) == 8 * count(config) > halves > count(config, 8, 4 * length)


def test_bounds_of_packed_sequences() -> None:
    make = _load("utils.packed_seq_utils").get_packed_seq_params
    padded, real = torch.tensor([[0, 4, 8, -1]]), torch.tensor([[0, 3, 7, 7]])
    one = make({"cu_seqlens": padded, "max_seqlen": torch.tensor([4])})
    assert (one.cu_seqlens_q.tolist(), one.cu_seqlens_q_padded, int(one.max_seqlen_kv)) == ([0, 4, 8], None, 4)
    two = make({"cu_seqlens": padded, "cu_seqlens_unpadded": real, "cu_seqlens_unpadded_argmin": torch.tensor(3)})
    assert (two.cu_seqlens_kv.tolist(), two.cu_seqlens_kv_padded.tolist()) == ([0, 3, 7], [0, 4, 8])
    assert (two.qkv_format, two.max_seqlen_q) == ("thd", None)
    names = {"cu_seqlens_q": real[:, :3], "cu_seqlens_kv": real[:, :3], "cu_seqlens_q_padded": padded}
    own = make({**names, "max_seqlen_q": torch.tensor([4]), "max_seqlen_kv": 4})
    assert (own.cu_seqlens_q.tolist(), own.cu_seqlens_q_padded.tolist()) == ([0, 3, 7], [0, 4, 8])
    assert (own.cu_seqlens_kv.tolist(), own.cu_seqlens_kv_padded, own.max_seqlen_q) == ([0, 3, 7], None, 4)


def test_the_tokens_of_a_row_reach_mamba_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_batch, "NUMBERS_TOKENS", True)
    monkeypatch.setattr(packed_batch, "PackedSeqParams", SimpleNamespace)  # as of releases that have the field
    for name in ("cu_seqlens", "cu_seqlens_q"):
        assert packed_batch.get_packed_seq_params({name: torch.tensor([0, 4, 8]), "total_tokens": 8}).total_tokens == 8


def test_a_container_of_ones_own() -> None:
    base = _load("utils.config_utils")._ConfigContainerBase

    @dataclass
    class Mine(base):  # type: ignore[misc,valid-type]
        size: int = 1

    assert Mine.from_dict({"size": 3}).size == 3
    assert "size: 1" in Mine().to_yaml()


def test_optimizer_and_scheduler_from_their_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    optim, seen = _load("optim"), []
    monkeypatch.setattr(optim, "get_megatron_optimizer", lambda *args, **kwargs: seen.append((args, kwargs)) or "opt")
    monkeypatch.setattr(optim, "current_device", lambda: SimpleNamespace(type="cuda"))
    monkeypatch.setattr(optim, "OptimizerParamScheduler", lambda optimizer, **laws: (optimizer, laws["max_lr"]))
    config = _load("config")
    chunk = torch.nn.Linear(2, 2)
    made = optim.setup_optimizer(config.OptimizerConfig(lr=0.5, min_lr=0.0), config.SchedulerConfig(), chunk)
    assert made == ("opt", ("opt", 0.5))
    ((args, kwargs),) = seen
    assert args[1] == [chunk]
    assert kwargs["use_gloo_process_groups"] is False
    assert kwargs["config_overrides"] is not None


# Module below the package -> names that scripts import: served from elsewhere
SERVED = {
    "models": "GPTModelProvider MLAModelProvider HybridModelProvider MambaModelProvider",
    **{module: names for module, homes in MODULES.items() if (names := " ".join(homes.values()))},
    "recipes.llama": "llama3_8b_pretrain_config",
    "recipes.qwen.h100.qwen3": "qwen3_30b_a3b_pretrain_config",
}


@every("module", SERVED)
def test_a_renamed_script_finds_what_is_here(module: str) -> None:
    found = importlib.import_module(f"cloudai_mbridge.{module}")
    assert [name for name in SERVED[module].split() if not hasattr(found, name)] == []


def test_a_recipe_is_a_configuration() -> None:
    from cloudai_mbridge.recipes.gpt import gpt_tiny_pretrain_config  # type: ignore[import-not-found]

    config = gpt_tiny_pretrain_config()
    assert (type(config), config.model.num_layers, config.train.train_iters) == (ConfigContainer, 4, None)
    assert gpt_tiny_pretrain_config() is not config


@every(
    ("statement", "line"),
    [
        ("from cloudai_mbridge import AutoBridge", "AutoBridge is absent on purpose: Megatron-Bridge converts"),
        ("from cloudai_mbridge import diffusion", "diffusion is absent on purpose"),
        ("from cloudai_mbridge.models import AutoBridge", "models.AutoBridge is absent on purpose: Megatron-Bridge"),
        ("import cloudai_mbridge.models.conversion.auto_bridge", "models.conversion is absent on purpose"),
        ("from cloudai_mbridge.data.builders import EnergonDatasetConfig", "data.builders.EnergonDatasetConfig is abs"),
        ("from cloudai_mbridge.recipes.llama import llama2_7b_pretrain_config", "shipped are deepseek_v3, "),
        ("from cloudai_mbridge.recipes.llama import llama3_8b_peft_config", "take llama3_8b_pretrain_config and"),
        ("from cloudai_mbridge.training.initialize import set_jit_fusion_options", "absent on purpose: training.ini"),
        ("from cloudai_mbridge.training.utils.omegaconf_utils import parse_hydra_overrides", "without OmegaConf"),
        ("import cloudai_mbridge.training.utils.visual_inputs", "training.utils.visual_inputs is absent on purpose"),
        ("from cloudai_mbridge.training.vlm_step import forward_step", "training.vlm_step is absent on purpose"),
    ],
)
def test_what_is_absent_on_purpose_ends_in_one_line(statement: str, line: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(statement)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_names_are_looked_for_as_ever() -> None:
    exec("from cloudai_mbridge import models, data\nfrom cloudai_mbridge.data import builders\n")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'cloudai_mbridge\.nothing'"):
        exec("import cloudai_mbridge.nothing")
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from cloudai_mbridge.training.utils.flop_utils import nothing")
    for package in ("cloudai_mbridge", "cloudai_mbridge.models"):
        assert not hasattr(importlib.import_module(package), "nothing")
