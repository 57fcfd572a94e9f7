"""CUDA graphs over Transformer Engine's layers: what is built for each kind, and what its helper would capture.

Everything up to the capture is real: Megatron-Core's helper finds the layers, makes their sample arguments and orders
them. Only `make_graphed_callables`, which needs a GPU, is a stand-in.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from tests.transformer_engine.engine import build, build_model, build_optimizer, configure, gpu, on_one_rank, torch

# isort: split
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs as layer_graphs

from cloudai_mbridge.training.compat import cuda_graphs
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.initialize import initialize
from cloudai_mbridge.training.loop.graphs import TrainingGraphs
from cloudai_mbridge.training.startup.prepare import prepare
from tests.transformer_engine import engine

# Model, implementation, what is captured -> how many of the two layers Transformer Engine would capture
KINDS = [
    ("dense", "transformer_engine", [], 2),
    ("dense", "transformer_engine", ["attn"], 2),
    ("dense", "transformer_engine", ["mlp"], 2),
    ("mla", "transformer_engine", ["attn"], 2),
    ("grouped", "transformer_engine", ["attn", "moe_router", "moe_preprocess"], 2),
    ("grouped", "transformer_engine", ["moe_router"], 1),
    ("grouped", "transformer_engine", ["mlp"], 1),
    ("dense", "local", [], 0),
    ("grouped", "local", ["attn", "moe_router"], 0),
    ("dense", "full_iteration", [], 0),
    ("grouped", "local", ["full_iteration"], 0),
]


@pytest.fixture(autouse=True)
def of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The random states of a CPU stand for those that a graph may capture, its stream for one of a GPU."""
    monkeypatch.setattr(get_cuda_rng_tracker(), "use_cudagraphable_rng", True, raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


def graphed(model: str, implementation: str, names: list[str], **fields: Any) -> ConfigContainer:
    config = configure(model, cuda_graph_impl=implementation, cuda_graph_scope=names, **fields)
    config.rerun_state_machine.check_for_nan_in_loss = False
    return config


@pytest.mark.parametrize(("model", "implementation", "names", "layers"), KINDS)
def test_built(model: str, implementation: str, names: list[str], layers: int) -> None:
    """The weights are those without graphs; the random numbers are Transformer Engine's."""
    with gpu():
        built = build(graphed(model, implementation, names))
    config = built.config
    assert config.rng.te_rng_tracker
    assert config.model.use_te_rng_tracker
    is_full = "full_iteration" in (implementation, *names)
    assert cuda_graphs.implementation(config.model) == ("full_iteration" if is_full else implementation)
    without = on_one_rank(model, with_te=True)
    assert built.checkpoint.keys() == without.checkpoint.keys()
    assert all(weight.equal(without.weights[name]) for name, weight in built.weights.items())
    managers = [name for name, _ in built.model.decoder.layers.named_modules() if "cudagraph_manager" in name]
    assert bool(managers) == (implementation == "local" and not is_full)


@pytest.mark.parametrize(("model", "implementation", "names", "layers"), [kind for kind in KINDS if kind[3]])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_what_the_helper_captures(
    model: str, implementation: str, names: list[str], layers: int, pipeline: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for each layer and micro-batch in flight; afterwards it is as before."""
    made: list[Any] = []

    def make_graphed_callables(modules: Any, arguments: Any, **options: Any) -> Any:
        assert len(arguments) == len(modules) * (2 * 8 if pipeline > 1 else 1) // pipeline
        made.extend(SimpleNamespace(reset=lambda: None) for _ in arguments)
        return tuple(made)

    monkeypatch.setattr(layer_graphs, "make_graphed_callables", make_graphed_callables)
    config = graphed(model, implementation, names, pipeline_model_parallel_size=pipeline, num_layers=2 * pipeline)
    if config.model.num_moe_experts:
        config.model.moe_layer_freq = [0, 1] * pipeline
    if pipeline > 1:
        config.model.pipeline_dtype = torch.bfloat16
    with gpu(), engine._groups(0, pipeline):
        prepare(config)
        initialize(config)
        chunks = build_model(config)
        graphs = TrainingGraphs(config, chunks, build_optimizer(config, chunks))
        for _ in range(config.model.cuda_graph_warmup_steps):
            graphs.capture_if_due(nullcontext)
            assert not made
            graphs.step_done(False)
        graphs.capture_if_due(nullcontext)
        graphs.capture_if_due(nullcontext)
        captured = [layer for layer in chunks[0].module.module.decoder.layers if layer.cuda_graphs]
        assert len(captured) == layers
        assert sum(len(layer.cuda_graphs) for layer in captured) == len(made)
        graphs.close()
        assert not any(layer.cuda_graphs for layer in captured)


def test_a_machine_without_a_gpu_refuses_each_kind() -> None:
    for implementation in ("local", "transformer_engine", "full_iteration"):
        with pytest.raises(ConfigError, match=rf"model\.cuda_graph_impl = '{implementation}' needs a GPU") as caught:
            prepare(graphed("dense", implementation, []))
        assert "\n" not in str(caught.value)
