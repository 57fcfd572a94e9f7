"""The presets of one release as rows, and as the text of a data file.

A data file is CSV. Its first lines begin with `#` and contain the settings of the whole release. An empty cell is None,
`?` is unknown, and a list is in brackets.
"""

import csv
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

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
class PresetRequest:
    """What a preset is chosen by, as the launcher's options say it.

    family: in a row, empty where the launcher does not look at it. variant: "" for the one without a name.
    """

    family: str
    recipe: str
    task: str
    gpu: str
    compute_dtype: str
    variant: str

    @property
    def key(self) -> tuple[str, ...]:
        """Recipe, task, GPU, number format and variant."""
        return self.recipe, self.task, self.gpu, self.compute_dtype, self.variant


@dataclass(frozen=True)
class PresetRow(PresetRequest):
    """One preset of a release.

    is_default: taken for job sizes that have no preset of their own.
    values: by our argument names, and a few more that their meaning depends on.
    base_gb: the batch that is scaled to other job sizes, where it is not the preset's own.
    """

    num_gpus: int
    is_default: bool
    values: Mapping[str, Any]
    base_gb: int | None = None


@dataclass(frozen=True)
class PresetSource:
    """What a release says of its presets.

    is_flat: one function for each preset and job size, as from 0.6 on.
    default_variant: what the launcher takes when none is passed.
    layouts: by recipe the pipeline layouts that it derives from a user's own pp and vp, (pp, vp) -> layout.
    """

    is_flat: bool
    default_variant: str
    rows: tuple[PresetRow, ...]
    layouts: Mapping[str, Mapping[tuple[int, int], str | None]]


def chosen_variant(variants: Container[str], variant: str) -> str | None:
    """Return the variant that the launcher of 0.3 to 0.5 takes for the requested variant, or None."""
    if variant in variants:
        return variant
    if variant == "v2" and "v1" in variants:
        return "v1"
    return "" if "" in variants else None


def from_text(text: str) -> PresetSource:
    """Read a data file."""
    lines = text.splitlines()
    about = dict(line.removeprefix("# ").rsplit(" = ", 1) for line in lines if line.startswith("#"))
    layouts: dict[str, dict[tuple[int, int], str | None]] = {}
    for name, layout in about.items():
        if name.startswith("layout "):
            _, recipe, pp, vp = name.split()
            layouts.setdefault(recipe, {})[int(pp[3:]), int(vp[3:])] = _value(layout)
    rows = tuple(_row(cells) for cells in csv.DictReader(line for line in lines if not line.startswith("#")))
    return PresetSource(_value(about["is_flat"]), about["default_variant"], rows, layouts)


def _row(cells: dict[str, str]) -> PresetRow:
    key: dict[str, Any] = {name: cells.pop(name) for name in KEY}
    key |= {name: _value(key[name]) for name in ("num_gpus", "is_default", "base_gb")}
    return PresetRow(**key, values={name: _value(cell) for name, cell in cells.items() if cell != UNKNOWN})


def _value(cell: str) -> Any:
    if cell.startswith("["):
        return cell[1:-1].split()
    if cell in ("true", "false"):
        return cell == "true"
    return None if cell == "" else int(cell) if cell.isdecimal() else cell
