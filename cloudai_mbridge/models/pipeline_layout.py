"""The decoder layers of every pipeline stage, by an explicit layout such as `Et*4|(t*4|)*14tmL` or by numbers.

Stages are separated by `|`; E is the embedding, t a decoder layer, m a multi-token-prediction layer, L the loss.
`x*3` repeats a symbol, `(ab|)*3` a group; commas are cosmetic. The notation is Megatron-Core's
(megatron.core.transformer.pipeline_parallel_layer_layout).
"""

import re
from functools import lru_cache

from cloudai_mbridge.errors import counted

_REPEATED_GROUP = re.compile(r"\(([^)]+)\)\*(\d+)")
_REPEATED_SYMBOL = re.compile(r"(.)\*(\d+)")
_MOST_SYMBOLS = 100_000
_SYMBOLS = frozenset("EtmL")


@lru_cache(maxsize=256)
def parse_layout(text: str) -> tuple[str, ...]:
    """Return the symbols of every stage, in pipeline order (all ranks of the first virtual stage first).

    ValueError: a symbol is unknown, or there are more than 100,000.
    """
    unrolled = text.replace(",", "")
    for pattern in (_REPEATED_GROUP, _REPEATED_SYMBOL):
        unrolled = _unroll(pattern, unrolled)
    stages = tuple(unrolled.split("|"))
    for stage in stages:
        if unknown := set(stage) - _SYMBOLS:
            raise ValueError(f"unknown symbol {min(unknown)!r}")
    return stages


def _unroll(pattern: re.Pattern[str], text: str) -> str:
    """Expand repeated parts."""
    pieces, end, length = [], 0, len(text)
    for match in pattern.finditer(text):
        times = int(match[2]) if len(match[2]) < len(str(_MOST_SYMBOLS)) else _MOST_SYMBOLS
        length += len(match[1]) * times
        if length > _MOST_SYMBOLS:
            raise ValueError(f"it has more than {_MOST_SYMBOLS} symbols")
        pieces += [text[end : match.start()], match[1] * times]
        end = match.end()
    return "".join((*pieces, text[end:]))


def num_stages(text: str) -> int:
    """Return the number of stages of a layout, or 0 if it cannot be read."""
    try:
        return len(parse_layout(text))
    except ValueError:
        return 0


def layout_fault(text: str, pp: int, vp: int | None, num_layers: int, mtp_num_layers: int) -> str | None:
    """Return why a layout is invalid for this pipeline and model, or None."""
    try:
        stages = parse_layout(text)
    except ValueError as error:
        return str(error)
    if len(stages) % pp:
        return f"{len(stages)} stages are not divisible by pp = {pp}"
    if vp is not None and len(stages) != pp * vp:
        return f"{len(stages)} stages are not pp*vp = {pp * vp}"
    return _order_fault("".join(stages), num_layers, mtp_num_layers) or _mtp_fault(stages, pp, mtp_num_layers)


def _order_fault(flat: str, num_layers: int, mtp_num_layers: int) -> str | None:
    if not flat.startswith("E") or flat.count("E") != 1:
        return "it must begin with its only E"
    if not flat.endswith("L") or flat.count("L") != 1:
        return "it must end with its only L"
    if flat.count("t") != num_layers:
        return f"it has {flat.count('t')} decoder layers for num_layers = {num_layers}"
    if flat.count("m") != mtp_num_layers:
        return f"it has {flat.count('m')} multi-token-prediction layers for {mtp_num_layers}"
    return "decoder layers stand behind m" if "m" in flat and "t" in flat[flat.index("m") :] else None


def _mtp_fault(stages: tuple[str, ...], pp: int, mtp_num_layers: int) -> str | None:
    """Megatron keeps all m layers together, in the last virtual stage of a rank.

    They embed tokens again, with a copy of the first stage's weights. Behind E's stage on its own rank, that copy
    stays zero where the output has weights of its own, and else the ranks wait for each other: Megatron-Core's own
    check looks at the earlier stages of that rank only.
    """
    with_mtp = [i for i, stage in enumerate(stages) if "m" in stage]
    if with_mtp and with_mtp[0] < len(stages) - pp:
        return "m must stand in the last virtual stage of its rank"
    if any(stages[i].count("m") != mtp_num_layers for i in with_mtp):
        return "all m layers must stand in one stage"
    if with_mtp and with_mtp[0] and with_mtp[0] % pp == 0:
        return "m must not stand on the first pipeline rank behind its stage with E, whose embedding it would not share"
    return None


