"""Megatron-Bridge's published performance: the meaning of a row of the tables, and the rows of a given point.

Columns as in the tables' transcription (`data/published.csv`): container, section, model, model_label, system, gpus,
precision, gbs, mbs, seq_len, fsdp, tp, pp, cp, vp, ep, tokens_per_s_per_gpu, tflops_per_s_per_gpu, variant, note;
further columns are ignored. variant: "alt" for a second number that stood in parentheses. note: "card" for a run of a
performance preset by its verification card, with date, and commit where the card names it; its container is the month.
Source: docs/performance-summary.md and its archive, and examples/model_verification_cards, in Megatron-Bridge.
"""

import csv
import re
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from cloudai_mbridge.estimate.architecture import Architecture, architecture
from cloudai_mbridge.megatron_bridge.release import version_key
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from cloudai_mbridge.training.flops import NEW, OLD, Formula, flops_per_token, lora_flops_per_sample

TABLE = resources.files("cloudai_mbridge.estimate") / "data" / "published.csv"
LAST_OLD_CONTAINER = "26.04.01"
_PRECISIONS = {
    "BF16": "bf16",
    "FP8": "fp8_cs",
    "FP8-CS": "fp8_cs",
    "FP8-MX": "fp8_mx",
    "MXFP8": "fp8_mx",
    "FP8-SC": "fp8_sc",
    "NVFP4": "nvfp4",
}
_SIZES = {"gpus": "num_gpus", "gbs": "gb", "mbs": "mb", "seq_len": "seq_length"}
_SIZES |= {name: name for name in ("tp", "pp", "cp", "vp", "ep")}
_TASKS = {"pre-training": "pretrain", "sft": "sft", "lora": "lora"}
_WITHOUT_MTP = re.compile(r"\b(w/o|without|no)[\s_-]*mtp\b", re.IGNORECASE)
_BATCH = attrgetter("num_gpus", "mb", "gb")
_COUNTS = attrgetter("tp", "pp", "cp", "vp", "ep", "et", "seq_length")
_SWITCHES = attrgetter("use_megatron_fsdp", "use_tokendrop", "moe_a2a_overlap")
_OTHERWISE = attrgetter(
    *("model_recipe_name", "compute_dtype", "task", "hidden_size", "num_layers", "vocab_size"),
    *("pipeline_model_parallel_layout", "recompute_modules", "recompute_num_layers", "activation_offload_layers"),
    *("first_k_dense_replace", "num_distributed_optimizer_instances", "cuda_graph_impl", "cuda_graph_scope"),
)
_LORA_RULE = "llama3_70b"  # the one recipe that the reference counts by a rule for LoRA


@dataclass(frozen=True)
class PublishedRow:
    """One row. args: of its point; the number format is derived if the table lacks it (25.09). is_card: of a card."""

    container: str
    label: str
    recipe: str
    args: ResolvedCmdArgs
    formula: Formula
    mtp_num_layers: int
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    is_card: bool = False

    @property
    def architecture(self) -> Architecture:
        """The model that was trained."""
        return architecture(load_recipe(self.recipe), self.args, mtp_num_layers=self.mtp_num_layers)

    @property
    def flops_per_token(self) -> float:
        """FLOPs per token by the formula of the row's time.

        Rows of LoRA without attention: the lengths of their packed sequences are not published, and short.
        """
        if self.args.task == "lora" and self.recipe == _LORA_RULE:
            return float(lora_flops_per_sample(self.architecture, tokens=1))
        return flops_per_token(self.architecture, self.formula)

    @property
    def step_time_s(self) -> float:
        """The step time that follows from the tokens per second."""
        tokens = (self.args.gb or 0) * (self.args.seq_length or 0)
        return tokens / (self.tokens_per_s_per_gpu * self.args.num_gpus)


def read_published() -> list[PublishedRow]:
    """Read the transcription of the tables that comes with the package."""
    return [published_row(columns) for columns in csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())]


