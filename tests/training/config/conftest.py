"""A small configuration that is valid, on one process and no GPU."""

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

# What these tests import at their top is only there with the training extra
HAS_MEGATRON = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("megatron") is not None
collect_ignore_glob = [] if HAS_MEGATRON else ["test_*.py"]

_ENVIRONMENT = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "NCCL_ALGO", "NVTE_CPU_OFFLOAD_V1", "PYTORCH_CUDA_ALLOC_CONF")

if HAS_MEGATRON:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns of every optional package that is not installed
        import torch
        from megatron.core.transformer import TransformerConfig

        import cloudai_mbridge.training.config as configs
        from cloudai_mbridge.training.compat import cuda_graphs
        from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider

    @dataclass
    class StandInProvider(TransformerConfig):  # type: ignore[misc]
        """Stands in for a model provider: a Megatron-Core model config that is checked when it is finalized."""

        seq_length: int = 32
        restore_modelopt_state: bool = False

        def __post_init__(self) -> None:
            """Leave everything to `finalize`, as a provider does."""

        def finalize(self) -> None:
            """Run Megatron-Core's own checks."""
            cuda_graphs.use_new_names(self)
            super().__post_init__()


def gpt_container(**changes: Any) -> Any:
    """Return a container with a GPT model and made-up data; sections are replaced by name."""
    sections: dict[str, Any] = {
        "model": GPTModelProvider(num_layers=2, hidden_size=64, num_attention_heads=4, vocab_size=128),
        "train": configs.TrainingConfig(train_iters=10, micro_batch_size=1, global_batch_size=8),
        "optimizer": configs.OptimizerConfig(lr=1e-4),
        "scheduler": configs.SchedulerConfig(),
        "dataset": configs.MockGPTDatasetConfig(seq_length=128, random_seed=1),
        "logger": configs.LoggerConfig(),
        "tokenizer": configs.TokenizerConfig(),
        "checkpoint": configs.CheckpointConfig(),
    }
    return configs.ConfigContainer(**{**sections, **changes})


@pytest.fixture(autouse=True)
def _one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start from an environment without a launcher, and leave torch as it was."""
    for name in _ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def make_config() -> Callable[..., Any]:
    """Return a builder of a valid container; sections are replaced by name."""

    def build(**sections: Any) -> Any:
        defaults: dict[str, Any] = {
            "train": configs.TrainingConfig(train_iters=10, micro_batch_size=1, global_batch_size=4),
            "model": StandInProvider(num_layers=4, hidden_size=32, num_attention_heads=4),
            "optimizer": configs.OptimizerConfig(lr=1e-3, min_lr=1e-5),
            "scheduler": configs.SchedulerConfig(),
            "dataset": configs.MockGPTDatasetConfig(
                seq_length=32, random_seed=1, reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False
            ),
            "logger": configs.LoggerConfig(),
            "tokenizer": configs.TokenizerConfig(),
            "checkpoint": configs.CheckpointConfig(),
        }
        return configs.ConfigContainer(**{**defaults, **sections})

    return build


@pytest.fixture
def config(make_config: Callable[..., Any]) -> Any:
    """Return a valid container."""
    return make_config()
