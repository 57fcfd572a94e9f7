"""Two tiny repositories, written here, in the two layouts of Megatron-Bridge."""

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

import pytest

PARSER = """
    def parse_cli_args():
        parser.add_argument("-c", "--compute_dtype", choices=["bf16", "fp8_cs"], default="bf16")
        parser.add_argument("-cv", "--config_variant", default={default!r})
"""
UTILS = """
    import importlib
    from dataclasses import dataclass
    from typing import Optional

    raise_if_run = open("/nonexistent/this-file-is-read-not-run")

    @dataclass
    class WorkloadBaseConfig:
        num_gpus: int = 1
        tensor_model_parallel_size: int = 1
        global_batch_size: int = 1
        pp_layout: Optional[str] = None

        @property
        def sequence_parallel(self):
            return self.tensor_model_parallel_size > 1

    def get_workload_base_config(recipe, gpu, dtype, variant):
        module = importlib.import_module("configs.toy")
        for name in (variant, "v1" if variant == "v2" else variant):
            found = getattr(module, f"{recipe}_pretrain_config_{gpu}_{dtype}_{name}".upper(), None)
            if found is not None:
                return found
        found = getattr(module, f"{recipe}_pretrain_config_{gpu}_{dtype}".upper(), None)
        if found is None:
            raise ValueError("no such preset")
        return found
"""
SIZES = """
    from dataclasses import replace
    from utils.utils import WorkloadBaseConfig

    BASE = WorkloadBaseConfig(num_gpus=16, global_batch_size=32)
    TOY_PRETRAIN_CONFIG_H100_BF16_V1 = replace(BASE, tensor_model_parallel_size=2)
    TOY_PRETRAIN_CONFIG_H100_FP8_CS_V1 = TOY_PRETRAIN_CONFIG_H100_BF16_V1
    TOY_PRETRAIN_CONFIG_H100_BF16_LARGE_SCALE = replace(TOY_PRETRAIN_CONFIG_H100_BF16_V1, num_gpus=64)
    PLAIN_PRETRAIN_CONFIG_B200_BF16 = replace(BASE, global_batch_size=48)
"""
BUILDERS = """
    import torch
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.bridge import AutoBridge
    from utils.utils import get_workload_base_config

    class Part:
        pass

    def build(base):
        cfg = Part()
        cfg.model = AutoBridge.from_hf_pretrained("some/model").to_megatron_provider(load_weights=False)
        cfg.train = Part()
        cfg.ddp = DistributedDataParallelConfig(overlap_grad_reduce=True)
        cfg.comm_overlap = None
        cfg.model.tensor_model_parallel_size = base.tensor_model_parallel_size
        cfg.model.seq_length = 4096
        cfg.train.global_batch_size, cfg.train.micro_batch_size = base.global_batch_size, 1
        return cfg

    def toy_pretrain_config_h100(precision="bf16", mock=True, config_variant="v1"):
        cfg = build(get_workload_base_config("toy", "h100", precision.upper(), config_variant))
        if precision == "fp8_cs" and config_variant == "v2":
            cfg.train.global_batch_size = 40
        if torch.cuda.is_available():
            cfg.model.context_parallel_size = 2
        return cfg

    def plain_pretrain_config_b200(precision="bf16", mock=True, config_variant="v1"):
        return build(get_workload_base_config("plain", "b200", precision.upper(), config_variant))
"""
FLAT = """
    from megatron.bridge.recipes.toy import toy_pretrain_config

    def _sized(cfg, tp):
        cfg.model.tensor_model_parallel_size = tp
        return cfg

    def toy_pretrain_8gpu_h100_bf16_config():
        return _sized(toy_pretrain_config(), 1)

    def toy_pretrain_32gpu_h100_bf16_config():
        cfg = _sized(toy_pretrain_config(), 2)
        cfg.train.global_batch_size = 64
        return cfg

    def toy_pretrain_64gpu_h100_bf16_large_config():
        return _sized(toy_pretrain_config(), 4)

    def small_pretrain_8gpu_h100_fp8cs_config():
        return _sized(toy_pretrain_config(), 1)

    def small_pretrain_16gpu_h100_fp8cs_config():
        return _sized(toy_pretrain_config(), 2)

    toy_pretrain_128gpu_h100_bf16_config = toy_pretrain_32gpu_h100_bf16_config
"""
RECIPE = """
    from megatron.bridge import AutoBridge
    from megatron.core.distributed import DistributedDataParallelConfig

    class Part:
        pass

    def toy_pretrain_config():
        cfg = Part()
        cfg.model = AutoBridge.from_hf_pretrained("some/model").to_megatron_provider()
        cfg.model.seq_length = 8192
        cfg.train = Part()
        cfg.train.global_batch_size = 16
        cfg.train.micro_batch_size = 1
        cfg.ddp = DistributedDataParallelConfig()
        cfg.comm_overlap = None
        return cfg
"""
FLAT_UTILS = """
    _DEFAULT_GPU_COUNT_OVERRIDES = {("small", "pretrain", "h100", "fp8cs", None): 8}
"""


def write(root: Path, files: Mapping[str, str]) -> Path:
    """Write a repository."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(text), encoding="utf-8")
    return root


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository in the layout of 0.3 to 0.5."""
    scripts = "scripts/performance"
    files = {
        "src/megatron/bridge/package_info.py": "MAJOR = 0\nMINOR = 3\nPATCH = 9\n",
        f"{scripts}/argument_parser.py": PARSER.format(default="v2"),
        f"{scripts}/utils/utils.py": UTILS,
        f"{scripts}/configs/toy/__init__.py": "from .builders import *\nfrom .toy_workload_base_configs import *\n",
        f"{scripts}/configs/toy/toy_workload_base_configs.py": SIZES,
        f"{scripts}/configs/toy/builders.py": BUILDERS,
    }
    return write(tmp_path / "old", files)


@pytest.fixture
def flat_clone(tmp_path: Path) -> Path:
    """A repository in the layout of 0.6."""
    files = {
        "src/megatron/bridge/package_info.py": "MAJOR = 0\nMINOR = 7\nPATCH = 0\n",
        "src/megatron/bridge/recipes/toy.py": RECIPE,
        "src/megatron/bridge/perf_recipes/toys/__init__.py": "from .h100 import *\n",
        "src/megatron/bridge/perf_recipes/toys/h100.py": FLAT,
        "scripts/performance/argument_parser.py": PARSER.format(default=None),
        "scripts/performance/utils/utils.py": FLAT_UTILS,
    }
    return write(tmp_path / "flat", files)
