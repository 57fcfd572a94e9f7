"""Every performance preset, resolved by the real configuration code of the launcher and by us: no difference."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge.preset_rows import PresetRow, catalog
from cloudai_mbridge.megatron_bridge.presets import UPSTREAM_DECIDES, find_preset, given_by, resolve_sizes, with_preset
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from tests.figures import Figure
from tests.interop.presets.reader import read_source

RUNNER = Path(__file__).with_name("real_presets.py")
# The Megatron-Core of 0.6 beside that of the environment: pip install --no-deps --ignore-requires-python --target.
CORE_0_6 = Path(sys.prefix) / "megatron-core-0.19"
FLAGS = {
    "model_family_name": "-m", "model_recipe_name": "-mr", "gpu_type": "-g", "compute_dtype": "-c", "task": "--task",
    "num_gpus": "-ng", "config_variant": "-cv", "tp": "-tp", "pp": "-pp", "cp": "-cp", "vp": "-vp", "ep": "-ep",
    "et": "-et", "mb": "-mb", "gb": "-gb", "seq_length": "-sl", "use_megatron_fsdp": "--use_megatron_fsdp",
    "nccl_ub": "--nccl_ub", "cuda_graph_impl": "--cuda_graph_impl", "cuda_graph_scope": "--cuda_graph_scope",
    "moe_a2a_overlap": "--moe_a2a_overlap", "recompute_num_layers": "-rl", "recompute_modules": "--recompute_modules",
    "activation_offload_layers": "-ol", "pipeline_model_parallel_layout": "--pipeline_model_parallel_layout",
}  # fmt: skip
# What the launcher says where it has no preset: of the sizes, or of the builder that applies them.
NOT_FOUND = ("Failed to get", "No flat perf recipe", "Invalid compute dtype")
OVERRIDES: tuple[dict[str, Any], ...] = (
    {"tp": 1}, {"tp": 2}, {"tp": 4}, {"pp": 1}, {"pp": 4}, {"pp": 8}, {"cp": 1}, {"cp": 2}, {"vp": 1}, {"vp": 2},
    {"ep": 1}, {"ep": 8}, {"et": 1}, {"mb": 2}, {"gb": 96}, {"pp": 4, "vp": 4}, {"pp": 16, "vp": 1}, {"pp": 1, "vp": 1},
    {"use_megatron_fsdp": True}, {"use_megatron_fsdp": False}, {"nccl_ub": True}, {"nccl_ub": False},
    {"cuda_graph_impl": "none"}, {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,mlp"},
    {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, {"cuda_graph_scope": "attn"},
    {"moe_a2a_overlap": True}, {"moe_a2a_overlap": False}, {"recompute_num_layers": 2},
    {"recompute_modules": "core_attn,layernorm"}, {"recompute_num_layers": 2, "recompute_modules": "core_attn"},
    {"activation_offload_layers": 3}, {"activation_offload_layers": 0},
    {"pipeline_model_parallel_layout": "Et*4|(t*4|)*14tmL"},
)  # fmt: skip


@pytest.fixture(params=["0.3.0", "0.6.0"])
def release(request: pytest.FixtureRequest) -> Release:
    """A release with its clone."""
    clone = request.getfixturevalue("launcher_0_3" if request.param == "0.3.0" else "launcher_0_6")
    if request.param == "0.6.0" and not (CORE_0_6 / "megatron/core").is_dir():
        pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
    return Release(request.param, "the unpacked source", clone)


def test_shipped_data_are_those_of_the_release(release: Release) -> None:
    shipped = catalog(Release(release.version, "shipped"))
    assert release.clone
    assert shipped
    assert shipped == read_source(release.clone)


def test_every_preset_of_the_release_is_known(release: Release) -> None:
    known = catalog(release)
    assert known
    ours = {_upstream_name(row, known.is_flat) for row in known.rows}
    real = set(_real(release, ["--list"])[0])
    assert ours - real == set()
    unknown = sorted(real - ours)
    answers = _real(release, *(_argv(_read_name(name)) for name in unknown))
    assert [name for name, answer in zip(unknown, answers, strict=True) if "refused" not in answer] == []


def test_sizes_are_those_of_the_real_configuration_code(release: Release, figure: Figure) -> None:
    points = list(_points(release))
    answers = _real(release, *(_argv(point) for point in points))
    differences = [
        f"{_argv(point)}: {difference}"
        for point, answer in zip(points, answers, strict=True)
        if (difference := _difference(_ours(point, release), answer))
    ]
    refused = sum("refused" in answer for answer in answers)
    figure(
        f"Megatron-Bridge {release.version}: {len(points)} points, {refused} refused by the launcher,"
        f" {len(differences)} differences"
    )
    assert differences[:20] == []


def test_what_is_chosen_without_and_with_a_variant(release: Release, figure: Figure) -> None:
    points = list(_choices(release))
    answers = _real(release, *(_argv(point) for point in points))
    differences = []
    for point, answer in zip(points, answers, strict=True):
        args = ResolvedCmdArgs(**point)
        known = find_preset(args, Release(release.version, "shipped")) is not None
        if known == any(text in answer.get("refused", "") for text in NOT_FOUND):
            differences.append(f"{_argv(point)}: {'known' if known else 'not known'} here, {answer}")
        elif known and (difference := _difference(_ours(point, release), answer)):
            differences.append(f"{_argv(point)}: {difference}")
    figure(f"Megatron-Bridge {release.version}: {len(points)} choices, {len(differences)} differences")
    assert differences[:20] == []


def _choices(release: Release) -> Iterator[dict[str, Any]]:
    """Yield every combination of what a preset is chosen by, most of which have none."""
    known = catalog(release)
    assert known
    rows = known.rows
    recipes = sorted({(row.family or "any", row.recipe, row.task) for row in rows})
    gpus, dtypes = sorted({row.gpu for row in rows}), sorted({row.compute_dtype for row in rows})
    for (family, recipe, task), gpu, dtype, variant in product(
        recipes, gpus, dtypes, (None, "v1", "v2", "large_scale")
    ):
        point = {"model_family_name": family, "model_recipe_name": recipe, "gpu_type": gpu, "compute_dtype": dtype}
        yield {**point, "task": task, "num_gpus": 48, **({"config_variant": variant} if variant else {})}


def _points(release: Release) -> Iterator[dict[str, Any]]:
    """Yield what a CloudAI user would write: each preset, at three sizes, and with something said."""
    known = catalog(release)
    assert known
    for row in known.rows:
        base = _key(row)
        for num_gpus in dict.fromkeys((row.num_gpus, max(row.num_gpus // 2, 1), row.num_gpus * 2)):
            yield {**base, "num_gpus": num_gpus}
        for number, override in enumerate(OVERRIDES):
            yield {**base, "num_gpus": row.num_gpus * (1 + number % 2), **override}


def _key(row: PresetRow) -> dict[str, Any]:
    key = {
        "model_family_name": row.family or "any",
        "model_recipe_name": row.recipe,
        "gpu_type": row.gpu,
        "compute_dtype": row.compute_dtype,
        "task": row.task,
    }
    return {**key, "config_variant": row.variant} if row.variant else key


def _argv(point: dict[str, Any]) -> list[str]:
    """Write the launcher's options as CloudAI does; vp = 1 is None there."""
    argv = ["-a", "account", "-p", "partition"]
    for name, value in point.items():
        text = "None" if name == "vp" and value == 1 else str(value).lower() if isinstance(value, bool) else str(value)
        argv += [FLAGS[name], text]
    return argv


