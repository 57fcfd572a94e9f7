"""Options shared by several commands, and runs by name: accepted in place of the path of a run's directory."""

import inspect
import math
import os
from collections.abc import Callable, Iterable
from functools import reduce
from pathlib import Path
from typing import Any

import click
from click.shell_completion import CompletionItem

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision, gpus
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.launch.script import REHEARSAL_LEVELS
from cloudai_mbridge.megatron_bridge.release import known_releases
from cloudai_mbridge.models.loading import HOOK_DIR
from cloudai_mbridge.pipeline import Request
from cloudai_mbridge.plan.read import LATEST, find_run, find_runs, refuse_distant
from cloudai_mbridge.recipes import recipe_names
from cloudai_mbridge.training.flops import Formula

RUN_TEXT = f"RUN is the directory of a run, the beginning of its name (see `mbridge runs`), or `{LATEST}`."


def as_run(value: str) -> Path:
    """Return the path that a user gives, or that of the run whose name it is: a type for click's parameters."""
    if not value or os.sep in value:
        return Path(value)
    try:
        os.lstat(value)
        return Path(value)
    except OSError as error:
        if not isinstance(error, FileNotFoundError):  # of a path that cannot exist, the command says why
            return Path(value)
    root = find_run(value)
    click.echo(f"note: {visible(value)} is {visible(str(root))}", err=True)
    return root


def as_near_run(value: str) -> Path:
    """Return the path as `as_run`. BadInput: `latest` is a run of another place, which may be another project's."""
    root = as_run(value)
    if value == LATEST and root != Path(value):
        refuse_distant(root)
    return root


def run_argument(name: str, metavar: str = "RUN", **options: Any) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Add an argument that is a run, and to the command's help what that may be."""

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        text = inspect.getdoc(command) or ""
        command.__doc__ = text if RUN_TEXT in text else f"{text}\n\n{RUN_TEXT}"
        kind = {"type": as_run, "shell_complete": complete_run, **options}
        return click.argument(name, metavar=metavar, **kind)(command)

    return decorate


def complete_run(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the name of a run; what has a slash is a path, which the shell completes."""
    names = [LATEST, *(run.name for run in find_runs())]
    found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
    return found or [CompletionItem(incomplete, type="dir")]


_Complete = Callable[[click.Context, click.Parameter, str], list[CompletionItem]]


def completing(names: Callable[[], Iterable[str]]) -> _Complete:
    """Return the completion of a parameter by names, in small letters or capitals; they are read only for it."""

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
        wanted = incomplete.lower()
        return [CompletionItem(name) for name in names() if name.lower().startswith(wanted)]

    return complete


def _releases() -> list[str]:
    return [each["version"] for each in known_releases()] + [NO_PRESET]


NO_PRESET = "none"  # of --release
COMPLETE_RECIPE, COMPLETE_GPU = completing(recipe_names), completing(gpus)
COMPLETE_PRECISION, COMPLETE_RELEASE = completing(lambda: map(str, Precision)), completing(_releases)


# Links are resolved. A circle of links stays, and is not the directory of a run
_RESOLVED: dict[str, Any] = {"callback": lambda ctx, param, value: Path(os.path.realpath(value))}
RUN_ROOT = run_argument("root", **_RESOLVED)
NEAR_RUN_ROOT = run_argument("root", type=as_near_run, **_RESOLVED)  # for a command that ends jobs


PATH = click.Path(path_type=Path)
SYSTEM_VARIABLE = "CLOUDAI_SYSTEM_CONFIG"


class Number(click.FloatRange):
    """A finite number in a range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):  # nan passes every range check
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document (docs/scripting.md).")

ALLOW_UNKNOWN = click.option(
    "--allow-unknown-args",
    "on_unknown_arg",
    flag_value=_warn,
    default=None,
    type=click.UNPROCESSED,
    help="Leave unknown keys of cmd_args out with a warning.",
)

REJECTED = click.option(
    "--rejected", "all_rejected", is_flag=True, help="Print every rejected point; default: many of them by rule."
)

DETACH = click.option(
    "--detach", is_flag=True, help="Submit, leave the jobs to Slurm, and exit; `mbridge resume` takes them back."
)


