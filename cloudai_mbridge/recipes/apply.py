"""From a recipe and a point's `cmd_args` to a training config; `models.cmd_args` maps arguments to fields.

Overrides of either launcher are refused if they prevent a run's success, or change the steps behind its logged rates.
"""

import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Any

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ARGUMENTS, QUANTIZED, ResolvedCmdArgs, names_in
from cloudai_mbridge.models.pipeline_layout import num_stages
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes.arguments import check_adapters, set_companions
from cloudai_mbridge.recipes.container import container_data, gather_in_large_buckets, use_precision_aware_adam
from cloudai_mbridge.recipes.load import Recipe, fit_pattern
from cloudai_mbridge.recipes.presets import sections_of
from cloudai_mbridge.training.compat import versions
from cloudai_mbridge.training.compat.versions import GPU, TRANSFORMER_ENGINE, installed_release
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema import check_section_values
from cloudai_mbridge.training.schema.known_names import OPTIMIZER_DTYPES
from cloudai_mbridge.training.schema.not_done import NEEDS, RECOMPUTED_BY_ENGINE, asked_for, needed


def place(key: str) -> tuple[str, str]:
    """Return (section, field) of SECTION.FIELD."""
    section, _, field = key.partition(".")
    return section, field


# cmd_args field -> (section, field) of the training config; extra_cmd_args may override PASSED_ON
MAPPED = {name: place(argument.config) for name, argument in ARGUMENTS.items() if argument.config}
PASSED_ON = {name: place(argument.config_extra) for name, argument in ARGUMENTS.items() if argument.config_extra}

# sizes of the model, the same in every launcher
_MODEL_FACTS = frozenset({"hidden_size", "num_layers", "num_moe_experts", "vocab_size"})

# Number formats are chosen by an argument that rules read; extra_cmd_args set the rest
_PRECISION, _OVERLAP = "mixed_precision", "comm_overlap"
_FORMAT = ("fp32", "fp16", "bf16", "params_dtype", "fp8", "fp8_recipe", "fp4", "fp4_recipe")
_TWO_NAMES = {"fp8_param": "fp8_param_gather", "fp4_param": "fp4_param_gather"}

# Fields of other sections that the section of overlaps sets
_OF_PARAMETERS = ("overlap_param_gather", "overlap_param_gather_with_optimizer_step", "align_param_gather")
_OVERLAPPED = {
    "ddp": (*_OF_PARAMETERS, "overlap_grad_reduce", "bucket_size", "delay_wgrad_compute"),
    "optimizer": _OF_PARAMETERS,
    "model": ("overlap_p2p_comm", "batch_p2p_comm", "defer_embedding_wgrad_compute", "wgrad_deferral_limit",
              "delay_wgrad_compute", "tp_comm_overlap", "tp_comm_bootstrap_backend"),
}  # fmt: skip

_STATE = {f"optimizer.{name}" for name in ("use_precision_aware_optimizer", *OPTIMIZER_DTYPES)}
_NO_GRAPHS, _FULL_ITERATION = ("", "none", "null"), "full_iteration"
_ALL_TO_ALL = ("None", "none", "")
# A recipe's choice stays there: a machine without a GPU falls back, and rejects a choice of the test
_BACKEND = "moe_flex_dispatcher_backend"

_ARGUMENT_OF = {place: name for name, place in MAPPED.items()}


def unsupported_args(args: ResolvedCmdArgs) -> dict[str, Any]:
    """Return the set arguments that the embedded loop would have to ignore, with their values."""
    found = {}
    for name in sorted(args.model_fields_set):
        argument, value = ARGUMENTS[name], getattr(args, name)
        is_idle = bool(argument.needs) and not any(getattr(args, other) for other in argument.needs)
        if (argument.refused or is_idle) and value is not None and value not in argument.harmless:
            found[name] = value
    return found


