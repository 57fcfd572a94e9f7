"""Rule E14: the software that trains has what a point's settings need, where it can be asked before the job does."""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cloudai_mbridge.constraints.rule import Answer, NotEvaluated, Point
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.release import version_key
from cloudai_mbridge.models.cmd_args import QUANTIZED, ResolvedCmdArgs
from cloudai_mbridge.models.system import System
from cloudai_mbridge.recipes.apply import lacking
from cloudai_mbridge.recipes.load import Sections
from cloudai_mbridge.recipes.presets import fields_since, sections_of
from cloudai_mbridge.training.compat.stack import ENGINE, Stack, stack_of
from cloudai_mbridge.training.compat.versions import RELEASES, TRANSFORMER_ENGINE
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema import check_section_values, packages
from cloudai_mbridge.training.schema.not_done import needed

_PATH, _CORE = "PYTHONPATH", "Megatron-Core "
_ALL_TO_ALL = ("none", "")
# Arguments that the table of packages reads, and their places
_READ = {
    "moe_flex_dispatcher_backend": ("model", "moe_flex_dispatcher_backend"),
    "num_moe_experts": ("model", "num_moe_experts"),
    "optimizer_type": ("optimizer", "optimizer"),
}
_EMERGING_SINCE = "0.18"


def e14_the_stack_has_what_the_point_needs(point: Point) -> Answer:
    """The Megatron-Core that trains has the settings of recipe and preset, and the packages that they need are there.

    The job's interpreter is asked: the system's python_executable, else the one that runs mbridge.

    Pass: a mixture of experts with hybridep on Megatron-Core 0.18 with deep_ep. Fail: the same on 0.16, or without it.
    Not evaluated: the software of a container, or of an interpreter that this machine cannot ask.
    Source: `cloudai_mbridge.training.startup.unsupported`, `cloudai_mbridge.training.schema`.
    """
    if not point.is_embedded:
        return None
    if point.recipe is None:
        return NotEvaluated("E14", "recipe")
    wanted: dict[str, None] = {}
    if not list(_missing(point, None, wanted)):
        return None
    if point.system is None:
        return NotEvaluated("E14", "system")
    stack = stack_at(point.system, point.args, point.variable)
    if not isinstance(stack, Stack) or stack.release is None:
        who = stack if isinstance(stack, str) else f"{stack.python}, which has no supported Megatron-Core,"
        return NotEvaluated("E14", f"knowledge that {who} has {' and '.join(_strictest(wanted)) or ENGINE}")
    if (missing := next(_missing(point, stack), None)) is None:
        return None
    remedy = (
        f"install it for {stack.python}, set the system's python_executable or container_image to software that has it,"
        " or change the setting (use_recipes = true takes no preset)"
    )
    return point.violation("E14", "model_recipe_name", missing, remedy, "model_recipe_name", core=stack.core)


def stack_at(system: System, args: ResolvedCmdArgs, variable: Callable[[str], Any]) -> Stack | str:
    """Return the software that trains a point of the embedded loop, or why it is unknown. variable: as in `Point`."""
    if args.container_image:
        return "the container"
    path, python = variable(_PATH), system.python_executable
    stack = stack_of(python, {} if path is None else {_PATH: str(path)})
    return f"{python}, which this machine cannot ask," if stack is None else stack


def _strictest(wanted: Mapping[str, None]) -> list[str]:
    """Return the needed packages, and the newest of the needed releases of Megatron-Core."""
    releases = sorted(
        (each for each in wanted if each.startswith(_CORE)), key=lambda each: version_key(each.split()[1])
    )
    return [*releases[-1:], *(each for each in wanted if not each.startswith(_CORE))]


def refuse_unknown_settings(data: Mapping[str, Any], stack: Stack | str) -> None:
    """Raise BadInput for settings of `extra_cmd_args` that the job would refuse: of another release, or of a package.

    data: a training configuration that passed the check for any release.
    """
    if not isinstance(stack, Stack) or stack.release is None:
        return

    def get(section: str, name: str, default: Any) -> Any:
        values = data.get(section)
        return values.get(name, default) if isinstance(values, Mapping) else default

    try:
        check_section_values(copy.deepcopy(dict(data)), release=stack.release)
    except ConfigError as error:
        raise BadInput(f"training config: {error} ({stack.python} has {stack.core})") from None
    pattern = get("model", "hybrid_layer_pattern", "")
    for message in packages.for_all(get, stack.modules.__contains__, pattern if isinstance(pattern, str) else ""):
        raise BadInput(f"training config: {message} ({stack.python})")


def _missing(point: Point, stack: Stack | None, wanted: dict[str, None] | None = None) -> Iterator[str]:
    """Yield the needs of a point's settings that the stack lacks.

    stack: None: the oldest release, without a package. wanted: takes releases and packages that are needed.
    """
    system, recipe = point.system, point.recipe
    assert recipe is not None
    release, wanted = (stack.release if stack else None) or RELEASES[0], {} if wanted is None else wanted
    python, version = (stack.python, stack.core) if stack else ("the job", release)
    # On this machine a preset's settings fall back; a job has them as they are
    is_here = system is not None and system.is_this_environment
    sections = sections_of(recipe, point.args, release if is_here else None, lacking(system))
    for key, since in fields_since(sections, release):
        wanted[f"{_CORE}{since}"] = None
        yield f"{key} needs Megatron-Core {since}, and {python} has {version}"
    get, has = _reader(sections, point), _noting(stack, wanted)
    optimizer, pattern = get("optimizer", "optimizer", "adam"), get("model", "hybrid_layer_pattern", "")
    if optimizer in packages.OF_EMERGING and version_key(release) < version_key(_EMERGING_SINCE):
        wanted[f"{_CORE}{_EMERGING_SINCE} or newer"] = None
        yield f"optimizer.optimizer = {optimizer!r} needs Megatron-Core {_EMERGING_SINCE}, and {python} has {version}"
    yield from packages.for_all(get, has, pattern if isinstance(pattern, str) else "")
    if is_here or (stack is not None and ENGINE in stack.modules):
        return  # E02 reports it of this machine
    if point.args.compute_dtype in QUANTIZED:
        yield f"compute_dtype = {point.args.compute_dtype!r} needs Transformer Engine, which {python} lacks"
    yield from needed(get, {TRANSFORMER_ENGINE})


def _noting(stack: Stack | None, wanted: dict[str, None]) -> Callable[[str], bool]:
    """Return whether a stack has a module; what it lacks is noted."""

    def has(module: str) -> bool:
        if stack is not None and module in stack.modules:
            return True
        wanted[module] = None
        return False

    return has


def _reader(sections: Sections, point: Point) -> packages.Get:
    """Return a function that reads settings: of the sections, with the arguments that decide about packages."""
    for name, (section, field) in _READ.items():
        if (value := getattr(point.args, name)) is not None:
            sections.setdefault(section, {})[field] = value
    model = sections.setdefault("model", {})
    if (backend := model.get("moe_flex_dispatcher_backend")) is not None:
        model["moe_token_dispatcher_type"] = "alltoall" if str(backend).lower() in _ALL_TO_ALL else "flex"

    def get(section: str, name: str, default: Any) -> Any:
        values: Mapping[str, Any] = sections.get(section, {})
        return values.get(name, default)

    return get
