"""The published configurations of a search: where they rank, and why another one is predicted to be faster."""

from collections.abc import Iterator
from dataclasses import dataclass

from cloudai_mbridge.estimate.published import PublishedRow, read_published
from cloudai_mbridge.megatron_bridge.release import version_key
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.tune.ranking import Candidate, Predictor, Ranking
from cloudai_mbridge.tune.space import SearchRequest, Sizes

_MOST_TERMS = 3


@dataclass(frozen=True)
class PublishedConfiguration:
    """A row of the published tables for just these GPUs, number format and batch.

    rank: among the best, None: not there. saved_s: by how much each term of the fastest layout's step is shorter.
    """

    row: PublishedRow
    sizes: Sizes
    step_time_s: float
    rank: int | None
    saved_s: dict[str, float]

    @property
    def reasons(self) -> list[str]:
        """The terms that differ most."""
        largest = sorted(self.saved_s.items(), key=lambda term: -abs(term[1]))[:_MOST_TERMS]
        return [f"{name} {-seconds:+.2g} s" for name, seconds in largest if seconds]


def published_configurations(request: SearchRequest, found: Ranking) -> Iterator[PublishedConfiguration]:
    """Yield every published configuration of a search, newest first, each once."""
    rows = [row for row in read_published() if _is_asked_for(row.args, request)]
    predictor, seen = Predictor(request), set()
    fastest = predictor.step_time(found.best[0].cmd_args)
    for row in sorted(rows, key=lambda row: version_key(row.container), reverse=True):
        key = (sizes_of(row.args), row.args.compute_dtype, row.args.use_megatron_fsdp)
        if key in seen:
            continue
        seen.add(key)
        step = predictor.step_time(row.args.model_dump(exclude_unset=True) | {"launcher": str(request.launcher)})
        saved = {name: seconds - fastest.terms[name] for name, seconds in step.terms.items()}
        ranks = (number for number, each in enumerate(found.best, 1) if _is_same(each, row.args))
        yield PublishedConfiguration(row, key[0], step.step_time_s, next(ranks, None), saved)


def sizes_of(args: ResolvedCmdArgs) -> Sizes:
    """Return the sizes that arguments set; what they leave out is 1."""
    return Sizes(*(getattr(args, name) or 1 for name in Sizes._fields))


def _is_asked_for(args: ResolvedCmdArgs, request: SearchRequest) -> bool:
    wanted = (request.recipe.name, request.gpu.name, request.num_gpus, request.gbs, request.seq_length, "pretrain")
    given = (args.model_recipe_name, args.gpu_type, args.num_gpus, args.gb, args.seq_length, args.task)
    return given == wanted and args.compute_dtype in request.precisions and not args.use_tokendrop


def _is_same(candidate: Candidate, args: ResolvedCmdArgs) -> bool:
    options = candidate.options
    is_same_kind = options.precision == args.compute_dtype and options.use_megatron_fsdp == bool(args.use_megatron_fsdp)
    return is_same_kind and not options.recompute and candidate.sizes == sizes_of(args)
