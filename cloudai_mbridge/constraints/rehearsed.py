"""Rule R01: what a rehearsal found. No formula of ours decides it: the words are those of the software that trains."""

from collections.abc import Sequence

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation

REHEARSED = "R01"


def r01_every_rank_of_the_point_is_built(point: Point) -> Answer:
    """The software that trains builds every distinct rank of the point: groups, model, optimizer, checkpoint.

    With --rehearse, the training program itself builds them on one core, without a GPU, in the interpreter that the job
    would use. The message is the words of the package that refused, be it Megatron-Core, Transformer Engine, another
    package, or the embedded loop: we do not check them, and another release may differ. Keys are the settings that the
    words name; else those of the line of source that refused, which need not be the cause.

    Pass: every distinct rank was built; nothing is said about the steps of training.
    Fail: extra_cmd_args."model.batch_invariant_mode" = "true", which Megatron-Core takes with FlashAttention only.
    Not evaluated: without --rehearse; in an image, unless with --on-slurm; without gpu_type.
    Source: `python -m cloudai_mbridge.training.dry`; the place in the source of the package is in `rehearsal.json`.
    """
    return NotEvaluated(REHEARSED, "a rehearsal") if point.is_embedded else None


def refused(
    stage: str, kind: str, message: str, *, rank: int | None, keys: Sequence[str], where: str, core: str | None
) -> Violation:
    """Return that a rank was not built. where: the place in the source that refused."""
    operands = {"stage": stage, **({} if rank is None else {"rank": rank}), "core": core}
    said = f"{kind}: {message}" if message else kind
    remedy = f"raised in {where}; change what it names" if where else "change what it names"
    return Violation(REHEARSED, ", ".join(keys) or stage, said, remedy, operands)
