"""`mbridge tune`: find the best layout of a model on a number of GPUs."""

import math
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import click
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole, new_console, print_json
from cloudai_mbridge.commands.options import COMPLETE_GPU, COMPLETE_PRECISION, COMPLETE_RECIPE, JSON, PATH, Number
from cloudai_mbridge.commands.plan import write_new
from cloudai_mbridge.commands.run.drive import drive, write
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.estimate.hardware import Price, price_of
from cloudai_mbridge.files.documents import fill, json_object, render_toml
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading import load_system, load_test_definition
from cloudai_mbridge.models.slurm_values import slurm_time
from cloudai_mbridge.tune.ranking import Candidate, PublishedConfiguration, Ranking, published_configurations, rank
from cloudai_mbridge.tune.space import ParallelSizes, SearchRequest, search_request, search_scenario

_SIZE = click.IntRange(1, 2**31)
MOST_GPUS = 2**20
# Candidate layouts of a search: the first by prediction. Later layouts are hardly ever better
MOST_MEASURED = 200
_MOST_RULES = 3


_RANKED_LAYOUT = json_object(
    "RankedLayout",
    "A layout. args: its test's cmd_args. step_time_90_s: the 90 % interval; None: endless. fits: how probably.",
    rank=int,
    args=Mapping[str, Any],
    step_time_s=float,
    step_time_90_s=tuple[float, float | None],
    peak_memory_gib=float | None,
    gpu_memory_gib=float | None,
    fits=float,
    tflops_per_gpu=float | None,
    gpu_hours=float | None,
    cost=float | None,
)
RANKED_LAYOUTS = json_object(
    "RankedLayouts",
    """The best layouts by prediction. layouts: of so many, where one that recomputes more is not another.

    Left out, although faster: too_large, illegal, not_predicted.
    """,
    version=Literal[1],
    layouts=int,
    too_large=int,
    illegal=int,
    not_predicted=int,
    rules=Mapping[str, int],
    best=[_RANKED_LAYOUT],
)


def _moved(context: click.Context, option: click.Parameter, file: str | None) -> None:
    if file is not None:
        raise BadInput(f"--replay is a benchmark now: python -m tests.benchmarks.replay {file}, in a clone of mbridge")


def _time_limit(context: click.Context, option: click.Parameter, text: str | None) -> str | None:
    try:
        return None if text is None else slurm_time(text)
    except ValueError as error:
        raise BadInput(f"--time-limit: {text!r} {error}") from None


