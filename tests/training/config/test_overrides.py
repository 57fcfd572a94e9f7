"""Overrides from the command line: typed, named by their key when they are wrong, and never evaluated."""

import dataclasses
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence
from tests.training.config.conftest import gpt_container

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    import torch

    from cloudai_mbridge.training.comm_overlap.config import CommOverlapConfig
    from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs
    from cloudai_mbridge.training.config.profiling import ProfilingConfig
    from cloudai_mbridge.training.config.resilience import FaultToleranceConfig
    from cloudai_mbridge.training.config.text.overrides import apply_overrides
    from cloudai_mbridge.training.config.text.serialization import to_dict
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.mixed_precision import MixedPrecisionConfig
    from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = config[part] if isinstance(config, dict) else getattr(config, part)
    return config


@every(
    ("override", "value"),
    [
        ("train.train_iters=20", 20),
        (" train.train_iters = 20 ", 20),
        ("train.train_iters=null", None),
        ("train.rampup_batch_size=[16,8,300]", [16, 8, 300]),
        ("train.exit_signal=SIGUSR1", signal.SIGUSR1),
        ("train.empty_unused_memory_level=2", 2),
        ("model.num_layers=4", 4),
        ("model.bf16=true", True),
        ("model.params_dtype=torch.bfloat16", torch.bfloat16),
        ("model.activation_func=torch.nn.functional.silu", torch.nn.functional.silu),
        ("model.moe_layer_freq=[0,1]", [0, 1]),
        ("optimizer.lr=3e-4", 3e-4),
        ("optimizer.lr=1", 1.0),
        ("optimizer.loss_scale=.inf", float("inf")),
        ("dataset.blend=null", None),
        ("dataset.blend=[[a,b],[0.3,1]]", (["a", "b"], [0.3, 1.0])),
        ("dataset.seq_length=64", 64),
        ("dataset.data_path=/a b", "/a b"),
        ('logger.tensorboard_dir="a b"', "a b"),
        ("logger.tensorboard_dir=a b", "a b"),
        ("logger.tensorboard_dir=''", ""),
        ("logger.wandb_exp_name=run: 1 #2", "run: 1 #2"),
        ("logger.wandb_exp_name=a=b", "a=b"),
        ("logger.wandb_exp_name='1'", "1"),
        ("logger.wandb_exp_name=yes", "yes"),
        ("logger.wandb_exp_name=${oc.env:HOME}", "${oc.env:HOME}"),
        ("logger.wandb_exp_name=!!python/name:os.system", "!!python/name:os.system"),
        ("logger.wandb_exp_name=__import__('os').system('true')", "__import__('os').system('true')"),
        ("logger.memory_keys={a: b}", {"a": "b"}),
        ("tokenizer.tokenizer_model=meta/llama", "meta/llama"),
        ("tokenizer.hf_tokenizer_kwargs.use_fast=true", True),
        ("tokenizer.hf_tokenizer_kwargs.deep.er=[1]", [1]),
        ("mixed_precision=bf16_mixed", "bf16_mixed"),
        ("mixed_precision.bf16=true", True),
        ("dist.lazy_init=true", True),
        ("ft.enable_ft_package=true", True),
    ],
)
def test_an_override_is_applied(override: str, value: Any) -> None:
    config = gpt_container()

    assert apply_overrides(config, [override]) is config

    read = _get(config, override.partition("=")[0].strip())
    assert read == value
    assert type(read) is type(value)


def test_a_tilde_sets_an_optional_section_to_null() -> None:
    config = apply_overrides(gpt_container(), ["~profiling", "train.train_iters=2", "~train.train_iters"])

    assert config.profiling is None
    assert config.train.train_iters is None


