"""Find the preset of a point among those of a release: from the installed clone, else from the shipped data."""

import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path

from cloudai_mbridge.megatron_bridge.presets.rows import (
    PresetRequest,
    PresetRow,
    PresetSource,
    chosen_variant,
    from_text,
)
from cloudai_mbridge.megatron_bridge.release import Release, known_releases

# 0.6 and later: labels of earlier releases that name the preset without a variant; v3 only before 0.6.
_OLD_LABELS = ("v1", "v2")


@dataclass(frozen=True)
class PresetCatalog:
    """The presets of a release."""

    source: PresetSource

    def find(self, request: PresetRequest, num_gpus: int) -> PresetRow | None:
        """Return the row that the launcher takes."""
        rows = self._of(request)
        if self.source.is_flat:
            exact = (row for row in rows if row.num_gpus == num_gpus)
            default = (row for row in rows if row.is_default and self.source.scales)
            return next(exact, None) or next(default, None)
        return rows[0] if rows else None

    def missing(self, request: PresetRequest, num_gpus: int) -> str:
        """Explain why no preset matches."""
        if sizes := self._of(request):
            known = ", ".join(str(row.num_gpus) for row in sizes)
            return f"no preset of {request.recipe} for num_gpus = {num_gpus}; presets exist for num_gpus {known}"
        rows = [row for row in self.source.rows if row.recipe == request.recipe]
        if not rows:
            return f"no preset for the recipe {request.recipe!r}"
        names = ("task", "gpu", "compute_dtype")
        for name in names if self.source.is_flat else ("family", *names):
            wanted = getattr(request, name)
            if not (kept := [row for row in rows if getattr(row, name) == wanted]):
                known = ", ".join(sorted({getattr(row, name) for row in rows}))
                return f"no preset of {request.recipe} with {name} = {wanted!r}; presets exist for {name} {known}"
            rows = kept
        variants = ", ".join(sorted({row.variant or "(none)" for row in rows}))
        wanted = f"no preset of {request.recipe} with config_variant = {request.variant!r}"
        return f"{wanted}; presets exist for config_variant {variants}"

    def _of(self, request: PresetRequest) -> list[PresetRow]:
        wanted = ("" if self.source.is_flat else request.family, *request.key[:-1])
        rows = [row for row in self.source.rows if (row.family, *row.key[:-1]) == wanted]
        if self.source.is_flat:
            labels = _OLD_LABELS if self.source.scales else (*_OLD_LABELS, "v3")
            variant: str | None = "" if request.variant in labels else request.variant
        else:
            variant = chosen_variant({row.variant for row in rows}, request.variant or self.source.default_variant)
        return [row for row in rows if row.variant == variant]


def catalog(release: Release, recipe: str = "") -> PresetCatalog | None:
    """Return the presets of a release, of one recipe or of all, or None where they are not known."""
    installed = _installed(release.clone, recipe) if release.clone else None
    return installed or _shipped(release.version)


@lru_cache(maxsize=256)
def _installed(clone: Path, recipe: str) -> PresetCatalog | None:
    from cloudai_mbridge.megatron_bridge.presets.reader import read_source  # only where there is a clone to read

    try:
        source = read_source(clone, re.escape(recipe)) if recipe else read_source(clone)
    except OSError:  # such as a directory that may not be read
        return None
    return None if source is None else PresetCatalog(source)


@lru_cache(maxsize=32)
def _shipped(version: str) -> PresetCatalog | None:
    known = next((one for one in known_releases() if one["version"] == version), None)
    if known is None:
        return None
    name = f"{known.get('presets', version)}.csv"
    file = files("cloudai_mbridge.megatron_bridge") / "data" / "presets" / name
    return PresetCatalog(from_text(file.read_text(encoding="utf-8")))
