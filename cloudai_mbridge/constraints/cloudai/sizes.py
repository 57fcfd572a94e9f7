"""C01, C03, C04, C06, C07, C09, C10: parallel sizes, batch sizes and their mutual exclusions."""

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point


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
    remedy = f"use a multiple of {size}, or smaller tp, pp or cp"
    return point.violation("C01", "num_gpus", fact, remedy, "num_gpus", "tp", "pp", "cp")


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
    remedy = f"use at least {size} GPUs, or smaller tp, pp or cp" if size > 0 else "use positive sizes"
    return point.violation("C03", "num_gpus", fact, remedy, "num_gpus", "tp", "pp", "cp")


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
    factors = ["mb", "dp", *(["num_distributed_optimizer_instances"] if instances != 1 else [])]
    fact = f"{gb} is not divisible by {'*'.join(factors)} = {divisor}"
    remedy = f"use a multiple of {divisor}" if divisor else "fix num_gpus, tp, pp and cp first"
    return point.violation("C04", "gb", fact, remedy, "gb", *factors)


def c06_fsdp_stands_alone(point: Point) -> Answer:
    """Megatron FSDP runs without pipeline, context and virtual pipeline parallelism.

    FSDP shards whole layers over the data-parallel ranks; its hooks do not know pipeline stages or split sequences.

    Pass: use_megatron_fsdp=true. Fail: use_megatron_fsdp=true, pp=2.
    Source: CloudAI MegatronBridge workload, constraint 6.
    """
    if not point.use_megatron_fsdp or (point.pp == 1 and point.cp == 1 and point.args.vp in (None, 1)):
        return None
    fact = "Megatron FSDP needs pp = cp = vp = 1"
    remedy = "set pp, cp and vp to 1, or use_megatron_fsdp to false"
    return point.violation("C06", "use_megatron_fsdp", fact, remedy, "pp", "cp", "vp")


def c07_ranks_fill_the_expert_groups(point: Point) -> Answer:
    """The number of GPUs is a multiple of et*ep*pp, if both et and ep are given.

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
    remedy = f"use a multiple of {size} GPUs, or smaller et, ep or pp" if size > 0 else "use positive et, ep and pp"
    return point.violation("C07", "ep", fact, remedy, "num_gpus", "et", "ep", "pp")


def c09_optimizer_instances_need_fsdp(point: Point) -> Answer:
    """More than one distributed-optimizer instance needs Megatron FSDP.

    Only FSDP's hybrid sharding knows replicas of the optimizer's shards in this workload.

    Pass: num_distributed_optimizer_instances=1. Fail: num_distributed_optimizer_instances=2 without FSDP.
    Source: CloudAI MegatronBridge workload, constraint 9.
    """
    name = "num_distributed_optimizer_instances"
    instances = point.args.num_distributed_optimizer_instances
    if instances is None or instances <= 1 or point.use_megatron_fsdp:
        return None
    remedy = f"set use_megatron_fsdp to true, or {name} to 1"
    return point.violation("C09", name, f"{instances} instances need Megatron FSDP", remedy, name, "use_megatron_fsdp")


def c10_no_offloading_in_a_pipeline(point: Point) -> Answer:
    """Activation offloading runs without pipeline parallelism.

    The offload handler counts the layers of the whole model; on a pipeline stage it waits for layers of others.

    Pass: pp=1, activation_offload_layers=1. Fail: pp=2, activation_offload_layers=1.
    Source: CloudAI MegatronBridge workload, constraint 10; Megatron-Core TransformerConfig.
    """
    if point.pp <= 1 or point.activation_offload_layers <= 0:
        return None
    name = "activation_offload_layers"
    fact = f"{point.activation_offload_layers} offloaded layers need pp = 1"
    return point.violation("C10", name, fact, f"set pp to 1, or {name} to 0", "pp", name)
