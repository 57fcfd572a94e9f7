"""Points of Megatron-Bridge's launcher: rules look at what it fills in, and at nothing that nobody knows."""

from typing import Any

import pytest

from cloudai_mbridge.constraints import CheckResult, RuleSet, Upstream, check
from cloudai_mbridge.constraints.megatron_sizes import m06_sequence_parallel_shares_are_whole
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.constraints.upstream import LIFTS, ask_loop
from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.presets import find_preset
from cloudai_mbridge.megatron_bridge.release import find_release, version_key
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import with_model_facts
from tests.cases import every
from tests.golden import Sentence

DENSE: dict[str, Any] = {"model_family_name": "llama", "num_gpus": 128, "config_variant": "v1"}  # tp4 pp8 cp2 vp8 gb64
EXPERTS: dict[str, Any] = {"model_family_name": "deepseek", "num_gpus": 256, "cuda_graph_impl": "none"}  # pp4 vp4 ep64
NAME = "preset llama31_405b pretrain gb200 bf16 v1, 0.3.0"


def _check(name: str, release: str = "", rules: RuleSet = RuleSet.RELEASE, **args: Any) -> CheckResult:
    written = ResolvedCmdArgs.model_validate({"model_recipe_name": name, "gpu_type": "gb200", **args})
    recipe, pinned = load_recipe(name), find_release(f"v{release}")
    upstream = Upstream(pinned, find_preset(written, pinned), rules)
    return check(with_model_facts(written, recipe), None, recipe, None, upstream)


def _ids(result: CheckResult) -> list[str]:
    return [violation.rule_id for violation in result.violations]


@every(
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


@every(
    ("name", "args"),
    [
        ("llama31_405b", {}),
        ("llama31_405b", {"vp": 4}),
        ("llama31_405b", {"num_gpus": 256}),
        ("deepseek_v3", {"moe_a2a_overlap": True}),
    ],
)
def test_what_the_launcher_fills_in_is_judged(name: str, args: dict[str, Any]) -> None:
    base = DENSE if name == "llama31_405b" else EXPERTS
    assert not _check(name, "0.3.0", **{**base, **args}).violations


def test_an_override_that_breaks_megatron_is_rejected_with_the_origin_of_every_operand(sentence: Sentence) -> None:
    (broken,) = _check("llama31_405b", "0.3.0", **DENSE, gb=63).violations
    sentence(str(broken))
    assert broken.origins == {"mb": NAME}


@every(
    ("name", "args", "rules"),
    [
        ("llama31_405b", {"vp": 5}, ["C08"]),
        ("llama31_405b", {"num_gpus": 96}, ["C01"]),
        ("deepseek_v3", {"ep": 48}, ["C07", "M07", "M11"]),
        ("deepseek_v3", {"ep": 1, "moe_a2a_overlap": True}, ["M19"]),
        ("deepseek_v3", {"recompute_num_layers": 1, "recompute_modules": "mlp"}, ["M15"]),
    ],
)
def test_overrides_are_judged_with_the_rest_of_the_preset(name: str, args: dict[str, Any], rules: list[str]) -> None:
    base = DENSE if name == "llama31_405b" else EXPERTS
    assert _ids(_check(name, "0.3.0", **{**base, **args})) == rules


def test_cloudais_verdict_on_what_is_written_holds_with_the_preset_or_not_at_all() -> None:
    """mb and gb for the preset's two replicas: CloudAI counts 128, as if tp, pp and cp were 1."""
    args: dict[str, Any] = {**DENSE, "mb": 1, "gb": 64}
    nobody_knows = _check("llama31_405b", **args)
    assert not nobody_knows.violations
    assert ("C04", "cp, which Megatron-Bridge decides,") in [(e.rule_id, e.missing) for e in nobody_knows.not_evaluated]
    filled_in = _check("llama31_405b", "0.3.0", **args)
    assert not filled_in.violations
    assert [str(each) for each in filled_in.lifted] == [f"C04 not enforced: holds with what {NAME} fills in"]
    assert _ids(_check("llama31_405b", "0.3.0", RuleSet.CLOUDAI, **args)) == ["C04"]
    assert _ids(_check("llama31_405b", "", RuleSet.CLOUDAI, **args)) == ["C04"]


@pytest.mark.parametrize(("args", "accepted"), [({"pp": 3, "vp": 1}, "C02"), ({"vp": 5}, "C08")])
def test_cloudais_placeholders_accept_everything_under_its_rules(args: dict[str, Any], accepted: str) -> None:
    assert accepted in _ids(_check("llama31_405b", "0.3.0", **{**DENSE, **args}))
    assert accepted not in _ids(_check("llama31_405b", "0.3.0", RuleSet.CLOUDAI, **{**DENSE, **args}))


def test_cloudais_c18_does_not_look_at_layouts() -> None:
    args = {**EXPERTS, "pp": 2, "vp": 8}
    assert "C18" not in _ids(_check("deepseek_v3", "0.3.0", **args))
    assert "C18" in _ids(_check("deepseek_v3", "0.3.0", RuleSet.CLOUDAI, **args))


@every("release", ["0.3.0", "0.6.0"])
@every(
    "mistake",
    [
        {"num_distributed_optimizer_instances": 3},
        {"moe_a2a_overlap": True},
        {"recompute_num_layers": 2},
        {"recompute_modules": "moe"},
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "full_iteration"},
    ],
)
def test_only_what_the_preset_breaks_by_itself_is_shipped_so(release: str, mistake: dict[str, Any]) -> None:
    pinned = find_release(f"v{release}")
    assert pinned is not None
    known = catalog(pinned)
    assert known is not None
    for row in known.rows:
        variant = {"config_variant": row.variant} if row.variant else {}
        names = {"model_family_name": row.family or "any", "gpu_type": row.gpu, "compute_dtype": row.compute_dtype}
        args = {**names, "task": row.task, "num_gpus": row.num_gpus, **variant}
        if row.recipe not in recipe_names():
            continue
        alone = {str(each) for each in _check(row.recipe, release, **args).lifted}
        with_mistake = _check(row.recipe, release, **args, **mistake)
        assert {str(each) for each in with_mistake.lifted if "shipped so" in str(each)} <= alone
        assert "C14" not in {each.rule_id for each in with_mistake.lifted}


