"""Rules C01-C18: CloudAI's constraints of the MegatronBridge workload, same verdict on the same inputs."""

from cloudai_mbridge.constraints.rule import Answer, Point, Violation


def c01_ranks_fill_the_model_parallel_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of tp*pp*cp.

    Megatron splits the ranks into groups of tp*pp*cp; a remainder has no group and initialisation fails.

    Pass: num_gpus=16, tp=2, pp=2, cp=2. Fail: num_gpus=12, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 1.
    """
    size = point.model_parallel_size
    if size != 0 and point.args.num_gpus % size == 0:
        return None
    return Violation(
        rule_id="C01",
        where="cmd_args.num_gpus",
        fact=f"{point.args.num_gpus} is not divisible by tp*pp*cp = {size}",
        remedy=f"use a multiple of {size}, or smaller tp, pp or cp",
        operands={"num_gpus": point.args.num_gpus, "tp": point.tp, "pp": point.pp, "cp": point.cp},
    )


def c03_at_least_one_model_replica(point: Point) -> Answer:
    """The data-parallel size num_gpus // (tp*pp*cp) is not zero.

    With fewer GPUs than one copy of the model needs there is nothing to run.

    Pass: num_gpus=8, tp=8. Fail: num_gpus=4, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 3.
    """
    if point.dp != 0:
        return None
    size = point.model_parallel_size
    return Violation(
        rule_id="C03",
        where="cmd_args.num_gpus",
        fact=f"data-parallel size {point.args.num_gpus} // (tp*pp*cp = {size}) is 0",
        remedy=f"use at least {size} GPUs, or smaller tp, pp or cp" if size > 0 else "use positive sizes",
        operands={"num_gpus": point.args.num_gpus, "tp": point.tp, "pp": point.pp, "cp": point.cp},
    )


def c04_global_batch_is_whole_micro_batches(point: Point) -> Answer:
    """The global batch is a multiple of mb*dp (times the optimizer instances under Megatron FSDP).

    Every data-parallel rank runs the same whole number of micro-batches per step. Absent or zero mb or gb: no verdict.

    Pass: num_gpus=8, tp=2, mb=2, gb=16. Fail: num_gpus=8, tp=2, mb=2, gb=20.
    Source: CloudAI MegatronBridge workload, constraint 4.
    """
    mb, gb = point.args.mb, point.args.gb
    if not mb or not gb:
        return None
    instances = (point.args.num_distributed_optimizer_instances or 1) if point.args.use_megatron_fsdp else 1
    divisor = mb * point.dp * instances
    if divisor != 0 and gb % divisor == 0:
        return None
    name = "mb*dp" if instances == 1 else "mb*dp*num_distributed_optimizer_instances"
    operands = {"gb": gb, "mb": mb, "dp": point.dp}
    if instances != 1:
        operands["num_distributed_optimizer_instances"] = instances
    return Violation(
        rule_id="C04",
        where="cmd_args.gb",
        fact=f"{gb} is not divisible by {name} = {divisor}",
        remedy=f"use a multiple of {divisor}" if divisor else "mend num_gpus, tp, pp and cp first",
        operands=operands,
    )


RULES = (
    c01_ranks_fill_the_model_parallel_groups,
    c03_at_least_one_model_replica,
    c04_global_batch_is_whole_micro_batches,
)