def rehearse_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --rehearse, and --on-slurm, which is nothing without it."""

    def check(context: click.Context, option: click.Parameter, given: bool) -> bool:
        if given and not context.params.get("rehearse"):
            raise BadInput("--on-slurm: is of --rehearse; add it")
        return given

    rehearse = click.option(
        "--rehearse",
        type=click.Choice(REHEARSAL_LEVELS),
        is_flag=False,
        flag_value=REHEARSAL_LEVELS[0],
        is_eager=True,
        help="Rehearse first; refused points are rejected. =step: each rank takes a step, too (docs/rehearse.md).",
    )
    help_text = "With --rehearse: on one core of a node of the cluster, in the image of the job."
    return rehearse(click.option("--on-slurm", is_flag=True, callback=check, help=help_text)(command))


RULES = click.option(
    "--rules",
    type=click.Choice([str(one) for one in RuleSet]),
    default=str(RuleSet.RELEASE),
    show_default=True,
    callback=lambda ctx, option, value: RuleSet(value),
    help="Rules for upstream points: those of the pinned release, or CloudAI's.",
)


def _formula(context: click.Context, option: click.Parameter, name: str) -> Formula:
    try:
        return Formula.named(name)
    except ValueError as error:
        raise BadInput(f"--flops-formula: {error}") from None


FLOPS_FORMULA = click.option(
    "--flops-formula",
    "formula",
    default="new",
    show_default=True,
    callback=_formula,
    shell_complete=completing(lambda: ("old", "new")),
    help="old or new.",
)


ONLY = click.option(
    "--only",
    multiple=True,
    metavar="EXPR",
    help="Points to run: names, wildcards, or coordinates such as tp=2,pp=[14]; give it again for others.",
)
FAILED_OF = click.option(
    "--failed-of",
    type=as_run,
    metavar="RUN",
    shell_complete=complete_run,
    help="Only points that failed or did not run in RUN.",
)


def _without_effect(*names: str, note: str) -> Callable[..., Any]:
    """Return a flag of CloudAI without effect here, which prints a note."""

    def say(context: click.Context, parameter: click.Parameter, given: bool) -> None:
        if given:
            click.echo(f"note: {names[0]}: {note}", err=True)

    help_text = "Accepted as in CloudAI; prints why it has no effect."
    return click.option(*names, is_flag=True, expose_value=False, callback=say, help=help_text)


_OF_ALL: tuple[Callable[..., Any], ...] = (
    ALLOW_UNKNOWN,
    RULES,
    click.option("--test-scenario", type=PATH, required=True, help="Scenario TOML."),
    click.option("--tests-dir", type=PATH, help="Directory of the test TOMLs."),
    click.option(
        "--system-config",
        type=PATH,
        required=True,
        envvar=SYSTEM_VARIABLE,
        help=f"System TOML; ${SYSTEM_VARIABLE} names one, too.",
    ),
)
_OF_A_RUN: tuple[Callable[..., Any], ...] = (
    FAILED_OF,
    ONLY,
    _without_effect(
        "--single-sbatch", note="every run keeps an allocation of its own; runs that need the same share one job array"
    ),
    _without_effect(
        "--enable-cache-without-check",
        "--cache-without-check",
        note="has no effect; mbridge only looks whether the launcher's files are there",
    ),
    click.option("--skip-hooks", is_flag=True, help="Run without the scenario's pre_test and post_test."),
    click.option("--hook-dir", type=PATH, help=f"Directory of the hooks' TOMLs; default: {HOOK_DIR}."),
    click.option("--output-dir", type=PATH, help="Where results go; default: the system's output_path."),
)


def request_of(options: dict[str, Any]) -> Request:
    """Return the request that the options of `scenario_options` define."""
    return Request(**{**options, "hook_dir": options["hook_dir"] or HOOK_DIR})


def scenario_options(*, output_dir: bool) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add CloudAI's options for a scenario on a system; with `output_dir`, also the options of dry-run and run."""
    options = (*_OF_A_RUN, *_OF_ALL) if output_dir else _OF_ALL
    return lambda command: reduce(lambda made, option: option(made), options, command)
