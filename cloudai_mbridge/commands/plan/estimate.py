"""`mbridge estimate` and `mbridge proxy`."""

import math
from collections.abc import Container, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.commands.console import new_console, print_json
from cloudai_mbridge.commands.options import (
    COMPLETE_GPU,
    COMPLETE_PRECISION,
    COMPLETE_RECIPE,
    COMPLETE_RELEASE,
    FLOPS_FORMULA,
    JSON,
    NO_PRESET,
    PATH,
    completing,
)
from cloudai_mbridge.commands.plan import write_new
from cloudai_mbridge.constraints import CheckResult, Upstream, check
from cloudai_mbridge.constraints.engine import with_origins
from cloudai_mbridge.constraints.rule_docs import details_hint
from cloudai_mbridge.errors import OK, BadInput, NothingFits, counted
from cloudai_mbridge.estimate.hardware import Gpu, gpu_named, precision_named, price_of
from cloudai_mbridge.estimate.headline import headline_estimator
from cloudai_mbridge.estimate.memory.arguments import expert_tp
from cloudai_mbridge.estimate.memory.estimate import GIB, StageMemory, worst_stage
from cloudai_mbridge.estimate.memory.layout import RECOMPUTE_MODULES
from cloudai_mbridge.estimate.point import Estimate, estimate_point
from cloudai_mbridge.estimate.proxy import render_proxy
from cloudai_mbridge.estimate.request import EstimateRequest, expands_segments, gpu_of, trained_question
from cloudai_mbridge.files.text import readable
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.presets import (
    Preset,
    describe,
    find_preset,
    given_to_loop,
    loop_preset,
    newest_release,
    origin,
    why_no_preset,
    why_no_variant,
    with_loop_preset,
    with_preset,
)
from cloudai_mbridge.megatron_bridge.release import find_release, known_releases
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import settings_of, with_model_facts, with_recipe_defaults
from cloudai_mbridge.recipes.load import Recipe, recipe_for
from cloudai_mbridge.recipes.presets import with_preset_of
from cloudai_mbridge.sweep.pinned import overridden_by
from cloudai_mbridge.training.flops import Formula

MOST_COLUMNS = 8
MIB = 2**20


def render_estimate(found: Estimate) -> RenderableType:
    """Return the tables; missing values are listed with their reasons."""
    where = f"{found.layout.num_gpus} x {found.gpu or 'unknown GPU'}, {found.precision}"
    headline = Table("", "", title=Text(f"{found.recipe} on {where}"), title_justify="left", show_header=False)
    for name, value in _lines(found):
        headline.add_row(name, Text(value))
    parts: list[RenderableType] = [headline]
    if found.memory and found.memory.stages:
        parts.append(_stages(found.memory.stages))
    if found.memory and found.memory.line:
        parts.append(Text(found.memory.line))
    if found.step_time_terms_s:
        table, total = (
            Table("term", "s", "share", title=Text("step time"), title_justify="left"),
            found.step_time_s or 0,
        )
        for name, seconds in found.step_time_terms_s.items():
            if seconds:
                table.add_row(name, f"{seconds:.4g}", f"{seconds / total:.1%}")
        parts.append(table)
    for reason in dict.fromkeys(why for name, why in found.missing.items() if name != "fits"):
        names = [name for name, why in found.missing.items() if why == reason]
        parts.append(Text(f"not known: {', '.join(names)} ({reason})", style="dim"))
    if found.filled_in:
        parts.append(Text(f"filled in by {found.filled_in}"))
    if found.not_filled_in:
        parts.append(Text(f"no preset: {found.not_filled_in}"))
    if found.not_considered:
        parts.append(Text(f"set, but not considered: {', '.join(found.not_considered)}", style="yellow"))
    return Group(*parts)


