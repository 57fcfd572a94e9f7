"""Run Megatron-Bridge's `pretrain` on a CPU: train_upstream.py CASE.json, a table of sections and what to write.

Keys beside the sections: `yaml`, where its own `to_yaml` writes the configuration; `notes`, where the numbers of its
callbacks go, not rounded; `layers`: "ours" if the model that is trained has our layers, where Megatron-Core's do not
run on a CPU. The YAML has Megatron-Bridge's all the same.
"""

import functools
import importlib
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from tests.interop.bridge_loop import upstream_on_cpu

# What a machine without Transformer Engine, Apex and GPU can do
_PLAIN: dict[str, Any] = {
    **dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion"), False),
    **dict.fromkeys(("apply_rope_fusion", "cross_entropy_loss_fusion", "persist_layer_norm"), False),
    **dict.fromkeys(("gradient_accumulation_fusion", "deallocate_pipeline_outputs"), False),
}
_MODEL: dict[str, Any] = {
    **{"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 4, "seq_length": 128},
    **{"vocab_size": 512, "make_vocab_size_divisible_by": 128, "normalization": "RMSNorm", "gated_linear_unit": True},
    **{"position_embedding_type": "rope", "add_bias_linear": False, "share_embeddings_and_output_weights": False},
    **{"attention_dropout": 0.0, "hidden_dropout": 0.0},
}


def main(case: dict[str, Any]) -> None:
    upstream_on_cpu.install()
    import torch.distributed as dist
    from megatron.bridge.training.callbacks import CallbackManager
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    from cloudai_mbridge.training.cpu import megatron_device
    from cloudai_mbridge.training.models.layer_specs import local_layer_spec

    with megatron_device():
        config = container(case)
        if os.environ.get("RANK", "0") == "0":
            config.to_yaml(case["yaml"])
        if case.get("layers") == "ours":
            config.model.transformer_layer_spec = local_layer_spec
        _join()
        notes = Notes()
        callbacks = CallbackManager()
        callbacks.register("on_train_step_end", notes.step)
        callbacks.register("on_eval_end", notes.evaluation)
        pretrain(config, forward_step, callbacks=callbacks)
        if dist.get_rank() == dist.get_world_size() - 1:
            Path(case["notes"]).write_text(json.dumps(vars(notes)))
        dist.destroy_process_group()


def container(case: dict[str, Any]) -> Any:
    """Return Megatron-Bridge's container: a tiny GPT in FP32, over it the sections of the case."""
    c: Any = importlib.import_module("megatron.bridge.training.config")

    def of(name: str, **defaults: Any) -> dict[str, Any]:
        return {**defaults, **case.get(name, {})}

    is_distributed = case.get("optimizer", {}).get("use_distributed_optimizer", False)
    optimizer = {"optimizer": "adam", "lr": 1e-3, "min_lr": 1e-6, "weight_decay": 0.01, "adam_beta2": 0.95}
    warmup = {"lr_decay_style": "cosine", "lr_warmup_iters": 2, "lr_decay_iters": 100}
    decay = {"start_weight_decay": 0.033, "end_weight_decay": 0.033, "weight_decay_incr_style": "constant"}
    model = _model(of("model", **_MODEL, **_PLAIN))
    data = {"random_seed": 1234, "seq_length": model.seq_length, "num_workers": 0, "dataloader_type": "single"}
    resets = dict.fromkeys(("reset_attention_mask", "reset_position_ids", "eod_mask_loss"), False)
    return c.ConfigContainer(
        model=model,
        train=c.TrainingConfig(**of("train", micro_batch_size=1, global_batch_size=4)),
        validation=c.ValidationConfig(**of("validation", eval_interval=None, eval_iters=0)),
        optimizer=c.OptimizerConfig(**of("optimizer", **optimizer)),
        scheduler=c.SchedulerConfig(**of("scheduler", **warmup, **decay)),
        ddp=c.DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, check_for_nan_in_grad=True, use_distributed_optimizer=is_distributed
        ),
        dataset=c.MockGPTDatasetConfig(**of("dataset", **data, **resets)),
        logger=c.LoggerConfig(**of("logger", log_interval=1)),
        tokenizer=c.TokenizerConfig(**of("tokenizer", tokenizer_type="NullTokenizer", vocab_size=512)),
        checkpoint=c.CheckpointConfig(**of("checkpoint", ckpt_format="torch_dist")),
        rng=c.RNGConfig(seed=1234),
        dist=c.DistributedInitConfig(distributed_backend="gloo", use_gloo_process_groups=True),
        mixed_precision=None,
    )


def _model(fields: dict[str, Any]) -> Any:
    import torch.nn.functional as F
    from megatron.bridge.models.gpt_provider import GPTModelProvider, local_layer_spec
    from megatron.bridge.models.mla_provider import MLAModelProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    if not fields.get("multi_latent_attention"):
        return GPTModelProvider(transformer_layer_spec=local_layer_spec, activation_func=F.silu, **fields)
    layers = functools.partial(get_gpt_decoder_block_spec, use_transformer_engine=False)
    return MLAModelProvider(transformer_layer_spec=layers, activation_func=F.silu, **fields)


def _join() -> None:
    """Make the process group before `pretrain` does: gloo's barrier has no devices."""
    import torch.distributed as dist

    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo")


class Notes:
    """What Megatron-Bridge tells its callbacks: of every step, and of every evaluation."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.evaluations: list[dict[str, float]] = []

    def step(self, context: Any) -> None:
        step = context.state.train_state.step + 1
        rate = context.optimizer.param_groups[0]["lr"]
        losses = {name: _number(value) for name, value in (context.loss_dict or {}).items()}
        self.steps.append({"step": step, "losses": losses, "grad_norm": context.grad_norm, "learning_rate": rate})

    def evaluation(self, context: Any) -> None:
        self.evaluations.append({name: _number(value) for name, value in (context.total_loss_dict or {}).items()})


def _number(value: Any) -> float:
    """Return a loss as one number: some are a sum and its tokens."""
    size = getattr(value, "numel", lambda: 1)()
    return float(value if size == 1 else value[0] / value[1])


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
