"""Presets as the launcher finds them, and joined with what a point says."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge import presets as find
from cloudai_mbridge.megatron_bridge.preset_rows import FIELDS, PresetCatalog, catalog, from_text
from cloudai_mbridge.megatron_bridge.presets import (
    UPSTREAM_DECIDES,
    find_preset,
    given_by,
    resolve_sizes,
    why_no_preset,
    with_preset,
)
from cloudai_mbridge.megatron_bridge.release import Release, find_release, known_releases
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from tests.cases import every
from tests.golden import Sentence
from tests.interop.presets.extract import as_text
from tests.interop.presets.extract import main as extract
from tests.interop.presets.reader import read_source

LLAMA = {"model_family_name": "llama", "model_recipe_name": "llama31_405b", "gpu_type": "gb300"}
DEEPSEEK = {"model_family_name": "deepseek", "model_recipe_name": "deepseek_v3", "gpu_type": "gb300", "num_gpus": 256}
TOY = {"model_family_name": "toy", "model_recipe_name": "toy", "gpu_type": "h100"}


def resolved(version: str | Release, **cmd_args: Any) -> ResolvedCmdArgs:
    args = ResolvedCmdArgs(**cmd_args)
    release = find_release(f"v{version}") if isinstance(version, str) else version
    return with_preset(args, find_preset(args, release)).args


@every("known", known_releases())
def test_every_release_has_presets_of_which_nearly_all_is_known(known: dict[str, str]) -> None:
    presets = catalog(Release(known["version"], "data"))
    assert presets
    assert len(presets.rows) > 200
    missing = {name for row in presets.rows for name in UPSTREAM_DECIDES if name not in row.values}
    assert missing == set()


def test_what_the_point_leaves_out_is_upstreams() -> None:
    args = ResolvedCmdArgs(**LLAMA, num_gpus=256, mb=2)
    preset = find_preset(args, find_release("v0.3.0"))
    assert preset
    assert preset.name == "llama31_405b pretrain gb300 bf16 v2"
    result = with_preset(args, preset)
    assert (result.args.tp, result.args.mb, result.args.seq_length) == (preset.values["tp"], 2, 8192)
    assert "mb" not in result.from_preset
    assert {"tp", "gb", "seq_length"} <= result.from_preset
    assert result.unknown == frozenset()
    assert result.args.model_fields_set == args.model_fields_set
    assert args.tp is None
    without = with_preset(ResolvedCmdArgs(**LLAMA, tp=2), None)
    assert (without.unknown, without.from_preset) == (frozenset(UPSTREAM_DECIDES) - {"tp"}, frozenset())


def test_until_0_5_the_batch_follows_the_number_of_gpus() -> None:
    assert resolved("0.3.0", **LLAMA, num_gpus=128).gb == resolved("0.3.0", **LLAMA, num_gpus=256).gb // 2
    assert resolved("0.3.0", **LLAMA, num_gpus=128, tp=8).gb == resolved("0.3.0", **LLAMA, num_gpus=128).gb
    assert resolved("0.3.0", **LLAMA, num_gpus=128, gb=77).gb == 77


def test_from_0_6_on_it_follows_the_data_parallel_size() -> None:
    at_256 = resolved("0.6.0", **DEEPSEEK).gb
    assert at_256
    doubled = {**DEEPSEEK, "num_gpus": 512}
    assert resolved("0.6.0", **doubled).gb == 2 * at_256
    assert resolved("0.6.0", **doubled, tp=2).gb == at_256
    assert resolved("0.6.0", **DEEPSEEK, tp=2).gb == at_256  # a preset of that size is not scaled
    refused = ResolvedCmdArgs(**{**DEEPSEEK, "num_gpus": 3})
    assert "gb" in with_preset(refused, find_preset(refused, find_release("v0.6.0"))).unknown


def test_one_virtual_stage_is_none() -> None:
    assert resolved("0.3.0", **LLAMA, num_gpus=256, vp=1).vp == 1
    assert given_by(ResolvedCmdArgs(vp=1)) == {"vp": 1}


@every("name", ["use_megatron_fsdp", "nccl_ub", "moe_a2a_overlap"])
def test_what_a_preset_switches_on_cannot_be_switched_off(name: str) -> None:
    known = catalog(Release("0.6.0", "data"))
    assert known
    row = next(row for row in known.rows if row.values[name])
    key = {"model_family_name": "any", "model_recipe_name": row.recipe, "gpu_type": row.gpu, "task": row.task}
    key |= {"compute_dtype": row.compute_dtype, **({"config_variant": row.variant} if row.variant else {})}
    args = ResolvedCmdArgs(**key, num_gpus=row.num_gpus, **{name: False})
    result = with_preset(args, find_preset(args, find_release("v0.6.0")))
    assert getattr(result.args, name) is True
    assert name in result.from_preset


def test_recomputation_is_of_layers_or_of_modules() -> None:
    assert resolved("0.3.0", **DEEPSEEK, compute_dtype="fp8_mx").recompute_modules == ["mla_up_proj"]
    of_layers = resolved("0.3.0", **DEEPSEEK, compute_dtype="fp8_mx", recompute_num_layers=2)
    assert (of_layers.recompute_num_layers, of_layers.recompute_modules) == (2, [])
    both = resolved("0.3.0", **DEEPSEEK, recompute_num_layers=2, recompute_modules="mlp")
    assert (both.recompute_num_layers, both.recompute_modules) == (None, "mlp")


@every(
    ("version", "graph", "expected"),
    [
        ("0.3.0", {}, ("transformer_engine", ["attn", "moe_router", "moe_preprocess"])),
        ("0.3.0", {"cuda_graph_impl": "none"}, ("none", [])),
        # an implementation of its own from 0.6 on
        ("0.3.0", {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, ("local", "full_iteration")),
        ("0.6.0", {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, ("full_iteration", [])),
    ],
)
def test_graphs_and_their_scope(version: str, graph: dict[str, str], expected: tuple[str, Any]) -> None:
    args = resolved(version, **DEEPSEEK, **graph)
    assert (args.cuda_graph_impl, args.cuda_graph_scope) == expected


def test_a_pipeline_of_another_size_gets_its_layout() -> None:
    own, name = resolved("0.3.0", **DEEPSEEK).pipeline_model_parallel_layout, "pipeline_model_parallel_layout"
    cases: tuple[tuple[dict[str, Any], str | None], ...] = (
        ({"pp": 8, "vp": 1}, "Et*8|(t*8|)*6t*5mL"),
        ({"pp": 1, "vp": 1}, None),
        ({"pp": 32}, own),
        ({"pp": 8, name: "EtL"}, "EtL"),
    )
    for given, layout in cases:
        assert getattr(resolved("0.3.0", **DEEPSEEK, **given), name) == layout, given


Ship = Callable[[str, Path], Release]


@pytest.fixture
def ship(monkeypatch: pytest.MonkeyPatch) -> Ship:
    """Let the presets of a clone be those of a release: ship("0.3.9", clone)."""
    shipped: dict[str, PresetCatalog] = {}
    monkeypatch.setattr(find, "catalog", lambda release: shipped.get(release.version) or catalog(release))

    def made(version: str, clone: Path) -> Release:
        source = read_source(clone)
        assert source
        shipped[version] = from_text(as_text(source, tuple(FIELDS)))
        return Release(version, f"test {clone}")

    return made


def test_variants_and_their_fallbacks(clone: Path, ship: Ship) -> None:
    old = ship("0.3.9", clone)
    assert resolved(old, **TOY, num_gpus=16).gb == 32  # v2 is not there: v1
    assert resolved(old, **TOY, num_gpus=16, config_variant="large_scale").gb == 8
    assert find_preset(ResolvedCmdArgs(**TOY, config_variant="v9"), old) is None
    plain = {**TOY, "model_recipe_name": "plain", "gpu_type": "b200"}
    assert resolved(old, **plain, num_gpus=16, config_variant="v9").gb == 48


def test_a_batch_that_the_builder_changed(clone: Path, ship: Ship) -> None:
    point = {**TOY, "compute_dtype": "fp8_cs", "num_gpus": 32}
    assert resolved(ship("0.3.9", clone), **point).gb == 64
    assert resolved(ship("0.5.9", clone), **point).gb == 40


def test_flat_presets_by_size(flat_clone: Path, ship: Ship) -> None:
    flat = ship("0.7.0", flat_clone)
    sizes = [
        (resolved(flat, **TOY, num_gpus=size).tp, resolved(flat, **TOY, num_gpus=size).gb) for size in (8, 32, 64, 128)
    ]
    assert sizes == [(1, 16), (2, 64), (2, 128), (2, 64)]
    assert resolved(flat, **TOY, num_gpus=64, config_variant="v1").tp == 2
    assert resolved(flat, **TOY, num_gpus=64, config_variant="large").tp == 4


@pytest.mark.parametrize(
    "cmd_args",
    [
        {"gpu_type": "a100"},
        {"model_family_name": "toys"},
        {"model_recipe_name": "other"},
        {"config_variant": "v9"},
        {"use_recipes": True},
        {"launcher": "embedded"},
    ],
    ids=[
        "gpu type a100",
        "model family name toys",
        "model recipe name other",
        "config variant v9",
        "use recipes True",
        "launcher embedded",
    ],
)
def test_why_there_is_none(clone: Path, ship: Ship, sentence: Sentence, cmd_args: dict[str, Any]) -> None:
    args = ResolvedCmdArgs(**{**TOY, **cmd_args})
    release = ship("0.3.9", clone)
    assert find_preset(args, release) is None
    sentence(why_no_preset(args, release))


def test_a_release_that_is_not_known(sentence: Sentence) -> None:
    assert find_preset(ResolvedCmdArgs(**LLAMA), None) is None
    sentence(why_no_preset(ResolvedCmdArgs(**LLAMA), None))
    sentence(why_no_preset(ResolvedCmdArgs(**LLAMA), Release("9.9.9", "test")))


def test_a_known_tag_wins_over_the_number_in_a_clone(clone: Path) -> None:
    assert find_release("v0.3.0", clone) == Release("0.3.0", "the installed old", clone)
    assert find_release("main", clone) == Release("0.3.9", "the installed old", clone, is_known=False)


@pytest.mark.parametrize(
    ("commit", "is_known"), [("v0.3.0", True), ("0.3.0", True), ("r0.3.0", True), ("main", False), ("abcdef1", False)]
)
def test_presets_of_an_installed_commit_that_is_no_release_are_not_known(
    clone: Path, commit: str, is_known: bool
) -> None:
    (clone / "src/megatron/bridge/package_info.py").write_text("MAJOR = 0\nMINOR = 3\nPATCH = 0\n")
    release = find_release(commit, clone)
    args = ResolvedCmdArgs(**LLAMA, num_gpus=256)
    assert (find_preset(args, release) is not None) is is_known
    unknown = "no presets of Megatron-Bridge at this commit (the installed old has version 0.3.0)"
    assert (unknown in why_no_preset(args, release)) is not is_known


def test_fast_path() -> None:
    preset = find_preset(ResolvedCmdArgs(**LLAMA, num_gpus=256), find_release("v0.3.0"))
    assert preset
    assert resolve_sizes({}, 256, preset) == {**preset.values}
    assert resolve_sizes({"tp": 1}, 256, preset) == {**preset.values, "tp": 1, "sequence_parallel": False}


def test_extracted_files_say_what_was_read(
    clone: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: Sentence
) -> None:
    assert extract([str(tmp_path), f"0.3.9={clone}"]) == 0
    lines = (tmp_path / "0.3.9.csv").read_text().splitlines()
    assert lines[:2] == ["# is_flat = false", "# default_variant = v2"]
    assert extract([str(tmp_path), f"0.3.9={tmp_path}"]) == 2
    sentence(capsys.readouterr().err)
    assert extract([]) == 2
