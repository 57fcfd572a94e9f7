"""C01, C03, C04, C06, C07, C09, C10: parallel sizes, batch sizes and what excludes what."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation


def c01_ranks_fill_the_model_parallel_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of tp*pp*cp.

    Megatron splits the ranks into groups of tp*pp*cp; a remainder has no group and initialisation fails.

    Pass: num_gpus=16, tp=2, pp=2, cp=2. Fail: num_gpus=12, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 1.
    """
    size = point.model_parallel_size
    if size != 0 and point.args.num_gpus % size == 0:
        return None
    fact = f"{point.args.num_gpus} is not divisible by tp*pp*cp = {size}"
    operands = {"num_gpus": point.args.num_gpus, "tp": point.tp, "pp": point.pp, "cp": point.cp}
    remedy = f"use a multiple of {size}, or smaller tp, pp or cp"
    return Violation("C01", "cmd_args.num_gpus", fact, remedy, operands)


def c03_at_least_one_model_replica(point: Point) -> Answer:
    """The data-parallel size num_gpus // (tp*pp*cp) is not zero.

    With fewer GPUs than one copy of the model needs there is nothing to run.

    Pass: num_gpus=8, tp=8. Fail: num_gpus=4, tp=8.
    Source: CloudAI MegatronBridge workload, constraint 3.
    """
    if point.dp != 0:
        return None
    size = point.model_parallel_size
    fact = f"data-parallel size {point.args.num_gpus} // (tp*pp*cp = {size}) is 0"
    operands = {"num_gpus": point.args.num_gpus, "tp": point.tp, "pp": point.pp, "cp": point.cp}
    remedy = f"use at least {size} GPUs, or smaller tp, pp or cp" if size > 0 else "use positive sizes"
    return Violation("C03", "cmd_args.num_gpus", fact, remedy, operands)


def c04_global_batch_is_whole_micro_batches(point: Point) -> Answer:
    """The global batch is a multiple of mb*dp (times the optimizer instances under Megatron FSDP).

    Every data-parallel rank runs the same whole number of micro-batches per step. Not evaluated: mb or gb is
    absent or zero.

    Pass: num_gpus=8, tp=2, mb=2, gb=16. Fail: num_gpus=8, tp=2, mb=2, gb=20.
    Source: CloudAI MegatronBridge workload, constraint 4.
    """
    mb, gb = point.args.mb, point.args.gb
    if not mb or not gb:
        return NotEvaluated("C04", "mb and gb")
    instances = (point.args.num_distributed_optimizer_instances or 1) if point.args.use_megatron_fsdp else 1
    divisor = mb * point.dp * instances
    if divisor != 0 and gb % divisor == 0:
        return None
    name = "mb*dp" if instances == 1 else "mb*dp*num_distributed_optimizer_instances"
    operands = {"gb": gb, "mb": mb, "dp": point.dp}
    if instances != 1:
        operands["num_distributed_optimizer_instances"] = instances
    fact = f"{gb} is not divisible by {name} = {divisor}"
    remedy = f"use a multiple of {divisor}" if divisor else "fix num_gpus, tp, pp and cp first"
    return Violation("C04", "cmd_args.gb", fact, remedy, operands)


def c06_fsdp_stands_alone(point: Point) -> Answer:
    """Megatron FSDP runs without pipeline, context and virtual pipeline parallelism.

    FSDP shards whole layers over the data-parallel ranks; its hooks do not know pipeline stages or split sequences.

    Pass: use_megatron_fsdp=true. Fail: use_megatron_fsdp=true, pp=2.
    Source: CloudAI MegatronBridge workload, constraint 6.
    """
    if not point.fsdp or (point.pp == 1 and point.cp == 1 and point.vp in (None, 1)):
        return None
    fact = "Megatron FSDP needs pp = cp = vp = 1"
    operands = {"pp": point.pp, "cp": point.cp, "vp": point.vp}
    remedy = "set pp, cp and vp to 1, or use_megatron_fsdp to false"
    return Violation("C06", "cmd_args.use_megatron_fsdp", fact, remedy, operands)


def c07_ranks_fill_the_expert_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of et*ep*pp, where both et and ep are given.

    Experts have groups of their own; a remainder of ranks has none. Without et or ep: no verdict.

    Pass: num_gpus=16, et=1, ep=8, pp=2. Fail: num_gpus=16, et=1, ep=12.
    Source: CloudAI MegatronBridge workload, constraint 7.
    """
    et, ep = point.args.et, point.args.ep
    if et is None or ep is None:
        return None
    size = et * ep * point.pp
    if size != 0 and point.args.num_gpus % size == 0:
        return None
    fact = f"num_gpus = {point.args.num_gpus} is not divisible by et*ep*pp = {size}"
    operands = {"num_gpus": point.args.num_gpus, "et": et, "ep": ep, "pp": point.pp}
    remedy = f"use a multiple of {size} GPUs, or smaller et, ep or pp" if size > 0 else "use positive et, ep and pp"
    return Violation("C07", "cmd_args.ep", fact, remedy, operands)


def c09_optimizer_instances_need_fsdp(point: Point) -> Answer:
    """More than one distributed-optimizer instance needs Megatron FSDP.

    Only FSDP's hybrid sharding knows replicas of the optimizer's shards in this workload.

    Pass: num_distributed_optimizer_instances=1. Fail: num_distributed_optimizer_instances=2 without FSDP.
    Source: CloudAI MegatronBridge workload, constraint 9.
    """
    instances = point.args.num_distributed_optimizer_instances
    if instances is None or instances <= 1 or point.fsdp:
        return None
    fact = f"{instances} instances need Megatron FSDP"
    operands = {"num_distributed_optimizer_instances": instances, "use_megatron_fsdp": point.fsdp}
    remedy = "set use_megatron_fsdp to true, or num_distributed_optimizer_instances to 1"
    return Violation("C09", "cmd_args.num_distributed_optimizer_instances", fact, remedy, operands)


def c10_no_offloading_in_a_pipeline(point: Point) -> Answer:
    """Activation offloading runs without pipeline parallelism.

    The offload handler counts the layers of the whole model; on a pipeline stage it waits for layers of others.

    Pass: pp=1, activation_offload_layers=1. Fail: pp=2, activation_offload_layers=1.
    Source: CloudAI MegatronBridge workload, constraint 10; Megatron-Core TransformerConfig.
    """
    if point.pp <= 1 or point.offload_layers <= 0:
        return None
    fact = f"{point.offload_layers} offloaded layers need pp = 1"
    operands = {"pp": point.pp, "activation_offload_layers": point.offload_layers}
    remedy = "set pp to 1, or activation_offload_layers to 0"
    return Violation("C10", "cmd_args.activation_offload_layers", fact, remedy, operands)


RULES = (
    c01_ranks_fill_the_model_parallel_groups,
    c03_at_least_one_model_replica,
    c04_global_batch_is_whole_micro_batches,
    c06_fsdp_stands_alone,
    c07_ranks_fill_the_expert_groups,
    c09_optimizer_instances_need_fsdp,
    c10_no_offloading_in_a_pipeline,
)