class SplitFault(ValueError):
    """Layers that cannot be split over the stages so. argument: the one at fault, pp or vp."""

    def __init__(self, argument: str, fact: str, remedy: str) -> None:
        super().__init__(f"{argument}: {fact}; {remedy}")
        self.argument, self.fact, self.remedy = argument, fact, remedy


_LAYOUT = "pipeline_model_parallel_layout"
_DIVIDE = f"use a pp that divides the layers, or an explicit {_LAYOUT}"


@lru_cache(maxsize=4096)
def split_layers(
    num_layers: int,
    pp: int,
    vp: int = 1,
    *,
    first: int | None = None,
    last: int | None = None,
    embedding: bool = False,
    loss: bool = False,
) -> tuple[int, ...]:
    """Return the decoder layers of every stage of a pipeline without a layout, virtual stage 0 of all ranks first.

    first, last: layers of the first and of the last rank. embedding, loss: whether each counts as a layer. SplitFault:
    Megatron-Core refuses the split, or would build another number of layers.
    """
    given = [count for count in (first, last) if count is not None]
    if given and (embedding or loss):
        fact = "a first or last stage of its own size excludes counting the embedding or the loss as a layer"
        raise SplitFault("pp", fact, "set either num_layers_in_*_pipeline_stage or account_for_*_in_pipeline_split")
    if len(given) > pp or any(count < 1 for count in given):
        fact = f"a first and last stage of {' and '.join(map(str, given))} layers do not make a pipeline of {pp}"
        raise SplitFault("pp", fact, "use at least 1 layer each, and pp of 2 or more")
    stages, layers = pp - len(given), num_layers + embedding + loss - sum(given)
    if (layers > 0) != (stages > 0) or layers < 0:
        fact = f"stages of their own size take {sum(given)} of {counted(num_layers, 'layer')}"
        fact += f", and {counted(stages, 'other stage')} cannot share the rest"
        raise SplitFault("pp", fact, f"leave a layer for every stage, or use an explicit {_LAYOUT}")
    if not stages and pp > 1 and vp > 1:  # Megatron-Core divides by the stages between
        remedy = "set vp to 1, or leave the size of one of them out"
        raise SplitFault("vp", "virtual stages need a stage beside a first and a last of their own size", remedy)
    if stages and layers % stages:
        what = f"pp = {pp}" if not given else f"the {stages} stages beside those of their own size"
        included = " and ".join(name for name, is_in in (("embedding", embedding), ("loss", loss)) if is_in)
        fact = f"{layers} layers{f', {included} included,' if included else ''} are not divisible by {what}"
        raise SplitFault("pp", fact, _DIVIDE)
    ranks = [layers // stages if stages else 0] * pp
    if first is not None:
        ranks[0] = first
    if last is not None:
        ranks[-1] = last
    for places in ranks if pp > 1 else ():  # without a pipeline, Megatron-Core ignores virtual stages
        if vp < 1 or places % vp:
            allowed = [n for n in range(1, places + 1) if all(each % n == 0 for each in ranks)]
            fact = f"{vp} virtual stages do not divide the {places} layers of a stage"
            raise SplitFault("vp", fact, f"use one of {', '.join(map(str, allowed))}")
    counts = [places // vp for places in ranks] * vp if pp > 1 else ranks
    counts[0] -= embedding
    counts[-1] -= loss
    return tuple(counts)


def layers_of_layout(text: str) -> tuple[int, ...]:
    """Return the decoder layers of every stage of a layout. ValueError: it cannot be read."""
    return tuple(stage.count("t") for stage in parse_layout(text))
