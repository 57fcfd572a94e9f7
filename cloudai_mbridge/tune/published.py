"""The published configurations of a search: their ranks, and why another configuration is predicted to be faster."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.estimate.published import read_published
from cloudai_mbridge.megatron_bridge.presets import UNSET, UPSTREAM_DECIDES, resolve_sizes
from cloudai_mbridge.megatron_bridge.release import version_key
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.tune.ranking import Candidate, Predictor, Ranking
from cloudai_mbridge.tune.space import ParallelSizes, SearchRequest, newest_preset

_MOST_TERMS = 3


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
    rows = [row for row in read_published() if _is_asked_for(row.args, request)]
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
        saved = {name: seconds - fastest.terms[name] for name, seconds in step.terms.items()}
        ranks = (number for number, each in enumerate(found.best, 1) if _is_same(each, args))
        yield PublishedConfiguration(source, args, measured_s, step.step_time_s, next(ranks, None), saved)


def _presets(request: SearchRequest) -> Iterator[tuple[str, ResolvedCmdArgs, None]]:
    """Yield the newest preset of each number format, if it is for this batch."""
    for precision in request.precisions:
        preset = newest_preset(request.recipe, request.gpu, request.num_gpus, precision)
        if preset is None or preset.num_gpus != request.num_gpus:
            continue
        known = resolve_sizes({}, request.num_gpus, preset)
        values = {name: _text(known[name]) for name in UPSTREAM_DECIDES if known.get(name) not in UNSET}
        args = {
            **{"model_family_name": request.recipe.family, "model_recipe_name": request.recipe.name},
            **{"gpu_type": request.gpu.name, "num_gpus": request.num_gpus, "compute_dtype": str(precision)},
            **values,
        }
        if (args.get("gb"), args.setdefault("seq_length", request.seq_length)) == (request.gbs, request.seq_length):
            yield f"preset of {preset.release.version}", ResolvedCmdArgs.model_validate(args), None


def _text(value: Any) -> Any:
    return ",".join(value) if isinstance(value, list) else value


def sizes_of(args: ResolvedCmdArgs) -> ParallelSizes:
    """Return the sizes that arguments set; a missing size is 1."""
    return ParallelSizes(*(getattr(args, name) or 1 for name in ParallelSizes._fields))


def _is_asked_for(args: ResolvedCmdArgs, request: SearchRequest) -> bool:
    wanted = (request.recipe.name, request.gpu.name, request.num_gpus, request.gbs, request.seq_length, "pretrain")
    given = (args.model_recipe_name, args.gpu_type, args.num_gpus, args.gb, args.seq_length, args.task)
    return given == wanted and args.compute_dtype in request.precisions and not args.use_tokendrop


def _is_same(candidate: Candidate, args: ResolvedCmdArgs) -> bool:
    options = candidate.options
    is_same_kind = options.precision == args.compute_dtype and options.use_megatron_fsdp == bool(args.use_megatron_fsdp)
    return is_same_kind and not options.recompute and candidate.sizes == sizes_of(args)
