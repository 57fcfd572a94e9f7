"""LoRA fine-tuning: the reference's special rule. The general one is `Cost.frozen`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloudai_mbridge.training.flops.quantities import query_groups, read


@dataclass(frozen=True)
class PackedSamples:
    """Averages over the packed samples of a data set: real tokens, and the sum of the squared sequence lengths."""

    tokens: float
    squared: float

    @classmethod
    def of(cls, samples: Iterable[Sequence[int]], global_batch_size: int = 1) -> "PackedSamples":
        """Average over samples, each given by its sequence lengths; the last incomplete global batch is left out."""
        rows = list(samples)
        rows = rows[: len(rows) // global_batch_size * global_batch_size]
        squared = sum(length * length for row in rows for length in row)
        return cls(sum(map(sum, rows)) / len(rows), squared / len(rows)) if rows else cls(0.0, 0.0)


def lora_flops_per_sample(model: Any, tokens: Any, squared: Any = 0) -> Any:
    """Return the reference's training FLOPs of one packed sample of Llama 3 70B with LoRA.

    Frozen weights cost 4 per token. The vocabulary is not padded; attention is counted as if it were not causal.
    """
    h, layers = model.hidden_size, model.num_layers
    per_layer = 12 + 12 * query_groups(model) / model.num_attention_heads + 18 * model.ffn_hidden_size / h
    frozen = tokens * layers * h**2 * (per_layer + 6 * model.vocab_size / (layers * h))
    return frozen * 2 / 3 + 12 * layers * h * squared


def is_lora(cfg: Any) -> bool:
    """Return whether a configuration trains LoRA adapters (its `peft` is of a class named LoRA)."""
    return any(kind.__name__ == "LoRA" for kind in type(getattr(cfg, "peft", None)).__mro__)


def has_special_rule(cfg: Any) -> bool:
    """Return whether the reference counts this run by its rule for LoRA.

    That is: LoRA, Llama 3 70B (by its Hugging Face id), SQuAD, and a packed file that exists.
    """
    data = getattr(cfg, "dataset", None)
    if not is_lora(cfg) or "Meta-Llama-3-70B" not in read(cfg.model, "hf_model_id", ""):
        return False
    hf = read(data, "hf_dataset")
    name = read(data, "dataset_name") or read(hf, "dataset_name") or read(hf, "path_or_dataset")
    return name in ("squad", "rajpurkar/squad") and _has_packed_file(data)


def _has_packed_file(data: Any) -> bool:
    specs = read(data, "packed_sequence_specs") or read(data, "offline_packing_specs")
    if path := read(specs, "packed_train_data_path"):
        return Path(path).exists()
    root = read(data, "dataset_root") or read(data, "hf_output_root")
    size = read(specs, "packed_sequence_size")
    if root is None or size is None:
        return False
    names = (f"packed/*/training_{size}.{suffix}" for suffix in ("idx.parquet", "npy"))
    return any(any(Path(root).glob(name)) for name in names)
