"""Rules E01...: limits of the embedded loop, so that no argument is silently ignored."""

import json
from collections.abc import Iterator

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point, Violation
from cloudai_mbridge.errors import BadInput, NotModelled
from cloudai_mbridge.estimate.architecture import architecture
from cloudai_mbridge.estimate.memory.adapter_parameters import check_ranks
from cloudai_mbridge.estimate.memory.layout import adapters_of
from cloudai_mbridge.estimate.memory.linears import ParameterSplit
from cloudai_mbridge.megatron_bridge.environment import gpu_label
from cloudai_mbridge.megatron_bridge.presets import loop_preset, why_no_variant
from cloudai_mbridge.models.cmd_args import ADAPTER_TASKS, FP8, IN_16_OR_32_BITS, QUANTIZED
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.recipes.apply import lacked_by, lacking, unsupported_args, why_unsupported
from cloudai_mbridge.recipes.arguments import wrong_data, wrong_value
from cloudai_mbridge.recipes.load import adapters_of_task
from cloudai_mbridge.training.compat.versions import TRANSFORMER_ENGINE

_DTYPES = (*IN_16_OR_32_BITS, *QUANTIZED)
_OF_SLURM = {
    "container_image": "containers",
    "enable_vboost": "boost",
    "lock_gpu_freq": "clocks",
    "peak_mem_clk": "clocks of memory",
    "enable_pct_binding": "binding of cores",
    "preempt_time": "signal before a time limit",
}
_WITH_FLEX = ("deepep", "hybridep")
_BALANCED_BY = (None, "aux_loss", "seq_aux_loss", "none")
_ADDS_TWICE = ("optim_grads_params", "optim_grads")
_WITHOUT_DEEPEP = ("gb200", "gb300", "vr200", "r100")


def e01_every_argument_reaches_the_training(point: Point) -> Answer:
    """No argument is set that the embedded loop would have to ignore.

    A benchmark without one of its options measures something else.

    Pass: tp=2. Fail: domain="vlm".
    Source: `cloudai_mbridge.recipes.apply`.
    """
    if not point.is_embedded or not (ignored := unsupported_args(point.args)):
        return None
    fact = f"the embedded launcher does not take {', '.join(f'{name} ({why_unsupported(name)})' for name in ignored)}"
    remedy = "follow the hints in parentheses, remove these arguments, or set launcher = 'megatron_bridge'"
    return Violation("E01", "cmd_args", fact, remedy, ignored)


def e02_the_machine_has_what_the_point_needs(point: Point) -> Answer:
    """The loop has the number format, and a machine that is known to lack a GPU or Transformer Engine needs neither.

    FP8 and FP4 are Transformer Engine's. "fp8" is one of its formats with the `fp8_recipe` that says which.

    Pass: compute_dtype="bf16". Fail: compute_dtype="fp8" without fp8_recipe; "fp8_mx" on a machine without a GPU.
    Source: `cloudai_mbridge.recipes.container`, `cloudai_mbridge.training.schema.not_done`.
    """
    dtype, fp8_recipe = point.args.compute_dtype, point.args.fp8_recipe
    if not point.is_embedded:
        return None
    if dtype not in _DTYPES:
        fact = f"the embedded launcher does not train in {dtype!r}"
        if dtype == FP8:
            fact += f" with fp8_recipe = {fp8_recipe!r}"
        return point.violation("E02", "compute_dtype", fact, f"use one of {', '.join(_DTYPES)}", "compute_dtype")
    if fp8_recipe:
        fact = f"fp8_recipe = {fp8_recipe!r} has no effect beside compute_dtype = {dtype!r}"
        return point.violation("E02", "fp8_recipe", fact, f"remove it, or set compute_dtype = {FP8!r}", "fp8_recipe")
    if not (lacked := lacked_by(point.args, lacking(point.system))):
        return None
    fact = f"this machine lacks {', '.join(f'{what} for {name}' for name, what in lacked.items())}"
    remedy = f"remove {'it' if len(lacked) == 1 else 'them'}, or run on a Slurm system"
    return point.violation("E02", next(iter(lacked)), fact, remedy, *lacked)


def e03_there_are_steps_to_measure(point: Point) -> Answer:
    """The number of steps is positive.

    Pass: max_steps=10. Fail: max_steps=0.
    Source: a run of no steps has no step time.
    """
    steps = point.args.max_steps
    if not point.is_embedded or (steps is not None and steps > 0):
        return None
    return point.violation("E03", "max_steps", f"max_steps is {steps}", "use at least 1", "max_steps")


