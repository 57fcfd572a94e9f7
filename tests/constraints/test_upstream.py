"""Points of Megatron-Bridge's launcher: rules look at what it fills in, and at nothing that nobody knows."""

from typing import Any

import pytest

from cloudai_mbridge.constraints import CheckResult, RuleSet, Upstream, check
from cloudai_mbridge.constraints.lifts import LIFTS
from cloudai_mbridge.megatron_bridge.presets import UPSTREAM_DECIDES, Preset
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import with_model_facts

VALUES: dict[str, Any] = dict.fromkeys(UPSTREAM_DECIDES)
DENSE = {**VALUES, "tp": 4, "pp": 8, "cp": 2, "vp": 8, "ep": 1, "mb": 1, "gb": 64, "seq_length": 8192}
EXPERTS = {**VALUES, "tp": 1, "pp": 4, "cp": 1, "vp": 4, "ep": 64, "et": 1, "mb": 1, "gb": 2048, "seq_length": 4096}


def _preset(values: dict[str, Any], num_gpus: int, version: str = "0.3.0") -> Preset:
    return Preset(Release(version, f"commit v{version}"), "THE_PRESET", num_gpus, values)


def _check(
    name: str, preset: Preset | None = None, release: str = "", rules: RuleSet = RuleSet.RELEASE, **args: Any
) -> CheckResult:
    written = ResolvedCmdArgs.model_validate({"model_recipe_name": name, "gpu_type": "gb200", **args})
    recipe = load_recipe(name)
    pinned = preset.release if preset else Release(release, "here") if release else None
    return check(with_model_facts(written, recipe), None, recipe, None, Upstream(pinned, preset, rules))


def _ids(result: CheckResult) -> list[str]:
    return [violation.rule_id for violation in result.violations]


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("llama31_405b", {"num_gpus": 128}),
        ("llama31_405b", {"num_gpus": 128, "vp": 8}),
        ("llama31_405b", {"num_gpus": 128, "gb": 100}),
        ("llama31_405b", {"num_gpus": 128, "recompute_modules": "core_attn", "activation_offload_layers": 2}),
        ("deepseek_v3", {"num_gpus": 256, "moe_a2a_overlap": True}),
        ("deepseek_v3", {"num_gpus": 256, "pp": 4}),
    ],
)
def test_what_nobody_knows_breaks_no_rule(name: str, args: dict[str, Any]) -> None:
    broken = _ids(_check(name, **args))
    assert broken == (["M16"] if "activation_offload_layers" in args else [])


def test_a_rule_names_what_nobody_knows() -> None:
    missing = {answer.rule_id: answer.missing for answer in _check("deepseek_v3", moe_a2a_overlap=True).not_evaluated}
    assert missing["M19"] == "ep, which Megatron-Bridge decides,"
    assert missing["M06"] == "tp, which Megatron-Bridge decides,"
    assert missing["C04"] == "mb and gb"


@pytest.mark.parametrize(
    ("name", "preset", "args"),
    [
        ("llama31_405b", _preset(DENSE, 128), {"num_gpus": 128}),
        ("llama31_405b", _preset(DENSE, 128), {"num_gpus": 128, "vp": 4}),
        ("deepseek_v3", _preset(EXPERTS, 256), {"num_gpus": 256, "moe_a2a_overlap": True}),
    ],
)
def test_what_the_launcher_fills_in_is_judged(name: str, preset: Preset, args: dict[str, Any]) -> None:
    assert not _check(name, preset, **args).violations


def test_an_override_that_breaks_megatron_is_rejected_with_the_origin_of_every_operand() -> None:
    (broken,) = _check("llama31_405b", _preset(DENSE, 128), num_gpus=128, gb=63).violations
    assert str(broken) == (
        "C04 cmd_args.gb: 63 is not divisible by mb*dp = 2 (gb=63, mb=1 (preset THE_PRESET, 0.3.0), dp=2);"
        " use a multiple of 2"
    )
    assert broken.origins == {"mb": "preset THE_PRESET, 0.3.0"}


