"""Build models of Transformer Engine's layers on a machine without a GPU. They cannot run there.

Transformer Engine and Megatron-Core ask torch for a GPU before they build a layer; `gpu` answers. torch's process group
"fake" stands for the other ranks: one process can be any rank of a layout. Import this module before Megatron-Core.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest import mock
from warnings import catch_warnings, simplefilter

import pytest

if find_spec("transformer_engine") is None:
    pytest.skip("Transformer Engine is not importable: use `make te`", allow_module_level=True)

# ruff: noqa: E402
import torch

if torch.cuda.is_available():
    pytest.skip("this machine has a GPU: these tests are for one without", allow_module_level=True)

from cloudai_mbridge.training import cpu
from tests.interop.absent_packages import stand_in_for

stand_in_for(("mamba_ssm", "causal_conv1d", "fla", "fast_hadamard_transform"))  # kernels that building does not call
cpu.install()

import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from torch.testing._internal.distributed.fake_pg import FakeStore

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.initialize import initialize
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine
from cloudai_mbridge.training.optim import build_optimizer
from cloudai_mbridge.training.setup import build_model
from cloudai_mbridge.training.startup.prepare import prepare

H100 = SimpleNamespace(major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="NVIDIA H100 80GB HBM3")
MODEL = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 512,
    "seq_length": 64,
}
MOE = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 64,
    "moe_shared_expert_intermediate_size": 32,
    "moe_layer_freq": [0, 1],
}
MLA = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "qk_norm": {"qk_layernorm": True},
    "mla": {**MLA, "qk_layernorm": True},
    "sequential": {**MOE, "moe_grouped_gemm": False},
    "grouped": {**MOE, "moe_grouped_gemm": True},
    "mtp": {**MOE, "moe_grouped_gemm": True, "mtp_num_layers": 1},
}
# The one model of which Transformer Engine has a whole layer
GPT3 = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "gated_linear_unit": False,
    "activation": "gelu",
    "num_query_groups": 4,
}
# Families with layers of their own, which a CPU has not
MAMBA = {
    "hybrid_layer_pattern": "M*-E",
    "num_layers": 4,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_num_groups": 4,
    "mamba_state_dim": 8,
    "gated_linear_unit": False,
    "activation": "squared_relu",
    "attention_backend": "auto",  # another one than the class's: Megatron-Core keeps it in the environment
    **{name: value for name, value in MOE.items() if name != "moe_layer_freq"},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "nemotron_h": MAMBA,
    "nemotron_3": {**MAMBA, "moe_latent_size": 32, "hybrid_layer_pattern": "M*-E/*E"},
    "qwen3_next": {
        **MOE,
        "qk_layernorm": True,
        "attention_output_gate": True,
        "moe_shared_expert_gate": True,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "mtp_num_layers": 1,
    },
    "glm5": {
        **MOE,
        **MLA,
        "qk_layernorm": True,
        "experimental_attention_variant": "dsa",
        "dsa_indexer_n_heads": 4,
        "dsa_indexer_head_dim": 16,
        "dsa_indexer_topk": 8,
    },
}


Place = tuple[str, tuple[int, ...], tuple[int, ...]]  # in a checkpoint: key, shape of the whole, offset


@dataclass(frozen=True)
class Built:
    """What one rank has before its first step."""

    config: ConfigContainer
    model: Any  # without its wrappers
    optimizer: Any
    checkpoint: dict[Place, torch.Tensor]  # the model's part, without extra states; empty with FSDP
    ranks: dict[str, int]  # the place in its groups: tp, ep, etp

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}


def configure(model: str, **fields: Any) -> ConfigContainer:
    """Return the configuration of one of MODELS or FAMILIES in bf16, with these fields of the model on top."""
    sections: dict[str, dict[str, Any]] = {
        "model": {**MODEL, **(MODELS | FAMILIES)[model], **fields},
        "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 8},
        "optimizer": {"lr": 1e-3},
        "scheduler": {},
    }
    return ConfigContainer.from_dict(container_data(sections))


def build(config: ConfigContainer, rank: int = 0, world: int = 1) -> Built:
    """Build what the loop builds before it loads a checkpoint, as one of `world` ranks."""
    with _groups(rank, world):
        prepare(config)
        initialize(config)
        chunks = build_model(config)
        optimizer = build_optimizer(config, chunks)
        model = chunks[0].module.module
        ranks = {
            "tp": mpu.get_tensor_model_parallel_rank(),
            "ep": mpu.get_expert_model_parallel_rank(),
            "etp": mpu.get_expert_tensor_parallel_rank(),
        }
        checkpoint = {} if config.ddp.use_megatron_fsdp else _checkpoint(model)
        return Built(config, model, optimizer, checkpoint, ranks)


@contextmanager
def gpu(kind: str = "h100") -> Iterator[None]:
    """Have torch answer as with one GPU: the loop takes Transformer Engine's layers, and Megatron-Core builds them."""
    device = (
        H100 if kind == "h100" else SimpleNamespace(**{**vars(H100), "major": 10, "name": f"NVIDIA {kind.upper()}"})
    )
    answers = {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": (device.major, device.minor),
        "get_device_properties": device,
    }
    with mock.patch.multiple(torch.cuda, **{name: lambda *_, value=value: value for name, value in answers.items()}):
        assert has_transformer_engine()
        yield


def _checkpoint(model: Any) -> dict[Place, torch.Tensor]:
    parts = model.sharded_state_dict()
    apply_factories(parts)  # which split the gate from the up projection
    tensors = [part for part in nested_values(parts) if isinstance(part, ShardedTensor)]
    return {(each.key, each.global_shape, each.global_offset): each.data.detach() for each in tensors}


@contextmanager
def _groups(rank: int, world: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        with cpu.megatron_device(), catch_warnings(), mock.patch.dict(os.environ):  # Megatron-Core sets variables
            simplefilter("ignore")  # Megatron-Core and torch warn of their own calls
            yield
    finally:
        mpu.destroy_model_parallel()
        destroy_num_microbatches_calculator()
        dist.destroy_process_group()


@cache
def on_one_rank(model: str, *, with_te: bool) -> Built:
    """Build one of MODELS on a single rank, with Transformer Engine's layers or those of a CPU."""
    with gpu() if with_te else nullcontext():
        return build(configure(model))
