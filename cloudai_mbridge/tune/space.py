"""The space of a search: the ways to spread a model over a number of GPUs; its request, and layouts as a scenario.

Only sizes that divide evenly are listed, since a grid of all sizes would be a hundred times as large. The rules
decide about the rest.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.estimate.hardware import Gpu, Precision, gpu_named, precision_named
from cloudai_mbridge.estimate.memory.parameters import pipeline_chunks
from cloudai_mbridge.estimate.request import gpu_on
from cloudai_mbridge.estimate.time.model import why_no_time
from cloudai_mbridge.megatron_bridge.presets import Preset, find_preset, resolve_sizes
from cloudai_mbridge.megatron_bridge.release import find_release, known_releases
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TEMPLATE, TUNE
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.recipes.apply import recipe_layout

_MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
# Recomputation that may replace the recipe's
ALL_LAYERS = "all layers"
_DENSE = ("", "core_attn", "mlp", ALL_LAYERS)
_EXPERTS = ("", "moe_act", "core_attn", "moe", ALL_LAYERS)
_LATENT = ("", "mla_up_proj", "moe_act", "moe", ALL_LAYERS)
_FULL_ITERATION = "full_iteration"


class ParallelSizes(NamedTuple):
    """Parallel sizes, and the sequences of a micro-batch."""

    tp: int
    pp: int
    cp: int
    vp: int
    ep: int
    et: int
    mb: int


class Options(NamedTuple):
    """Options of a layout. recompute: modules, `ALL_LAYERS`, or "" as the recipe does.

    without_graphs: the CUDA graphs that the recipe has are off.
    """

    precision: Precision
    use_megatron_fsdp: bool = False
    recompute: str = ""
    without_graphs: bool = False


@dataclass(frozen=True)
class SearchRequest:
    """Request of a search. gbs: sequences of a step, the same for all layouts. launcher: of the training."""

    recipe: Recipe
    gpu: Gpu
    num_gpus: int
    gbs: int
    seq_length: int
    precisions: tuple[Precision, ...] = (Precision.BF16,)
    launcher: Launcher = Launcher.MEGATRON_BRIDGE
    max_steps: int = 10

    @cached_property
    def model(self) -> Architecture:
        """The model that all layouts train."""
        return architecture(self.recipe, ResolvedCmdArgs(launcher=self.launcher, seq_length=self.seq_length))

    @property
    def recomputable(self) -> tuple[str, ...]:
        """The possible recomputation of a layout; the recipe's own first."""
        if self.model.num_moe_experts is None:
            return _DENSE
        return _LATENT if self.model.multi_latent_attention else _EXPERTS

    def cmd_args(self, sizes: ParallelSizes, options: Options) -> dict[str, Any]:
        """Return the arguments of a test with this layout."""
        args: dict[str, Any] = {
            "launcher": str(self.launcher),
            "gpu_type": self.gpu.name,
            "model_family_name": self.recipe.family,
            "model_recipe_name": self.recipe.name,
            "compute_dtype": str(options.precision),
            "num_gpus": self.num_gpus,
            **sizes._asdict(),
            "gb": self.gbs,
            "seq_length": self.seq_length,
            "max_steps": self.max_steps,
        }
        if self.model.num_moe_experts is None:
            del args["ep"], args["et"]
        if options.use_megatron_fsdp:
            args["use_megatron_fsdp"] = True
        if options.recompute == ALL_LAYERS:
            args["recompute_num_layers"] = self.layers_per_chunk(sizes)
        elif options.recompute:
            args["recompute_modules"] = options.recompute
        if graphs := self.graphs(options.precision):
            args |= {"cuda_graph_impl": "none"} if options.without_graphs else graphs
        return args | (self._switched_off(sizes, options) if self.launcher is Launcher.EMBEDDED else {})

    def _switched_off(self, sizes: ParallelSizes, options: Options) -> dict[str, Any]:
        """Return values that unset recipe settings the layout cannot have; only the embedded loop lets a test do so."""
        values = preset_values(self.recipe, self.gpu, self.num_gpus, options.precision)
        has_stages, is_interleaved = sizes.pp > 1, sizes.vp > 1
        cannot = {
            "use_megatron_fsdp": not options.use_megatron_fsdp,
            "activation_offload_layers": has_stages or bool(options.recompute) or not options.use_megatron_fsdp,
            "moe_a2a_overlap": sizes.ep == 1
            or (has_stages and not is_interleaved)
            or options.recompute in (ALL_LAYERS, "moe"),
        }
        return {name: type(values[name])() for name, is_off in cannot.items() if is_off and values.get(name)}

    def graphs(self, precision: Precision) -> dict[str, str]:
        """Return the arguments of the CUDA graphs that the recipe has in this number format; {} for none."""
        values = preset_values(self.recipe, self.gpu, self.num_gpus, precision)
        impl, scope = values.get("cuda_graph_impl"), values.get("cuda_graph_scope")
        if impl in (None, "none"):
            return {}
        if impl == _FULL_ITERATION:  # the newest releases' name for it
            impl, scope = "local", [_FULL_ITERATION]
        return {"cuda_graph_impl": impl} | ({"cuda_graph_scope": ",".join(scope)} if scope else {})

    def always_shards(self, precision: Precision) -> bool:
        """Return whether the newest preset has Megatron-FSDP, which its launcher cannot switch off."""
        if self.launcher is not Launcher.MEGATRON_BRIDGE:
            return False
        return bool(preset_values(self.recipe, self.gpu, self.num_gpus, precision).get("use_megatron_fsdp"))

    def layouts(self) -> Iterator[tuple[ParallelSizes, bool]]:
        """Yield every layout that satisfies the divisibility rules, and whether Megatron-FSDP shards everything."""
        num_gpus = self.num_gpus
        for tp in _divisors(num_gpus, self.model.num_attention_heads):
            if tp > self.gpu.nvlink_domain:
                return  # tensor parallelism across the network is never worth it
            for pp in _divisors(num_gpus // tp):
                stages = self._virtual_stages(pp)
                for cp in _divisors(num_gpus // (tp * pp)) if stages else ():
                    for mb in self._micro_batches(num_gpus // (tp * pp * cp), cp):
                        for ep, et in self._expert_sizes(tp, pp):
                            yield from ((ParallelSizes(tp, pp, cp, vp, ep, et, mb), False) for vp in stages)
                            if pp == cp == 1:
                                yield ParallelSizes(tp, pp, cp, 1, ep, et, mb), True

    def pipeline_layout(self, pp: int, vp: int) -> str | None:
        """Return the recipe's explicit layout of these stages, if it has one."""
        return recipe_layout(self.recipe, pp, vp, with_mtp=self.model.mtp_num_layers > 0) if pp > 1 else None

    def layers_per_chunk(self, sizes: ParallelSizes) -> int:
        """Return the most layers of a virtual stage."""
        return -(-self.model.num_layers // (sizes.pp * sizes.vp))

    def _micro_batches(self, dp: int, cp: int) -> list[int]:
        if cp > 1 and self.seq_length % (2 * cp):
            return []
        return [mb for mb in _MICRO_BATCHES if self.gbs % (mb * dp) == 0]

    def _virtual_stages(self, pp: int) -> list[int]:
        """Return the numbers of virtual stages for which Megatron-Core has a split; [] if there is not even one."""
        found, most = [], 1 if pp == 1 else -(-(self.model.num_layers + 2) // pp)
        for vp in range(1, most + 1):
            with suppress(BadInput):
                pipeline_chunks(self.model, pp, vp, self.pipeline_layout(pp, vp))
                found.append(vp)
        return found

    def _expert_sizes(self, tp: int, pp: int) -> list[tuple[int, int]]:
        experts, per_stage = self.model.num_moe_experts, self.num_gpus // pp
        if experts is None:
            return [(1, 1)]
        sizes = [(ep, et) for et in sorted({1, tp}) for ep in _divisors(experts)]
        return [(ep, et) for ep, et in sizes if per_stage % (ep * et) == 0]


def newest_preset(recipe: Recipe, gpu: Gpu, num_gpus: int, precision: Precision) -> Preset | None:
    """Return the preset that the newest known launcher takes for a number of GPUs; None without one."""
    return _preset(recipe.family, recipe.name, gpu.name, num_gpus, str(precision))


@cache
def _preset(family: str, recipe: str, gpu: str, num_gpus: int, precision: str) -> Preset | None:
    names = {"model_family_name": family, "model_recipe_name": recipe, "gpu_type": gpu}
    args = ResolvedCmdArgs.model_validate({**names, "compute_dtype": precision, "num_gpus": num_gpus})
    return find_preset(args, find_release(f"v{known_releases()[-1]['version']}"))


def preset_values(recipe: Recipe, gpu: Gpu, num_gpus: int, precision: Precision) -> dict[str, Any]:
    """Return the settings of that preset, the batch scaled to the GPUs; {} without one."""
    preset = newest_preset(recipe, gpu, num_gpus, precision)
    return resolve_sizes({}, num_gpus, preset) if preset else {}


def _divisors(number: int, of: int = 0) -> list[int]:
    """Return the divisors of both numbers; every number divides 0."""
    low = [each for each in range(1, math.isqrt(number) + 1) if number % each == 0]
    return [each for each in sorted({*low, *(number // each for each in low)}) if of % each == 0]


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


def search_scenario(
    layouts: Sequence[Mapping[str, Any]], base: Mapping[str, Any], name: str, max_trials: int | None
) -> dict[str, Any]:
    """Return a scenario of one test that searches among layouts.

    layouts: arguments of each, the most promising first. base: a test definition with the remaining settings; a
    layout's own cmd_args take precedence.
    """
    shared, axes, added = _as_space(layouts)
    sweep = {key: value for key, value in (("zip", [list(axes)] if axes else []), ("include", added)) if value}
    test = {
        "id": name,
        "name": name,
        "description": f"the best of {len(layouts)} layouts",
        "test_template_name": TEMPLATE,
        **{key: value for key, value in base.items() if key not in ("name", "description", "cmd_args", "sweep")},
        "agent": TUNE,
        "cmd_args": {**base.get("cmd_args", {}), **shared, **axes},
        **({"agent_steps": max_trials} if max_trials else {}),
        **({"sweep": {**base.get("sweep", {}), **sweep}} if sweep else {}),
    }
    return {"name": name, "Tests": [test]}


def _as_space(
    layouts: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, list[Any]], list[dict[str, Any]]]:
    """Return the common arguments, the axes that vary together, and the points outside of the axes.

    A layout with arguments that others lack, such as recomputed modules, is a point outside of the axes.
    """
    names = dict.fromkeys(name for layout in layouts for name in layout)
    everywhere = [name for name in names if all(name in layout for layout in layouts)]
    shared = {name: layouts[0][name] for name in everywhere if len({repr(layout[name]) for layout in layouts}) == 1}
    own = [{name: value for name, value in layout.items() if name not in everywhere} for layout in layouts]
    fewest = min(own, key=len)
    on_axes = [layout for layout, extra in zip(layouts, own, strict=True) if extra == fewest]
    varying = [name for name in everywhere if name not in shared]
    added = [
        {name: layout[name] for name in varying} | extra
        for layout, extra in zip(layouts, own, strict=True)
        if extra != fewest and extra.keys() >= fewest.keys()
    ]
    return shared | fewest, {name: [layout[name] for layout in on_axes] for name in varying}, added
