"""The variables that recipes set, by GPU, tensor and context parallelism, FSDP and graphs."""

import re
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge.environment import CONNECTIONS, connections, gpu_label, recipe_environment
from cloudai_mbridge.megatron_bridge.preset_rows import catalog
from cloudai_mbridge.megatron_bridge.presets import loop_preset, newest_release, with_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem
from tests.cases import every


def of_loop(recipe: str, gpu: str, **cmd_args: Any) -> dict[str, str]:
    """Return the variables of a point of the embedded loop, the parallel sizes from its preset."""
    args = ResolvedCmdArgs.model_validate({"launcher": "embedded", "model_recipe_name": recipe, **cmd_args})
    preset = loop_preset(args, gpu)
    trained = with_preset(args, preset).args
    trained = trained.model_copy(update={"use_megatron_fsdp": None, "nccl_ub": None, "cuda_graph_impl": None})
    return recipe_environment(trained.model_copy(update=cmd_args), gpu, preset)


@every(
    ("gpu", "args", "expected"),
    [
        ("h100", {}, 32),
        ("h100", {"tp": 2}, 1),
        ("h100", {"cp": 2}, 1),
        ("h100", {"tp": 2, "use_megatron_fsdp": True}, 32),
        ("h100", {"tp": 2, "moe_a2a_overlap": True}, 8),
        ("a100", {"tp": 2}, 1),
        ("gb200", {"tp": 2}, 32),
        ("gb300", {"cp": 8}, 32),
        ("toaster", {"tp": 2}, None),
        ("", {"tp": 2}, None),
    ],
)
def test_connections(gpu: str, args: dict[str, Any], expected: int | None) -> None:
    assert connections(ResolvedCmdArgs(**args), gpu) == expected


def test_connections_are_those_of_the_recipes() -> None:
    """Of 428, all but those for H100 that overlap through DeepEP or HybridEP, which the loop does not."""
    presets = catalog(newest_release())
    assert presets
    others = set()
    for row in presets.rows:
        assert all(re.fullmatch(r"[A-Z][A-Z0-9_]*=[A-Za-z0-9_:,]+", text) for text in row.values["env_vars"])
        values = {name: row.values[name] for name in ("tp", "cp", "use_megatron_fsdp", "moe_a2a_overlap")}
        found = f"{CONNECTIONS}={connections(ResolvedCmdArgs(**values), row.gpu)}"
        if found not in row.values["env_vars"]:
            others.add((row.recipe, row.gpu, row.variant))
    assert others == {
        ("qwen3_235b_a22b", "h100", "hybridep_dev"),
        *((name, "h100", "") for name in ("qwen35_vl_122b_a10b", "qwen35_vl_397b_a17b", "qwen3_vl_235b_a22b")),
    }


def test_a_recipe_sets_more_than_connections() -> None:
    assert of_loop("llama3_8b", "h100", num_gpus=8) == {
        CONNECTIONS: "1",
        **dict.fromkeys(("NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE"), "0"),
        **dict.fromkeys(("NVTE_BWD_LAYERNORM_SM_MARGIN", "NVTE_FWD_LAYERNORM_SM_MARGIN"), "20"),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "TORCH_NCCL_AVOID_RECORD_STREAMS": "1",
        "TORCH_NCCL_HIGH_PRIORITY": "1",
    }


def test_they_follow_what_a_test_changes() -> None:
    assert of_loop("llama3_8b", "h100", num_gpus=8, cp=1)[CONNECTIONS] == "32"
    assert of_loop("llama3_8b", "h100", num_gpus=8, cp=1, tp=2)[CONNECTIONS] == "1"
    assert of_loop("llama3_8b", "h100", num_gpus=8, use_megatron_fsdp=True)[CONNECTIONS] == "32"
    overlapping = of_loop("qwen3_235b_a22b", "h100", num_gpus=256)
    without = of_loop("qwen3_235b_a22b", "h100", num_gpus=256, moe_a2a_overlap=False)
    assert (overlapping[CONNECTIONS], without[CONNECTIONS]) == ("8", "1")
    assert of_loop("llama3_70b", "h100", num_gpus=64)["NCCL_P2P_NET_CHUNKSIZE"] == "2097152"
    assert "NCCL_P2P_NET_CHUNKSIZE" not in of_loop("llama3_70b", "h100", num_gpus=64, pp=1)
    experts = "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN"
    assert of_loop("qwen3_30b_a3b", "h100", num_gpus=16)[experts] == "8"
    assert of_loop("qwen3_30b_a3b", "h100", num_gpus=16, ep=4)[experts] == "4"


def test_what_only_graphs_and_user_buffers_need_goes_with_them() -> None:
    without, having = (of_loop("llama3_8b", "gb200", num_gpus=8, **more) for more in ({}, {"cuda_graph_impl": "local"}))
    names = "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_AVOID_RECORD_STREAMS"
    assert [without[name] for name in names] == ["expandable_segments:True", "1"]
    assert [having[name] for name in names] == ["expandable_segments:True,graph_capture_record_stream_reuse:True", "0"]
    for recipe in ("llama3_70b", "llama3_8b"):  # the first one's has user buffers, the other one's has none
        assert of_loop(recipe, "gb300", num_gpus=64)["NCCL_NVLS_ENABLE"] == "0"
        assert of_loop(recipe, "gb300", num_gpus=64, nccl_ub=True)["NCCL_NVLS_ENABLE"] == "1"


@pytest.mark.parametrize("gpu", ["h100", "gb200"])
def test_without_a_preset_only_connections_are_known(gpu: str) -> None:
    assert of_loop("gpt_tiny", gpu, tp=2) == {CONNECTIONS: "1" if gpu == "h100" else "32"}
    assert of_loop("gpt_tiny", "", tp=2) == {}


def test_the_gpu_is_the_tests_else_the_clusters() -> None:
    cluster = SlurmSystem(
        name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpu_type="gb200"
    )
    here = LocalSystem(name="here", scheduler="local", gpu_type="gb200")
    assert {gpu_label(ResolvedCmdArgs(gpu_type="H100"), system) for system in (cluster, here)} == {"h100"}
    assert [gpu_label(ResolvedCmdArgs(), system) for system in (cluster, here, None)] == ["gb200", "", ""]