def test_overrides_are_judged_with_the_rest_of_the_preset() -> None:
    preset = _preset(DENSE, 128)
    assert _ids(_check("llama31_405b", preset, num_gpus=128, vp=5)) == ["C08"]
    assert _ids(_check("llama31_405b", preset, num_gpus=96)) == ["C01"]
    assert _ids(_check("deepseek_v3", _preset(EXPERTS, 256), num_gpus=256, ep=48)) == ["C07", "M07", "M11"]
    assert _ids(_check("deepseek_v3", _preset(EXPERTS, 256), num_gpus=256, ep=1, moe_a2a_overlap=True)) == ["M19"]


def test_cloudais_verdict_on_what_is_written_holds_with_the_preset_or_not_at_all() -> None:
    """mb and gb for the preset's two replicas: CloudAI counts 128, as if tp, pp and cp were 1."""
    args: dict[str, Any] = {"num_gpus": 128, "mb": 1, "gb": 64}
    assert _ids(_check("llama31_405b", **args)) == ["C04"]
    with_preset = _check("llama31_405b", _preset(DENSE, 128), **args)
    assert not with_preset.violations
    assert [str(each) for each in with_preset.lifted] == [
        "C04 lifted: holds with what preset THE_PRESET, 0.3.0 fills in"
    ]
    assert _ids(_check("llama31_405b", _preset(DENSE, 128), rules=RuleSet.CLOUDAI, **args)) == ["C04"]


TE: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"}
FULL: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}


@pytest.mark.parametrize(
    ("rule_id", "before", "since", "args"),
    [
        ("C05", "0.5.1", "0.6", {"use_megatron_fsdp": True, **FULL}),
        ("C11", "", "0.3", {"moe_a2a_overlap": True, **TE}),
        ("C11", "0.4.2", "0.5", {"moe_a2a_overlap": True, **FULL}),
        ("C12", "0.5.1", "0.6", {"activation_offload_layers": 2, **FULL}),
        ("C13", "0.4.2", "0.5", {"cuda_graph_impl": "full_iteration"}),
        ("C15", "", "0.3", {"cuda_graph_impl": "none", "cuda_graph_scope": "moe,moe_router"}),
        ("C16", "", "0.3", {"cuda_graph_impl": "none", "cuda_graph_scope": "moe_preprocess"}),
        ("C17", "", "0.3", {"recompute_modules": "mla_up_proj", **TE}),
    ],
)
def test_a_lifted_rule_rejects_nothing(rule_id: str, before: str, since: str, args: dict[str, Any]) -> None:
    assert rule_id in _ids(_check("deepseek_v3", release=before, num_gpus=8, **args))
    after = _check("deepseek_v3", release=f"{since}.0", num_gpus=8, **args)
    assert rule_id not in _ids(after)
    (lifted,) = [each for each in after.lifted if each.rule_id == rule_id]
    assert lifted.since == since
    assert str(lifted).startswith(f"{rule_id} lifted in {since}: ")
    asked = _check("deepseek_v3", release=f"{since}.0", rules=RuleSet.CLOUDAI, num_gpus=8, **args)
    assert rule_id in _ids(asked)
    assert not asked.lifted


def test_a_lift_is_for_what_the_release_runs_only() -> None:
    experts = {**TE, "cuda_graph_scope": "attn,moe"}
    assert "C11" in _ids(_check("deepseek_v3", release="0.6.0", moe_a2a_overlap=True, **experts))
    assert "C05" in _ids(_check("deepseek_v3", release="0.6.0", use_megatron_fsdp=True, **TE))
    assert "C17" in _ids(_check("deepseek_v3", release="0.6.0", recompute_modules="moe", **TE))
    assert "C13" in _ids(_check("deepseek_v3", release="0.6.0", cuda_graph_impl="te"))


def test_lifts_say_since_when_and_where_it_shows() -> None:
    for rule_id, rows in LIFTS.items():
        for row in rows:
            assert row.rule_id == rule_id
            assert row.source
            assert row.key >= (0, 3)
