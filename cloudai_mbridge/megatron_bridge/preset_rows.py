"""The presets of one release, which mbridge ships as a data file.

A data file is CSV. Its first lines begin with `#` and contain the settings of the whole release. An empty cell is None,
`?` is unknown, and a list is in brackets.
"""

import csv
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any

from cloudai_mbridge.megatron_bridge.release import Release, known_releases

KEY = ("family", "recipe", "task", "gpu", "compute_dtype", "variant", "num_gpus", "is_default", "base_gb")
UNKNOWN = "?"
# Our argument (or, after it, a setting that its meaning depends on), and its field in the configuration.
FIELDS = {
    "tp": "model.tensor_model_parallel_size",
    "pp": "model.pipeline_model_parallel_size",
    "cp": "model.context_parallel_size",
    "vp": "model.virtual_pipeline_model_parallel_size",
    "ep": "model.expert_model_parallel_size",
    "et": "model.expert_tensor_parallel_size",
    "mb": "train.micro_batch_size",
    "gb": "train.global_batch_size",
    "seq_length": "model.seq_length",
    "use_megatron_fsdp": "ddp.use_megatron_fsdp",
    "nccl_ub": "ddp.nccl_ub",
    "cuda_graph_impl": "model.cuda_graph_impl",
    "cuda_graph_scope": "model.cuda_graph_scope",
    "moe_a2a_overlap": "comm_overlap.overlap_moe_expert_parallel_comm",
    "recompute_granularity": "model.recompute_granularity",
    "recompute_method": "model.recompute_method",
    "recompute_num_layers": "model.recompute_num_layers",
    "recompute_modules": "model.recompute_modules",
    "activation_offload_layers": "model.cpu_offloading_num_layers",
    "pipeline_model_parallel_layout": "model.pipeline_model_parallel_layout",
    "moe_flex_dispatcher_backend": "model.moe_flex_dispatcher_backend",
    "sequence_parallel": "model.sequence_parallel",
    "env_vars": "env_vars",
}


@dataclass(frozen=True)
class PresetRow:
    """One preset of a release, in the words of the launcher's options; without values, the one that a point asks for.

    family: empty where the launcher does not look at it. variant: "" for the one without a name.
    is_default: taken for job sizes that have no preset of their own.
    values: by our argument names, and a few more that their meaning depends on.
    base_gb: the batch that is scaled to other job sizes, if it is not the preset's own.
    """

    family: str
    recipe: str
    task: str
    gpu: str
    compute_dtype: str
    variant: str
    num_gpus: int
    is_default: bool = False
    values: Mapping[str, Any] = field(default_factory=dict, hash=False)
    base_gb: int | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Recipe, task, GPU, number format and variant."""
        return self.recipe, self.task, self.gpu, self.compute_dtype, self.variant


# 0.6 and later: labels of earlier releases that name the preset without a variant
_OLD_LABELS = ("v1", "v2")


@dataclass(frozen=True)
class PresetCatalog:
    """The presets of a release.

    is_flat: one function for each preset and job size, as from 0.6 on.
    default_variant: the launcher's if none is passed.
    layouts: by recipe the pipeline layouts that it derives from a user's own pp and vp, (pp, vp) -> layout.
    """

    is_flat: bool
    default_variant: str
    rows: tuple[PresetRow, ...]
    layouts: Mapping[str, Mapping[tuple[int, int], str | None]]

    def find(self, wanted: PresetRow) -> PresetRow | None:
        """Return the row that the launcher takes."""
        rows = self._of(wanted)
        if self.is_flat:
            exact = (row for row in rows if row.num_gpus == wanted.num_gpus)
            default = (row for row in rows if row.is_default)
            return next(exact, None) or next(default, None)
        return rows[0] if rows else None

    def missing(self, wanted: PresetRow) -> str:
        """Explain why no preset matches."""
        recipe, num_gpus = wanted.recipe, wanted.num_gpus
        if sizes := self._of(wanted):
            known = ", ".join(str(row.num_gpus) for row in sizes)
            return f"no preset of {recipe} for num_gpus = {num_gpus}; presets exist for num_gpus {known}"
        rows = [row for row in self.rows if row.recipe == recipe]
        if not rows:
            return f"no preset for the recipe {recipe!r}"
        names = ("task", "gpu", "compute_dtype")
        for name in names if self.is_flat else ("family", *names):
            value = getattr(wanted, name)
            if not (kept := [row for row in rows if getattr(row, name) == value]):
                known = ", ".join(sorted({getattr(row, name) for row in rows}))
                return f"no preset of {recipe} with {name} = {value!r}; presets exist for {name} {known}"
            rows = kept
        variants = ", ".join(sorted({row.variant or "(none)" for row in rows}))
        no_preset = f"no preset of {recipe} with config_variant = {wanted.variant!r}"
        return f"{no_preset}; presets exist for config_variant {variants}"

    def _of(self, wanted: PresetRow) -> list[PresetRow]:
        key = ("" if self.is_flat else wanted.family, *wanted.key[:-1])
        rows = [row for row in self.rows if (row.family, *row.key[:-1]) == key]
        if self.is_flat:
            variant: str | None = "" if wanted.variant in _OLD_LABELS else wanted.variant
        else:
            variant = chosen_variant({row.variant for row in rows}, wanted.variant or self.default_variant)
        return [row for row in rows if row.variant == variant]


def chosen_variant(variants: Container[str], variant: str) -> str | None:
    """Return the variant that the launcher of 0.3 to 0.5 takes for the requested variant, or None."""
    if variant in variants:
        return variant
    if variant == "v2" and "v1" in variants:
        return "v1"
    return "" if "" in variants else None


def from_text(text: str) -> PresetCatalog:
    """Read a data file."""
    lines = text.splitlines()
    about = dict(line.removeprefix("# ").rsplit(" = ", 1) for line in lines if line.startswith("#"))
    layouts: dict[str, dict[tuple[int, int], str | None]] = {}
    for name, layout in about.items():
        if name.startswith("layout "):
            _, recipe, pp, vp = name.split()
            layouts.setdefault(recipe, {})[int(pp[3:]), int(vp[3:])] = _value(layout)
    rows = []
    for cells in csv.DictReader(line for line in lines if not line.startswith("#")):
        key: dict[str, Any] = {name: cells.pop(name) for name in KEY}
        key |= {name: _value(key[name]) for name in ("num_gpus", "is_default", "base_gb")}
        values = {name: _value(cell) for name, cell in cells.items() if cell != UNKNOWN}
        rows.append(PresetRow(**key, values=values))
    return PresetCatalog(_value(about["is_flat"]), about["default_variant"], tuple(rows), layouts)


def _value(cell: str) -> Any:
    if cell.startswith("["):
        return cell[1:-1].split()
    if cell in ("true", "false"):
        return cell == "true"
    return None if cell == "" else int(cell) if cell.isdecimal() else cell


@lru_cache(maxsize=32)
def catalog(release: Release) -> PresetCatalog | None:
    """Return the presets of a release, or None if unknown."""
    known = next((one for one in known_releases() if one["version"] == release.version), None)
    if known is None or not release.is_known:
        return None
    name = f"{known.get('presets', release.version)}.csv"
    file = files("cloudai_mbridge.megatron_bridge") / "data" / "presets" / name
    return from_text(file.read_text(encoding="utf-8"))
