"""Sharded parameters and offloaded optimizer state change no loss; checkpoints go on where they stopped."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.golden import Sentence

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.compat.versions import installed_release  # noqa: E402
from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.startup.prepare import prepare  # noqa: E402
from tests.training.conftest import Train  # noqa: E402

pytestmark = [pytest.mark.process, pytest.mark.kept_ranks]

STEPS, TOLERANCE = 4, 1e-5
SHARDED: dict[str, Any] = {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "optim_grads_params"}
META = {"init_model_with_meta_device": True}
KINDS: dict[str, dict[str, Any]] = {
    "fsdp2": {"dist": {"use_torch_fsdp2": True}},
    "megatron-fsdp": {"ddp": SHARDED, "model": META, "checkpoint": {"ckpt_format": "fsdp_dtensor"}},
}
OFFLOADED = {"optimizer": {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}}


def _sections(kind: dict[str, Any], **checkpoint: Any) -> dict[str, Any]:
    model = {"num_layers": 2, **kind.get("model", {})}
    logger = {"log_params_norm": True}
    both = {**kind.get("checkpoint", {}), **checkpoint}
    return {
        **kind,
        "model": model,
        "train": {"train_iters": STEPS, "global_batch_size": 4},
        "logger": logger,
        "checkpoint": both,
    }


def _assert_near(found: dict[int, float], expected: dict[int, float]) -> None:
    assert found.keys() == expected.keys()
    assert max(abs(found[step] - expected[step]) for step in found) < TOLERANCE


@pytest.mark.parametrize("name", KINDS)
def test_shards_train_as_replicas_and_resume(train: Train, tmp_path: Path, name: str) -> None:
    replicas = train(2, _sections({"model": {}}))
    saves = installed_release() == "0.19"
    place = str(tmp_path / "saved")
    whole = train(2, _sections(KINDS[name], **({"save": place, "save_interval": 2} if saves else {})))
    _assert_near(whole.losses, replicas.losses)
    norms = [[record["params_norm"] for record in run.records] for run in (whole, replicas)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    if saves:
        resumed = train(2, _sections(KINDS[name], load=place, ckpt_step=2))
        assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}
        other = {"save": str(tmp_path / "other"), "save_interval": 3}
        alone = train(1, _sections(KINDS[name], load=place, ckpt_step=2, **other))
        _assert_near(alone.losses, resumed.losses)
        again = train(2, _sections(KINDS[name], load=other["save"], ckpt_step=3))
        _assert_near(again.losses, {4: resumed.losses[4]})


EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "expert_model_parallel_size": 2}
BETWEEN = {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"}


@pytest.mark.skipif(installed_release() != "0.19", reason="older releases add up gradients otherwise")
@pytest.mark.parametrize(("ranks", "ddp"), [(2, {}), (4, BETWEEN)])
def test_gradients_are_divided_once(train: Train, ranks: int, ddp: dict[str, Any]) -> None:
    """Every rank of a group has other experts, and several micro-batches."""
    kind = KINDS["megatron-fsdp"]
    replicas = train(ranks, _sections({"model": EXPERTS}))
    shards = train(ranks, _sections({**kind, "ddp": {**SHARDED, **ddp}, "model": {**META, **EXPERTS}}))
    _assert_near(shards.losses, replicas.losses)
    for norm in ("grad_norm", "params_norm"):
        found, expected = ([record[norm] for record in run.records] for run in (shards, replicas))
        assert found == pytest.approx(expected, rel=1e-5)


def test_an_offloaded_optimizer_trains_and_resumes(train: Train, tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    plain = train(1, _sections({}))
    whole = train(1, _sections(OFFLOADED, save=place, save_interval=2))
    _assert_near(whole.losses, plain.losses)
    resumed = train(1, _sections(OFFLOADED, load=place, ckpt_step=2))
    assert resumed.losses == {step: whole.losses[step] for step in (3, 4)}


def test_a_distributed_optimizer_is_offloaded_in_the_precision_of_a_recipe(train: Train) -> None:
    """The recipe makes it 16 bits, which the distributed optimizer needs for that."""
    both = {"optimizer": {"use_distributed_optimizer": True}, "ddp": {"use_distributed_optimizer": True}}
    offloaded = {**both, "optimizer": {**both["optimizer"], **OFFLOADED["optimizer"]}}
    plain, other = (train(1, _sections(kind), "mixed_precision=bf16_mixed").losses for kind in (both, offloaded))
    assert other.keys() == plain.keys()
    assert max(abs(other[step] - plain[step]) for step in plain) < 1e-3
    refused = train(1, _sections(offloaded), code=2)
    assert "optimizer_cpu_offload = True cannot be combined with use_distributed_optimizer" in refused.stderr


def test_the_first_step_keeps_weights_that_were_loaded(train: Train, tmp_path: Path) -> None:
    half = {"model": {"dtype": "bf16"}}
    saved = train(1, _sections(half, save=str(tmp_path / "saved"), save_interval=STEPS))
    kept = {"pretrained_checkpoint": str(tmp_path / "saved")}
    plain, offloaded = (train(1, _sections({**half, **kind}, **kept)).losses for kind in ({}, OFFLOADED))
    _assert_near(offloaded, plain)
    assert max(plain.values()) < saved.losses[1]  # random weights would be back in the second step


@pytest.mark.parametrize(
    "sections",
    [
        {"dist": {"use_torch_fsdp2": True}, "optimizer": {"use_distributed_optimizer": True}},
        {"model": META},
        {"model": {"cpu_offloading": True, "cpu_offloading_num_layers": 1}},
        pytest.param(
            {"ddp": SHARDED},
            marks=pytest.mark.skipif(installed_release() != "0.16", reason="only 0.16 adds up gradients twice"),
        ),
        {"ddp": {**SHARDED, "outer_dp_sharding_strategy": "optim"}},
        {"ddp": SHARDED, "train": {"check_weight_hash_across_dp_replicas_interval": 1}},
    ],
    ids=[
        "use torch fsdp2 True",
        "init model with meta device",
        "needs Transformer Engine",
        "the model on one data",
        "num distributed optimizer instances 1",
        "have no replicas",
    ],
)
def test_refused_before_anything_starts(tiny: Any, sentence: Sentence, sections: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(ConfigContainer.from_dict(tiny(sections)))
    sentence(caught)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(installed_release() != "0.19", reason="older releases save no sharded parameters")
def test_a_checkpoint_of_the_other_format(train: Train, tmp_path: Path) -> None:
    place = str(tmp_path / "saved")
    train(1, _sections({}, save=place, save_interval=STEPS))
    done = train(1, _sections(KINDS["megatron-fsdp"], load=place), code=2)
    assert "is in the format 'torch_dist', which needs ddp.use_megatron_fsdp = False" in done.stderr
    assert json.loads((Path(place) / "iter_0000004" / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
