"""Every published configuration passes with its recipe; the ones that cannot are named with the reason."""

import csv
from typing import Any

from cloudai_mbridge.constraints import check
from cloudai_mbridge.estimate.published import TABLE
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.recipes import load_recipe

RECIPES = {
    "LLAMA3_8B": "llama3_8b",
    "LLAMA3_70B": "llama3_70b",
    "LLAMA3.1_405B": "llama31_405b",
    "DeepSeekV3": "deepseek_v3",
    "DeepSeekV4 Flash": "deepseek_v4_flash",
    "GPT OSS 120B": "gpt_oss_120b",
    "Qwen3_30B_a3B": "qwen3_30b_a3b",
    "Qwen3_235B_a22B": "qwen3_235b_a22b",
    "Kimi_K2": "kimi_k2",
    "Nemotron_3_Nano": "nemotron_3_nano",
    "Nemotron_3_5_Lightning": "nemotron_3_5_lightning",
    "Nemotron_3_Super": "nemotron_3_super",
    "Nemotron_3_Ultra": "nemotron_3_ultra",
}
PRECISIONS = {"FP8": "fp8_cs", "FP8-CS": "fp8_cs", "MXFP8": "fp8_mx", "FP8-MX": "fp8_mx", "NVFP4": "nvfp4"}
SIZES = {"num_gpus": "gpus", "gb": "gbs", "mb": "mbs", "seq_length": "seq_len"} | {
    n: n for n in ("tp", "pp", "cp", "vp", "ep")
}

# (container, label, system, variant) -> rules that object; docs/launcher.md says why
INCONSISTENT = {("25.09", "DeepSeekV3 (tokendrop)", "DGX-GB200", "alt"): {"C07", "M07"}}


def arguments(row: dict[str, str]) -> dict[str, Any]:
    sizes = {name: int(row[column]) for name, column in SIZES.items() if row[column] not in ("", "n/a")}
    return {
        **sizes,
        **({"et": 1} if "ep" in sizes else {}),
        "model_recipe_name": RECIPES[row["model"]],
        "gpu_type": row["system"].removeprefix("DGX-").lower(),
        "compute_dtype": PRECISIONS.get(row["precision"], "bf16"),
        "use_megatron_fsdp": row["fsdp"] not in ("", "0"),
    }


def test_published_rows() -> None:
    with TABLE.open(encoding="utf-8") as text:
        rows = [row for row in csv.DictReader(text) if row["tp"] not in ("", "n/a")]
    assert len(rows) == 154 + 12  # tables and verification cards
    for row in rows:
        args = arguments(row)
        system = SlurmSystem(
            name="c",
            scheduler="slurm",
            default_partition="p",
            partitions=[{"name": "p"}],
            gpus_per_node=4 if args["gpu_type"].startswith("gb") else 8,
        )
        result = check(ResolvedCmdArgs.model_validate(args), system, load_recipe(args["model_recipe_name"]))
        expected = INCONSISTENT.get((row["container"], row["model_label"], row["system"], row["variant"]), set())
        assert {violation.rule_id for violation in result.violations} == expected, (row, result.violations)