def why_unsupported(name: str) -> str:
    """Return why the embedded loop would have to ignore an argument, or the setting to use instead."""
    return ARGUMENTS[name].refused or f"no effect without {' or '.join(ARGUMENTS[name].needs)}"


def with_recipe_defaults(args: ResolvedCmdArgs, recipe: Recipe, but: Collection[str] = ()) -> ResolvedCmdArgs:
    """Fill in the recipe's values of arguments that the user left unset, so that rules and reports see every size."""
    left_out = {*but, _BACKEND}
    missing = {
        name: default
        for name, (section, field) in MAPPED.items()
        if name not in left_out
        if getattr(args, name) is None and (default := recipe.default(section, field)) is not None
    }
    return args.model_copy(update=missing)


def with_model_facts(args: ResolvedCmdArgs, recipe: Recipe, but: Collection[str] = ()) -> ResolvedCmdArgs:
    """Fill in the sizes of the recipe's model. How upstream's recipe of this name is run, is upstream's to decide."""
    return with_recipe_defaults(args, recipe, but={*but} | (MAPPED.keys() - _MODEL_FACTS))


def core_release(system: System | None) -> str | None:
    """Return the release of Megatron-Core that trains on this system; None if only the job can detect it."""
    return installed_release() if _is_this_environment(system) else None


def lacking(system: System | None) -> frozenset[str]:
    """Return which of `GPU` and `TRANSFORMER_ENGINE` this system's machine certainly lacks."""
    return versions.lacking() if _is_this_environment(system) else frozenset()


def _is_this_environment(system: System | None) -> bool:
    return system is not None and system.is_this_environment


def lacked_by(args: ResolvedCmdArgs, lacking: Collection[str]) -> dict[str, str]:
    """Return the arguments of the embedded loop that need a capability that the machine lacks -> the capability."""
    is_quantized = args.compute_dtype in QUANTIZED and TRANSFORMER_ENGINE in lacking
    by_format = {"compute_dtype": TRANSFORMER_ENGINE} if is_quantized else {}
    found = by_format | {
        name: what
        for name, (section, field) in MAPPED.items()
        if (value := getattr(args, name)) is not None
        for what, harmless in (NEEDS.get(f"{section}.{field}", ("", ())),)
        if what in lacking and value not in harmless and str(value).strip().lower() not in _NO_GRAPHS
    }
    if GPU in lacking and args.moe_flex_dispatcher_backend not in (None, *_ALL_TO_ALL):
        found["moe_flex_dispatcher_backend"] = GPU
    if TRANSFORMER_ENGINE in lacking and set(names_in(args.recompute_modules)) & {*RECOMPUTED_BY_ENGINE}:
        found["recompute_modules"] = TRANSFORMER_ENGINE
    return found


