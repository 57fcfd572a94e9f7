"""A proxy as a test definition."""

import json
from typing import Any

from cloudai_mbridge.estimate.proxy import Proxy
from cloudai_mbridge.models.cmd_args import Launcher

# Sequences of a step for every rank: enough micro-batches to see a steady step, few enough for a small machine
_SEQUENCES = 4


def render_proxy(proxy: Proxy, num_gpus: int, max_steps: int) -> str:
    """Return the TOML of a test: the recipe's shapes with fewer layers, for the embedded loop where it can build it."""
    recipe, name = proxy.recipe, f"{proxy.recipe.name}_{proxy.num_layers}_layers"
    launcher = Launcher.MEGATRON_BRIDGE if recipe.not_embedded else Launcher.EMBEDDED
    lines = [
        f"# A proxy of {recipe.name}: {proxy.num_layers} of its {proxy.layers_before} layers, of the same shapes.",
        *(f"# {line}" for line in _remarks(proxy)),
        f'name = "{name}"',
        f'description = "{recipe.name} with {proxy.num_layers} of {proxy.layers_before} layers"',
        'test_template_name = "MegatronBridge"',
        "",
        "[metrics]",
        f"warmup_steps = {min(3, max_steps - 1)}",
        "",
        "[cmd_args]",
        f'launcher = "{launcher}"',
        f"model_family_name = {json.dumps(recipe.family)}",
        f'model_recipe_name = "{recipe.name}"',
        f"num_layers = {proxy.num_layers}",
        f"num_gpus = {num_gpus}",
        f"mb = {recipe.default('train', 'micro_batch_size') or 1}",
        f"gb = {num_gpus * _SEQUENCES * (recipe.default('train', 'micro_batch_size') or 1)}",
        f"max_steps = {max_steps}",
        'compute_dtype = "bf16"',
    ]
    if proxy.changed:
        lines += ["", "[extra_cmd_args]"]
        lines += [f'"model.{key}" = {_value(value)}' for key, value in sorted(proxy.changed.items())]
    return "\n".join(lines) + "\n"


def _remarks(proxy: Proxy) -> list[str]:
    remarks = [f"model.{name} is shrunk with them." for name in sorted(proxy.changed)]
    for stages, text in proxy.recipe.pipeline_layouts.items():
        layout = text if proxy.recipe.not_embedded else text.replace("m", "")
        remarks.append(f'With {stages} pipeline stages: pipeline_model_parallel_layout = "{layout}"')
    if proxy.recipe.not_embedded:
        remarks.append(
            f"The embedded loop cannot build {proxy.recipe.not_embedded}; Megatron-Bridge's launcher runs it."
        )
    return [
        *remarks,
        f"gb is {_SEQUENCES} micro-batches a rank, not the recipe's; set tp, pp, ep and seq_length as needed.",
    ]


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return json.dumps(text)
