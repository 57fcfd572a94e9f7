"""Proxy model as a test definition."""

import json
from typing import Any

from cloudai_mbridge.estimate.proxy import Proxy
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.test_definition import TEMPLATE

# Sequences of a step per rank: enough micro-batches for a steady step, few enough for a small machine
_SEQUENCES = 4


def render_proxy(proxy: Proxy, num_gpus: int, max_steps: int) -> str:
    """Return the TOML of a test: the recipe's shapes with fewer layers, for the embedded loop if it can build it."""
    recipe, micro_batch_size = proxy.recipe, proxy.recipe.default("train", "micro_batch_size") or 1
    cmd_args = {
        "launcher": str(Launcher.MEGATRON_BRIDGE if recipe.not_embedded else Launcher.EMBEDDED),
        "model_family_name": recipe.family,
        "model_recipe_name": recipe.name,
        "num_layers": proxy.num_layers,
        "num_gpus": num_gpus,
        "mb": micro_batch_size,
        "gb": num_gpus * _SEQUENCES * micro_batch_size,
        "max_steps": max_steps,
        "compute_dtype": "bf16",
    }
    definition: dict[str, Any] = {
        "name": f"{recipe.name}_{proxy.num_layers}_layers",
        "description": f"{recipe.name} with {proxy.num_layers} of {proxy.layers_before} layers",
        "test_template_name": TEMPLATE,
        "metrics": {"warmup_steps": min(3, max_steps - 1)},
        "cmd_args": cmd_args,
    }
    if proxy.changed:
        definition["extra_cmd_args"] = {
            f"model.{key}": value if isinstance(value, str) else json.dumps(value)
            for key, value in sorted(proxy.changed.items())
        }
    remarks = "".join(f"# {line}\n" for line in _remarks(proxy))
    return remarks + render_toml(definition)


def _remarks(proxy: Proxy) -> list[str]:
    remarks = [
        f"A proxy of {proxy.recipe.name}: {proxy.num_layers} of its {proxy.layers_before} layers, of the same shapes.",
        *(f"model.{name} is shrunk with them." for name in sorted(proxy.changed)),
    ]
    for stages, text in proxy.recipe.pipeline_layouts.items():
        remarks.append(f'With {stages} pipeline stages: pipeline_model_parallel_layout = "{text}"')
    if proxy.recipe.not_embedded:
        remarks.append(
            f"The embedded loop cannot build {proxy.recipe.not_embedded}; Megatron-Bridge's launcher runs it."
        )
    return [
        *remarks,
        f"gb is {_SEQUENCES} micro-batches a rank, not the recipe's; set tp, pp, ep and seq_length as needed.",
    ]