def _lines(found: Estimate) -> Iterator[tuple[str, str]]:
    layout = found.layout
    sizes = f"tp{layout.tp} pp{layout.pp} cp{layout.cp} vp{layout.vp} ep{layout.ep} etp{layout.expert_tp} dp{layout.dp}"
    yield "layout", f"{sizes}, {layout.num_microbatches} micro-batches of {layout.mbs} x {layout.seq_length} tokens"
    if found.parameters:
        yield "parameters", f"{_count(found.parameters.total)}, active {_count(found.parameters.active)}"
    yield "FLOPs per token", f"{found.flops_per_token:.6g} ({found.flops_formula})"
    if (memory := found.memory) is not None:
        share = "" if memory.share is None else f", states and activations {memory.share:.0%} of it"
        given = "" if memory.gpu_memory_gib is None else f" of {memory.gpu_memory_gib:.0f}"
        worst = "" if memory.worst_stage is None else f" on stage {memory.worst_stage}"
        size, unit = (memory.peak_memory_gib, "GiB") if given else _in_unit(memory.peak_memory_gib * GIB)
        fits = ": does not fit" if found.fits is False else ": may not fit" if "fits" in found.missing else ""
        bound = f"{memory.bound} " if memory.bound else ""
        yield "memory", f"{bound}{size:.1f}{given} {unit}{worst}{fits}{share} ({memory.estimator})"
        if memory.why_bound:
            yield f"why {memory.bound}", memory.why_bound
    if found.fits is False:
        yield "if it did fit", ""
    if found.step_time_s is not None:
        interval = found.step_time_90_s
        bounds = f", 90 % interval {interval[0]:.3g} - {interval[1]:.3g} s" if interval else ""
        yield "step time", f"{found.step_time_s:.4g} s{bounds}"
        yield "its error", found.step_time_error or ""
        yield "tokens/s/GPU", f"{found.tokens_per_s_per_gpu:.0f}"
        yield "TFLOP/s/GPU", f"{found.tflops_per_gpu:.0f}" + ("" if found.mfu is None else f", MFU {found.mfu:.1%}")
    if found.gpu_hours is not None:
        cost = "" if found.cost is None else f", {found.cost:.2f} {found.currency}"
        yield f"{found.num_steps} steps", f"{readable(found.gpu_hours)} GPU-hours{cost}"
    for row in found.published:
        rates = f"{row.tokens_per_s_per_gpu:.0f} tokens/s/GPU, {row.tflops_per_gpu:.0f} TFLOP/s/GPU ({row.formula})"
        yield f"published, {row.container}", f"{row.step_time_s:.4g} s, {rates}"


def _stages(stages: tuple[StageMemory, ...]) -> Table:
    columns = _columns(stages)
    unit = _in_unit(max(stage.total for stage in stages))[1]
    size = {"GiB": GIB, "MiB": MIB}[unit]
    title = Text(f"memory per pipeline stage, {unit} (* the fullest)")
    shown = (Column(Text(name), justify="right") for name, _ in columns)
    table = Table("term", *shown, title=title, title_justify="left")
    for term in stages[0].terms:
        if any(stage.terms[term] for _, stage in columns):
            table.add_row(term, *(f"{stage.terms[term] / size:.2f}" for _, stage in columns))
    table.add_section()
    table.add_row("total", *(f"{stage.total / size:.2f}" for _, stage in columns))
    return table


def _in_unit(size: float) -> tuple[float, str]:
    """Return bytes as a readable number, and its unit."""
    return (size / GIB, "GiB") if size >= GIB else (size / MIB, "MiB")


def _columns(stages: tuple[StageMemory, ...]) -> list[tuple[str, StageMemory]]:
    """Merge neighboring equal stages into columns; of too many columns, keep the first, the last and the fullest."""
    columns: list[tuple[int, StageMemory]] = []
    for stage in stages:
        if not columns or columns[-1][1].terms != stage.terms:
            columns.append((stage.stage, stage))
    ends = [start for start, _ in columns[1:]] + [len(stages)]
    worst = worst_stage(stages).stage
    named = [
        (f"{start if end - start == 1 else f'{start}-{end - 1}'}{'*' if start <= worst < end else ''}", stage)
        for (start, stage), end in zip(columns, ends, strict=True)
    ]
    if len(named) <= MOST_COLUMNS:
        return named
    fullest = sorted(range(1, len(named) - 1), key=lambda i: -named[i][1].total)[: MOST_COLUMNS - 2]
    return [named[i] for i in (0, *sorted(fullest), len(named) - 1)]


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**8 else f"{parameters / 1e6:.3f} M"


_SIZE = click.IntRange(1, 2**63 - 1)
DOES_NOT_FIT = NothingFits.exit_code
_GRAPHS = ("none", "local", "transformer_engine")
_RECOMPUTABLE = ("none", "full", *RECOMPUTE_MODULES)
_ESTIMATORS = ("default", "megatron-bridge/seed", "megatron-bridge/head")