def test_a_key_below_a_null_section_makes_it_with_its_defaults() -> None:
    config = apply_overrides(gpt_container(profiling=None), ["profiling.use_nsys_profiler=true"])
    assert config.profiling == ProfilingConfig(use_nsys_profiler=True)

    config = apply_overrides(gpt_container(), ["ft.simulated_fault_rank=1"])
    assert config.ft == FaultToleranceConfig(simulated_fault_rank=1)

    dataset = FinetuningDatasetConfig(seq_length=8)
    config = apply_overrides(gpt_container(dataset=dataset), ["dataset.packed_sequence_specs.packed_sequence_size=16"])
    assert dataset.packed_sequence_specs == PackedSequenceSpecs(packed_sequence_size=16)


def test_a_whole_section_is_given_as_a_table() -> None:
    config = apply_overrides(gpt_container(), ["comm_overlap={tp_comm_overlap: true}", "comm_overlap.bucket_size=5"])
    assert config.comm_overlap == CommOverlapConfig(tp_comm_overlap=True, bucket_size=5)

    config = apply_overrides(gpt_container(), ["mixed_precision={_target_: MixedPrecisionConfig, bf16: true}"])
    assert config.mixed_precision == MixedPrecisionConfig(bf16=True)

    config = apply_overrides(gpt_container(), ["dataset={_target_: FinetuningDatasetConfig, seq_length: 8}"])
    assert config.dataset == FinetuningDatasetConfig(seq_length=8)


REFUSED = [
    ("train.train_iter=1", "train.train_iter:"),
    ("trian.train_iters=1", "trian:"),
    ("train_iters=1", "train_iters:"),
    ("zzzzz=1", "zzzzz:"),
    ("ft.enable=true", "ft.enable:"),
    ("~ft.enable", "ft.enable:"),
    ("train._private=1", "train._private:"),
    ("train.__class__=1", "train.__class__:"),
    ("validate=1", "validate:"),
    ("train.finalize=1", "train.finalize:"),
    ("scheduler.lr_decay_steps=1", "scheduler.lr_decay_steps:"),
    ("train.train_iters=1.0", "train.train_iters: 1.0"),
    ("train.train_iters=1e3", "train.train_iters: 1000.0"),
    ("train.train_iters=true", "train.train_iters:"),
    ("train.train_iters='1'", "train.train_iters:"),
    ("train.train_iters=1_000", "train.train_iters:"),
    ("train.train_iters=${x}", "train.train_iters:"),
    ("train.rampup_batch_size=[16,8,x]", "train.rampup_batch_size[2]:"),
    ("train.rampup_batch_size=16", "train.rampup_batch_size:"),
    ("train.exit_signal=SIGTERN", "train.exit_signal:"),
    ("model.bf16=yes", "model.bf16:"),
    ("model.bf16=1", "model.bf16:"),
    ("model.activation_func=os.system", "model.activation_func:"),
    ("model.transformer_layer_spec={module: [os, system]}", "model.transformer_layer_spec: "),
    ("model={_target_: os.system}", "model._target_:"),
    ("optimizer.lr=nan", "optimizer.lr:"),
    ("optimizer.lr=1e999", "optimizer.lr:"),
    ("logger.wandb_exp_name=123", "logger.wandb_exp_name:"),
    ("logger.log_interval=null", "logger.log_interval:"),
    ("logger.tensorboard_dir=", "logger.tensorboard_dir:"),
    ("logger.tensorboard_dir=[a", "logger.tensorboard_dir:"),
    ("logger.tensorboard_dir={a: *b}", "logger.tensorboard_dir:"),
    ('logger.tensorboard_dir="a" b', "logger.tensorboard_dir:"),
    ("scheduler.lr_decay_style=cosin", "scheduler.lr_decay_style:"),
    ("~train", "train:"),
    ("~train.manual_gc", "train.manual_gc:"),
    ("~profiling=1", "~profiling:"),
    ("~", "'':"),
    ("+train.new=1", "+train.new:"),
    ("++train.new=1", "++train.new:"),
    ("train.train_iters", "train.train_iters:"),
    ("", "config: write key=value"),
    ("=1", "'':"),
    ("train..train_iters=1", "'train..train_iters':"),
    ("train.rampup_batch_size.0=1", "train.rampup_batch_size:"),
    ("train.iterations_to_skip.0=1", "train.iterations_to_skip:"),
    ("train.train_iters.x=1", "train.train_iters:"),
    ("comm_overlap.bucket_size=1", "comm_overlap:"),
    ("peft.dim=8", "peft:"),
    ("peft=lora", "peft:"),
    ("tokenizer.hf_tokenizer_kwargs._target_=os.system", "tokenizer.hf_tokenizer_kwargs._target_:"),
    ("tokenizer.hf_tokenizer_kwargs={_target_: os.system}", "tokenizer.hf_tokenizer_kwargs._target_:"),
    ("tokenizer.hf_tokenizer_kwargs.a={_target_: os.system}", "tokenizer.hf_tokenizer_kwargs.a._target_:"),
]


