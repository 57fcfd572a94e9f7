"""One rank of a rehearsal, from the configuration to the keys of its checkpoint, and why it stopped if it did."""

import gc
import re
import resource
import time
import traceback
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any

from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.checkpointing import check_checkpoint_packages
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.dry import states, step
from cloudai_mbridge.training.dry.balanced import Balanced
from cloudai_mbridge.training.dry.machine import GpuMeansMeta, as_rank
from cloudai_mbridge.training.dry.places import distinct_ranks, layout_of, saving_ranks
from cloudai_mbridge.training.initialize import initialize
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.optim import build_optimizer
from cloudai_mbridge.training.resilience.packages import check_packages
from cloudai_mbridge.training.setup import build_model
from cloudai_mbridge.training.startup.prepare import prepare, take_vocabulary
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer

_SECTIONS = ("model", "ddp", "optimizer", "dist", "comm_overlap", "checkpoint", "train", "mixed_precision", "peft")
_MOST_FRAMES = 8


class NotBuilt(Exception):
    """A rank that could not be built. stage: the one that was not finished."""

    def __init__(self, stage: str, error: BaseException, config: Any) -> None:
        super().__init__(stage)
        self.stage, self.error, self.config = stage, error, config

    def document(self) -> dict[str, Any]:
        """Return the stage, the engine's own words, its places in the source, and the settings that they name."""
        inner = self.error
        while inner.__cause__ is not None:  # a refusal in words of ours of what a package has raised
            inner = inner.__cause__
        frames = traceback.extract_tb(inner.__traceback__)
        text = " ".join(str(self.error).split())
        places = [f"{_short(each.filename)}:{each.lineno} {each.name}" for each in frames[-_MOST_FRAMES:]]
        return {
            "stage": self.stage,
            "kind": type(self.error).__name__,
            "message": text,
            "where": places,
            "keys": settings_named(text, [each.line or "" for each in reversed(frames)], self.config),
        }


def settings_named(text: str, lines: list[str], config: Any) -> list[str]:
    """Return the settings that an error's text names, else those of the innermost line of source that names one."""
    places: dict[str, list[str]] = {}
    for section in _SECTIONS:
        target = getattr(config, section, None)
        for each in fields(target) if is_dataclass(target) else ():
            places.setdefault(each.name, []).append(section)
    for words in (text, *lines):
        named = [word for word in dict.fromkeys(re.findall(r"[a-z_0-9]{5,}", words)) if "_" in word and word in places]
        if named:
            return [f"{places[word][0]}.{word}" for word in named]
    return []


def configured(path: Path, world_size: int, gpus_per_node: int) -> dict[str, Any]:
    """Return the ranks to build and what the preparation changed: the rehearsal's first look at a configuration."""
    with as_rank(0, world_size, gpus_per_node):
        config, adapted = _prepared(path)
        layout = layout_of(config, world_size)
        return {
            "ranks": distinct_ranks(layout),
            "saving": saving_ranks(layout),
            "layout": {name: getattr(layout, name) for name in ("tp", "cp", "pp", "dp", "ep", "etp")},
            "order": layout.order,
            "adapted": adapted,
            "transformer_engine": has_transformer_engine(),
        }


def _prepared(path: Path, *, with_step: bool = False) -> tuple[ConfigContainer, dict[str, Any]]:
    config: Any = None
    try:
        config = ConfigContainer.from_yaml(path)
        if with_step:
            _replace_in_step(config)
        config.logger.save_config_filepath = None
        adapted = prepare(config)
        check_packages(config)
        check_checkpoint_packages(config)
    except Exception as error:
        raise NotBuilt("configuration", error, config) from error
    return config, adapted


def _replace_in_step(config: Any) -> None:
    """Let collectives of torch, and saved tensors, stand for what libraries of their own send and keep in a step.

    All-to-alls for DeepEP and HybridEP, which send a token once to a rank with several of its experts; gathers and
    scatters for those that Transformer Engine's user buffers overlap with matrix products; the activations of experts
    for their stash, which has somewhat more room.
    """
    if getattr(config.model, dispatcher := "moe_token_dispatcher_type", None) == "flex":
        setattr(config.model, dispatcher, "alltoall")
        plain: Any = MoEAlltoAllTokenDispatcher
        plain.__init__ = _copies_early(plain.__init__)
    for section in (config.model, config.comm_overlap):
        for name in ("tp_comm_overlap", "moe_paged_stash"):
            if getattr(section, name, None):
                setattr(section, name, False)
    if hasattr(config.model, "cuda_graph_warmup_steps"):  # no step is captured
        config.model.cuda_graph_warmup_steps = 1 << 20


