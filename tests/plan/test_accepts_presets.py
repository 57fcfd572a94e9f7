"""Every performance configuration of a release, as a CloudAI user writes it, is planned; also with all written out."""

from collections.abc import Iterator
from typing import Any

import pytest

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT
from cloudai_mbridge.megatron_bridge.preset_rows import PresetRow, catalog
from cloudai_mbridge.megatron_bridge.presets import UPSTREAM_DECIDES, find_preset, with_preset
from cloudai_mbridge.megatron_bridge.release import find_release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.loading import LoadedTest
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.plan.walk import PointWalk
from cloudai_mbridge.sweep.checked import CheckedPoint

URL = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
# configurations; of these, what breaks a rule of Megatron-Core's and is accepted as upstream ships it
SHIPPED = {"0.3.0": (234, 0), "0.6.0": (428, 17)}


def _rows(version: str) -> tuple[PresetRow, ...]:
    found = catalog(find_release(f"v{version}"))  # type: ignore[arg-type]
    assert found is not None
    return found.rows


def _as_cloudai(row: PresetRow) -> dict[str, Any]:
    variant = {"config_variant": row.variant} if row.variant else {}
    names = {"model_family_name": row.family or "any", "model_recipe_name": row.recipe, "gpu_type": row.gpu}
    return {**names, "compute_dtype": row.compute_dtype, "task": row.task, "num_gpus": row.num_gpus, **variant}


def _written_out(version: str, args: dict[str, Any]) -> dict[str, Any]:
    preset = find_preset(ResolvedCmdArgs.model_validate(args), find_release(f"v{version}"))
    assert preset is not None
    values = {name: preset.values.get(name) for name in UPSTREAM_DECIDES}
    texts = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return {**args, **{name: value for name, value in texts.items() if value not in (None, "")}}


def _preview(version: str, args: dict[str, Any]) -> CheckedPoint:
    definition = TestDefinition.model_validate(
        {"name": "n", "description": "", "cmd_args": args, "git_repos": [{"url": URL, "commit": f"v{version}"}]}
    )
    per_node = 4 if args["gpu_type"] in ("gb200", "gb300", "vr200") else 8
    system = SlurmSystem(
        name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpus_per_node=per_node
    )
    (found,) = PointWalk(
        LoadedTest(TestRun(id="t", test_name="n"), definition), system, RuleSet.RELEASE, DEFAULT_LIMIT
    ).points()
    return found


def _previews(version: str, is_written_out: bool) -> Iterator[tuple[PresetRow, CheckedPoint]]:
    for row in _rows(version):
        args = _as_cloudai(row)
        yield row, _preview(version, _written_out(version, args) if is_written_out else args)


@pytest.mark.parametrize("is_written_out", [False, True], ids=["as in CloudAI", "written out"])
@pytest.mark.parametrize("version", SHIPPED)
def test_all_performance_configurations_are_planned(version: str, is_written_out: bool) -> None:
    seen = shipped_so = 0
    for row, found in _previews(version, is_written_out):
        where = (row.recipe, row.task, row.gpu, row.compute_dtype, row.variant, row.num_gpus)
        assert not found.violations, (where, list(map(str, found.violations)))
        assert not found.is_held_back, (where, found.headline)
        seen += 1
        shipped_so += any("is shipped so" in lifted.reason for lifted in found.lifted)
    assert (seen, shipped_so) == SHIPPED[version]


CHANGES: tuple[dict[str, Any], ...] = (
    {"use_megatron_fsdp": True}, {"activation_offload_layers": 3}, {"moe_a2a_overlap": True}, {"tp": 2}, {"pp": 4},
    {"pp": 1, "vp": 1}, {"cp": 2}, {"ep": 8}, {"gb": 96}, {"cuda_graph_impl": "none"}, {"cuda_graph_scope": "attn"},
    {"recompute_num_layers": 2}, {"recompute_modules": "core_attn,layernorm"},
)  # fmt: skip


def _trained(version: str, args: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the launcher trains, as a test would say it; None where that is not known."""
    written = ResolvedCmdArgs.model_validate(args)
    resolved = with_preset(written, find_preset(written, find_release(f"v{version}")))
    values = {name: getattr(resolved.args, name) for name in UPSTREAM_DECIDES}
    texts = {name: ",".join(value) if isinstance(value, list) else value for name, value in values.items()}
    return None if resolved.unknown else {name: value for name, value in texts.items() if value not in (None, "")}


@pytest.mark.parametrize("version", SHIPPED)
def test_the_same_numbers_get_the_same_verdict_whoever_writes_them(version: str) -> None:
    """A change to a preset, and all that results written out."""
    rows, compared = _rows(version)[::3], 0
    for number, row in enumerate(rows):
        change = CHANGES[number % len(CHANGES)]
        short = {**_as_cloudai(row), **change}
        trained = _trained(version, short)
        if trained is None or _trained(version, long := {**short, **trained}) != trained:
            continue  # what is unset cannot be written
        verdicts = [{each.rule_id for each in _preview(version, args).violations} for args in (short, long)]
        assert verdicts[0] == verdicts[1], (row.key, change)
        compared += 1
    assert compared > len(rows) / 2


def test_estimates_are_for_the_filled_in_sizes() -> None:
    (row,) = [
        row
        for row in _rows("0.3.0")
        if (row.recipe, row.gpu, row.compute_dtype, row.variant) == ("llama31_405b", "gb200", "bf16", "v1")
    ]
    args = _as_cloudai(row)
    short, long = (_preview("0.3.0", given).headline for given in (args, _written_out("0.3.0", args)))
    assert short is not None
    assert short.step_time_s is not None
    assert short == long
    twice = _preview("0.3.0", {**args, "num_gpus": 2 * row.num_gpus}).headline  # twice the batch on twice the GPUs
    assert twice is not None
    assert twice.tokens_per_s_per_gpu == pytest.approx(short.tokens_per_s_per_gpu, rel=0.05)