def e04_containers_need_slurm(point: Point) -> Answer:
    """A container image, clocks, the binding of cores and a signal before the time limit need a Slurm system.

    This machine runs points in its own environment, and its clocks are not the run's to set.

    Pass: container_image="". Fail: container_image="nemo", lock_gpu_freq=1500 on a local system.
    Source: `cloudai_mbridge.launch.script`.
    """
    if not (point.is_embedded and isinstance(point.system, LocalSystem)):
        return None
    needing = [name for name in _OF_SLURM if getattr(point.args, name) not in (None, False, "", -1)]
    if not needing:
        return None
    fact = f"a local system has no {', no '.join(_OF_SLURM[name] for name in needing)}"
    remedy = f"remove {', '.join(needing)}, or run on a Slurm system"
    return point.violation("E04", needing[0], fact, remedy, *needing)


def e05_the_loop_builds_the_model(point: Point) -> Answer:
    """The embedded loop can build the recipe's model.

    Pass: model_recipe_name="llama3_8b". Fail: model_recipe_name="nemotron_3_nano". Not evaluated: no recipe.
    Source: `not_embedded` in the recipe's file.
    """
    if not point.is_embedded:
        return None
    if point.recipe is None:
        return NotEvaluated("E05", "recipe")
    if not point.recipe.not_embedded:
        return None
    fact = f"the embedded loop cannot build {point.recipe.name} because of {point.recipe.not_embedded}"
    remedy = "set launcher = 'megatron_bridge', or choose another recipe"
    return point.violation("E05", "model_recipe_name", fact, remedy, model_recipe_name=point.recipe.name)


def e06_replicated_experts_stay_equal(point: Point) -> Answer:
    """Without expert parallelism, experts are sharded as the dense layers are.

    With ep=1 Megatron-Core reduces the gradients of the experts over the groups of the dense layers: experts that are
    replicated over tensor-parallel ranks would drift apart, without an error.

    Pass: experts, tp=2, ep=1, et=2. Fail: experts, tp=2, ep=1, et=1. Not evaluated: no recipe.
    Source: two processes against one: the loss differs by 1e-2 after 8 steps.
    """
    if not point.is_embedded:
        return None
    if point.recipe is None:
        return NotEvaluated("E06", "recipe")
    if not point.num_moe_experts or (point.args.ep or 1) > 1 or (et := point.expert_tp) == (tp := point.tp):
        return None
    why = ", as the experts have biases," if point.args.et is None else ""
    fact = f"et = {et}{why} differs from tp = {tp} while ep = 1: Megatron-Core trains the experts incorrectly"
    remedy = "use tp = 1, or ep > 1" if why else f"use et = {tp}, or ep > 1"
    return point.violation("E06", "et", fact, remedy, et=et, tp=tp, ep=1)


def e07_arguments_are_complete(point: Point) -> Answer:
    """Arguments that are read together are complete, and none is without effect.

    Data sets and tokenizers have arguments of their own, and only a mixture of experts has layers without experts.

    Pass: data="c4", c4_root="/c4". Fail: data="c4"; data="mock", dataset_root="/squad"; optimizer_type="lion";
    first_k_dense_replace=1 without experts.
    Source: Megatron-Bridge 0.6.0, scripts/performance/utils/overrides.py.
    """
    if not point.is_embedded:
        return None
    wrong = wrong_data(point.args) or wrong_value(point.args)
    dense, name = point.args.first_k_dense_replace, "first_k_dense_replace"
    if dense is not None and wrong is None:
        if point.recipe is None:
            return NotEvaluated("E07", "recipe")
        if not point.num_moe_experts:
            wrong = name, "the model has no experts", f"remove {name}"
        elif not 0 <= dense <= (point.num_layers or 0):
            wrong = name, f"the model has {point.num_layers} layers", f"use 0 to {point.num_layers}"
    return None if wrong is None else point.violation("E07", *wrong, wrong[0])


