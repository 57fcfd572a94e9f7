"""Call every performance recipe of Megatron-Bridge, and print the container of each as its own YAML writer gives it.

    python real_containers.py LAUNCHER_DIRECTORY > containers.jsonl

A line is {"recipe", "gpu", "num_gpus", "yaml"}. Real are the recipes, the bridges of the models, and the classes of
Megatron-Bridge and Megatron-Core; stand-ins are the kernels, the files of Hugging Face (`hugging_face.py`) and the GPU.
"""

import importlib
import json
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hugging_face import provider_of
from real_presets import LAUNCHER, load_packages

NAME = re.compile(r"\w+_(?P<num_gpus>\d+)gpu_(?P<gpu>[a-z0-9]+)_\w+_config")


def recipes() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield name and function of every recipe."""
    import megatron.bridge.perf_recipes as package

    families = [each.name for each in pkgutil.iter_modules(package.__path__) if each.ispkg]
    for family in families:
        members = vars(importlib.import_module(f"{package.__name__}.{family}"))
        yield from ((name, member) for name, member in members.items() if NAME.fullmatch(name))


def stand_in_for_models() -> None:
    """Let a model of Hugging Face be what its published file makes of it."""
    from megatron.bridge.models.conversion.auto_bridge import AutoBridge

    def from_hf_pretrained(cls: type, path: str, **keywords: Any) -> Any:
        return SimpleNamespace(to_megatron_provider=lambda **given: provider_of(path), hf_pretrained=SimpleNamespace())

    AutoBridge.from_hf_pretrained = classmethod(from_hf_pretrained)


def main() -> None:
    """Print each recipe's container."""
    answers, sys.stdout = sys.stdout, sys.stderr
    torch = load_packages(LAUNCHER)
    stand_in_for_models()
    file = Path(tempfile.mkdtemp()) / "container.yaml"
    for name, function in recipes():
        found = NAME.fullmatch(name)
        assert found
        gpu = found["gpu"]
        device = SimpleNamespace(major=9 if gpu == "h100" else 10, minor=0, name=f"NVIDIA {gpu.upper()}")
        torch.cuda.get_device_properties = lambda *args, device=device: device
        function().to_yaml(str(file))
        answer = {"recipe": name, "gpu": gpu, "num_gpus": int(found["num_gpus"])}
        print(json.dumps({**answer, "yaml": file.read_text(encoding="utf-8")}), file=answers, flush=True)


if __name__ == "__main__":
    main()
