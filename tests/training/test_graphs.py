"""CUDA graphs without a GPU: what is called when, and that Megatron-Core's wrapper trains as the loop without it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cases import every

torch = pytest.importorskip("torch")

from cloudai_mbridge.training.compat import cuda_graphs  # noqa: E402
from tests.training.conftest import Finished, run_ranks  # noqa: E402

SCRIPT = Path(__file__).with_name("train_with_stand_ins.py")
SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2, "num_query_groups": 2}
FULL = {"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration", "cuda_graph_warmup_steps": 2}
OF_LAYERS = {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"], "cuda_graph_warmup_steps": 2}
EVALUATED = {"eval_interval": 2, "eval_iters": 2}
GATHERED = {
    "ddp": {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "optimizer": {"use_distributed_optimizer": True, "overlap_param_gather": True},
}

Run = Callable[..., dict[str, list[str]]]


@pytest.fixture
def in_turn(tmp_path: Path, tiny: Callable[..., dict[str, Any]]) -> Run:
    """Train configurations in the same processes; return the lines of each."""

    def run(processes: int, **runs: dict[str, Any]) -> dict[str, list[str]]:
        for name, sections in runs.items():
            model = {**SMALL, "seq_length": 16, **sections.pop("model", {})}
            train = {"train_iters": 6, "global_batch_size": 4, **sections.pop("train", {})}
            (tmp_path / f"{name}.json").write_text(json.dumps(tiny({"model": model, "train": train, **sections})))
        done = run_ranks(processes, [str(SCRIPT), *(f"{name}.json" for name in runs)], tmp_path)
        parts = re.split(r"^LAYOUT (\w+)\n", done.stdout, flags=re.MULTILINE)
        return {name: text.splitlines() for name, text in zip(parts[1::2], parts[2::2], strict=True)}

    return run


def numbers(lines: list[str]) -> tuple[dict[int, float], list[str]]:
    """Return the losses by step, and the lines of evaluations."""
    losses = Finished(0, "\n".join(lines), "").losses
    return losses, [line for line in lines if line.startswith(" validation loss at")]


def events(lines: list[str]) -> list[str]:
    """Return what the stand-ins say, and the steps."""
    found = []
    for line in lines:
        if line.startswith(("HELPER", "CREATE", "MANUAL", "DELETE", "CAPTURED")):
            found.append(line)
        elif line.startswith("MBRIDGE_STEP"):
            found.append(f"step {json.loads(line.partition(' ')[2])['step']}")
        elif "validation loss at" in line:
            found.append("evaluated")
    return found


@pytest.mark.process
def test_a_full_iteration_trains_as_without_its_graph(in_turn: Run) -> None:
    """Warm-up, capture, replay on the static buffers; an evaluation has a graph of its own; both are deleted."""
    dropout = {"hidden_dropout": 0.1}
    runs = {
        "plain": {"model": dropout, "validation": EVALUATED},
        "full": {"model": {**FULL, **dropout}, "validation": EVALUATED},
        "again": {"model": FULL, "train": {"exit_interval": 3}},
    }
    lines = in_turn(1, **runs)
    losses, evaluated = numbers(lines["plain"])
    assert len(losses) == 6
    assert len(evaluated) == 5
    assert numbers(lines["full"]) == (losses, evaluated)
    steps = [f"step {number}" for number in range(1, 7)]
    assert [event for event in events(lines["full"]) if event != "evaluated"] == [
        *steps[:2],
        "CAPTURED training",
        *steps[2:4],
        "CAPTURED validation",
        *steps[4:],
    ]
    assert events(lines["again"]) == [*steps[:2], "CAPTURED training", steps[2]], "the run has left early"


@pytest.mark.process
@pytest.mark.parametrize("warmup", [0, 2])
def test_graphs_of_layers_are_captured_once_with_the_hooks_off(in_turn: Run, warmup: int) -> None:
    """The hooks that gather parameters are handed over when they are on: a replay calls no module's own."""
    model = {**OF_LAYERS, "cuda_graph_warmup_steps": warmup}
    sections = {**GATHERED, "train": {"train_iters": 4, "iterations_to_skip": [2]}}
    lines = in_turn(
        2,
        plain={**sections, "train": dict(sections["train"])},
        layers={**sections, "model": model, "train": dict(sections["train"])},
    )
    assert numbers(lines["layers"]) == numbers(lines["plain"])
    captured = {
        0: ["CREATE 1 hooks=False", "MANUAL hooks=True", "step 1", "step 2", "step 4"],
        2: ["step 1", "step 2", "CREATE 1 hooks=False", "MANUAL hooks=True", "step 4"],
    }[warmup]
    assert events(lines["layers"]) == ["HELPER 16 1 1 transformer_engine", *captured, "DELETE"]


