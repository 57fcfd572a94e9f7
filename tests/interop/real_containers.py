"""Call every performance recipe of Megatron-Bridge, and print the container of each as its own YAML writer gives it.

    python real_containers.py LAUNCHER_DIRECTORY > containers.jsonl

A line is {"recipe", "gpu", "num_gpus", "given", "yaml", "resolved", "unset"}: the fields that only a user can give,
which are set here; the container as the recipe returns it, with these; as Megatron-Bridge's loop resolves and validates
it on such a GPU with Transformer Engine (or "refused" and why); and the fields that have their classes' own values.
Real are the recipes, the bridges of the models, and the classes of Megatron-Bridge and Megatron-Core; stand-ins are the
kernels, the files of Hugging Face (`hugging_face.py`) and the GPU.
"""

import dataclasses
import importlib
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absent_packages import OTHERS, stand_in_for
from hugging_face import provider_of
from judge_containers import be_a_gpu, on
from real_presets import LAUNCHER

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


def give(container: Any) -> list[str]:
    """Set the fields without which Megatron-Bridge refuses a recipe, as its messages demand; return them."""
    given: dict[str, Any] = {}
    if container.peft is not None:
        given["checkpoint.pretrained_checkpoint"] = tempfile.gettempdir()
    if getattr(container.dataset, "fast_cache_load", False) and container.dataset.path_to_cache is None:
        given["dataset.path_to_cache"] = tempfile.gettempdir()
        given["dataset.seq_length"] = container.model.seq_length
    for field, value in given.items():
        section, _, name = field.partition(".")
        setattr(getattr(container, section), name, value)
    return list(given)


def resolved(container: Any, file: Path) -> dict[str, Any]:
    """Return what Megatron-Bridge's loop makes of a container; it is changed."""
    from megatron.bridge.training.config import runtime_config_update

    before = dict(os.environ)  # a recipe sets variables
    try:
        runtime_config_update(container)
    except (AssertionError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    finally:
        os.environ.clear()
        os.environ.update(before)
    container.to_yaml(str(file))
    return {"resolved": file.read_text(encoding="utf-8"), "unset": unset(container)}


def unset(container: Any) -> list[str]:
    """Return, as SECTION.FIELD, what has the value that its class gives it."""
    sections = {each.name: getattr(container, each.name) for each in dataclasses.fields(container)}
    return [
        f"{name}.{each.name}"
        for name, section in sections.items()
        if dataclasses.is_dataclass(section)
        for each in dataclasses.fields(section)
        if hasattr(section, each.name) and getattr(section, each.name) == _default(each)
    ]


def _default(field: Any) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def main() -> None:
    """Print each recipe's container."""
    answers, sys.stdout = sys.stdout, sys.stderr
    sys.path.insert(0, str(LAUNCHER / "src"))
    be_a_gpu()
    stand_in_for(OTHERS)
    stand_in_for_models()
    file = Path(tempfile.mkdtemp()) / "container.yaml"
    for name, function in recipes():
        found = NAME.fullmatch(name)
        assert found
        gpu, num_gpus = found["gpu"], int(found["num_gpus"])
        on(gpu, num_gpus)
        container = function()
        given = give(container)
        container.to_yaml(str(file))
        answer = {"recipe": name, "gpu": gpu, "num_gpus": num_gpus, "given": given}
        answer["yaml"] = file.read_text(encoding="utf-8")
        print(json.dumps({**answer, **resolved(container, file)}), file=answers, flush=True)


if __name__ == "__main__":
    main()