@every(("override", "message"), REFUSED)
def test_a_wrong_override_is_refused_by_its_key_and_changes_nothing(
    sentence: Sentence, override: str, message: str
) -> None:
    config = gpt_container()
    before = to_dict(config)

    with pytest.raises(ConfigError) as caught:
        apply_overrides(config, ["train.train_iters=11", "ft.simulated_fault_rank=1", "~profiling", override])

    assert message in str(caught.value)
    sentence(caught, yaml=r"while parsing .*|expected '<document.*")
    assert "\n" not in str(caught.value)
    assert to_dict(config) == {**before}


def test_a_recipe_name_has_no_keys_below_it(sentence: Sentence) -> None:
    with pytest.raises(ConfigError, match=r"mixed_precision:") as caught:
        apply_overrides(gpt_container(mixed_precision="bf16_mixed"), ["mixed_precision.bf16=true"])
    sentence(caught)

    config = apply_overrides(
        gpt_container(mixed_precision="bf16_mixed"), ["~mixed_precision", "mixed_precision.grad_reduce_in_fp32=false"]
    )
    assert config.mixed_precision == MixedPrecisionConfig(grad_reduce_in_fp32=False)


def test_a_union_of_classes_is_given_whole(sentence: Sentence) -> None:
    @dataclasses.dataclass
    class First:
        a: int = 1

    @dataclasses.dataclass
    class Second:
        b: int = 1

    @dataclasses.dataclass
    class Root:
        part: First | Second | None = None

    Root.__annotations__["part"] = First | Second | None
    with pytest.raises(ConfigError, match=r"part:") as caught:
        apply_overrides(Root(), ["part.b=2"])
    sentence(caught)


def test_a_frozen_section_cannot_be_changed(sentence: Sentence) -> None:
    @dataclasses.dataclass(frozen=True)
    class Frozen:
        a: int = 1

    with pytest.raises(ConfigError, match="a:") as caught:
        apply_overrides(Frozen(), ["a=2"])
    sentence(caught)


def test_a_provider_of_the_callers_own_takes_overrides() -> None:
    @dataclasses.dataclass
    class Own(GPTModelProvider):
        extra: Path | None = None

    config = gpt_container(model=Own(num_layers=2, hidden_size=64, num_attention_heads=4))
    apply_overrides(config, ["model.extra=/a", "model.num_layers=3"])

    assert (config.model.extra, config.model.num_layers) == (Path("/a"), 3)


@every("override", [None, 3, b"train.train_iters=1"])
def test_an_override_is_text(sentence: Sentence, override: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        apply_overrides(gpt_container(), [override])
    sentence(caught)


@every("plus", ["", "+", "++"])
def test_a_table_takes_new_keys_as_hydra_writes_them(plus: str) -> None:
    config = apply_overrides(gpt_container(), [f"{plus}env_vars.NEW=1"])
    assert config.env_vars == {"NEW": 1}
