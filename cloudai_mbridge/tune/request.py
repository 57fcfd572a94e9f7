"""The request for a search, from the names and numbers that a user gives."""

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Gpu, gpu_named
from cloudai_mbridge.estimate.precision import Precision, precision_named
from cloudai_mbridge.estimate.request import gpu_on
from cloudai_mbridge.estimate.time.model import why_no_time
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.tune.space import SearchRequest, newest_preset, preset_values


def search_request(
    system: System | None,
    *,
    recipe: str,
    gpu: str | None,
    num_gpus: int,
    precisions: tuple[str, ...],
    gbs: int | None,
    seq_length: int | None,
    launcher: str,
    max_steps: int,
) -> SearchRequest:
    """Return the search request; BadInput: an unknown name, or no times can be predicted."""
    found, name = load_recipe(recipe), gpu or (system.gpu_type if system else None)
    if name is None:
        raise BadInput("no GPU is named; use --gpu, or --system-config with a gpu_type")
    device = gpu_on(gpu_named(name), system)
    formats = tuple(dict.fromkeys(map(precision_named, precisions)))
    for each in formats:
        if reason := why_no_time(device, each):
            raise BadInput(f"no layout can be ranked: {reason}")
    return SearchRequest(
        recipe=found,
        gpu=device,
        num_gpus=num_gpus,
        gbs=gbs or _batch(found, device, num_gpus, formats[0]),
        seq_length=seq_length or found.default("model", "seq_length"),
        precisions=formats,
        launcher=Launcher(launcher),
        max_steps=max_steps,
    )


def _batch(recipe: Recipe, gpu: Gpu, num_gpus: int, precision: Precision) -> int:
    """Return the batch of the newest preset, scaled to these GPUs; without a preset, the recipe's."""
    if scaled := preset_values(recipe, gpu, num_gpus, precision).get("gb"):
        return int(scaled)
    preset = newest_preset(recipe, gpu, num_gpus, precision)
    own: int | None = preset.values.get("gb") if preset else None
    if preset is None or own is None:
        return int(recipe.default("train", "global_batch_size"))
    return max(1, round(own * num_gpus / preset.row.num_gpus))  # its own sizes do not divide these GPUs