def _ours(point: dict[str, Any], release: Release) -> dict[str, Any]:
    args = ResolvedCmdArgs(**point)
    preset = find_preset(args, Release(release.version, "shipped"))
    assert preset, point
    resolved = with_preset(args, preset)
    assert resolved.unknown <= {"gb", "recompute_num_layers"}, (point, resolved.unknown)
    ours = {name: getattr(resolved.args, name) for name in UPSTREAM_DECIDES if name not in resolved.unknown}
    return ours | {"sequence_parallel": resolve_sizes(given_by(args), args.num_gpus, preset)["sequence_parallel"]}


def _difference(ours: dict[str, Any], answer: dict[str, Any]) -> dict[str, Any]:
    """Return what differs; a point that the launcher refuses has nothing to compare."""
    if "refused" in answer:
        return {}
    real = _by_our_names(answer)
    ours = {name: _lists(name, value) for name, value in ours.items()} | ({"vp": None} if ours["vp"] == 1 else {})
    names = [name for name in real if name in ours or real[name] is not None]
    return {name: (ours.get(name, "?"), real[name]) for name in names if ours.get(name, "?") != real[name]}


def _lists(name: str, value: Any) -> Any:
    if name == "pipeline_model_parallel_layout" and value is not None:
        return _stages(value)
    return value.split(",") if name in ("cuda_graph_scope", "recompute_modules") and isinstance(value, str) else value


