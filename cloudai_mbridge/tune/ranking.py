"""The layouts of a space in the order of their predicted step times, and the ranks of published configurations.

The step time is computed for all layouts, memory and rules only for the fastest, in order, until enough have passed. A
layout that may need too much memory is queued again with more recomputation, which only makes it slower.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from operator import attrgetter
from statistics import NormalDist
from typing import Any

from cloudai_mbridge.constraints import Upstream, check
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, headline_estimator
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.point import times_of
from cloudai_mbridge.estimate.published import read_published
from cloudai_mbridge.estimate.request import EstimateRequest, expands_segments
from cloudai_mbridge.estimate.time.calibration import HeldOutError
from cloudai_mbridge.estimate.time.model import TimeModel
from cloudai_mbridge.megatron_bridge.presets import (
    UNSET,
    UPSTREAM_DECIDES,
    find_preset,
    loop_preset,
    newest_release,
    resolve_sizes,
)
from cloudai_mbridge.megatron_bridge.release import pin_of, version_key
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.models.test_definition import TEMPLATE
from cloudai_mbridge.recipes.presets import with_preset_of
from cloudai_mbridge.sweep.checked import with_recipe
from cloudai_mbridge.tune.space import ALL_LAYERS, Options, ParallelSizes, SearchRequest, newest_preset

# Standard deviation of the logarithm of a predicted peak. An assumption: the terms were compared with measurements
# (docs/models.md), the allocator was not
MEMORY_SD = 0.05
_CERTAIN = 0.99


@dataclass(frozen=True)
class Candidate:
    """A layout that breaks no rule and is predicted to fit. fits: the probability of it. cmd_args: of its test."""

    sizes: ParallelSizes
    options: Options
    cmd_args: dict[str, Any]
    headline: Headline
    fits: float

    @property
    def step_time_s(self) -> float:
        """The predicted seconds of a step."""
        assert self.headline.step_time_s is not None  # else it would not be ranked
        return self.headline.step_time_s

    def as_definition(self) -> dict[str, Any]:
        """Return it as the data of a test TOML; with the upstream launcher it pins the release of the presets."""
        args = self.cmd_args
        about = f"{args['model_recipe_name']} on {args['num_gpus']} {args['gpu_type']}"
        return {
            "name": f"{args['model_recipe_name']}_{args['num_gpus']}x{args['gpu_type']}",
            "description": f"{about}: {self.step_time_s:.4g} s a step predicted",
            "test_template_name": TEMPLATE,
            **({"git_repos": [pin_of(newest_release().version)]} if args["launcher"] != Launcher.EMBEDDED else {}),
            "cmd_args": args,
        }


@dataclass
class Ranking:
    """The best candidates, and the outcome of the layouts ranked before the last of them.

    num_too_large, num_illegal: whatever they recompute. rules: how many break each rule. reasons: of each rule,
    the words of one violation. errors: of step times by number format, on rows that the time model had not seen.
    """

    errors: Mapping[str, HeldOutError] = field(default_factory=dict)
    best: list[Candidate] = field(default_factory=list)
    num_layouts: int = 0
    num_too_large: int = 0
    num_illegal: int = 0
    num_unknown: int = 0
    rules: Counter[str] = field(default_factory=Counter)
    reasons: dict[str, str] = field(default_factory=dict)

    def interval_s(self, candidate: Candidate) -> tuple[float, float]:
        """Return the bounds between which 90 % of such step times are expected; 0 and infinity if unknown."""
        error = self.errors.get(str(candidate.options.precision))
        return (error.interval_s(candidate.step_time_s) if error else None) or (0.0, math.inf)


def rank(request: SearchRequest, count: int) -> Ranking:
    """Return the `count` layouts with the shortest predicted steps, simpler layouts first if equal."""
    ranking, predictor = Ranking(), Predictor(request)
    queue = [
        predictor.entry(sizes, Options(precision, is_sharded))
        for sizes, is_sharded in request.layouts()
        for precision in request.precisions
        if is_sharded or not request.always_shards(precision)
    ]
    ranking.num_layouts = len(queue)
    too_large: set[_Place] = set()
    illegal: dict[_Place, dict[str, str]] = {}
    heapq.heapify(queue)
    seen: set[tuple[ParallelSizes, Options]] = set()
    while queue and len(ranking.best) < count:
        _, sizes, options = heapq.heappop(queue)
        if (sizes, options) in seen:  # less memory is needed in two ways
            continue
        seen.add((sizes, options))
        place = sizes, options.precision, options.use_megatron_fsdp
        fit = predictor.fit(sizes, options)
        if fit is None:
            ranking.num_unknown += 1
            continue
        probability, headline = fit
        if probability < _CERTAIN and not options.recompute:
            for more in predictor.recomputing(sizes, options):
                heapq.heappush(queue, predictor.entry(sizes, more))
        rules = predictor.rules_broken(sizes, options) if headline else {}
        if rules:
            illegal.setdefault(place, rules)
        elif not headline:
            too_large.add(place)
        if rules or not headline:
            if request.graphs(options.precision) and not options.without_graphs:
                heapq.heappush(queue, predictor.entry(sizes, options._replace(without_graphs=True)))
            continue
        ranking.best.append(Candidate(sizes, options, request.cmd_args(sizes, options), headline, probability))
        ranking.errors = predictor.errors
    found = {(each.sizes, each.options.precision, each.options.use_megatron_fsdp) for each in ranking.best}
    ranking.num_too_large = len(too_large - found - illegal.keys())
    ranking.num_illegal = len(illegal.keys() - found)
    broken = [rules for place, rules in illegal.items() if place not in found]
    ranking.rules = Counter(rule for rules in broken for rule in rules)
    ranking.reasons = {rule: text for rules in reversed(broken) for rule, text in rules.items()}
    return ranking


_Place = tuple[ParallelSizes, Precision, bool]
Entry = tuple[tuple[Any, ...], ParallelSizes, Options]


class Predictor:
    """Predictions for the layouts of one search."""

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._headline = headline_estimator()
        self._bases: dict[tuple[int, Options], tuple[ParallelLayout, TimeModel]] = {}
        self._text = cache(request.pipeline_layout)
        self._fit_of = cache(self._fit)
        self.errors: dict[str, HeldOutError] = {}

    def entry(self, sizes: ParallelSizes, options: Options) -> Entry:
        """Return a layout with its sort key: its time; if equal, less sharding and recomputation first."""
        seconds = float(f"{self.step_time_s(sizes, options):.5g}")
        kind = options.use_megatron_fsdp, options.recompute, options.without_graphs
        return (seconds, *kind, math.prod(sizes)), sizes, options

    def step_time_s(self, sizes: ParallelSizes, options: Options) -> float:
        """Return the predicted seconds of a step; infinity if the sizes do not fit together."""
        (layout, times), pp, vp = self._base(sizes, options), sizes.pp, sizes.vp
        changed: dict[str, Any] = {"pp": pp, "cp": sizes.cp, "vp": vp, "mbs": sizes.mb}
        if self._request.model.num_moe_experts is not None:
            changed |= {"ep": sizes.ep, "etp": sizes.et}
        if options.recompute == ALL_LAYERS:
            num_layers = self._request.layers_per_chunk(sizes)
            changed["recompute"] = replace(layout.recompute, num_layers=num_layers)
        try:
            return times.step_time_s(layout.changed(**changed, pipeline_layout=self._text(pp, vp)))
        except BadInput:
            return math.inf

    def rules_broken(self, sizes: ParallelSizes, options: Options) -> dict[str, str]:
        """Return the rules that a layout breaks with the defaults of its launcher's newest release, and why."""
        args = self.question(sizes, options).args
        preset = find_preset(args, newest_release())  # the embedded loop's is in the arguments already
        upstream = Upstream(preset.release, preset) if preset else None
        violations = check(args, None, self._request.recipe, None, upstream).violations
        return {violation.rule_id: str(violation) for violation in violations}

    def recomputing(self, sizes: ParallelSizes, options: Options) -> Iterator[Options]:
        """Yield the options whose recomputation differs from the recipe's."""
        as_it_is = self._base(sizes, options)[0].recompute
        for recompute in self._request.recomputable[1:]:
            other = options._replace(recompute=recompute)
            if self._base(sizes, other)[0].recompute != as_it_is:
                yield other

    def _base(self, sizes: ParallelSizes, options: Options) -> tuple[ParallelLayout, TimeModel]:
        """Return a layout of this tensor parallel size and these options, and the step times of all of them."""
        key = (sizes.tp, options)
        if key not in self._bases:
            question = self.question(sizes, options)
            model = question.architecture
            times = times_of(question, model)
            self.errors[str(options.precision)] = times.error()
            self._bases[key] = question.layout_of(model), times
        return self._bases[key]

    def fit(self, sizes: ParallelSizes, options: Options) -> tuple[float, Headline | None] | None:
        """Return the probability that a layout fits into memory, and its headline; None if memory or time is unknown.

        The headline is None if the layout is held back. More sequences in a micro-batch need more memory, so a layout
        that is too large for one sequence is so for any.
        """
        alone = sizes._replace(mb=1)
        if alone != sizes and (least := self._fit_of(alone, options)) is not None and least[1] is None:
            return least
        return self._fit_of(sizes, options)

    def _fit(self, sizes: ParallelSizes, options: Options) -> tuple[float, Headline | None] | None:
        found = self._headline(self.question(sizes, options))
        if not found.step_time_s or not found.peak_memory_gib or not found.gpu_memory_gib:
            return None
        needed = NormalDist(math.log(found.peak_memory_gib), MEMORY_SD)
        return needed.cdf(math.log(found.gpu_memory_gib)), None if found.exceeds(DEFAULT_LIMIT) else found

    def step_time(self, cmd_args: Mapping[str, Any]) -> dict[str, float]:
        """Return the predicted step of a test's arguments, in its terms."""
        question = self._request_of(cmd_args)
        model = question.architecture
        return times_of(question, model).step_time(question.layout_of(model))

    def question(self, sizes: ParallelSizes, options: Options) -> EstimateRequest:
        """Return the estimate request of a layout."""
        return self._request_of(self._request.cmd_args(sizes, options))

    def _request_of(self, cmd_args: Mapping[str, Any]) -> EstimateRequest:
        args = ResolvedCmdArgs.model_validate(cmd_args)
        preset = loop_preset(args, self._request.gpu.name) or find_preset(args, newest_release())
        recipe = with_preset_of(self._request.recipe, preset)
        trained = with_recipe(args, recipe, preset=preset)
        return EstimateRequest(recipe, trained, self._request.gpu, expands_segments=expands_segments(preset))


