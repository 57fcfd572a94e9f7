"""Datasets beyond plain GPT pretraining: fine-tuning, packed sequences, fill in the middle."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cloudai_mbridge.training.config.dataset import DataloaderConfig, GPTDatasetConfig


@dataclass
class PackedSequenceSpecs:
    """Packing of several short samples into one sequence; sizes are in tokens."""

    packed_sequence_size: int = -1  # not positive: no packing
    max_single_sequence_length: int | None = None  # of a sample; None: dataset.seq_length
    tokenizer_model_name: str | None = None
    num_tokenizer_workers: int = -1
    packed_train_data_path: str | None = None
    packed_val_data_path: str | None = None
    packed_metadata_path: str | None = None
    pad_cu_seqlens: bool = False  # pad the sequence boundaries to one length: CUDA graphs need it
    pad_seq_to_mult: int | None = 1


@dataclass(kw_only=True)
class FinetuningDatasetConfig(DataloaderConfig):
    """Prompt and answer pairs under `dataset_root`, `seq_length` tokens per sample."""

    dataloader_type: Literal["single", "cyclic", "batch", "external"] | None = "batch"
    dataset_root: str | Path | None = None
    seq_length: int
    seed: int = 1234
    memmap_workers: int = 1
    max_train_samples: int | None = None
    packed_sequence_specs: PackedSequenceSpecs | None = None
    dataset_kwargs: dict[str, Any] | None = None
    do_validation: bool = True
    do_test: bool = True

    @property
    def sample_options(self) -> dict[str, Any]:
        """Options that turn a line into a sample."""
        return self.dataset_kwargs or {}


@dataclass(init=False)
class GPTFIMDatasetConfig(GPTDatasetConfig):
    """GPT pretraining with fill-in-the-middle samples; rates are probabilities."""

    fim_rate: float | None = None
    fim_spm_rate: float | None = None
    fim_extra_tokens: dict[str, Any] | None = None
    fim_split_sample: str | None = None
    fim_fragment_rate: float | None = None
    fim_no_prefix: str | None = None
    fim_data: bool = field(init=False, default=True)

    def __init__(
        self,
        fim_rate: float | None = None,
        fim_spm_rate: float | None = None,
        fim_extra_tokens: dict[str, Any] | None = None,
        fim_split_sample: str | None = None,
        fim_fragment_rate: float | None = None,
        fim_no_prefix: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Take the fill-in-the-middle settings, and GPTDatasetConfig's by name."""
        super().__init__(**kwargs)
        self.fim_data = True
        self.fim_rate = fim_rate
        self.fim_spm_rate = fim_spm_rate
        self.fim_extra_tokens = fim_extra_tokens
        self.fim_split_sample = fim_split_sample
        self.fim_fragment_rate = fim_fragment_rate
        self.fim_no_prefix = fim_no_prefix
