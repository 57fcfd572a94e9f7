"""Find the preset of a point among a release's presets, which mbridge ships."""

from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from cloudai_mbridge.megatron_bridge.presets.rows import (
    PresetRequest,
    PresetRow,
    PresetSource,
    chosen_variant,
    from_text,
)
from cloudai_mbridge.megatron_bridge.release import Release, known_releases

# 0.6 and later: labels of earlier releases that name the preset without a variant
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
            default = (row for row in rows if row.is_default)
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
            variant: str | None = "" if request.variant in _OLD_LABELS else request.variant
        else:
            variant = chosen_variant({row.variant for row in rows}, request.variant or self.source.default_variant)
        return [row for row in rows if row.variant == variant]


@lru_cache(maxsize=32)
def catalog(release: Release) -> PresetCatalog | None:
    """Return the presets of a release, or None if unknown."""
    known = next((one for one in known_releases() if one["version"] == release.version), None)
    if known is None or not release.is_known:
        return None
    name = f"{known.get('presets', release.version)}.csv"
    file = files("cloudai_mbridge.megatron_bridge") / "data" / "presets" / name
    return PresetCatalog(from_text(file.read_text(encoding="utf-8")))
