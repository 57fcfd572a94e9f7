"""A step of Megatron-Bridge's own recipes on one GPU, in its loop and in ours by turns:

    python tests/benchmarks/recipes_on_gpu.py llama3_8b_pretrain_8gpu_h100_bf16_config=4 ... [--steps 15] [--pairs 1]

By hand, on a machine with a GPU, Transformer Engine and megatron-bridge 0.6. NAME=LAYERS: a recipe, and how many of its
layers one GPU holds. Megatron-Bridge trains it first and writes its YAML, with which our loop trains then. One rank,
sequences of 4096 tokens, 4 micro-batches of 1, samples made up, no `gradient_accumulation_fusion`: Megatron-Bridge's
loop needs Apex for it.

Printed for each pair: the median of the elapsed times in ms after five steps, smallest and largest, peak memory in GiB
and last loss of both, and the ratio ours / Megatron-Bridge. Initial weights differ; samples do not.
"""

import argparse
import importlib
import json
import os
import pkgutil
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEFT_OUT = 5
TOKENS, MICRO_BATCHES = 4096, 4
_ELAPSED = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+)")
_LOSS = re.compile(r"lm loss: ([\d.E+-]+)")
_MEMORY = re.compile(r'"peak_memory_gib": ([\d.]+)')
# Of what Megatron-Bridge imports: what is real on a machine with a GPU
_REAL = ("triton", "transformer_engine", "transformer_engine_torch", "einops", "PIL", "regex", "hydra")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="NAME=LAYERS")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--pairs", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mbridge-beside-") as directory:
        for recipe in args.recipes * args.pairs:
            name, _, layers = recipe.partition("=")
            yaml = str(Path(directory, "theirs.yaml"))
            theirs = _train([__file__, "--upstream", name, layers, str(args.steps), yaml])
            ours = _train(["-m", "cloudai_mbridge.training", "--config", yaml])
            ratio = theirs["ms"] and ours["ms"] / theirs["ms"]
            print(f"{recipe}: Megatron-Bridge {theirs['words']}; ours {ours['words']}; ratio {ratio:.3f}", flush=True)


def _train(program: list[str]) -> dict[str, Any]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
    done = subprocess.run([sys.executable, "-P", *program], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {' '.join(program)}\n{done.stderr[-3000:]}")
    elapsed = [float(text) for text in _ELAPSED.findall(done.stdout)][LEFT_OUT:]
    median, memory = statistics.median(elapsed), max(map(float, _MEMORY.findall(done.stdout)))
    range_ = f"{min(elapsed):.1f} to {max(elapsed):.1f}, n = {len(elapsed)}"
    words = f"{median:.1f} ms ({range_}), {memory:.1f} GiB, loss {_LOSS.findall(done.stdout)[-1]}"
    return {"ms": median, "words": words}


def train_upstream(name: str, layers: int, steps: int, yaml: str) -> None:
    """Train a recipe with fewer layers by Megatron-Bridge's `pretrain`, after writing its YAML."""
    sys.path.insert(0, str(ROOT / "tests" / "interop"))
    import torch
    import transformer_engine.pytorch  # noqa: F401 - before what looks for it
    from absent_packages import OTHERS, _Finder
    from bridge_loop.upstream_on_cpu import import_core

    absent = tuple(package for package in OTHERS if package not in _REAL)
    import_core()
    sys.meta_path.insert(0, _Finder(absent))
    _train_module("initialize").compile_helpers = lambda: None  # the wheel contains them compiled, and no Makefile
    for each in ("train", "eval"):  # a stand-in of ModelOpt answers where None means that nothing is distilled
        _train_module(each).get_tensor_shapes_adjust_fn_for_distillation = lambda *args, **options: None
    from real_containers import stand_in_for_models

    stand_in_for_models()
    config = _scaled(_recipe(name)(), layers, steps)
    config.to_yaml(yaml)
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29531")
    _train_module("pretrain").pretrain(config, _train_module("gpt_step").forward_step)
    print(json.dumps({"peak_memory_gib": torch.cuda.max_memory_reserved() / 2**30}))


def _train_module(name: str) -> Any:
    return importlib.import_module(f"megatron.bridge.training.{name}")


def _recipe(name: str) -> Any:
    package = importlib.import_module("megatron.bridge.perf_recipes")
    for family in (each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg):
        if found := getattr(importlib.import_module(f"{package.__name__}.{family}"), name, None):
            return found
    sys.exit(f"{name}: no performance recipe of Megatron-Bridge")


def _scaled(config: Any, layers: int, steps: int) -> Any:
    """Let a recipe fit one GPU."""
    model = config.model
    sizes = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    for size in (*sizes, "expert_model_parallel_size", "expert_tensor_parallel_size"):
        setattr(model, size, 1)
    model.virtual_pipeline_model_parallel_size = model.pipeline_model_parallel_layout = None
    model.sequence_parallel = model.gradient_accumulation_fusion = False
    model.num_layers, model.seq_length = layers, TOKENS
    model.recompute_num_layers = model.recompute_num_layers and 1
    if model.num_moe_experts:
        model.moe_token_dispatcher_type, model.moe_flex_dispatcher_backend = "alltoall", None
    if config.comm_overlap is not None:
        for field in ("tp_comm_overlap", "overlap_moe_expert_parallel_comm", "delay_wgrad_compute"):
            setattr(config.comm_overlap, field, False)
    config.dataset.seq_length = TOKENS
    tokenizer: Any = importlib.import_module("megatron.bridge.training.tokenizers.config")
    config.tokenizer = tokenizer.TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=model.vocab_size)
    config.train.micro_batch_size, config.train.global_batch_size, config.train.train_iters = 1, MICRO_BATCHES, steps
    config.validation.eval_iters, config.validation.eval_interval = 0, None
    config.checkpoint.save = config.checkpoint.load = config.checkpoint.save_interval = None
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 2, 100
    config.env_vars = {}
    return config


if __name__ == "__main__":
    if sys.argv[1:2] == ["--upstream"]:
        train_upstream(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
    else:
        main()
