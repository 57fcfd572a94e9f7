"""What recipes set for a preset of upstream's, beside the arguments."""

from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.presets import loop_preset, newest_release, with_loop_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes import Recipe, load_recipe, recipe_names
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults
from cloudai_mbridge.recipes.load import recipe_for
from cloudai_mbridge.recipes.presets import TUNED, user_buffers, with_preset_of
from cloudai_mbridge.training import comm_overlap
from cloudai_mbridge.training.compat.versions import GPU, TRANSFORMER_ENGINE
from tests.cases import every
from tests.golden import Sentence

QWEN = {"model_recipe_name": "qwen3_30b_a3b", "gpu_type": "gb200", "compute_dtype": "fp8_mx", "num_gpus": 8}
KIMI = {"model_recipe_name": "kimi_k2", "gpu_type": "h100", "num_gpus": 1024}
LLAMA = {"model_recipe_name": "llama3_70b", "gpu_type": "gb200", "num_gpus": 64}


def _recipe(**given: Any) -> tuple[Recipe, ResolvedCmdArgs]:
    args = ResolvedCmdArgs(launcher="embedded", **given)
    preset = loop_preset(args, args.gpu_type)
    recipe = with_preset_of(recipe_for(args.model_recipe_name, args.task), preset)
    return recipe, with_recipe_defaults(with_loop_preset(args, preset).args, recipe)


def _config(
    given: dict[str, Any], lacking: tuple[str, ...] = (), core: str | None = None, **extra: str
) -> dict[str, Any]:
    recipe, args = _recipe(**given)
    return training_config(recipe, args, {key.replace("__", "."): text for key, text in extra.items()}, core, lacking)


def test_every_block_is_of_a_preset_and_sets_fields_that_exist() -> None:
    known = catalog(newest_release())
    assert known
    for name in (name for name in recipe_names() if load_recipe(name).blocks):
        rows = [row for row in known.rows if row.recipe == name]
        seen: set[int] = set()
        for row in rows:
            variant = {"config_variant": row.variant} if row.variant else {}
            given = {"model_recipe_name": name, "gpu_type": row.gpu, "compute_dtype": row.compute_dtype, **variant}
            given |= {"task": row.task, "pretrained_checkpoint": "/c"}
            recipe, args = _recipe(**given, num_gpus=row.num_gpus)
            assert recipe is _recipe(**given, num_gpus=row.num_gpus)[0]  # estimates are cached by it
            assert recipe.base
            seen |= set(map(id, recipe.chosen))
            training_config(recipe, args, {})
        assert seen == set(map(id, load_recipe(name).blocks)), name


def test_a_block_goes_with_its_arguments_and_what_a_test_sets_wins() -> None:
    model = _config(QWEN)["model"]
    assert (model["moe_paged_stash"], model["moe_token_dispatcher_type"]) == (True, "flex")
    assert "moe_paged_stash" not in _config(QWEN, core="0.17")["model"]  # which has none
    without_graphs = _config(QWEN | {"cuda_graph_impl": "none", "moe_flex_dispatcher_backend": "None"})["model"]
    assert "moe_paged_stash" not in without_graphs
    assert without_graphs["moe_token_dispatcher_type"] == "alltoall"
    set_by_name = _config(QWEN | {"lr": 1e-3}, model__moe_paged_stash="false", ddp__bucket_size="7")
    assert set_by_name["model"]["moe_paged_stash"] is False
    assert set_by_name["optimizer"]["lr"] == 1e-3
    assert set_by_name["comm_overlap"]["bucket_size"] == set_by_name["ddp"]["bucket_size"] == 7  # what decides, too


def test_muon_is_the_presets_unless_a_test_names_adam() -> None:
    muon = _config(KIMI)
    assert muon["optimizer"]["optimizer"] == "dist_muon"
    assert not muon["ddp"]["use_distributed_optimizer"]
    adam = _config(KIMI | {"optimizer_type": "adam"})
    assert (adam["optimizer"]["optimizer"], adam["ddp"]["use_distributed_optimizer"]) == ("adam", True)


def test_a_machine_falls_back_for_what_a_recipe_chooses_alone(sentence: Sentence) -> None:
    lacking = (GPU, TRANSFORMER_ENGINE)
    sizes = {"tp": 2, "recompute_modules": "core_attn", "cuda_graph_impl": "none", "use_megatron_fsdp": False}
    given = LLAMA | sizes | {"activation_offload_layers": 0}
    assert _config(given)["comm_overlap"]["tp_comm_overlap"] is True
    assert _config(given, lacking)["comm_overlap"]["tp_comm_overlap"] is False
    with pytest.raises(BadInput, match=r"comm_overlap\.tp_comm_overlap") as caught:
        _config(given, lacking, comm_overlap__tp_comm_overlap="true")
    sentence(caught)


@every("name", TUNED)
def test_user_buffers_are_those_of_the_training_loop(name: str) -> None:
    layer = getattr(comm_overlap, f"userbuffers_{name}")
    for slot, values in user_buffers(name).items():
        if slot != "_target_":
            kind = getattr(comm_overlap, values["_target_"].rpartition(".")[2])
            assert kind(**{key: value for key, value in values.items() if key != "_target_"}) == getattr(layer, slot)
