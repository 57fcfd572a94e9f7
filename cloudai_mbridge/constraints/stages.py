"""The decoder layers of every stage of a point's pipeline: by a layout, a hybrid's pattern, or numbers."""

from typing import Any

from cloudai_mbridge.constraints.rule import Point, UnknownOperandError
from cloudai_mbridge.models.pipeline_layout import SplitFault, layers_of_layout, layout_fault, split_layers

_LAYOUT, _PATTERN = "pipeline_model_parallel_layout", "hybrid_layer_pattern"
_FIRST, _LAST = "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"
_EMBEDDING, _LOSS = "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"
_BLOCKS = "M*-EGD+"
_SINCE = "0.17"  # patterns that say where a stage ends


def layers_of_stages(point: Point) -> tuple[int, ...]:
    """Return the layers of every stage, virtual stage 0 of all ranks first, of a point with positive pp.

    SplitFault: the layers cannot be split so. UnknownOperandError: a number is unknown.
    """
    layers = point.num_layers
    if layers is None:
        raise UnknownOperandError("num_layers")
    pattern, text = point.layer_pattern, point.pipeline_layout
    if pattern is not None and (point.is_embedded or not text):
        return _of_pattern(point, pattern, layers)
    if text:
        return _of_layout(point, text, layers)
    return _of_numbers(point, layers, point.vp or 1)


def _of_numbers(point: Point, layers: int, vp: int) -> tuple[int, ...]:
    ends = {"first": point.size(_FIRST), "last": point.size(_LAST)}
    counted = {"embedding": point.is_on(_EMBEDDING), "loss": point.is_on(_LOSS)}
    return split_layers(layers, point.pp, vp, **ends, **counted)


def _of_layout(point: Point, text: str, layers: int) -> tuple[int, ...]:
    if others := uneven_by(point):
        fact, remedy = f"an explicit layout excludes {', '.join(others)}", "remove one of them"
        raise SplitFault(_LAYOUT, fact, remedy)
    predicted = text.count("m") if point.mtp_num_layers is None else point.mtp_num_layers
    if fault := layout_fault(text, point.pp, point.args.vp, layers, predicted):
        raise SplitFault(_LAYOUT, f"the layout {text!r} does not fit: {fault}", "fix the layout")
    return layers_of_layout(text)


def _of_pattern(point: Point, pattern: str, layers: int) -> tuple[int, ...]:
    """Return the split of a hybrid model, which the embedded loop trains without virtual stages."""
    stages = pattern.split("|")
    symbols = "".join(stages)
    if unknown := sorted(set(symbols) - {*_BLOCKS}):
        raise SplitFault("num_layers", f"{_PATTERN} has unknown layers {', '.join(unknown)}", f"use some of {_BLOCKS}")
    if len(symbols) != layers:
        fact = f"{_PATTERN} has {len(symbols)} layers for num_layers = {layers}"
        raise SplitFault("num_layers", fact, "make them equal")
    if point.pipeline_layout:
        raise SplitFault(_LAYOUT, f"the stages of a hybrid model stand in {_PATTERN}", f"remove {_LAYOUT}")
    if point.is_embedded and (point.vp or 1) > 1:
        raise SplitFault("vp", "hybrid models have no virtual stages in the embedded loop", "set vp to 1")
    if len(stages) == 1:
        split = _of_numbers(point, layers, 1)
        is_counted = point.is_on(_EMBEDDING) or point.is_on(_LOSS)  # checked by Megatron-Core, but not split so
        return split_layers(layers, point.pp) if is_counted else split
    if point.has_core(_SINCE) is False:
        fact = f"stages in {_PATTERN} need Megatron-Core {_SINCE}, and {point.core} trains"
        raise SplitFault("pp", fact, "remove | from it")
    if len(stages) != point.pp:
        raise SplitFault("pp", f"{_PATTERN} has {len(stages)} stages for pp = {point.pp}", "make them equal")
    if others := uneven_by(point):
        raise SplitFault("pp", f"stages in {_PATTERN} exclude {', '.join(others)}", "remove one of them")
    return tuple(map(len, stages))


def uneven_by(point: Point) -> dict[str, Any]:
    """Return the settings that make stages uneven, by their names; without those that are unset."""
    values = {name: point.size(name) for name in (_FIRST, _LAST)}
    switches = {name: point.is_on(name) or None for name in (_EMBEDDING, _LOSS)}
    return {name: value for name, value in (values | switches).items() if value is not None}