def e08_the_variant_exists(point: Point) -> Answer:
    """A variant of a preset exists for the recipe, task, GPU and number format.

    Pass: config_variant="large_scale", model_recipe_name="deepseek_v3", gpu_type="gb200", compute_dtype="fp8_mx".
    Fail: config_variant="large_scale", model_recipe_name="llama3_8b". Not evaluated: unknown GPU type.
    Source: the presets of Megatron-Bridge 0.6.0.
    """
    if not (point.is_embedded and point.args.config_variant):
        return None
    if not (gpu := gpu_label(point.args, point.system)):
        return NotEvaluated("E08", "gpu_type")
    if loop_preset(point.args, gpu):
        return None
    fact = why_no_variant(point.args, gpu)
    return point.violation(
        "E08", "config_variant", fact, "use one of these, or remove config_variant", "config_variant"
    )


def e09_limited_experts_are_there_and_exchange_all_to_all(point: Point) -> Answer:
    """Experts of a fixed size need experts, the all-to-all dispatcher, and balance by an auxiliary loss or none.

    Pass: experts, use_tokendrop=true. Fail: use_tokendrop=true on a dense model. Not evaluated: no recipe.
    Source: Megatron-Bridge 0.6.0, megatron.bridge.training.utils.moe_token_drop.
    """
    if not (point.is_embedded and point.args.use_tokendrop):
        return None
    if point.recipe is None:
        return NotEvaluated("E09", "recipe")
    backend = point.args.moe_flex_dispatcher_backend or point.of_recipe("moe_flex_dispatcher_backend")
    needs = {
        "experts": bool(point.num_moe_experts),
        "moe_flex_dispatcher_backend other than deepep and hybridep": backend not in _WITH_FLEX,
        "moe_router_load_balancing_type aux_loss, seq_aux_loss or none": (
            point.of_recipe("moe_router_load_balancing_type") in _BALANCED_BY
        ),
    }
    if not (missing := [name for name, is_there in needs.items() if not is_there]):
        return None
    fact, remedy = f"use_tokendrop needs {' and '.join(missing)}", "remove use_tokendrop, or provide it"
    return point.violation("E09", "use_tokendrop", fact, remedy, "use_tokendrop", "moe_flex_dispatcher_backend")


def e10_the_gpu_has_the_backend(point: Point) -> Answer:
    """DeepEP has no kernels for GPUs in one NVLink domain of several nodes.

    Pass: moe_flex_dispatcher_backend="deepep", gpu_type="h100". Fail: the same with gpu_type="gb200".
    Not evaluated: unknown GPU.
    Source: Megatron-Bridge 0.6.0, megatron.bridge.training.flex_dispatcher_backend.
    """
    backend = point.args.moe_flex_dispatcher_backend
    if not point.is_embedded or backend != "deepep":
        return None
    if not (gpu := gpu_label(point.args, point.system)):
        return NotEvaluated("E10", "gpu_type")
    if gpu not in _WITHOUT_DEEPEP:
        return None
    name, fact = "moe_flex_dispatcher_backend", f"deepep does not run on {gpu}"
    return point.violation("E10", name, fact, "use hybridep, or None for all-to-all", name, gpu_type=gpu)


def e11_sharded_parameters_have_checkpoints(point: Point) -> Answer:
    """Checkpoints of Megatron-FSDP need Megatron-Core 0.19, and one instance of its optimizer to be saved.

    Pass: use_megatron_fsdp=true, save_dir="/ckpt" on Megatron-Core 0.19. Fail: the same on 0.18, or with
    num_distributed_optimizer_instances=2; checkpoint.save of `extra_cmd_args` alike. Not evaluated: the release is not
    known.
    Source: `cloudai_mbridge.training.startup.unsupported`.
    """
    if not (point.is_embedded and point.use_megatron_fsdp):
        return None
    given = dict(_checkpoints(point))
    saved = next((path for path, name in given.items() if name == "save_dir"), None)
    instances, name = point.args.num_distributed_optimizer_instances, "num_distributed_optimizer_instances"
    if saved and instances and instances > 1:
        fact = f"{instances} instances of Megatron-FSDP's optimizer cannot be saved"
        remedy = f"remove {saved.partition('.')[2]}, or use {name} = 1"
        return Violation("E11", saved, fact, remedy, {"use_megatron_fsdp": True, name: instances})
    if not given:
        return None
    if (has_checkpoints := point.has_core("0.19")) is None:
        return NotEvaluated("E11", "the release of Megatron-Core")
    if has_checkpoints:
        return None
    fact = f"Megatron-Core {point.core} has no checkpoints of Megatron-FSDP"
    remedy = f"remove {' and '.join(path.partition('.')[2] for path in given)}, or install Megatron-Core 0.19"
    return Violation("E11", next(iter(given)), fact, remedy, {"use_megatron_fsdp": True, "core": point.core})