def _by_our_names(answer: dict[str, Any]) -> dict[str, Any]:
    """Read the real configuration with Megatron-Core's meaning: what has no effect is left out."""
    granularity, impl = answer["recompute_granularity"], answer["cuda_graph_impl"]
    modules = answer["recompute_modules"]
    scopes = [*_scopes(answer["cuda_graph_modules"]), *_scopes(answer["cuda_graph_scope"])]
    block = granularity == "full" and answer["recompute_method"] == "block"
    layout = answer["pipeline_model_parallel_layout"]
    return {
        "tp": answer["tensor_model_parallel_size"],
        "pp": answer["pipeline_model_parallel_size"],
        "cp": answer["context_parallel_size"],
        "vp": answer["virtual_pipeline_model_parallel_size"],
        "ep": answer["expert_model_parallel_size"],
        "et": answer["expert_tensor_parallel_size"],
        "mb": answer["micro_batch_size"],
        "gb": answer["global_batch_size"],
        "seq_length": answer["seq_length"],
        "sequence_parallel": bool(answer["sequence_parallel"]),
        "use_megatron_fsdp": bool(answer["use_megatron_fsdp"]),
        "nccl_ub": bool(answer["nccl_ub"]),
        "cuda_graph_impl": impl,
        "cuda_graph_scope": [] if impl == "none" else scopes,
        "moe_a2a_overlap": bool(answer["overlap_moe"]),
        "recompute_num_layers": answer["recompute_num_layers"] if block else None,
        "recompute_modules": (["core_attn"] if modules is None else modules) if granularity == "selective" else [],
        "activation_offload_layers": answer["cpu_offloading_num_layers"] if answer["cpu_offloading"] else 0,
        "pipeline_model_parallel_layout": None if layout is None else _stages(layout),
    }


def _scopes(value: Any) -> list[str]:
    names = [value] if isinstance(value, str) else value or []
    return [name for name in names if name != "full"]


def _stages(layout: Any) -> list[list[str]]:
    """Read a layout: a list of stages, or Megatron's short form."""
    if isinstance(layout, list):
        return layout
    text = layout
    while "(" in text:
        front, _, rest = text.partition("(")
        inner, _, rest = rest.partition(")*")
        digits = len(rest) - len(rest.lstrip("0123456789"))
        text = front + inner * int(rest[:digits]) + rest[digits:]
    return [list(_layers(stage)) for stage in text.split("|")]


def _layers(stage: str) -> Iterator[str]:
    names = {"E": "embedding", "t": "decoder", "m": "mtp", "L": "loss"}
    for index, letter in enumerate(stage):
        if letter in names:
            rest = stage[index + 1 :]
            digits = len(rest) - len(rest.removeprefix("*").lstrip("0123456789")) if rest.startswith("*") else 0
            yield from [names[letter]] * (int(rest[1:digits]) if digits else 1)


def _upstream_name(row: PresetRow, is_flat: bool) -> str:
    variant = f"_{row.variant}" if row.variant else ""
    if is_flat:
        dtype = row.compute_dtype.replace("_", "")
        return f"{row.recipe}_{row.task}_{row.num_gpus}gpu_{row.gpu}_{dtype}{variant}_config"
    return f"{row.recipe}_{row.task}_config_{row.gpu}_{row.compute_dtype}{variant}".upper()


def _read_name(name: str) -> dict[str, Any]:
    """Return the point that asks for a preset of the releases up to 0.5."""
    found = re.fullmatch(r"(\w+)_(pretrain|sft|lora)_config_([a-z0-9]+)_(bf16|fp8_..|nvfp4)(?:_(\w+))?", name.lower())
    assert found, name
    recipe, task, gpu, dtype, variant = found.groups()
    family = recipe.split("_")[0].rstrip("0123456789")
    key = {"model_family_name": family, "model_recipe_name": recipe, "gpu_type": gpu, "compute_dtype": dtype}
    return {**key, "task": task, "num_gpus": 64, **({"config_variant": variant} if variant else {})}


def _real(release: Release, *requests: list[str]) -> list[Any]:
    """Return the answers of the real configuration code."""
    path = [str(CORE_0_6)] if release.version >= "0.6" else []
    done = subprocess.run(
        [sys.executable, str(RUNNER), str(release.clone)],
        input="".join(json.dumps(request) + "\n" for request in requests),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(requests), done.stderr[-3000:]
    return answers
