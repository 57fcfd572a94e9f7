"""M02-M07: sizes against each other."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point

_SIZES = ("num_gpus", "tp", "pp", "cp", "vp", "ep", "et", "mb", "gb", "seq_length", "hidden_size", "num_layers")


def m02_sizes_are_positive(point: Point) -> Answer:
    """Every size that is given is positive.

    CloudAI reads 0 as "not given" and lets pairs of negative sizes through; Megatron divides by them.

    Pass: tp=1. Fail: tp=0.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    bad = {name: value for name in _SIZES if (value := getattr(point.args, name)) is not None and value < 1}
    if not bad:
        return None
    return point.violation("M02", next(iter(bad)), "sizes must be positive", "use at least 1", **bad)


def m03_virtual_stages_need_a_pipeline(point: Point) -> Answer:
    """Virtual pipeline stages need more than one pipeline stage.

    Interleaving passes micro-batches on between ranks; with one rank there is no other to pass them to.

    Pass: pp=2, vp=2. Fail: pp=1, vp=2.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    vp = point.args.vp
    if (vp or 1) == 1 or point.pp > 1:
        return None
    return point.violation("M03", "vp", f"vp = {vp} needs pp > 1", "set vp to 1 or pp above 1", "vp", "pp")


def m04_interleaving_takes_whole_rounds(point: Point) -> Answer:
    """With virtual stages, the number of micro-batches per step is a multiple of pp.

    The interleaved schedule works in rounds of pp micro-batches.

    Pass: pp=2, vp=2, gb=8, mb=1, dp=1. Fail: gb=9. Not evaluated: mb or gb is unknown, or C04 is broken.
    Source: megatron.core.pipeline_parallel.schedules.forward_backward_pipelining_with_interleaving.
    """
    if (point.args.vp or 1) == 1 or point.pp <= 1:
        return None
    per_round = (point.args.mb or 0) * point.dp
    if per_round <= 0 or not point.args.gb or point.args.gb % per_round:
        return NotEvaluated("M04", "a number of micro-batches")
    micro_batches = point.args.gb // per_round
    if micro_batches % point.pp == 0:
        return None
    fact = f"{micro_batches} micro-batches per step are not a multiple of pp = {point.pp}"
    remedy = f"use a gb that is a multiple of mb*dp*pp = {per_round * point.pp}"
    return point.violation("M04", "gb", fact, remedy, "gb", "mb", "dp", "pp", "vp")


def m05_context_parallel_halves_divide_the_sequence(point: Point) -> Answer:
    """With context parallelism, the sequence length is a multiple of 2*cp.

    Each rank takes one chunk from the front and one from the back of the sequence: causal attention is balanced then.

    Pass: seq_length=4096, cp=2. Fail: seq_length=4098, cp=2. Not evaluated: the sequence length is unknown.
    Source: megatron.core.utils.get_batch_on_this_cp_rank.
    """
    if point.cp <= 1:
        return None
    if (length := point.seq_length) is None:
        return NotEvaluated("M05", "seq_length")
    if length % (2 * point.cp) == 0:
        return None
    fact = f"{length} is not divisible by 2*cp = {2 * point.cp}"
    return point.violation("M05", "seq_length", fact, f"use a multiple of {2 * point.cp}", "seq_length", "cp")


def m06_sequence_parallel_shares_are_whole(point: Point) -> Answer:
    """With tensor parallelism, tp divides the sequence (of one context-parallel rank).

    Sequence parallelism is on whenever tp > 1: every tensor-parallel rank keeps an equal part of the sequence.
    At tp = 1 it is always off.

    Pass: seq_length=4096, tp=2. Fail: seq_length=4097, tp=2. Not evaluated: the sequence length is unknown, or
    `extra_cmd_args` set model.sequence_parallel.
    Source: megatron.core.tensor_parallel.mappings.
    """
    if point.tp <= 1 or point.cp < 1:
        return None
    if "sequence_parallel" in point.overridden:
        return NotEvaluated("M06", "sequence_parallel, which extra_cmd_args set,")
    if (length := point.seq_length) is None:
        return NotEvaluated("M06", "seq_length")
    if length % point.cp or (length // point.cp) % point.tp == 0:
        return None
    fact = f"{length} is not divisible by tp*cp = {point.tp * point.cp}"
    return point.violation(
        "M06", "seq_length", fact, f"use a multiple of {point.tp * point.cp}", "seq_length", "tp", "cp"
    )


def m07_ranks_fill_the_expert_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of et*ep*pp, et being 1 if missing and ep > 1.

    C07 checks this only if et is given.

    Pass: num_gpus=8, tp=2, ep=8. Fail: num_gpus=8, tp=4, ep=16.
    Not evaluated: et is not given to the upstream launcher.
    Source: megatron.core.parallel_state.initialize_model_parallel.
    """
    if (point.args.ep or 1) == 1 and point.args.et is None:
        return None  # C01 reports it
    if point.args.et is None and not (point.is_embedded or point.is_resolved):
        return NotEvaluated("M07", "et, which upstream recipes set themselves")
    et, ep = point.expert_tp, point.args.ep or 1
    size = et * ep * point.pp
    if size < 1 or point.args.num_gpus % size == 0:
        return None
    fact = f"num_gpus = {point.args.num_gpus} is not divisible by et*ep*pp = {size}"
    remedy = "use smaller ep or pp, or set et to 1"
    return point.violation("M07", "ep", fact, remedy, "num_gpus", et=et, ep=ep, pp=point.pp)
