"""Run the real configuration code of Megatron-Bridge's launcher, as its `run_script.py` does, and print the result.

    python real_presets.py LAUNCHER_DIRECTORY < requests.jsonl > answers.jsonl

A request is the launcher's argv; an answer is the sizes that it would train with, or {"refused": why}. The request
["--list"] is answered with the names of all presets; ["--whole", ...] with every field of the configuration, and
["--parsed", ...] with what the parser makes of the argv. Real are the argument parser, the recipes, the overrides and
the classes of Megatron-Bridge and Megatron-Core. Not real: a model from Hugging Face (there is no network) is a bare
GPTModelProvider, and the GPU is one of the asked kind.
"""

import importlib
import json
import os
import re
import sys
import tempfile
import typing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absent_packages import KERNELS, OTHERS, stand_in_for

LAUNCHER = Path(sys.argv[-1])
IS_FLAT = (LAUNCHER / "src/megatron/bridge/perf_recipes").is_dir()
MODEL = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
    "virtual_pipeline_model_parallel_size", "expert_model_parallel_size", "expert_tensor_parallel_size", "seq_length",
    "cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules", "recompute_granularity", "recompute_method",
    "recompute_num_layers", "recompute_modules", "cpu_offloading", "cpu_offloading_num_layers",
    "pipeline_model_parallel_layout", "sequence_parallel", "moe_token_dispatcher_type", "moe_flex_dispatcher_backend",
)  # fmt: skip
MIXTURE = re.compile(r"_a\d+b|deepseek|kimi|gpt_oss|glm5|nemotron_3|qwen3_next|qwen35")


def load_core() -> Any:
    """Import the real Megatron-Core, with stand-ins for kernels; return torch."""
    import torch

    torch.compile = lambda model=None, **keywords: model if model is not None else (lambda one: one)  # no kernels
    typing.override = getattr(typing, "override", lambda one: one)  # Python 3.12
    stand_in_for(KERNELS)
    import megatron.core.extensions.transformer_engine
    import megatron.core.models.gpt
    import megatron.core.transformer.transformer_config  # noqa: F401

    return torch


def load_packages(launcher: Path) -> Any:
    """Import the real packages, with stand-ins for those that are absent; return torch."""
    sys.path.insert(0, str(launcher / "src"))
    torch = load_core()
    stand_in_for(OTHERS)
    return torch


def load() -> SimpleNamespace:
    """Import the real code."""
    sys.path[:0] = [str(LAUNCHER / "scripts/performance"), str(LAUNCHER / "scripts/common")]
    os.environ["NEMO_HOME"] = tempfile.gettempdir()
    torch = load_packages(LAUNCHER)
    import argument_parser
    from utils import overrides, utils

    return SimpleNamespace(torch=torch, parser=argument_parser.parse_cli_args(), overrides=overrides, utils=utils)


def without_network(real: SimpleNamespace, recipe: str, gpu: str) -> None:
    """Let a model from Hugging Face be one of no particular size, on one GPU of the asked kind."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    experts = 128 if MIXTURE.search(recipe) else None

    def provider(*args: Any, **keywords: Any) -> Any:
        sizes = {"num_layers": 64, "hidden_size": 64, "num_attention_heads": 64}
        return GPTModelProvider(**sizes, num_moe_experts=experts, seq_length=1, vocab_size=128)

    bridge = SimpleNamespace(to_megatron_provider=provider, hf_pretrained=SimpleNamespace())
    AutoBridge.from_hf_pretrained = classmethod(lambda cls, *args, **keywords: bridge)
    device = SimpleNamespace(major=9 if gpu == "h100" else 10, name=f"NVIDIA {gpu.upper()}")
    real.torch.cuda.get_device_properties = lambda *args: device


def resolve(real: SimpleNamespace, argv: list[str]) -> Any:
    """Return the configuration that the launcher would train with."""
    args, hydra = real.parser.parse_known_args(argv)
    without_network(real, args.model_recipe_name, args.gpu)
    if IS_FLAT:
        import run_script

        return run_script._prepare_perf_recipe(args, hydra)
    recipe = real.utils.get_perf_optimized_recipe(
        model_family_name=args.model_family_name,
        model_recipe_name=args.model_recipe_name,
        train_task=args.task,
        gpu=args.gpu,
        compute_dtype=args.compute_dtype,
        mock=args.data == "mock",
        config_variant=args.config_variant,
    )
    recipe = real.overrides.set_cli_overrides(recipe, hydra)
    recipe = real.overrides.set_user_overrides(recipe, args)
    names = ("model_family_name", "model_recipe_name", "gpu", "num_gpus", "compute_dtype", "task")
    said = [getattr(args, name) for name in names]
    return real.overrides.set_post_overrides(
        recipe, *said, user_gbs=args.global_batch_size, config_variant=args.config_variant
    )


def listed(real: SimpleNamespace) -> list[str]:
    """Return the name of every preset that can be asked for."""
    if IS_FLAT:
        families = [importlib.import_module(name) for name in real.utils.perf_recipe_family_modules()]
        return [name for one in families for name in vars(one) if re.search(r"_\d+gpu_.*_config$", name)]
    families = sorted(path.parent.name for path in (LAUNCHER / "scripts/performance/configs").glob("*/__init__.py"))
    modules = [importlib.import_module(f"configs.{family}") for family in families]
    return [name for one in modules for name in vars(one) if isinstance(vars(one)[name], real.utils.WorkloadBaseConfig)]


def told(config: Any) -> dict[str, Any]:
    """Return the sizes and switches of a configuration."""
    values = {name: getattr(config.model, name, None) for name in MODEL}
    values |= {name: getattr(config.train, name) for name in ("global_batch_size", "micro_batch_size")}
    values |= {name: getattr(config.ddp, name) for name in ("use_megatron_fsdp", "nccl_ub")}
    values["overlap_moe"] = getattr(config.comm_overlap, "overlap_moe_expert_parallel_comm", None)
    return {name: _plain(value) for name, value in values.items()}


def whole(config: Any) -> dict[str, str]:
    """Return every field as SECTION.FIELD, with what is printed of its value; of no section, as FIELD."""
    found = {}
    for section, values in vars(config).items():
        fields = vars(values) if hasattr(values, "__dict__") and not isinstance(values, type) else {"": values}
        found |= {f"{section}.{name}".rstrip("."): str(value) for name, value in fields.items()}
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, bool | int | str) else getattr(value, "name", str(value))


def _answer(real: SimpleNamespace, argv: list[str], save: list[str]) -> Any:
    if argv == ["--list"]:
        return listed(real)
    if argv[0] == "--parsed":
        return {name: str(value) for name, value in vars(real.parser.parse_args(argv[1:])).items()}
    if argv[0] == "--whole":
        return whole(resolve(real, [*argv[1:], *save]))
    return told(resolve(real, [*argv, *save]))


def main() -> None:
    """Answer each request."""
    answers, sys.stdout = sys.stdout, sys.stderr
    real = load()
    save = ["--save_config_filepath", str(Path(tempfile.mkdtemp()) / "config.yaml")]
    for line in sys.stdin:
        argv = json.loads(line)
        try:
            answer = _answer(real, argv, save)
        except (Exception, SystemExit) as error:
            answer = {"refused": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