def training_config(
    recipe: Recipe,
    args: ResolvedCmdArgs,
    extra: Mapping[str, str],
    core: str | None = None,
    lacking: Collection[str] = (),
) -> dict[str, Any]:
    """Return the training config as plain data, checked as the training process will check it.

    core: the release of Megatron-Core; None: unknown, keys of any release pass. lacking: as `lacking` returns it.
    BadInput: `extra_cmd_args` name an unknown key, have a value of the wrong type, or need a missing capability.
    """
    sections = sections_of(recipe, args, core, lacking)
    for name, (section, field) in MAPPED.items():
        if (value := getattr(args, name)) is not None:
            sections.setdefault(section, {})[field] = value
    if (predicted := extra.get("model.mtp_num_layers")) is not None:
        sections["model"]["mtp_num_layers"] = parse_value(predicted)
    _derive(sections["model"], recipe)
    _capture(sections)
    if (dense := args.first_k_dense_replace) is not None:
        sections["model"]["moe_layer_freq"] = [int(layer >= dense) for layer in range(sections["model"]["num_layers"])]
    data = container_data(sections, core)
    _overlap_experts(data)
    has_checkpoints = bool(args.save_dir or args.load_dir or {"checkpoint.save", "checkpoint.load"} & extra.keys())
    set_companions(data, args, has_checkpoints=has_checkpoints)
    for name, (section, field) in PASSED_ON.items():
        if (value := getattr(args, name)) not in (None, "", *ARGUMENTS[name].harmless):
            if f"{section}.{field}" in extra:
                raise BadInput(f"extra_cmd_args: {section}.{field} is set by cmd_args.{name}, too; remove one of them")
            data.setdefault(section, {})[field] = _ranks(value) if name == "profiling_ranks" else value
    for key, text in _in_both_sections(extra, data).items():
        section, _, field = key.partition(".")
        if not field:
            raise BadInput(f"extra_cmd_args: {key!r} is not SECTION.FIELD such as optimizer.lr")
        if argument := _ARGUMENT_OF.get((section, field)):
            raise BadInput(f"extra_cmd_args: {key!r} is cmd_args.{argument}; set it there, so that the rules see it")
        if not isinstance(data.setdefault(section, {}), dict) or (section == _PRECISION and field in _FORMAT):
            raise BadInput(f"extra_cmd_args: {key!r}: {section} is chosen by cmd_args.compute_dtype; set that")
        data[section][field] = parse_value(text)
    _drop_other_names(data, extra)
    check_adapters(data, args)
    if not _STATE & extra.keys():
        use_precision_aware_adam(data)
    gather_in_large_buckets(data, args.num_gpus)
    _refuse_not_done(data, lacking)
    try:
        check_section_values(data, release=core)
    except ConfigError as error:
        raise BadInput(f"training config: {error}") from None
    return data


def _in_both_sections(extra: Mapping[str, str], data: Mapping[str, Any]) -> Mapping[str, str]:
    """Apply fields of extra_cmd_args that a section with precedence would overwrite."""
    found = dict(extra)
    if data.get(_PRECISION) and (text := extra.get("ddp.grad_reduce_in_fp32")) is not None:
        found.setdefault(f"{_PRECISION}.grad_reduce_in_fp32", text)
    for section, names in _OVERLAPPED.items() if data.get(_OVERLAP) else ():
        for name in names:
            if (text := extra.get(f"{section}.{name}")) is not None:
                found.setdefault(f"{_OVERLAP}.{name}", text)
    return found


def _drop_other_names(data: dict[str, Any], extra: Mapping[str, str]) -> None:
    """Let extra_cmd_args for FP8 or FP4 weights replace the format's own setting, which may have the other name."""
    for name, gather in _TWO_NAMES.items():
        for given, other in ((name, gather), (gather, name)):
            if f"{_PRECISION}.{given}" in extra and f"{_PRECISION}.{other}" not in extra:
                data[_PRECISION].pop(other, None)


def _ranks(value: Any) -> list[int]:
    """Return the ranks of 3, "0,3" or [0, 3]; BadInput for text of another form."""
    texts = value.strip("[] ").split(",") if isinstance(value, str) else value if isinstance(value, list) else [value]
    try:
        return [int(text) for text in texts]
    except ValueError:
        raise BadInput(f"cmd_args.profiling_ranks: {value!r} is not a list of ranks such as '0,3'") from None


def _refuse_not_done(data: Mapping[str, Any], lacking: Collection[str]) -> None:
    """Reject settings that the training loop would reject, before a job is submitted for it."""

    def get(section: str, name: str, default: Any) -> Any:
        values = data.get(section)
        return values.get(name, default) if isinstance(values, dict) else default

    if asked := list(asked_for(get)):
        raise BadInput(f"training config: the training loop does not do this: {'; '.join(asked)}")
    if missing := list(needed(get, lacking)):
        raise BadInput(f"training config: this machine cannot train that: {'; '.join(missing)}")