@click.command()
@click.option("--recipe", shell_complete=COMPLETE_RECIPE, required=True, help="See `mbridge list`.")
@click.option(
    "--gpu",
    shell_complete=COMPLETE_GPU,
    help="Such as gb200; default: the system's gpu_type. Without one: FLOPs and memory only.",
)
@click.option("--num-gpus", type=_SIZE, help="Default: the preset's, or as few as hold the layout.")
@click.option(
    "--precision",
    shell_complete=COMPLETE_PRECISION,
    default="bf16",
    show_default=True,
    help="bf16 fp8_cs fp8_ds fp8_mx fp8_sc nvfp4 fp32.",
)
@click.option("--seq-length", "seq_length", type=_SIZE, help="Tokens per sequence; default: the recipe's.")
@click.option("--tp", type=_SIZE, help="Tensor parallel size.")
@click.option("--pp", type=_SIZE, help="Pipeline parallel size.")
@click.option("--cp", type=_SIZE, help="Context parallel size.")
@click.option("--vp", type=_SIZE, help="Virtual pipeline stages per rank.")
@click.option("--ep", type=_SIZE, help="Expert parallel size.")
@click.option("--etp", "et", type=_SIZE, help="Expert tensor parallel size; default: 1, embedded: tp.")
@click.option("--mbs", "mb", type=_SIZE, help="Sequences per micro-batch; default: the preset's, or the recipe's.")
@click.option("--gbs", "gb", type=_SIZE, help="Sequences per step; default: the preset's, or the recipe's.")
@click.option("--num-layers", type=_SIZE, help="Decoder layers; default: the recipe's.")
@click.option("--pipeline-layout", "pipeline_model_parallel_layout", help="Such as 'Et*4|(t*4|)*14tmL'.")
@click.option(
    "--recompute",
    shell_complete=completing(lambda: _RECOMPUTABLE),
    help="none, full, or modules such as core_attn,mlp; default: the upstream recipe's.",
)
@click.option("--recompute-num-layers", type=_SIZE, help="Recompute the first layers of every chunk.")
@click.option(
    "--offload-layers", "activation_offload_layers", type=click.IntRange(0, 2**63 - 1), help="In host memory."
)
@click.option("--fsdp/--no-fsdp", "use_megatron_fsdp", default=None, help="Megatron-FSDP.")
@click.option(
    "--cuda-graph",
    "cuda_graph_impl",
    shell_complete=completing(lambda: _GRAPHS),
    help="none, local or transformer_engine.",
)
@click.option("--cuda-graph-scope", help="Such as attn or full_iteration.")
@click.option("--moe-a2a-overlap/--no-moe-a2a-overlap", default=None, help="Overlap the experts' exchange.")
@click.option("--task", type=click.Choice(["pretrain", "sft", "lora", "peft"]), help="Default: pretrain.")
@click.option("--launcher", type=click.Choice([str(one) for one in Launcher]), help="Launcher whose defaults apply.")
@click.option(
    "--release",
    shell_complete=COMPLETE_RELEASE,
    help="Of Megatron-Bridge: its preset fills in what is left out here; none: no preset. Default: newest.",
)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="As in extra_cmd_args; may be repeated.")
@FLOPS_FORMULA
@click.option("--memory-estimator", type=click.Choice(_ESTIMATORS), default="default", show_default=True)
@click.option("--max-steps", type=_SIZE, help="Steps, for GPU-hours and cost; default: 10.")
@click.option("--system-config", type=PATH, help="System TOML with gpu_type and [prices].")
@JSON
def estimate(
    recipe: str, memory_estimator: str, system_config: Path | None, as_json: bool, formula: Formula, **given: Any
) -> int:
    """Estimate one point: FLOPs, memory of every stage, step time, MFU, cost. Nothing is run (docs/estimate.md).

    Exit codes: 0, or 9 if the point does not fit into the GPU's memory.
    """
    system = load_system(system_config) if system_config else None
    request = _request(recipe, system, formula, **given)
    price, why_not = price_of(system, request.gpu.name if request.gpu else None)
    found = estimate_point(request, estimator=memory_estimator, price=price, why_no_price=why_not)
    if as_json:
        print_json(found)
    else:
        new_console().print(render_estimate(found))
    if found.memory is not None and "fits" in found.missing:
        click.echo(
            f"warning: the point may not fit: {found.memory.bound} {found.memory.peak_memory_gib:.1f} GiB on the"
            f" fullest GPU, which has {found.memory.gpu_memory_gib:.1f} GiB; {found.missing['fits']}",
            err=True,
        )
    if found.fits is not False or found.memory is None:
        return OK
    click.echo(
        f"warning: the point does not fit: {found.memory.peak_memory_gib:.1f} GiB on the fullest GPU, which has"
        f" {found.memory.gpu_memory_gib:.1f} GiB; step time and throughput assume that it did",
        err=True,
    )
    return DOES_NOT_FIT


