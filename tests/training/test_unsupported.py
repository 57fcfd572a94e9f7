"""A configuration that asks for what the loop does not do is refused by name, and never trained without it."""

import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
from cloudai_mbridge.training.config import (
    CheckpointConfig,
    ConfigContainer,
    FaultToleranceConfig,
    TensorInspectConfig,
    runtime_config_update,
)
from cloudai_mbridge.training.config.finetuning import PackedSequenceSpecs
from cloudai_mbridge.training.config.text.classes import class_path
from cloudai_mbridge.training.config.text.overrides import apply_overrides
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models.hybrid_provider import HybridModelProvider
from cloudai_mbridge.training.models.layer_specs import local_layer_spec
from cloudai_mbridge.training.peft.config import LoRA
from cloudai_mbridge.training.resilience import packages
from cloudai_mbridge.training.schema import packages as of_settings
from cloudai_mbridge.training.schema.forms import why_missing
from cloudai_mbridge.training.schema.not_done import ASKS_FOR_NOTHING, NEEDS
from cloudai_mbridge.training.startup import prepare, unsupported
from cloudai_mbridge.training.startup.prepare import adapt_to_device, refuse_unsupported
from tests.cases import every
from tests.golden import Sentence
from tests.training.conftest import run_ranks

SECTIONS: dict[str, Any] = {
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512, "seq_length": 32},
    "train": {"train_iters": 2, "micro_batch_size": 1, "global_batch_size": 2},
    "optimizer": {"lr": 1e-3},
}


def make_config() -> ConfigContainer:
    return ConfigContainer.from_dict(container_data(SECTIONS))


@pytest.fixture
def config() -> ConfigContainer:
    return make_config()


def test_what_our_recipes_ask_for_is_done(config: ConfigContainer) -> None:
    refuse_unsupported(config)
    adapt_to_device(config, has_gpu=False)
    runtime_config_update(config)
    refuse_unsupported(config)


@every("path", ASKS_FOR_NOTHING)
def test_every_field_is_one_and_is_refused_by_name(path: str) -> None:
    section, _, name = path.partition(".")
    config = make_config()
    config.ft = FaultToleranceConfig()
    if (target := getattr(config, section)) is None:
        return  # which asks for nothing
    if why_missing(class_path(type(target)), name, "this release") and not hasattr(target, name):
        return  # this release of Megatron-Core has no such field
    assert hasattr(target, name) or section == "model"
    setattr(target, name, "something")
    with pytest.raises(ConfigError, match=rf"{path} = 'something' \(use ") as caught:
        refuse_unsupported(config)
    assert ASKS_FOR_NOTHING[path][0] in str(caught.value)
    assert "\n" not in str(caught.value)


@every(("pattern", "numbers", "is_done"), [("M*-", False, False), ("*-", False, True), ("M*-", True, True)])
def test_packed_sequences_of_mamba_layers(pattern: str, numbers: bool, is_done: bool, monkeypatch: Any) -> None:
    """Megatron-Core before 0.17 carries the state from one sequence into the next."""
    monkeypatch.setattr(unsupported, "NUMBERS_TOKENS", numbers)
    monkeypatch.setattr(unsupported, "_lacking", set)
    config = make_config()
    config.model = HybridModelProvider(hybrid_layer_pattern=pattern, hidden_size=64, vocab_size=512)
    refuse_unsupported(config)
    for dataset in (
        SimpleNamespace(packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=64)),
        SimpleNamespace(inter_document_masking=True),
    ):
        found = [
            *unsupported._of_documents(
                SimpleNamespace(**{**vars(config), "dataset": dataset, "eval_batch_sizes": (1, 1)})
            )
        ]
        assert any("with Mamba layers, whose state would cross" in text for text in found) is not is_done


@every(("text", "is_done"), [("Et|t|m|L", False), ("E|t|tm|L", False), ("Et|t||mL", True), ("EttmL", True)])
def test_multi_token_prediction_behind_the_embedding(text: str, is_done: bool) -> None:
    config = make_config()
    ranks = 2 if "|" in text else 1
    config.model.pipeline_model_parallel_layout = PipelineParallelLayerLayout(text, ranks)
    with nullcontext() if is_done else pytest.raises(ConfigError, match=r"m on the first pipeline rank, behind"):
        refuse_unsupported(config)