# Arguments of checkpoints -> the key of `extra_cmd_args` that sets the same
CHECKPOINTS = {"save_dir": "checkpoint.save", "load_dir": "checkpoint.load"}


def _checkpoints(point: Point) -> Iterator[tuple[str, str]]:
    """Yield the keys that set checkpoints, such as "cmd_args.save_dir", and their arguments."""
    for name, key in CHECKPOINTS.items():
        if getattr(point.args, name):
            yield f"cmd_args.{name}", name
        elif key in point.settings:
            yield f"extra_cmd_args.{key}", name


def e12_shards_of_gradients_have_several_ranks(point: Point) -> Answer:
    """Megatron-FSDP on Megatron-Core 0.16 has several ranks for each shard, of the model and of its experts.

    That release adds up the gradients of one rank twice.

    Pass: use_megatron_fsdp=true, num_gpus=2 on Megatron-Core 0.16; num_gpus=1 on 0.19. Fail: num_gpus=1 on 0.16.
    Not evaluated: unknown release. It passes with another ddp.data_parallel_sharding_strategy in `extra_cmd_args`.
    Source: `cloudai_mbridge.training.startup.unsupported`.
    """
    if not (point.is_embedded and point.use_megatron_fsdp and (part := _on_one_rank(point))):
        return None
    if point.core is None:
        return NotEvaluated("E12", "the release of Megatron-Core")
    if point.has_core("0.17"):
        return None
    if point.settings.get("ddp.data_parallel_sharding_strategy", _ADDS_TWICE[0]) not in _ADDS_TWICE:
        return None
    fact = f"{part} is on one data-parallel rank, whose gradients Megatron-Core {point.core} adds up twice"
    remedy = "use more GPUs, remove use_megatron_fsdp, or install Megatron-Core 0.19"
    return point.violation("E12", "use_megatron_fsdp", fact, remedy, "num_gpus", "tp", "cp", "ep", core=point.core)


def _on_one_rank(point: Point) -> str:
    """Return the state that ranks of an optimizer's instance do not share, or ""."""
    instances = point.num_optimizer_instances
    if (ranks := point.dp * point.cp) == instances:
        return "the model"
    of_expert = (point.args.ep or 1) * point.expert_tp
    return "an expert" if point.num_moe_experts and ranks * point.tp == of_expert * instances else ""


def e13_adapters_fit_the_layers_and_ranks(point: Point) -> Answer:
    """Adapters have a rank that the tensor-parallel ranks of their layers split evenly.

    Pass: task="lora", tp=2, peft.dim=32. Fail: task="lora", tp=2, peft.dim=31. Not evaluated: no recipe, or adapters
    whose memory is not modelled.
    Source: `cloudai_mbridge.training.peft`.
    """
    if not point.is_embedded or point.args.task not in ADAPTER_TASKS:
        return None
    if point.recipe is None:
        return NotEvaluated("E13", "recipe")
    own = {key.partition(".")[2]: value for key, value in point.settings.items() if key.startswith("peft.")}
    dim = own.get("dim", point.recipe.default("peft", "dim"))
    if point.tp < 1 or point.expert_tp < 1 or (point.args.ep or 1) < 1:
        return NotEvaluated("E13", "positive sizes")
    try:
        adapters = adapters_of({**adapters_of_task(point.recipe), **point.recipe.sections.get("peft", {}), **own})
        model = {key: json.dumps(value) for key, value in point.settings.items() if key.startswith("model.")}
        has_te = TRANSFORMER_ENGINE not in lacking(point.system)
        split = ParameterSplit(point.tp, point.args.ep or 1, point.expert_tp, has_te)
        check_ranks(architecture(point.recipe, point.args, model), adapters, split)
    except NotModelled as error:
        return NotEvaluated("E13", f"a model of it ({error})")
    except BadInput as error:
        if not str(error).startswith("peft"):
            return NotEvaluated("E13", f"a model ({error})")
        fact, _, remedy = str(error).rpartition("; ")
        where = "extra_cmd_args.peft.dim" if "dim" in own else "cmd_args.task"
        return Violation("E13", where, fact, remedy, {"dim": dim, "tp": point.tp, "et": point.expert_tp})
    return None
