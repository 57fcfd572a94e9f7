"""Shipped points at their true size and in their true world, one of every family and number format, as a rehearsal
builds them: with Transformer Engine's layers, compared with the estimate."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge import pipeline
from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.estimate.point import estimate_point
from cloudai_mbridge.plan.run_plan import RunPlan
from cloudai_mbridge.plan.walk import PointWalk
from cloudai_mbridge.training.flops import flops_per_token
from tests.figures import Figure

# isort: split
from tests.transformer_engine.engine import MODELS  # noqa: F401 - skips where Transformer Engine is not importable

pytestmark = [pytest.mark.process]
ROOT = Path(__file__).parents[2]
SYSTEMS = ("gb200", "gb300", "h100")
# system, test, number format
SAMPLE = [
    *(
        ("gb200", name, form)
        for name in ("llama3_8b", "llama3_70b", "llama31_405b")
        for form in ("bf16", "fp8_cs", "nvfp4")
    ),
    *(("gb200", name, form) for name in ("qwen3_235b_a22b", "deepseek_v3") for form in ("bf16", "fp8_mx", "nvfp4")),
    *(("gb200", name, form) for name in ("qwen3_30b_a3b", "gpt_oss_120b") for form in ("bf16", "fp8_mx")),
    ("gb300", "llama31_405b", "bf16"),
    ("gb300", "gpt_oss_120b", "fp8_mx"),
    ("h100", "qwen3_30b_a3b", "fp8_cs"),
    ("h100", "deepseek_v3", "fp8_sc"),
    ("h100", "gpt_oss_120b", "fp8_cs"),
]
# What Transformer Engine reads while it is imported
_AT_IMPORT = "NVTE_CUTEDSL_FUSED_GROUPED_MLP"
_STAND_IN = (
    "def __getattr__(name):\n    if name.startswith('__'): raise AttributeError(name)\n    return type(name, (), {})\n"
)
# DDP pads its buffers, so that every rank has a share as large, and as long as NCCL likes
_PADDING = 1e-6

Events = dict[str, list[dict[str, Any]]]


def _steps(events: Events) -> dict[str, dict[str, Any]]:
    return {job: event for job, each in events.items() for event in each if event["event"] == "step"}


def _runs() -> Iterator[tuple[str, RunPlan, Any]]:
    """Yield the sample: the kind of GPU, the run, and the memory of its stages as estimated."""
    for system in SYSTEMS:
        request = pipeline.Request(
            ROOT / f"systems/{system}.toml", ROOT / f"conf/scenarios/{system}.toml", ROOT / "test_defs", Path("unused")
        )
        loaded = pipeline.load(request)
        prepared = pipeline.plan_loaded(loaded)
        for test in loaded.scenario.tests:
            walk = PointWalk(test, prepared.system, RuleSet.RELEASE, None)
            for point in walk:
                form = point.coordinates["compute_dtype"]
                if (system, test.run.id.removesuffix(f"_{system}"), form) in SAMPLE:
                    run = next(
                        run
                        for run in prepared.plan.runs
                        if run.test_id == test.run.id and run.coordinates == point.coordinates
                    )
                    memory = estimate_point(walk.estimates.request(point)).memory
                    assert memory is not None
                    yield system, run, memory.stages


@pytest.fixture(scope="module")
def runs() -> list[tuple[str, RunPlan, Any]]:
    found = list(_runs())
    assert len(found) == len(SAMPLE) == 24
    return found


@pytest.fixture(scope="module")
def events(runs: list[tuple[str, RunPlan, Any]], tmp_path_factory: pytest.TempPathFactory) -> Events:
    """Rehearse all of them, with one process for each kind of GPU and environment. The first rank takes a step."""
    directory = tmp_path_factory.mktemp("rehearsal")
    (directory / "deep_ep.py").write_text(_STAND_IN)
    groups = defaultdict[tuple[str, str, str], list[dict[str, Any]]](list)
    for number, (gpu, run, _) in enumerate(runs):
        config = directory / f"{number}.json"
        config.write_text(json.dumps(run.training_config))
        env = {**run.recipe_env, **run.env}
        world = run.num_nodes * run.ranks_per_node
        job = {"id": f"{gpu}/{run.key}", "config": str(config), "world": world, "gpus_per_node": run.ranks_per_node}
        for level, ranks in {"step": [0], "states": [world // 2, world - 1]}.items():
            groups[gpu, env.get(_AT_IMPORT, "0"), level].append({**job, "env": env, "ranks": ranks})
    path = os.pathsep.join((str(directory), os.environ.get("PYTHONPATH", "")))

    def rehearsed(gpu: str, at_import: str, level: str) -> list[dict[str, Any]]:
        listed = directory / f"jobs-{gpu}-{at_import}-{level}"
        listed.write_text("\n".join(map(json.dumps, groups[gpu, at_import, level])))
        program = [sys.executable, "-m", "cloudai_mbridge.training.dry", "--jobs", str(listed), "--gpu", gpu]
        done = subprocess.run(
            [*program, "--level", level],
            env={**os.environ, "PYTHONPATH": path, _AT_IMPORT: at_import},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stdout, done.stderr[-3000:]
        return [event for line in done.stdout.splitlines() if "job" in (event := json.loads(line))]

    found: Events = defaultdict(list)
    with ThreadPoolExecutor(2) as pool:
        for event in chain.from_iterable(pool.map(rehearsed, *zip(*groups, strict=True))):
            found[event["job"]].append(event)
    return found


def test_every_rank_of_the_sample_is_built(events: Events, figure: Figure) -> None:
    refused = [event for each in events.values() for event in each if event["event"] == "refused"]
    assert [(event["job"], event.get("rank"), event["message"]) for event in refused] == []
    built = [event for each in events.values() for event in each if event["event"] == "built"]
    cpu, memory = max(event["cpu_s"] for event in built), max(event["peak_mib"] for event in built)
    figure(f"{len(events)} of {len(SAMPLE)} build, {len(built)} ranks; at most {cpu:.1f} CPU s and {memory} MiB a rank")
    assert len(built) == 3 * len(SAMPLE)
    assert memory < 1024


def test_states_are_those_of_the_estimate(events: Events, runs: list[tuple[str, RunPlan, Any]]) -> None:
    different = []
    for gpu, run, stages in runs:
        is_sharded = bool(run.training_config["ddp"].get("use_megatron_fsdp"))
        for event in events[f"{gpu}/{run.key}"]:
            if event["event"] != "built":
                continue
            stage = stages[event["place"]["pp"]]
            optimizer = event["optimizer"]["main_bytes"] + event["optimizer"]["moment_bytes"]
            pairs = {"parameters": (event["parameters"]["count"], stage.parameters)}
            if not is_sharded:
                pairs |= {
                    "gradients": (event["gradients"]["bytes"], stage.terms["gradients"]),
                    "optimizer": (optimizer, stage.terms["optimizer"]),
                }
            different += [
                (run.key, event["rank"], name, built, estimated)
                for name, (built, estimated) in pairs.items()
                if abs(built - estimated) > (0 if name == "parameters" else _PADDING * estimated)
            ]
    assert different == []


def test_activations_are_those_of_the_estimate(
    events: Events, runs: list[tuple[str, RunPlan, Any]], figure: Figure
) -> None:
    """Those that Transformer Engine's layers keep for the backward pass at its fullest, within 3 %."""
    steps, different = _steps(events), dict[str, float]()
    for gpu, run, stages in runs:
        step = steps[f"{gpu}/{run.key}"]
        kept = step["activations"]
        is_expandable = "expandable_segments:True" in {**run.recipe_env, **run.env}.get("PYTORCH_CUDA_ALLOC_CONF", "")
        assert is_expandable == (step["reserved_bytes"] == max(step["peaks"].values()))
        if kept is not None:
            assert max(step["peaks"].values()) > kept["peak_bytes"]
        assert (kept is None) == bool(run.training_config["model"].get("cpu_offloading"))  # in the host's memory
        if kept is not None:
            different[run.key] = stages[0].activations / kept["peak_bytes"] - 1
    assert len(different) >= 20
    worst = max(different, key=lambda key: abs(different[key]))
    figure(f"activations of {len(different)}: worst {different[worst]:+.2%} ({worst})")
    assert {key: each for key, each in different.items() if abs(each) > 0.03} == {}


def test_flops_are_those_of_the_formula(events: Events, runs: list[tuple[str, RunPlan, Any]], figure: Figure) -> None:
    """Of one stage, whose ranks all do the same, without recomputation."""
    steps, ratios = _steps(events), dict[str, float]()
    for gpu, run, _ in runs:
        model, step = run.training_config["model"], steps[f"{gpu}/{run.key}"]
        if model.get("pipeline_model_parallel_size", 1) > 1 or model.get("recompute_granularity"):
            continue
        tokens = run.training_config["train"]["global_batch_size"] * model["seq_length"]
        router = 6 * model["hidden_size"] * (model.get("num_moe_experts") or 0) * model["num_layers"]
        expected = (flops_per_token(SimpleNamespace(**model)) + router) * tokens / (run.num_nodes * run.ranks_per_node)
        ratios[run.key] = sum(step["flops"].values()) / expected
    figure(f"FLOPs of {len(ratios)}: {min(ratios.values()):.5f} to {max(ratios.values()):.5f} of the formula")
    assert {key: each for key, each in ratios.items() if abs(each - 1) > 1e-3} == {}
    assert len(ratios) >= 5