def _copies_early(initialize: Callable[..., None]) -> Callable[..., None]:
    """Let a dispatcher copy counts to the host as without graphs: with a graph of the other one it may refuse to."""

    @wraps(initialize)
    def function(self: Any, *args: Any, **kwargs: Any) -> None:
        initialize(self, *args, **kwargs)
        self.cuda_dtoh_point = "before_permutation_1"

    return function


def build(
    path: Path, rank: int, world_size: int, gpus_per_node: int, *, with_step: bool = False, in_full: bool = False
) -> dict[str, Any]:
    """Build one rank and return what it holds. The process is of no further use: Megatron-Core's groups stay up.

    with_step: let it take a step: `step` is what it did, and `log` what it communicated, in order. in_full: of all
    micro-batches, in place of a few from which the rest follows.

    NotBuilt: with the stage that was not reached.
    """
    if with_step:
        cpu.redirect_by(Balanced)
    started, stage, config = time.process_time(), "configuration", None
    with as_rank(rank, world_size, gpus_per_node):
        config, _ = _prepared(path, with_step=with_step)
        try:
            config.model.perform_initialization = False
            config.model.use_cpu_initialization = False
            # Transformer Engine draws no values then, and quantizes none
            config.model.init_model_with_meta_device = not with_step
            whole: dict[str, int] = {}
            config.model.register_pre_wrap_hook(partial(_with_memory, config, whole))
            stage = "tokenizer"
            if config.model.vocab_size is None:
                take_vocabulary(config.model, build_tokenizer(config).vocab_size)
            stage = "groups"
            initialize(config)
            found: dict[str, Any] = {"rank": rank, "place": _place(), "micro_batches": get_num_microbatches()}
            stage = "model"
            chunks = build_model(config)
            found["parameters"] = whole or states.parameters(chunks)
            found["weights"], found["gradients"] = states.weights(chunks), states.gradients(chunks)
            found["layers"] = [_layers(chunk) for chunk in chunks]
            stage = "optimizer"
            optimizer = build_optimizer(config, chunks)
            found["optimizer"] = states.optimizer_states(config, optimizer)
            stage = "checkpoint"
            held = [] if config.ddp.use_megatron_fsdp else states.shards(config, chunks)
            found["checkpoint"] = {
                "keys": len({each[0] for each in held}),
                "bytes": sum(each[4] for each in held if each[5]),
            }
            found["cpu_s"] = round(time.process_time() - started, 2)
            if with_step:
                stage = "step"
                found["step"], log = step.step(config, chunks, optimizer, in_full=in_full)
                found["log"] = log.document()
        except Exception as error:
            raise NotBuilt(stage, error, config) from error
    gc.collect()
    found["shards"] = held
    found["peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    return found


def _with_memory(config: Any, whole: dict[str, int], chunks: list[Any]) -> list[Any]:
    """Let wrappers take the parameters as they are: Megatron-FSDP would draw their values now, and shards them.

    whole: gets the parameters before they are sharded.
    """
    config.model.init_model_with_meta_device = False
    if config.ddp.use_megatron_fsdp:
        GpuMeansMeta.hides_meta = True
        whole |= states.parameters(chunks)
    return chunks


def _place() -> dict[str, int]:
    return {
        "tp": mpu.get_tensor_model_parallel_rank(),
        "cp": mpu.get_context_parallel_rank(),
        "pp": mpu.get_pipeline_model_parallel_rank(),
        "dp": mpu.get_data_parallel_rank(),
        "ep": mpu.get_expert_model_parallel_rank(),
        "etp": mpu.get_expert_tensor_parallel_rank(),
    }


def _layers(chunk: Any) -> list[int]:
    """Return the numbers of the decoder's layers in a chunk, from 1."""
    inner = chunk
    while hasattr(inner, "module"):
        inner = inner.module
    decoder = getattr(inner, "decoder", None)
    return [each.layer_number for each in getattr(decoder, "layers", ())]


def _short(path: str) -> str:
    """Return a path of the source from its package on."""
    return re.sub(r"^.*(?:site-packages|dist-packages|lib/python3\.\d+)/", "", path)