@click.command()
@click.argument("recipe", shell_complete=COMPLETE_RECIPE)
@click.option("--layers", type=_SIZE, required=True, help="Decoder layers to keep.")
@click.option("--gpus", "num_gpus", type=_SIZE, default=1, show_default=True, help="Ranks of the definition.")
@click.option("--max-steps", type=_SIZE, default=10, show_default=True, help="Steps of the definition.")
@click.option("--output", type=PATH, help="Test TOML to write; default: standard output.")
def proxy(recipe: str, layers: int, num_gpus: int, max_steps: int, output: Path | None) -> int:
    """Shrink a RECIPE to fewer layers of the same shapes, as a test definition for a small machine."""
    text = render_proxy(load_recipe(recipe), layers, num_gpus, max_steps)
    if output is None:
        click.echo(text, nl=False)
        return OK
    write_new("--output", output, text)
    click.echo(f"written: {output}")
    return OK


def _request(
    recipe_name: str,
    system: System | None,
    formula: Formula,
    *,
    gpu: str | None,
    precision: str,
    recompute: str | None,
    overrides: tuple[str, ...],
    num_gpus: int | None,
    release: str | None,
    **sizes: Any,
) -> EstimateRequest:
    """Return the point that the options describe; BadInput: an unknown name, or broken rules, one line each."""
    recipe, extra = load_recipe(recipe_name), _overrides(overrides)
    chosen = {name: value for name, value in sizes.items() if value is not None}
    chosen |= _recomputation(recompute, extra, sizes["recompute_num_layers"])
    if gpu is not None:
        chosen["gpu_type"] = gpu_named(gpu).name
    args = ResolvedCmdArgs.model_validate(
        {
            **chosen,
            "model_recipe_name": recipe_name,
            "model_family_name": recipe.family,
            "compute_dtype": str(precision_named(precision)),
            "num_gpus": num_gpus or 1,
        }
    )
    device, why_not = gpu_of(args, system, is_set=gpu is not None)
    if gpu is None and (system is None or not system.gpu_type):
        device, why_not = None, "no GPU is named; use --gpu, or a --system-config with gpu_type"
    elif device is None:
        raise BadInput(why_not)
    label, is_upstream = gpu_label(args, system), args.launcher is not Launcher.EMBEDDED
    if device is not None:
        args = args.model_copy(update={"gpu_type": device.name})
    elif release not in (None, NO_PRESET):
        raise BadInput(f"--release: presets differ by GPU, and {why_not}")
    preset, why_none = _preset_of(release, args, device, label, why_not)
    if preset is not None and is_upstream and recompute == "none" and preset.values.get("recompute_granularity"):
        raise BadInput(
            f"--recompute none: {preset.name} recomputes, and the launcher cannot switch that off; use --release none"
        )
    args = args.model_copy(update={"num_gpus": num_gpus or _fewest(args, recipe, preset)})
    if preset is not None and release is None and (why := _why_unknown(args, preset)):
        preset, why_none = None, why
    options = _Options(recipe, system, formula, device, why_not, extra)
    if preset is None or not is_upstream:
        is_free = device is not None and not (preset or release or extra or recompute or _is_laid_out(sizes))
        return _of_loop_or_alone(options, args, preset, why_none, precision if is_free else None)
    full = with_model_facts(args, recipe)
    upstream = Upstream(preset.release, preset, overridden=overridden_by(extra))
    checked = check(full, system, recipe, None, upstream)
    request = trained_question(recipe, full, preset, "", device, why_not, extra, formula)
    if release is not None or (checked.passed and preset.num_gpus == args.num_gpus):
        _require_passed(checked, preset=preset)
        return request
    if not (why := str(checked.violations[0]) if checked.violations else _why_too_large(request)):
        return request
    why_none = f"{preset.name} does not suit {counted(args.num_gpus, 'GPU')}: {why}"
    if not (extra or recompute or _is_laid_out(sizes)):
        return _of_loop_or_alone(options, args, None, why_none, precision)
    if checked.passed:
        return request
    with suppress(BadInput):  # the options alone make a point that breaks no rule, and fits
        alone = _of_loop_or_alone(options, args, None, why_none)
        if not _why_too_large(alone):
            return alone
    _require_passed(checked, preset=preset)
    return request