_MOST_TERMS = 3
_POINT = attrgetter("model_recipe_name", "gpu_type", "num_gpus", "gb", "seq_length", "task")


@dataclass(frozen=True)
class PublishedConfiguration:
    """NVIDIA's configuration for exactly these GPUs, number format and batch: a row of the tables, or a preset.

    source: the container of a row, or the preset's release. measured_s: None of a preset. rank: among the best, None:
    not there. saved_s: by how much each term of the fastest layout's step is shorter.
    """

    source: str
    args: ResolvedCmdArgs
    measured_s: float | None
    step_time_s: float
    rank: int | None
    saved_s: dict[str, float]

    @property
    def reasons(self) -> list[str]:
        """The terms that differ most."""
        largest = sorted(self.saved_s.items(), key=lambda term: -abs(term[1]))[:_MOST_TERMS]
        return [f"{name} {-seconds:+.2g} s" for name, seconds in largest if seconds]


def published_configurations(request: SearchRequest, found: Ranking) -> Iterator[PublishedConfiguration]:
    """Yield every published configuration of a search, newest first, then the presets, each once."""
    wanted = (request.recipe.name, request.gpu.name, request.num_gpus, request.gbs, request.seq_length, "pretrain")
    rows = [
        row
        for row in read_published()
        if _POINT(row.args) == wanted and row.args.compute_dtype in request.precisions and not row.args.use_tokendrop
    ]
    newest_first = sorted(rows, key=lambda row: version_key(row.container), reverse=True)
    published = [(row.container, row.args, row.step_time_s) for row in newest_first]
    predictor, seen = Predictor(request), set()
    fastest = predictor.step_time(found.best[0].cmd_args)
    for source, args, measured_s in (*published, *_presets(request)):
        key = (sizes_of(args), args.compute_dtype, args.use_megatron_fsdp)
        if key in seen:
            continue
        seen.add(key)
        step = predictor.step_time(args.model_dump(exclude_unset=True) | {"launcher": str(request.launcher)})
        saved = {name: seconds - fastest[name] for name, seconds in step.items()}
        ranks = (number for number, each in enumerate(found.best, 1) if _is_same(each, args))
        yield PublishedConfiguration(source, args, measured_s, sum(step.values()), next(ranks, None), saved)