TE: dict[str, Any] = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn,moe_router"}
FULL: dict[str, Any] = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}


@every(
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
    assert rule_id in _ids(_check("deepseek_v3", before, num_gpus=8, **args))
    after = _check("deepseek_v3", f"{since}.0", num_gpus=8, **args)
    assert rule_id not in _ids(after)
    (lifted,) = [each for each in after.lifted if each.rule_id == rule_id]
    assert lifted.since == since
    assert str(lifted).startswith(f"{rule_id} lifted in {since}: ")
    asked = _check("deepseek_v3", f"{since}.0", RuleSet.CLOUDAI, num_gpus=8, **args)
    assert rule_id in _ids(asked)
    assert not asked.lifted


def test_a_lift_is_for_what_the_release_runs_only() -> None:
    experts = {**TE, "cuda_graph_scope": "attn,moe"}
    assert "C11" in _ids(_check("deepseek_v3", "0.6.0", moe_a2a_overlap=True, **experts))
    assert "C05" in _ids(_check("deepseek_v3", "0.6.0", use_megatron_fsdp=True, **TE))
    assert "C17" in _ids(_check("deepseek_v3", "0.6.0", recompute_modules="moe", **TE))
    assert "C13" in _ids(_check("deepseek_v3", "0.6.0", cuda_graph_impl="te"))


def test_lifts_say_since_when_and_where_it_shows() -> None:
    for rule_id, rows in LIFTS.items():
        for row in rows:
            assert row.rule_id == rule_id
            assert row.source
            assert version_key(row.since) >= (0, 3)


def test_sequence_parallelism_that_an_override_decides_is_not_judged() -> None:
    args = ResolvedCmdArgs(launcher="megatron_bridge", tp=2, num_gpus=2, seq_length=4097)
    for overridden in (frozenset[str](), frozenset({"sequence_parallel"})):
        answer = ask_loop(m06_sequence_parallel_shares_are_whole, Point(args, overridden=overridden))
        assert isinstance(answer, NotEvaluated if overridden else Violation)


@every(
    ("rule_id", "core", "args"),
    [
        ("C05", "0.19", dict(use_megatron_fsdp=True, cuda_graph_impl="local", cuda_graph_scope="full_iteration")),
        ("C11", "0.16", dict(moe_a2a_overlap=True, cuda_graph_impl="transformer_engine", cuda_graph_scope="attn")),
        ("C11", "0.18", dict(moe_a2a_overlap=True, cuda_graph_impl="full_iteration")),
        ("C13", "0.18", dict(cuda_graph_impl="full_iteration")),
        (
            "C17",
            None,
            dict(cuda_graph_impl="transformer_engine", cuda_graph_scope="attn", recompute_modules="core_attn"),
        ),
    ],
)
def test_the_embedded_loop_has_what_its_core_has(rule_id: str, core: str | None, args: dict[str, Any]) -> None:
    given = ResolvedCmdArgs.model_validate({"launcher": "embedded", "num_gpus": 8, "ep": 8, **args})
    result = check(given, core=core)
    assert rule_id not in {broken.rule_id for broken in result.violations}
    if core not in (None, "0.16"):
        assert rule_id in {broken.rule_id for broken in check(given, core="0.17").violations}
