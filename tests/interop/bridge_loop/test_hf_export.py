"""Weights that Megatron-Bridge exports from our model, read by transformers and peft: the same logits, in FP32."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.interop.bridge_loop.export_hf import TOKENS

PROGRAM, REPOSITORY = Path(__file__).with_name("export_hf.py"), Path(__file__).parents[3]
STEPS = 3
TOLERANCE = 1e-5  # of logits around 1

_SIZES = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "head_dim": 16,
    "norm_topk_prob": True,
}
_OF_EXPERTS = {
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 96, "moe_token_dispatcher_type": "alltoall"},
    **{"qk_layernorm": True, "kv_channels": 16, "expert_model_parallel_size": 2},
    **{"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-3},
}


def _source(directory: Path, kind: str, **sizes: Any) -> Path:
    """Write a model of transformers with weights of its own, and a tokenizer."""
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(**_SIZES, **_HEADS, **sizes, tie_word_embeddings=False)
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(directory)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"the": 0, "<unk>": 1}, "<unk>"))
    tokenizer.save(str(directory / "tokenizer.json"))
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(described))
    return directory


def _container(source: Path, **model: Any) -> dict[str, Any]:
    plain = dict.fromkeys(("bias_activation_fusion", "masked_softmax_fusion", "bias_dropout_fusion"), False)
    shape = {
        **{"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 192, "num_attention_heads": 4, "seq_length": 128},
        **{"num_query_groups": 2, "vocab_size": 512, "make_vocab_size_divisible_by": 128, "normalization": "RMSNorm"},
        **{"gated_linear_unit": True, "activation_func": {"_target_": "torch.nn.functional.silu", "_call_": False}},
        **{"position_embedding_type": "rope", "add_bias_linear": False, "layernorm_epsilon": 1e-6},
        **{"share_embeddings_and_output_weights": False, "attention_dropout": 0.0, "hidden_dropout": 0.0},
    }
    target = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    return {
        "model": {"_target_": target, **shape, **plain, "gradient_accumulation_fusion": False, **model},
        "train": {"train_iters": STEPS, "micro_batch_size": 1, "global_batch_size": 4},
        "optimizer": {"optimizer": "adam", "lr": 1e-2, "min_lr": 1e-6},
        "scheduler": {"lr_decay_style": "constant", "lr_decay_iters": 10},
        "dataset": {
            "_target_": "megatron.bridge.training.config.MockGPTDatasetConfig",
            **{"random_seed": 1, "seq_length": 128, "num_workers": 0, "dataloader_type": "single"},
            **dict.fromkeys(("reset_attention_mask", "reset_position_ids", "eod_mask_loss"), False),
        },
        "logger": {"log_interval": 1},
        "tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 511},
        "checkpoint": {
            **{"save": "saved", "save_interval": STEPS, "ckpt_format": "torch_dist"},
            **{"also_save_hf_checkpoint": True, "hf_source_path": str(source)},
        },
        "rng": {"seed": 1234},
        "validation": {"eval_iters": 0},
        "dist": {"distributed_backend": "gloo"},
    }


def _train(directory: Path, container: dict[str, Any], *overrides: str, ranks: int = 1) -> Any:
    """Train; return the logits of the trained model."""
    import torch

    (directory / "config.json").write_text(json.dumps(container))
    start = [sys.executable, "-m", "cloudai_mbridge.training.one_machine", "--nproc-per-node", str(ranks)]
    program = [*start, str(PROGRAM), "config.json", "logits.pt", *overrides]
    done = subprocess.run(program, cwd=directory, env=_env(), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return torch.load(directory / "logits.pt")


def _env() -> dict[str, str]:
    """Return variables with which a program anywhere imports the tests; no model is looked up on the network."""
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def _exported(directory: Path) -> Path:
    return directory / "saved" / f"iter_{STEPS:07d}" / "hf"


def _logits(model: Any) -> Any:
    import torch

    with torch.no_grad():
        return model.eval()(torch.tensor([TOKENS])).logits


def _compare(found: Any, expected: Any, first: Any) -> None:
    assert float((found - expected).abs().max()) < TOLERANCE
    assert float((found - first).abs().max()) > 100 * TOLERANCE, "the weights are the source's"


@pytest.mark.process
def test_a_dense_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = _source(tmp_path / "source", "Llama")
    logits = _train(tmp_path, _container(source))
    exported = transformers.AutoModelForCausalLM.from_pretrained(_exported(tmp_path))
    _compare(_logits(exported), logits, _logits(transformers.AutoModelForCausalLM.from_pretrained(source)))
    assert (_exported(tmp_path) / "tokenizer.json").is_file()


@pytest.mark.process
def test_experts_on_two_ranks(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = _source(tmp_path / "source", "Qwen3Moe", **_EXPERTS)
    logits = _train(tmp_path, _container(source, **_OF_EXPERTS), "checkpoint.hf_distributed_save=true", ranks=2)
    exported = transformers.AutoModelForCausalLM.from_pretrained(_exported(tmp_path))
    _compare(_logits(exported), logits, _logits(transformers.AutoModelForCausalLM.from_pretrained(source)))


@pytest.mark.process
@pytest.mark.parametrize("kind", ["lora.LoRA", "canonical_lora.CanonicalLoRA"])
def test_adapters(tmp_path: Path, kind: str) -> None:
    """The base is the export of a run without adapters; peft adds those of a second run."""
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    container = _container(_source(tmp_path / "source", "Llama"))
    first = _train(tmp_path, container, "checkpoint.save=base")
    container["peft"] = {"_target_": f"megatron.bridge.peft.{kind}", "dim": 8, "alpha": 16}
    container["checkpoint"]["pretrained_checkpoint"] = "base"
    logits = _train(tmp_path, container)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base" / f"iter_{STEPS:07d}" / "hf")
    _compare(_logits(peft.PeftModel.from_pretrained(base, str(_exported(tmp_path)))), logits, first)


@pytest.mark.process
@pytest.mark.parametrize("wrong", ["no such directory", "no weights", "other layers"])
def test_a_source_that_cannot_be_exported_is_refused_before_training(tmp_path: Path, wrong: str) -> None:
    source = tmp_path / "source"
    if wrong != "no such directory":
        _source(source, "Llama")
    if wrong == "no weights":
        (source / "model.safetensors").unlink()
    layers = {"num_layers": 3} if wrong == "other layers" else {}
    (tmp_path / "config.json").write_text(json.dumps(_container(source, **layers)))
    program = [sys.executable, str(PROGRAM), "config.json", "logits.pt"]
    done = subprocess.run(program, cwd=tmp_path, env=_env(), capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert "ConfigError: checkpoint.also_save_hf_checkpoint = True: Megatron-Bridge cannot export" in done.stderr
    assert "MBRIDGE_STEP" not in done.stdout