@dataclass(frozen=True)
class _Options:
    """Options of a point that no preset changes."""

    recipe: Recipe
    system: System | None
    formula: Formula
    device: Gpu | None
    why_not: str
    extra: dict[str, str]


def _preset_of(
    release: str | None, args: ResolvedCmdArgs, device: Gpu | None, label: str, why_not: str
) -> tuple[Preset | None, str]:
    """Return the preset of a point, or None and the reason. label: the GPU of a point of the embedded loop."""
    if release == NO_PRESET:
        return None, f"--release {NO_PRESET}"
    if release is not None:
        return _preset(release, args), ""
    if device is None:
        return None, why_not
    if args.launcher is Launcher.EMBEDDED:
        preset = loop_preset(args, label)
        return preset, "" if preset else why_no_variant(args, label)
    preset = find_preset(args, newest_release())
    return preset, "" if preset else why_no_preset(args, newest_release())


def _of_loop_or_alone(
    options: _Options, args: ResolvedCmdArgs, preset: Preset | None, why_none: str, precision: str | None = None
) -> EstimateRequest:
    """Return the request of a point of the embedded loop, or of one without a preset.

    precision: of a point whose layout the options leave open, for the fastest one; None takes the point as it is.
    """
    recipe, system, extra = options.recipe, options.system, options.extra
    if precision is not None and (found := _fastest(recipe.name, precision, args, system, why_none)) is not None:
        args, why_none = found, f"{why_none}; the layout is the fastest that fits, as `mbridge tune` predicts"
    elif preset is None:
        why_none = f"{why_none}; sizes that are not given are 1, the batch is the recipe's"
    given, resolved = given_to_loop(args), with_loop_preset(args, preset)
    recipe = with_preset_of(recipe_for(recipe.name, args.task), preset)
    args = with_recipe_defaults(resolved.args, recipe, but=resolved.from_preset)
    _require_passed(check(args, system, recipe, settings=settings_of(extra)), given, preset)
    return EstimateRequest(
        recipe,
        args,
        options.device,
        options.why_not,
        extra,
        options.formula,
        expands_segments=expands_segments(preset),
        filled_in=describe(resolved),
        why_not_filled_in=why_none,
    )


_LAID_OUT = (
    *("tp", "pp", "cp", "vp", "ep", "et", "mb", "num_layers", "pipeline_model_parallel_layout", "use_megatron_fsdp"),
    *("recompute_num_layers", "activation_offload_layers", "cuda_graph_impl", "cuda_graph_scope", "moe_a2a_overlap"),
    "task",
)


def _is_laid_out(sizes: Mapping[str, Any]) -> bool:
    """Return whether the options say anything about the layout."""
    return any(sizes[name] is not None for name in _LAID_OUT)


def _why_unknown(args: ResolvedCmdArgs, preset: Preset) -> str:
    """Return which sizes of a preset are unknown on so many GPUs, such as a batch that the launcher does not scale."""
    unknown = sorted(with_preset(args, preset).unknown & {"tp", "pp", "cp", "ep", "mb", "gb"})
    return f"{', '.join(unknown)} of {preset.name} on {counted(args.num_gpus, 'GPU')}: not known" if unknown else ""


def _why_too_large(request: EstimateRequest) -> str:
    """Return why a point does not fit into the GPU's memory; "" if it does, or this is not known."""
    found = headline_estimator()(request)
    needed, given = found.peak_memory_gib, found.gpu_memory_gib
    if not needed or not given or needed <= given or found.why_less or request.published(request.architecture):
        return ""
    return f"it needs {needed:.1f} of {given:.0f} GiB"


