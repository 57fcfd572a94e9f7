"""Human-readable estimate: headline, memory of the stages, terms of the step time."""

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Column, Table
from rich.text import Text

from cloudai_mbridge.estimate.memory import StageMemory
from cloudai_mbridge.estimate.memory.other import GIB
from cloudai_mbridge.estimate.point import PointEstimate

MOST_COLUMNS = 8
MIB = 2**20


def render_estimate(found: PointEstimate) -> RenderableType:
    """Return the tables; missing values are listed with their reasons."""
    parts: list[RenderableType] = [_headline(found)]
    if found.stages:
        parts.append(_stages(found.stages))
    if found.reference:
        parts.append(Text(found.reference.line()))
    if found.step_time:
        parts.append(_step_time(found.step_time.terms, found.step_time.step_time_s))
    for reason in dict.fromkeys(found.missing.values()):
        names = [name for name, why in found.missing.items() if why == reason]
        parts.append(Text(f"not known: {', '.join(names)} ({reason})", style="dim"))
    if found.filled_in:
        parts.append(Text(f"filled in by {found.filled_in}"))
    if found.not_considered:
        parts.append(Text(f"set, but not considered: {', '.join(found.not_considered)}", style="yellow"))
    return Group(*parts)


def _headline(found: PointEstimate) -> Table:
    layout = found.layout
    where = f"{layout.num_gpus} x {found.gpu or 'unknown GPU'}, {layout.precision}"
    table = Table("", "", title=Text(f"{found.recipe} on {where}"), title_justify="left", show_header=False)
    for name, value in _lines(found):
        table.add_row(name, Text(value))
    return table


def _lines(found: PointEstimate) -> Iterator[tuple[str, str]]:
    layout = found.layout
    sizes = f"tp{layout.tp} pp{layout.pp} cp{layout.cp} vp{layout.vp} ep{layout.ep} etp{layout.expert_tp} dp{layout.dp}"
    yield "layout", f"{sizes}, {layout.num_microbatches} micro-batches of {layout.mbs} x {layout.seq_length} tokens"
    if found.parameters:
        yield "parameters", f"{_count(found.parameters.total)}, active {_count(found.parameters.active)}"
    yield "FLOPs per token", f"{found.flops_per_token:.6g} ({found.formula})"
    if found.peak_memory_gib is not None:
        share = "" if found.memory_share is None else f", states and activations {found.memory_share:.0%} of it"
        given = "" if found.gpu_memory_gib is None else f" of {found.gpu_memory_gib:.0f}"
        worst = "" if found.worst_stage is None else f" on stage {found.worst_stage.stage}"
        size, unit = (found.peak_memory_gib, "GiB") if given else _in_unit(found.peak_memory_gib * GIB)
        fits = ": does not fit" if found.fits is False else ""
        yield "memory", f"{size:.1f}{given} {unit}{worst}{fits}{share} ({found.estimator})"
    if found.fits is False:
        yield "if it did fit", ""
    if found.step_time_s is not None:
        yield "step time", f"{found.step_time_s:.4g} s ({found.held_out_error})"
        yield "tokens/s/GPU", f"{found.tokens_per_s_per_gpu:.0f}"
        yield "TFLOP/s/GPU", f"{found.tflops_per_gpu:.0f}" + ("" if found.mfu is None else f", MFU {found.mfu:.1%}")
    if found.gpu_hours is not None:
        cost = "" if found.cost is None else f", {found.cost:.2f} {found.currency}"
        yield f"{found.num_steps} steps", f"{found.gpu_hours:.4g} GPU-hours{cost}"
    for row in found.published:
        rates = f"{row.tokens_per_s_per_gpu:.0f} tokens/s/GPU, {row.tflops_per_gpu:.0f} TFLOP/s/GPU ({row.formula})"
        yield f"published, {row.container}", f"{row.step_time_s:.4g} s, {rates}"


def _stages(stages: Sequence[StageMemory]) -> Table:
    columns = _columns(stages)
    unit = _in_unit(max(stage.total for stage in stages))[1]
    size = {"GiB": GIB, "MiB": MIB}[unit]
    title = Text(f"memory per pipeline stage, {unit} (* the fullest)")
    shown = (Column(Text(name), justify="right") for name, _ in columns)
    table = Table("term", *shown, title=title, title_justify="left")
    for term in stages[0].terms:
        if any(stage.terms[term] for _, stage in columns):
            table.add_row(term, *(f"{stage.terms[term] / size:.2f}" for _, stage in columns))
    table.add_section()
    table.add_row("total", *(f"{stage.total / size:.2f}" for _, stage in columns))
    return table


def _in_unit(size: float) -> tuple[float, str]:
    """Return bytes as a readable number, and its unit."""
    return (size / GIB, "GiB") if size >= GIB else (size / MIB, "MiB")


def _columns(stages: Sequence[StageMemory]) -> list[tuple[str, StageMemory]]:
    """Merge neighboring equal stages into columns; of too many columns, keep the first, the last and the fullest."""
    columns: list[tuple[int, StageMemory]] = []
    for stage in stages:
        if not columns or columns[-1][1].terms != stage.terms:
            columns.append((stage.stage, stage))
    ends = [start for start, _ in columns[1:]] + [len(stages)]
    worst = next(stage.stage for stage in stages if stage.is_worst)
    named = [
        (f"{start if end - start == 1 else f'{start}-{end - 1}'}{'*' if start <= worst < end else ''}", stage)
        for (start, stage), end in zip(columns, ends, strict=True)
    ]
    if len(named) <= MOST_COLUMNS:
        return named
    fullest = sorted(range(1, len(named) - 1), key=lambda i: -named[i][1].total)[: MOST_COLUMNS - 2]
    return [named[i] for i in (0, *sorted(fullest), len(named) - 1)]


def _step_time(terms: Mapping[str, float], total: float) -> Table:
    table = Table("term", "s", "share", title=Text("step time"), title_justify="left")
    for name, seconds in terms.items():
        if seconds:
            table.add_row(name, f"{seconds:.4g}", f"{seconds / total:.1%}")
    return table


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**8 else f"{parameters / 1e6:.3f} M"