def _derive(model: dict[str, Any], recipe: Recipe) -> None:
    """Apply the consequences of the arguments, as Megatron-Bridge's recipes do."""
    for field in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"):
        model[field] = model.get(field) or 1
    if model.get("virtual_pipeline_model_parallel_size") == 1:
        model["virtual_pipeline_model_parallel_size"] = None
    predicted = model.setdefault("mtp_num_layers", recipe.mtp_num_layers or None)
    given, pp = model.get("pipeline_model_parallel_layout"), model["pipeline_model_parallel_size"]
    vp = model.get("virtual_pipeline_model_parallel_size")
    if given and vp is None:
        model["virtual_pipeline_model_parallel_size"] = virtual_stages(given, pp)
    layers = model["num_layers"]
    model["pipeline_model_parallel_layout"] = trained_layout(recipe, given, pp, vp, layers, predicted)
    if (backend := model.get(_BACKEND)) is not None:  # the dispatcher with backends, or all-to-all for "None"
        model["moe_token_dispatcher_type"] = "alltoall" if backend in _ALL_TO_ALL else "flex"
        if backend in _ALL_TO_ALL:
            del model[_BACKEND]
    model["sequence_parallel"] = model["tensor_model_parallel_size"] > 1
    if isinstance(modules := model.get("recompute_modules"), str):
        model["recompute_modules"] = names_in(modules)
    if model.get("recompute_num_layers"):
        model.update(recompute_granularity="full", recompute_method="block", recompute_modules=None)
    elif model.get("recompute_modules"):
        model["recompute_granularity"] = "selective"
    if isinstance(pattern := model.get("moe_layer_freq"), list):  # fewer or more layers than the recipe has
        layers = model["num_layers"]
        model["moe_layer_freq"] = (pattern + pattern[-1:] * layers)[:layers]
    if (blocks := model.get("hybrid_layer_pattern")) and isinstance(predicted, int | None):
        model["hybrid_layer_pattern"] = fit_pattern(blocks, model["num_layers"], predicted or 0)


def _capture(sections: dict[str, dict[str, Any]]) -> None:
    """Set the companion setting of CUDA graphs, as upstream's launcher does: Transformer Engine's random numbers."""
    model = sections["model"]
    kind = str(model.pop("cuda_graph_impl", None) or "none").strip().lower()
    scopes = [name.lower() for name in names_in(model.pop("cuda_graph_scope", None))]
    if kind in _NO_GRAPHS:
        return
    sections["rng"] = {**sections.get("rng", {}), "te_rng_tracker": True}
    if kind == _FULL_ITERATION:  # the names in every release
        kind, scopes = "local", [_FULL_ITERATION, *(name for name in scopes if name != kind)]
    model["cuda_graph_impl"] = kind
    if scopes:
        model["cuda_graph_scope"] = scopes


def _overlap_experts(data: dict[str, Any]) -> None:
    """Add the companion settings of the overlapped expert exchange, as upstream's launcher does."""
    name, overlap = "overlap_moe_expert_parallel_comm", data.get("comm_overlap", {})
    if overlap.get(name):
        data["comm_overlap"] = {"tp_comm_overlap": False, "delay_wgrad_compute": True, **overlap}
        data["model"]["moe_shared_expert_overlap"] = False
    elif overlap.keys() == {name}:  # off, as it is without the section
        del data["comm_overlap"]


_MTP_STAGE = re.compile(r"m(\*\d+)?")


def trained_layout(
    recipe: Recipe, given: str | None, pp: int, vp: int | None, num_layers: int | None, predicted: Any
) -> str | None:
    """Return the explicit layout that the embedded loop trains: the given one, else the recipe's for all its layers.

    predicted: the layers of multi-token prediction; a layout of a recipe or preset loses its stage without them.
    """
    if given:
        return _MTP_STAGE.sub("", given) if predicted == 0 else given
    is_whole = num_layers == recipe.default("model", "num_layers")
    return recipe_layout(recipe, pp, vp, with_mtp=predicted not in (None, 0)) if is_whole else None