def published_of(args: ResolvedCmdArgs, gpu: str, mtp_num_layers: int) -> tuple[PublishedRow, ...]:
    """Return the rows of exactly this point: recipe, GPU, number format, sizes, batch, and nothing else set.

    args: with the recipe's defaults. gpu: its name in the hardware table.
    """
    rows = rows_of_shape(args, gpu, mtp_num_layers)
    return tuple(row for row in rows if _BATCH(row.args) == _BATCH(args))


def rows_of_shape(args: ResolvedCmdArgs, gpu: str, mtp_num_layers: int) -> tuple[PublishedRow, ...]:
    """Return the rows that agree with a point in all but GPUs and batch."""
    if args.launcher is Launcher.EMBEDDED:
        return ()
    rows = _by_shape().get(_shape(args, gpu), ())
    return tuple(row for row in rows if row.mtp_num_layers == mtp_num_layers)


@cache
def _by_shape() -> Mapping[Hashable, tuple[PublishedRow, ...]]:
    shapes: dict[Hashable, tuple[PublishedRow, ...]] = {}
    for row in read_published():
        shape = _shape(with_recipe_defaults(row.args, load_recipe(row.recipe)), row.args.gpu_type)
        shapes[shape] = (*shapes.get(shape, ()), row)
    return MappingProxyType(shapes)


def _shape(args: ResolvedCmdArgs, gpu: str) -> Hashable:
    sizes = [value or 1 for value in _COUNTS(args)]
    switches = [bool(value) for value in _SWITCHES(args)]
    return gpu, *switches, *sizes, *map(str, _OTHERWISE(args))


def published_row(columns: Mapping[str, str]) -> PublishedRow:
    """Return the parsed row."""
    given = {name: text for name, text in columns.items() if (text or "").strip().lower() not in ("", "n/a", "-")}
    label = given.get("model_label", columns["model"])
    remarks = f"{label} {given.get('note', '')} {given.get('variant', '')}"
    gpu, wanted = columns["system"].lower().removeprefix("dgx-"), _letters(columns["model"].partition("(")[0])
    recipe = next(name for name in recipe_names() if _letters(name) == wanted)
    sizes = {name: int(_number(given[column])) for column, name in _SIZES.items() if column in given}
    if "precision" in given:
        precision = _PRECISIONS[given["precision"].strip().upper()]
    elif given.get("variant") != "alt":
        # The tables of 25.09 have no such column. They are of FP8: by their footnote, the numbers in parentheses are of
        # another quantization granularity, 32 x 32 on Blackwell and 128 x 128 on Hopper
        precision = "fp8_cs"
    else:
        precision = "fp8_sc" if gpu == "h100" else "fp8_mx"
    arguments: dict[str, Any] = {
        **sizes,
        "model_recipe_name": recipe,
        "gpu_type": gpu,
        "compute_dtype": precision,
        "task": _TASKS[columns["section"].strip().lower()],
        "use_megatron_fsdp": bool(_number(given.get("fsdp", "0"))),
        **({"use_tokendrop": True} if "tokendrop" in remarks else {}),
        **({"et": 1} if "ep" in sizes else {}),
    }
    return PublishedRow(
        container=columns["container"],
        label=label,
        recipe=recipe,
        args=ResolvedCmdArgs.model_validate(arguments),
        formula=formula_of(columns["container"]),
        mtp_num_layers=0 if _WITHOUT_MTP.search(remarks) else load_recipe(recipe).mtp_num_layers,
        tokens_per_s_per_gpu=_number(columns["tokens_per_s_per_gpu"]),
        tflops_per_gpu=_number(columns["tflops_per_s_per_gpu"]),
        is_card=given.get("note") == "card",
    )


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _number(text: str) -> float:
    return float(text.replace(",", ""))


def formula_of(container: str) -> Formula:
    """Return the formula of a container's published numbers."""
    return OLD if version_key(container) <= version_key(LAST_OLD_CONTAINER) else NEW
