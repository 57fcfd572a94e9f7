"""Read a baseline file. A gate compares with the values of its runs; a file that contradicts them is refused."""

from pathlib import Path

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline.model import Baseline
from cloudai_mbridge.gate.baseline.sums import find_mistake
from cloudai_mbridge.models.loading.load import validate
from cloudai_mbridge.models.loading.toml_source import read_toml

BASELINE_VERSION = 1


def load_baseline(path: Path) -> Baseline:
    """Read a baseline and check that it agrees with itself.

    Raises:
        BadInput: no such file, or wrong, or edited by hand.
    """
    source = read_toml(path)
    version = source.data.get("version")
    if version != BASELINE_VERSION or isinstance(version, bool):
        place = source.where(("version",))
        raise BadInput(f"{place}: {version!r} is unknown, {BASELINE_VERSION} is needed; use the mbridge that wrote it")
    baseline = validate(Baseline, source.data, source)
    for i, point in enumerate(baseline.points):
        if mistake := find_mistake(point):
            raise BadInput(f"{source.where(('points', i))}: {point.point!r}: {mistake}")
        if baseline.point(point.point) is not point:
            raise BadInput(f"{source.where(('points', i, 'point'))}: {point.point!r} appears twice; remove one")
    return baseline
