"""Layers of hybrid models, written as a pattern: see docs/training.md."""

BLOCKS = "M*-EG"


def fit_pattern(pattern: str, layers: int, mtp: int) -> str:
    """Return a pattern of so many decoder layers, and of so many blocks of multi-token prediction behind them.

    It goes on from its beginning. `|` between pipeline stages is kept where the number of layers is.
    """
    whole, *prediction = pattern.split("/")
    blocks = [block for block in whole if block in BLOCKS]
    if blocks and len(blocks) != layers:
        whole = "".join((blocks * (layers // len(blocks) + 1))[:layers])
    return "/".join([whole, *(prediction * mtp)[:mtp]])
