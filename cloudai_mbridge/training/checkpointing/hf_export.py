"""Export of the weights to Hugging Face's format, next to a checkpoint, by Megatron-Bridge if it is installed.

Megatron-Bridge maps the tensors of each model family; the checkpoint itself does not need this mapping.
"""

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.checkpointing.layout import FSDP_DTENSOR
from cloudai_mbridge.training.checkpointing.verify import one_line
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.peft.config import DoRA
from cloudai_mbridge.training.process.log_lines import write_line
from cloudai_mbridge.training.process.provenance import is_installed


def source_of(cfg: Any) -> str | None:
    """Return the model on the hub, or the directory, whose configuration and tokenizer the export copies."""
    given = cfg.checkpoint.hf_source_path, getattr(cfg.model, "hf_model_id", None), cfg.tokenizer.tokenizer_model
    return next((str(source) for source in given if source), None)


def _revision_of(cfg: Any) -> str | None:
    """Return the revision of the model's own source on the hub; None for its newest, and for other sources."""
    own = getattr(cfg.model, "hf_model_id", None)
    return getattr(cfg.model, "hf_model_revision", None) if own and source_of(cfg) == str(own) else None


def problems(cfg: Any) -> Iterator[str]:
    """Yield the fields of `checkpoint` that prevent an export, each with its value and a remedy."""
    c = cfg.checkpoint
    if not c.also_save_hf_checkpoint:
        return
    if c.ckpt_format == FSDP_DTENSOR:
        yield "also_save_hf_checkpoint = True needs ckpt_format = 'torch_dist'; use False"
    if c.non_persistent_ckpt_type == "local":
        yield "also_save_hf_checkpoint = True needs non_persistent_ckpt_type = 'global'; use False"
    if isinstance(cfg.peft, DoRA):
        yield "also_save_hf_checkpoint = True: Megatron-Bridge exports no magnitudes of DoRA; use LoRA, or False"
    if source_of(cfg) is None:
        yield "also_save_hf_checkpoint = True needs hf_source_path, model.hf_model_id or tokenizer.tokenizer_model"
    if not is_installed("megatron.bridge"):
        yield (
            "also_save_hf_checkpoint = True needs the Python package megatron-bridge, which is not installed:"
            " run `pip install megatron-bridge` in the job's environment, or use False"
        )


def check(cfg: Any) -> None:
    """Open the source of an export, if one is configured. Any rank, before the process group.

    Raises ConfigError: Megatron-Bridge does not support the model, or configuration, tokenizer or weights are missing.
    """
    if not cfg.checkpoint.also_save_hf_checkpoint:
        return
    source = source_of(cfg)
    bridge = _open(source, cfg.checkpoint.hf_trust_remote_code, _revision_of(cfg))
    with _refusals(source), TemporaryDirectory() as unused:  # else a missing file is found at the first checkpoint
        bridge.hf_pretrained.save_artifacts(unused, original_source_path=source)
        if cfg.peft is None and not _tensors(bridge):
            raise FileNotFoundError("it has no weights in safetensors, whose names and files the export follows")
        layers = getattr(bridge.hf_pretrained.config, "num_hidden_layers", None)
        if not getattr(cfg.model, "hybrid_layer_pattern", None) and layers not in (None, cfg.model.num_layers):
            raise ValueError(f"it has {layers} layers, and the model {cfg.model.num_layers}")


def save(cfg: Any, model: list[Any], checkpoint: str) -> None:
    """Write the weights, or a model's adapters alone, into `hf/` of a checkpoint's directory. A collective.

    Raises Megatron-Bridge's errors, after the ranks' collectives: a rank that fails alone keeps no other waiting.
    """
    c, source, path = cfg.checkpoint, source_of(cfg), Path(checkpoint, "hf")
    bridge = _open(source, c.hf_trust_remote_code, _revision_of(cfg))
    if cfg.peft is not None:
        bridge.save_hf_adapter(model, path, cfg.peft, base_model_name_or_path=source, show_progress=False)
        return
    names: set[str] = set()

    def named() -> Iterator[Any]:
        for weight in bridge.export_hf_weights(model, cpu=True, show_progress=False):
            names.add(weight[0])
            yield weight

    by_rank = {"distributed_save": True, "save_every_n_ranks": c.hf_save_every_n_ranks} if c.hf_distributed_save else {}
    weights = named()
    try:
        bridge.hf_pretrained.state.source.save_generator(weights, path, strict=False, **by_rank)
        if dist.get_rank() == 0:
            bridge.hf_pretrained.save_artifacts(path, original_source_path=source)
    finally:
        for _ in weights:
            pass
    if dist.get_rank() == 0:
        missing = sorted(_tensors(bridge) - names)  # Megatron-Bridge writes the others
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        clause = f"; of {source} the model lacks {missing[0]}{more}" if missing else ""
        write_line(f"  saved Hugging Face weights to {path}{clause}")


def _tensors(bridge: Any) -> set[str]:
    return set(bridge.hf_pretrained.state.source.key_to_filename_map)


@functools.cache
def _open(source: str | None, trusts_code: bool, revision: str | None = None) -> Any:
    with _refusals(source):
        from megatron.bridge.models.conversion import auto_bridge, peft_bridge

        peft_bridge.ModuleDict = torch.nn.ModuleDict  # its own class and ours, of adapters for parts of a layer
        options = {} if revision is None else {"revision": revision}
        return auto_bridge.AutoBridge.from_hf_pretrained(source, trust_remote_code=trusts_code, **options)


@contextlib.contextmanager
def _refusals(source: str | None) -> Iterator[None]:
    """Turn Megatron-Bridge's errors, of its import too, into one line."""
    try:
        yield
    except Exception as error:
        switch = "checkpoint.also_save_hf_checkpoint = True"
        raise ConfigError(f"{switch}: Megatron-Bridge cannot export {source!r}: {one_line(error)}") from error