def _presets(request: SearchRequest) -> Iterator[tuple[str, ResolvedCmdArgs, None]]:
    """Yield the newest preset of each number format, if it is for this batch."""
    for precision in request.precisions:
        preset = newest_preset(request.recipe, request.gpu, request.num_gpus, precision)
        if preset is None or preset.num_gpus != request.num_gpus:
            continue
        known = resolve_sizes({}, request.num_gpus, preset)
        given = {name: known[name] for name in UPSTREAM_DECIDES if known.get(name) not in UNSET}
        args = {
            **{"model_family_name": request.recipe.family, "model_recipe_name": request.recipe.name},
            **{"gpu_type": request.gpu.name, "num_gpus": request.num_gpus, "compute_dtype": str(precision)},
            **{name: ",".join(value) if isinstance(value, list) else value for name, value in given.items()},
        }
        if (args.get("gb"), args.setdefault("seq_length", request.seq_length)) == (request.gbs, request.seq_length):
            yield f"preset of {preset.release.version}", ResolvedCmdArgs.model_validate(args), None


def sizes_of(args: ResolvedCmdArgs) -> ParallelSizes:
    """Return the sizes that arguments set; a missing size is 1."""
    return ParallelSizes(*(getattr(args, name) or 1 for name in ParallelSizes._fields))


def _is_same(candidate: Candidate, args: ResolvedCmdArgs) -> bool:
    options = candidate.options
    is_same_kind = options.precision == args.compute_dtype and options.use_megatron_fsdp == bool(args.use_megatron_fsdp)
    return is_same_kind and not options.recompute and candidate.sizes == sizes_of(args)