def _fewest(args: ResolvedCmdArgs, recipe: Recipe, preset: Preset | None) -> int:
    """Return the number of GPUs of a preset; if it does not suit the sizes, or without one, the fewest for these."""
    if preset is not None:
        args = with_preset(args.model_copy(update={"num_gpus": preset.num_gpus}), preset).args
    tp, pp = args.tp or 1, args.pp or 1
    fewest = math.lcm(tp * pp * (args.cp or 1), (args.ep or 1) * (expert_tp(args, recipe) or tp) * pp)
    return preset.num_gpus if preset is not None and preset.num_gpus % fewest == 0 else fewest


def _fastest(
    recipe: str, precision: str, args: ResolvedCmdArgs, system: System | None, why_none: str
) -> ResolvedCmdArgs | None:
    """Return the arguments with the layout that `mbridge tune` ranks first; None if no step times are known.

    NothingFits, BadInput: no layout is feasible. why_none: reason for no preset.
    """
    from cloudai_mbridge.commands.plan.tune import why_no_layout  # slow to import, and seldom needed
    from cloudai_mbridge.tune.ranking import rank
    from cloudai_mbridge.tune.space import search_request

    try:
        request = search_request(
            system,
            recipe=recipe,
            gpu=args.gpu_type,
            num_gpus=args.num_gpus,
            precisions=(precision,),
            gbs=args.gb,
            seq_length=args.seq_length,
            launcher=str(args.launcher),
            max_steps=args.max_steps or 1,
        )
    except BadInput:
        return None
    found = rank(request, 1)
    if not found.best and not found.num_unknown:
        is_memory = found.num_too_large > 0 and not found.num_illegal
        raise (NothingFits if is_memory else BadInput)(
            f"no preset: {why_none}\nno feasible layout on {counted(args.num_gpus, 'GPU')}:"
            f" {why_no_layout(request, found)}; give another --num-gpus, or sizes such as --tp and --pp"
        )
    return (
        ResolvedCmdArgs.model_validate(args.model_dump(exclude_unset=True) | found.best[0].cmd_args)
        if found.best
        else None
    )


def _require_passed(checked: CheckResult, given: Container[str] = (), preset: Preset | None = None) -> None:
    """Raise BadInput if a point breaks rules. given: its own arguments. preset: with the others, or None."""
    if checked.violations:
        found = [str(with_origins(each, given, preset)) for each in checked.violations]
        if preset is not None:
            found.append(
                f"options that are not given have the values of {origin(preset)}; --release none leaves it out"
            )
        raise BadInput("\n".join([*found, details_hint(each.rule_id for each in checked.violations)]))


def _preset(version: str, args: ResolvedCmdArgs) -> Preset:
    """Return the preset of a release for a point; BadInput if it is missing, or the release is unknown."""
    release = find_release(f"v{version.removeprefix('v')}")
    if release is None:
        known = ", ".join(each["version"] for each in known_releases())
        raise BadInput(f"--release: {version!r} is not known; use one of {known}")
    if (preset := find_preset(args, release)) is None:
        raise BadInput(f"--release: {why_no_preset(args, release)}; give all sizes, with --release none")
    return preset


def _overrides(given: tuple[str, ...]) -> dict[str, str]:
    extra: dict[str, str] = {}
    for text in given:
        name, sign, extra[name] = text.partition("=")
        if not sign or not name:
            raise BadInput(f"--set: {text!r} is not KEY=VALUE such as model.mtp_num_layers=0")
    try:  # with the checks for the keys of a test definition
        TestDefinition.model_validate({"name": "estimate", "description": "", "extra_cmd_args": extra})
    except ValueError as error:
        said = str(error).splitlines()[2].strip().partition(" [type")[0]
        raise BadInput(f"--set: {said.removeprefix('Value error, ')}") from None
    return extra


def _recomputation(recompute: str | None, extra: dict[str, str], num_layers: int | None) -> dict[str, Any]:
    if recompute is None:
        return {}
    if recompute != "none" and num_layers is not None:
        raise BadInput(f"--recompute: {recompute!r} and --recompute-num-layers exclude each other; use one of them")
    if recompute == "full":
        extra["model.recompute_granularity"] = "full"
        return {}
    return {"recompute_modules": "" if recompute == "none" else recompute}