@every("path", NEEDS)
def test_what_only_other_machines_can_train_is_refused_by_name(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    section, _, name = path.partition(".")
    what, harmless = NEEDS[path]
    config = make_config()
    config.comm_overlap, config.tensor_inspect = CommOverlapConfig(tp_comm_overlap=False), TensorInspectConfig()
    config.model.tensor_model_parallel_size, config.model.sequence_parallel = 2, True
    if not hasattr(target := getattr(config, section), name):
        return  # this release of Megatron-Core has no such field
    setattr(target, name, "something")
    with pytest.raises(ConfigError, match=rf"cannot train that: {path} = 'something' needs {what} \(use ") as caught:
        refuse_unsupported(config)
    assert "\n" not in str(caught.value)
    setattr(target, name, harmless[0])
    refuse_unsupported(config)
    setattr(target, name, "something")
    monkeypatch.setattr(unsupported, "_lacking", set)
    refuse_unsupported(config)


def test_overlap_with_one_rank_needs_nothing(config: ConfigContainer) -> None:
    config.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    refuse_unsupported(config)


@pytest.mark.parametrize("modules", [["moe", "moe_act"], ["layernorm"]], ids=["moe act", "layernorm"])
def test_modules_that_transformer_engine_recomputes(
    config: ConfigContainer, sentence: Sentence, modules: list[str]
) -> None:
    config.model.recompute_granularity, config.model.recompute_modules = "selective", modules
    with pytest.raises(ConfigError, match=r"recompute_modules") as caught:
        refuse_unsupported(config)
    sentence(caught)
    config.model.recompute_granularity = None
    refuse_unsupported(config)


def test_experts_that_megatron_would_train_wrongly(config: ConfigContainer, sentence: Sentence) -> None:
    """Measured: tp 2, etp 1, ep 1 leaves the curve of one process by 1e-2, as the experts' replicas drift apart."""
    config.model.num_moe_experts = 4
    config.model.tensor_model_parallel_size = 2
    config.model.expert_tensor_parallel_size = 1
    with pytest.raises(ConfigError, match=r"expert_tensor_parallel_size") as caught:
        refuse_unsupported(config)
    sentence(caught)
    config.model.expert_model_parallel_size = 2
    refuse_unsupported(config)
    config.model.expert_model_parallel_size, config.model.expert_tensor_parallel_size = 1, None
    refuse_unsupported(config)


def test_local_layers_beside_transformer_engine(config: ConfigContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = config.model
    model.transformer_layer_spec = local_layer_spec
    refuse_unsupported(config)
    monkeypatch.setattr(unsupported, "has_transformer_engine", lambda: True)
    with pytest.raises(ConfigError, match=r"model\.transformer_layer_spec = local_layer_spec \(Transformer Engine"):
        refuse_unsupported(config)


def test_several_are_named_at_once(config: ConfigContainer) -> None:
    config.checkpoint = CheckpointConfig(save_wgrads_interval=2, use_checkpoint_args=True)
    config.model.num_moe_experts, config.model.tensor_model_parallel_size = 4, 2
    config.model.expert_tensor_parallel_size = 1
    with pytest.raises(ConfigError, match=r"save_wgrads_interval.*use_checkpoint_args.*expert_tensor_parallel_size"):
        refuse_unsupported(config)


@every("name", ["muon", "dist_muon", "lion", "soap", "adamw"])
def test_optimizers_of_a_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config()
    config.optimizer.optimizer = name
    monkeypatch.setattr(packages, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match="use one of adam" if name == "adamw" else "needs Megatron-Core 0.18"):
        packages.check_packages(config)
    monkeypatch.setattr(packages, "find_spec", lambda module: module)
    monkeypatch.setattr(packages, "is_installed", lambda module: False)
    with pytest.raises(ConfigError, match=r"use one of adam|cloudai-mbridge\[emerging\]"):
        packages.check_packages(config)
    monkeypatch.setattr(packages, "is_installed", lambda module: True)
    with pytest.raises(ConfigError) if name in ("adamw", "dist_muon") else nullcontext():
        packages.check_packages(config)
    refuse_unsupported(config)
    config.optimizer.use_distributed_optimizer = True
    with pytest.raises(ConfigError, match=rf"use_distributed_optimizer = True with .* = '{name}' \(use"):
        refuse_unsupported(config)


def test_models_of_modelopt(config: ConfigContainer, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model.restore_modelopt_state = True
    refuse_unsupported(config)
    monkeypatch.setattr(packages, "is_installed", lambda module: module != of_settings.MODELOPT)
    with pytest.raises(ConfigError, match=r"needs the Python package 'cloudai-mbridge\[modelopt\]', which is not"):
        packages.check_packages(config)
    config.checkpoint.non_persistent_ckpt_type = "global"
    with pytest.raises(ConfigError, match=r"non_persistent_ckpt_type = 'global' with model.restore_modelopt"):
        refuse_unsupported(config)
    config.peft = LoRA()
    with pytest.raises(ConfigError, match=r"model.restore_modelopt_state = True with peft \(use False\)"):
        refuse_unsupported(config)


@pytest.mark.process
@pytest.mark.skipif(not packages.is_installed(of_settings.EMERGING), reason="emerging-optimizers is not installed")
@pytest.mark.parametrize("name", of_settings.OF_EMERGING)
def test_two_ranks_with_an_optimizer_of_the_package(train: Any, name: str) -> None:
    sections = {"model": {"dtype": "bf16"}, "train": {"train_iters": 4}, "optimizer": {"optimizer": name}}
    one, two = train(1, sections).losses, train(2, sections).losses
    assert one == pytest.approx(two, abs=2e-3)
    assert one[4] < one[1]
    if name == "muon":
        assert train(2, sections, "optimizer.use_layer_wise_distributed_optimizer=true").losses == two


@pytest.mark.process
@every(
    ("override", "words"),
    [
        ("checkpoint.save=c checkpoint.ckpt_format=torch", "checkpoint.ckpt_format"),
        ("logger.wandb_project=p logger.wandb_exp_name=e", "wandb"),
        ("model.num_layers=many", "model.num_layers"),
        ("optimizer.lr=-1", "optimizer: lr = -1"),
        ("optimizer.optimizer=muon", "optimizer.optimizer = 'muon' needs"),
    ],
)
def test_a_configuration_that_cannot_run_is_one_line(
    tmp_path: Path, config: ConfigContainer, override: str, words: str
) -> None:
    config.to_yaml(tmp_path / "c.yaml")
    done = run_ranks(1, ["-m", "cloudai_mbridge.training", "--config", "c.yaml", *override.split()], tmp_path, code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert words in line
    assert "Traceback" not in done.stderr


@every(
    ("override", "words"),
    [
        ("checkpoint.save_wgrads_interval=2", "checkpoint.save_wgrads_interval = 2"),
        ("train.global_batch_size=3 train.micro_batch_size=2", "train.global_batch_size = 3"),
        ("model.num_query_groups=3", "num_query_groups"),
        ("train.micro_batch_size=0", "train.micro_batch_size = 0"),
        ("logger.log_interval=0", "logger.log_interval = 0"),
        ("mixed_precision=bf16_with_fp8_current_scaling_mixed", "model.fp8 = 'hybrid'"),
        ("dataset.data_path=/x", "data_path"),
        ("model.cpu_offloading=true", "model.cpu_offloading"),
        ("logger.save_config_filepath=/nowhere/c.yaml", "logger.save_config_filepath"),
    ],
)
def test_a_configuration_that_cannot_run_is_refused_before_anything_starts(
    sentence: Sentence, override: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare.prepare(apply_overrides(make_config(), override.split()))
    assert words in str(caught.value)
    sentence(caught)
    assert "\n" not in str(caught.value)


def test_the_page_lists_what_is_refused_with_its_reason() -> None:
    text = (Path(__file__).parents[2] / "docs/training.md").read_text()
    rows = re.findall(r"^\| (`\w+\..+) \| (.+) \|$", text.partition("\n## Refused\n")[2].partition("\n## ")[0], re.M)
    listed = {field: reason for fields, reason in rows for field in re.findall(r"`(\w+\.\w+)`", fields)}
    assert listed == {field: reason for field, (reason, _) in ASKS_FOR_NOTHING.items()}
    assert len(listed) <= 25
