"""Layers of hybrid models, written as a pattern: see docs/training.md."""

BLOCKS = "M*-EG"


def fit_pattern(pattern: str, layers: int, mtp: int) -> str:
    """Return a pattern of this many decoder layers, followed by this many blocks of multi-token prediction.

    A longer pattern repeats from its beginning. `|` between pipeline stages is kept if the number of layers is.
    """
    whole, *prediction = pattern.split("/")
    blocks = [block for block in whole if block in BLOCKS]
    if blocks and len(blocks) != layers:
        whole = "".join((blocks * (layers // len(blocks) + 1))[:layers])
    return "/".join([whole, *(prediction * mtp)[:mtp]])