@click.command()
@click.option("--recipe", shell_complete=COMPLETE_RECIPE, help="See `mbridge list`.")
@click.option("--gpu", shell_complete=COMPLETE_GPU, help="Such as gb200; default: the system's gpu_type.")
@click.option("--num-gpus", type=click.IntRange(1, MOST_GPUS), help="GPUs of the job.")
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    default=["bf16"],
    show_default=True,
    shell_complete=COMPLETE_PRECISION,
    help="May be repeated.",
)
@click.option("--gbs", type=_SIZE, help="Sequences per step; default: the preset's, or the recipe's.")
@click.option("--seq-length", type=_SIZE, help="Tokens per sequence; default: the recipe's.")
@click.option("--launcher", type=click.Choice([str(one) for one in Launcher]), default=str(Launcher.MEGATRON_BRIDGE))
@click.option("--max-steps", type=_SIZE, default=10, show_default=True, help="Steps, for the cost and the test.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="How many layouts to show.")
@click.option("--write", type=(click.IntRange(min=1), PATH), metavar="RANK FILE", help="Write one as a test TOML.")
@click.option("--system-config", type=PATH, help="System TOML with gpu_type, [prices] and calibration.")
@click.option("--max-trials", type=_SIZE, help="Measure: layouts to run on the system at most.")
@click.option("--max-gpu-hours", type=Number(min=0, min_open=True), help="Measure: GPU time to use at most.")
@click.option(
    "--time-limit", metavar="TIME", callback=_time_limit, help="Of a job that measures a layout, as in a scenario."
)
@click.option("--base", type=PATH, help="Test TOML with the remaining settings: containers, repositories, variables.")
@click.option("--output-dir", type=PATH, help="Where to write the results of measuring; default: the system's.")
@click.option(
    "--replay", expose_value=False, hidden=True, is_eager=True, callback=_moved, help="Moved to the benchmarks."
)
@JSON
def tune(
    top: int,
    write: tuple[int, Path] | None,
    system_config: Path | None,
    as_json: bool,
    recipe: str | None,
    num_gpus: int | None,
    max_trials: int | None,
    max_gpu_hours: float | None,
    time_limit: str | None,
    base: Path | None,
    output_dir: Path | None,
    **given: Any,
) -> int:
    """Rank the layouts of a model on a number of GPUs by their predicted step time, or measure the best (docs/tune.md).

    Nothing is run without --max-trials or --max-gpu-hours.
    """
    is_measured = max_trials is not None or max_gpu_hours is not None
    if not is_measured and (time_limit or output_dir or (base and not write)):
        raise BadInput(
            "--time-limit, --base and --output-dir are for measuring; give --max-trials or --max-gpu-hours"
            " (--base is for --write, too)"
        )
    if recipe is None or num_gpus is None:
        raise BadInput("give --recipe and --num-gpus")
    system = load_system(system_config) if system_config else None
    request = search_request(system, recipe=recipe, num_gpus=num_gpus, **given)
    found = rank(request, MOST_MEASURED if is_measured else max(top, write[0] if write else 0))
    if not found.best:
        raise BadInput(f"no feasible layout: {why_no_layout(request, found)}")
    if is_measured:
        if system_config is None:
            raise BadInput("--max-trials and --max-gpu-hours measure; give the --system-config to run on")
        if write or as_json:
            raise BadInput("--write and --json are for a ranking; leave them out, or --max-trials and --max-gpu-hours")
        name = f"tune_{request.recipe.name}_{num_gpus}x{request.gpu.name}"
        layouts = [candidate.cmd_args for candidate in found.best]
        scenario = search_scenario(layouts, _read_base(base), name, max_trials)
        scenario["Tests"][0] |= {"time_limit": time_limit} if time_limit else {}
        return _measure(scenario, max_gpu_hours, system_config, output_dir)
    price, why_not = price_of(system, request.gpu.name) if system else (None, "")
    if write:
        _write(found, *write, _read_base(base))
    if as_json:
        document = {
            "version": 1,
            "layouts": found.num_layouts,
            "too_large": found.num_too_large,
            "illegal": found.num_illegal,
            "not_predicted": found.num_unknown,
            "rules": dict(found.rules.most_common()),
            "best": [_ranked(number, each, found, price) for number, each in enumerate(found.best[:top], 1)],
        }
        print_json(document, RANKED_LAYOUTS)
    else:
        _show(new_console(), request, found, top, price, why_not)
    if write:
        click.echo(f"written: {write[1]}", err=as_json)
    return OK


def why_no_layout(request: SearchRequest, found: Ranking) -> str:
    """Return why no layout was ranked."""
    if not found.num_layouts:
        number = counted(request.num_gpus, "GPU")
        return f"no sizes divide {number} and a batch of {request.gbs}; use another --num-gpus or --gbs"
    if found.num_too_large and not found.num_illegal:
        return f"{_counts(found)}; use more GPUs"
    return "; ".join([_counts(found), *(found.reasons[rule] for rule, _ in found.rules.most_common(_MOST_RULES))])


def _read_base(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    data: dict[str, Any] = load_test_definition(path).model_dump(mode="json", exclude_unset=True)
    return data


def _measure(
    scenario: dict[str, Any], max_gpu_hours: float | None, system_config: Path, output_dir: Path | None
) -> int:
    limits = {"max_gpu_hours": max_gpu_hours} if max_gpu_hours is not None else {}
    with TemporaryDirectory() as directory:
        path = Path(directory, "scenario.toml")
        path.write_text(render_toml(scenario), encoding="utf-8")
        prepared = pipeline.plan(pipeline.Request(system_config, path, None, output_dir), limits)
    console = new_console()
    return drive(console, prepared, write(console, prepared))


def _show(
    console: SteadyConsole, request: SearchRequest, found: Ranking, top: int, price: Price | None, why_not: str
) -> None:
    where = f"{request.num_gpus} x {request.gpu.name}, batch {request.gbs} x {request.seq_length} tokens"
    console.print_line(f"{request.recipe.name} on {where}: {_counts(found)}")
    names = ("", "layout", "step time, s", "90 % interval", "memory, GiB", "fits", "TFLOP/s/GPU")
    table = Table(*(Column(name, justify="left" if name == "layout" else "right") for name in names))
    if price is not None:
        table.add_column(f"{price.currency} for {counted(request.max_steps, 'step')}", justify="right")
    for number, candidate in enumerate(found.best[:top], 1):
        table.add_row(*map(Text, _cells(number, candidate, found, price, request)))
    console.print(table)
    for precision in request.precisions:
        if graphs := request.graphs(precision):
            console.print_line(f"CUDA graphs as in the recipe, in {precision}: {', '.join(graphs.values())}")
    for published in published_configurations(request, found):
        console.print_line(_comparison(published, names_format=len(request.precisions) > 1))
    for name, error in found.errors.items():
        console.print_line(f"step times in {name}: {error}")
    if why_not:
        console.print_line(f"no cost: {why_not}")


def _cells(number: int, candidate: Candidate, found: Ranking, price: Price | None, request: SearchRequest) -> list[str]:
    headline = candidate.headline
    low, high = found.interval_s(candidate)
    interval = f"{low:.3g} - {high:.3g}" if math.isfinite(high) else "none"
    cells = [str(number), _layout(candidate, request), f"{candidate.step_time_s:.4g}", interval]
    cells += [f"{headline.peak_memory_gib:.0f} of {headline.gpu_memory_gib:.0f}", f"{candidate.fits:.0%}"]
    cells.append(f"{headline.tflops_per_gpu:.0f}")
    hours = headline.gpu_hours(request.max_steps)
    return cells if price is None or hours is None else [*cells, f"{price.per_gpu_hour * hours:.2f}"]


def _comparison(published: PublishedConfiguration, *, names_format: bool) -> str:
    """Compare a published configuration with the fastest layout, in one line."""
    args = published.args
    sizes = " ".join(f"{name}{getattr(args, name) or 1}" for name in ParallelSizes._fields if name != "et")
    sizes += " FSDP" * bool(args.use_megatron_fsdp)
    sizes += f" in {args.compute_dtype}" * names_format
    if published.measured_s is None:
        line = f"{published.source}: {sizes}; predicted {published.step_time_s:.4g} s"
    else:
        known = f"published for {published.source}: {sizes}, {published.measured_s:.4g} s"
        line = f"{known}; predicted {published.step_time_s:.4g} s"
    if published.rank is not None:
        return f"{line}: layout {published.rank}"
    return f"{line}; of that, layout 1 changes {', '.join(published.reasons)}"


def _layout(candidate: Candidate, request: SearchRequest) -> str:
    """Return a readable layout, without the settings that all layouts share or that are off."""
    words = [f"{name}{candidate.cmd_args[name]}" for name in ParallelSizes._fields if name in candidate.cmd_args]
    words += ["FSDP"] * candidate.options.use_megatron_fsdp
    words += [f"recompute {candidate.options.recompute}"] * bool(candidate.options.recompute)
    words += ["no CUDA graphs"] * candidate.options.without_graphs
    words += [candidate.options.precision] * (len(request.precisions) > 1)
    return " ".join(words)


def _counts(found: Ranking) -> str:
    rules = ", ".join(f"{rule} {count}" for rule, count in found.rules.most_common(_MOST_RULES))
    reasons = [f"{found.num_too_large} need too much memory", f"{found.num_illegal} break rules"]
    reasons[1] += f" ({rules})" if rules else ""
    reasons += [f"{found.num_unknown} cannot be predicted"] * bool(found.num_unknown)
    return f"{found.num_layouts} layouts; faster ones left out: {', '.join(reasons)}"


def _ranked(number: int, candidate: Candidate, found: Ranking, price: Price | None) -> dict[str, Any]:
    headline, args = candidate.headline, candidate.cmd_args
    hours = headline.gpu_hours(args["max_steps"])
    return fill(
        _RANKED_LAYOUT,
        headline,
        rank=number,
        args=args,
        step_time_s=candidate.step_time_s,
        step_time_90_s=found.interval_s(candidate),
        fits=candidate.fits,
        gpu_hours=hours,
        cost=price.per_gpu_hour * hours if price and hours is not None else None,
    )


def _write(found: Ranking, number: int, path: Path, base: Mapping[str, Any]) -> None:
    if number > len(found.best):
        raise BadInput(f"--write: there is no layout {number}; use 1 to {len(found.best)}")
    own = found.best[number - 1].as_definition()
    # the repositories that the base test pins take precedence over the layout's
    pins = {"git_repos": base["git_repos"]} if base.get("git_repos") else {}
    text = render_toml({**own, **base, **own, "cmd_args": {**base.get("cmd_args", {}), **own["cmd_args"]}, **pins})
    write_new("--write", path, text)
