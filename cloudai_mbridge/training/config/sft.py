"""Fine-tuning data as Megatron-Bridge 0.6 has them: a source, the conversion of its rows to samples, and packing."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs

# Keys of dataset_kwargs that `preprocessing` has instead
_SEMANTIC = ("prompt_template", "add_bos", "add_eos", "answer_only_loss", "label_key", "input_key", "strip_whitespace")


@dataclass(kw_only=True)
class HFDatasetSourceConfig:
    """One split of a data set of Hugging Face: a known name, or a path with the adapter of its rows."""

    dataset_name: str | None = None
    path_or_dataset: str | None = None
    split: str | None = None
    subset: str | list[str] | None = None
    load_kwargs: dict[str, Any] | None = None
    schema_adapter: str | None = None
    adapter_kwargs: dict[str, Any] | None = None

    def finalize(self) -> None:
        """Check that there is one source. Raises ValueError."""
        if (self.dataset_name is None) == (self.path_or_dataset is None):
            raise ValueError("dataset.hf_dataset needs dataset_name or path_or_dataset, and not both")
        where = "dataset.hf_dataset"
        for name in ("subset", "schema_adapter") if self.dataset_name is not None else ():
            if (value := getattr(self, name)) is not None:
                raise ValueError(f"{where}.{name} = {value!r}: {self.dataset_name!r} has its own; remove it")
        if self.adapter_kwargs:
            raise ValueError(
                f"{where}.adapter_kwargs = {self.adapter_kwargs!r}: no adapter of text takes any; remove it"
            )


@dataclass(kw_only=True)
class ChatSFTPreprocessingConfig:
    """Rows that are conversations, in the tokenizer's chat template."""

    loss_mode: Literal["assistant", "last_turn", "full"] = "assistant"

    def options(self) -> dict[str, Any]:
        """Return the same in keys of `dataset_kwargs`. Raises ValueError: an unsupported mode."""
        if self.loss_mode == "last_turn":
            raise ValueError("dataset.preprocessing.loss_mode = 'last_turn' is not done; use 'assistant' or 'full'")
        return {"answer_only_loss": self.loss_mode == "assistant"}


@dataclass(kw_only=True)
class PromptCompletionSFTPreprocessingConfig:
    """Rows of a prompt and a completion, tokenized apart."""

    prompt_column: str = "prompt"
    completion_column: str = "completion"
    prompt_template: str = "{prompt}"
    separator: str = ""
    loss_mode: Literal["completion", "full"] = "completion"
    strip_whitespace: bool = True
    add_bos: bool = False
    add_sep: bool = False
    add_eos: bool = True
    truncation_method: Literal["left", "right"] = "right"

    def options(self) -> dict[str, Any]:
        """Return the same in keys of `dataset_kwargs`. Raises ValueError: an unsupported setting, or no template."""
        for name, only in (("add_sep", False), ("truncation_method", "right")):
            if (value := getattr(self, name)) != only:
                raise ValueError(f"dataset.preprocessing.{name} = {value!r} is not done; use {only!r}")
        if self.prompt_template.count("{prompt}") != 1 or "{output}" in self.prompt_template + self.separator:
            raise ValueError(f"dataset.preprocessing.prompt_template {self.prompt_template!r} needs {{prompt}} once")
        return {
            "prompt_template": self.prompt_template.replace("{prompt}", "{input}") + self.separator + "{output}",
            "input_key": self.prompt_column,
            "label_key": self.completion_column,
            "strip_whitespace": self.strip_whitespace,
            "add_bos": self.add_bos,
            "add_eos": self.add_eos,
            "answer_only_loss": self.loss_mode == "completion",
        }


@dataclass(kw_only=True)
class GPTSFTDatasetConfig(FinetuningDatasetConfig):
    """Prompt and answer pairs of `dataset_root`, or of a data set of Hugging Face that is written to files first."""

    hf_dataset: HFDatasetSourceConfig | None = None
    hf_validation_dataset: HFDatasetSourceConfig | None = None
    hf_test_dataset: HFDatasetSourceConfig | None = None
    hf_output_root: str | Path | None = None
    hf_validation_proportion: float | None = None
    hf_rewrite: bool = False
    preprocessing: ChatSFTPreprocessingConfig | PromptCompletionSFTPreprocessingConfig | None = None
    enable_offline_packing: bool = False
    offline_packing_specs: PackedSequenceSpecs | None = None

    def finalize(self) -> None:
        """Check the source and the packing, and derive `packed_sequence_specs`. Raises ValueError."""
        super().finalize()
        if (self.dataset_root is None) == (self.hf_dataset is None):
            raise ValueError("dataset: set dataset_root or hf_dataset, and not both")
        for source in (self.hf_dataset, self.hf_validation_dataset, self.hf_test_dataset):
            if source is not None:
                source.finalize()
        share = self.hf_validation_proportion
        if share is not None and (self.hf_validation_dataset is not None or not 0 < share < 1):
            raise ValueError(
                f"dataset.hf_validation_proportion = {share}: use more than 0 and less than 1, or hf_validation_dataset"
            )
        if self.enable_offline_packing != (self.offline_packing_specs is not None):
            raise ValueError(
                "dataset.enable_offline_packing and offline_packing_specs go together: set both or neither"
            )
        if self.offline_packing_specs is not None:
            self.packed_sequence_specs = self.offline_packing_specs
        _ = self.sample_options

    @property
    def sample_options(self) -> dict[str, Any]:
        """`dataset_kwargs` with the settings of `preprocessing`. Raises ValueError: both set the same."""
        given = self.dataset_kwargs or {}
        if self.preprocessing is None:
            return given
        if both := [name for name in _SEMANTIC if name in given]:
            raise ValueError(f"dataset.dataset_kwargs: {', '.join(both)} is set by dataset.preprocessing; remove it")
        return {**self.preprocessing.options(), **given}

    def source_facts(self) -> dict[str, Any]:
        """Return the settings that determine the files that a data set of Hugging Face is written to."""
        names = ("hf_dataset", "hf_validation_dataset", "hf_test_dataset", "preprocessing")
        facts = {name: None if (value := getattr(self, name)) is None else asdict(value) for name in names}
        share = self.hf_validation_proportion
        return {**facts, "proportion": share, "seed": None if share is None else self.seed}