def virtual_stages(layout: str, pp: int) -> int | None:
    """Return the virtual stages that an explicit layout makes; None for no more than one."""
    stages = num_stages(layout) // pp if pp > 0 else 0
    return stages if stages > 1 else None


def recipe_layout(recipe: Recipe, pp: int, vp: int | None, *, with_mtp: bool) -> str | None:
    """Return the recipe's explicit pipeline layout for pp*vp stages, if it has one."""
    layout = recipe.pipeline_layouts.get(str(pp * (vp or 1)))
    return layout if layout is None or with_mtp else _MTP_STAGE.sub("", layout)


def settings_of(extra: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings of `extra_cmd_args` for the embedded loop by their keys, SECTION.FIELD."""
    return {key.lstrip("+"): parse_value(text) for key, text in extra.items()}


def parse_value(text: str) -> Any:
    """Read a value as TOML would (number, boolean, list, quoted string); anything else is a string."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except ValueError:  # not TOML, or a number of thousands of digits
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


# value, number of steps (None: the launcher decides) -> whether steps are missing from the log
_IsHiding = Callable[[Any, int | None], bool]


def _ends_early(interval: Any, num_steps: int | None) -> bool:
    """Return whether a training that exits after the first iteration divisible by `interval` exits early."""
    is_number = isinstance(interval, int | float) and not isinstance(interval, bool)
    return is_number and interval > 0 and num_steps is not None and interval < num_steps


def _is_on(value: Any, _: int | None) -> bool:
    return value not in (False, None, 0, [], "false", "False", "null", "None")


_NOT_PRINTED = "steps are measured by the lines that they print"
_HIDING: Mapping[str, tuple[_IsHiding, str]] = {
    "logger.log_interval": (lambda value, _: value != 1, f"prints no line for some steps, and {_NOT_PRINTED}"),
    "train.exit_interval": (_ends_early, "ends the training before max_steps"),
    "train.exit_duration_in_mins": (_is_on, "may end the training before max_steps; use a time limit instead"),
    "train.iterations_to_skip": (_is_on, f"leaves steps out, and {_NOT_PRINTED}"),
    "train.train_samples": (_is_on, "is a second length; cmd_args.max_steps is the first"),
    "train.skip_train": (_is_on, "trains no step"),
    "validation.skip_train": (_is_on, "trains no step"),
}
_RESIZING = ("train.rampup_batch_size", "train.step_batch_size_schedule")
# The embedded loop writes its records anyway
_HIDING_UPSTREAM: Mapping[str, tuple[_IsHiding, str]] = {
    "logger.skip_train_metrics_log": (_is_on, f"prints no line for any step, and {_NOT_PRINTED}"),
    # which the embedded loop's configuration refuses as the argument's own place
    "train.train_iters": (
        lambda value, num_steps: num_steps is not None and value != num_steps,
        "is another length than cmd_args.max_steps; set that",
    ),
}


def refuse_hidden_steps(extra: Mapping[str, str], num_steps: int | None, *, is_upstream: bool) -> None:
    """Raise BadInput for `extra_cmd_args` that keep steps out of the log, or vary the size of its steps.

    num_steps: None if the launcher decides.
    """
    table = {**_HIDING, **_HIDING_UPSTREAM} if is_upstream else _HIDING
    for key, text in extra.items():
        is_hiding, why = table.get(key.lstrip("+"), (None, ""))
        if is_hiding is not None and is_hiding(parse_value(text), num_steps):
            raise BadInput(f"extra_cmd_args: {key!r} = {text} {why}: such a run fails; remove it")
        if key.lstrip("+") in _RESIZING and _is_on(parse_value(text), num_steps):
            raise BadInput(
                f"extra_cmd_args: {key!r} = {text} varies the batch size, and rates are of cmd_args.gb; remove it"
            )