@every(
    ("fields", "kind", "has_attention"),
    [
        ({"enable_cuda_graph": True}, "local", True),
        ({"external_cuda_graph": True, "cuda_graph_scope": ["mlp"]}, "transformer_engine", False),
        ({"external_cuda_graph": True, "cuda_graph_scope": "attn,mlp"}, "transformer_engine", True),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "full_iteration", True),
        ({"cuda_graph_impl": "none", "cuda_graph_scope": "attn"}, "", False),
        ({}, "", False),
    ],
)
def test_names_of_every_release(fields: dict[str, Any], kind: str, has_attention: bool) -> None:
    from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider

    model = GPTModelProvider(num_layers=2, hidden_size=8, num_attention_heads=2, transformer_impl="local", **fields)
    for _ in range(2):  # the checks of Megatron-Core are repeated
        cuda_graphs.use_new_names(model)
        model.run_post_init()
        assert cuda_graphs.implementation(model) == kind
        assert cuda_graphs.captures_attention(model) is has_attention


@every(("te", "impl"), [(True, "transformer_engine"), (False, "local"), (False, "none")])
def test_the_tracker_of_random_numbers(te: bool, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloudai_mbridge.training import initialize

    asked: dict[str, Any] = {}
    monkeypatch.setattr(initialize, "model_parallel_cuda_manual_seed", lambda seed, **more: asked.update(more))
    monkeypatch.setattr(initialize.mpu, "get_pipeline_model_parallel_rank", lambda: 1)
    monkeypatch.setattr(initialize, "current_device", lambda: torch.device("cuda"))
    rng = SimpleNamespace(seed=1, te_rng_tracker=te, inference_rng_tracker=False, data_parallel_random_init=False)
    config: Any = SimpleNamespace(rng=rng, model=SimpleNamespace(cuda_graph_impl=impl, cuda_graph_scope=None))
    initialize._seed_generators(config)
    assert asked == {
        "te_rng_tracker": te,
        "inference_rng_tracker": False,
        "use_cudagraphable_rng": impl != "none",
        "force_reset_rng": True,
    }


def test_states_of_a_tracker_that_graphs_can_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are kept as tensors, and set in the generators that the graphs draw from."""
    from cloudai_mbridge.training.process import generators

    own = {"model-parallel-rng": torch.Generator().manual_seed(1)}
    tracker = SimpleNamespace(get_states=lambda: dict(own))
    monkeypatch.setattr(generators, "get_cuda_rng_tracker", lambda: tracker)
    kept = generators.tracker_states()
    drawn = torch.rand(3, generator=own["model-parallel-rng"])
    assert all(isinstance(state, torch.Tensor) for state in kept.values())
    generators.set_tracker_states({**kept, "of another layout": torch.zeros(1)})
    assert torch.rand(3, generator=own["model-parallel-rng"]).equal(drawn)
    with generators.kept_generators():
        drawn = torch.rand(3, generator=own["model-parallel-rng"])
    assert torch.rand(3, generator=own["model-parallel-rng"]).equal(drawn)


def test_bounds_of_packed_sequences_have_one_shape() -> None:
    from cloudai_mbridge.training.data.packed_batch import longest_sequence, sequence_bounds, with_fixed_bounds

    def rows(*bounds: int) -> dict[str, Any]:
        padded = torch.tensor([bounds], dtype=torch.int32)
        return {"tokens": torch.zeros(1, 10), "cu_seqlens": padded, "cu_seqlens_argmin": torch.tensor([[4]])}

    for given, fixed in (((0, 4, 10, 10, -1), [0, 4, 10, 10, 10, 10]), ((0, 3, 5, 9, -1), [0, 3, 5, 9, 10, 10])):
        found = with_fixed_bounds(rows(*given))
        bounds = sequence_bounds(found)
        assert bounds is not None
        assert bounds.tolist() == fixed
        assert longest_sequence(found, bounds) == 10
    assert with_fixed_bounds({"tokens": 1}) == {"tokens": 1}
