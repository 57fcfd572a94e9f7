"""What is estimated of a point of Megatron-Bridge's launcher: the sizes that will be trained."""

from collections.abc import Mapping

from cloudai_mbridge.estimate.hardware import Gpu
from cloudai_mbridge.estimate.request import EstimateRequest
from cloudai_mbridge.megatron_bridge.presets.find import Preset, describe, said, with_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes.load import Recipe
from cloudai_mbridge.training.flops import NEW, Formula

# Without these there is no estimate; the others are taken as unset where nobody knows them
_NEEDED = ("tp", "pp", "cp", "ep", "mb", "gb")
# What a row of the published tables says of a point
_PUBLISHED = ("tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "use_megatron_fsdp")
_BATCH = ("mb", "gb")
_MODEL = ("num_layers", "hidden_size", "vocab_size", "first_k_dense_replace", "num_distributed_optimizer_instances")


def trained_question(
    recipe: Recipe,
    args: ResolvedCmdArgs,
    preset: Preset | None,
    why_no_preset: str,
    gpu: Gpu | None,
    why_no_gpu: str,
    extra: Mapping[str, str],
    formula: Formula = NEW,
) -> EstimateRequest:
    """Return what is to be estimated of a point. args: its own, with the sizes of the recipe's model."""
    resolved = with_preset(args, preset)
    if missing := _missing(resolved.unknown, recipe):
        why = f"Megatron-Bridge decides {', '.join(missing)}, and {why_no_preset}; set them"
        return EstimateRequest(recipe, args, gpu, why_no_gpu, extra, formula, why_no_layout=why)
    trained, published = resolved.args, None
    if not trained.seq_length:
        trained = trained.model_copy(update={"seq_length": recipe.default("model", "seq_length")})
    if preset is not None:
        published = args.model_copy(update={name: getattr(trained, name) for name in _PUBLISHED})
    is_its_gpu = preset is not None and gpu is not None and gpu.name == preset.row.gpu
    shipped = _shipped(recipe, args, preset, extra) if is_its_gpu else ()
    return EstimateRequest(
        recipe, trained, gpu, why_no_gpu, extra, formula, published, shipped, filled_in=describe(resolved)
    )


def _missing(unknown: frozenset[str], recipe: Recipe) -> list[str]:
    has_experts = recipe.default("model", "num_moe_experts") is not None
    return [name for name in _NEEDED if name in unknown and (has_experts or name != "ep")]


def _shipped(
    recipe: Recipe, args: ResolvedCmdArgs, preset: Preset | None, extra: Mapping[str, str]
) -> tuple[tuple[int, int, int], ...]:
    """Return GPUs and batch of the preset, which upstream ships for this GPU, if the point changes nothing else."""
    if preset is None or extra or not all(isinstance(preset.values.get(name), int) for name in _BATCH):
        return ()
    changed = [name for name, value in said(args).items() if name not in _BATCH and value != preset.values.get(name)]
    changed += [name for name in _MODEL if getattr(args, name) not in (None, recipe.default("model", name))]
    return () if changed else ((preset.num_gpus, preset.values["mb"], preset.values["gb"]),)
