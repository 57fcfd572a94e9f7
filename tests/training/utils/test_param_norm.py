"""The parameters' norm in every layout is the unsharded model's, computed here by its definition."""

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.models.param_norm import param_is_not_shared

SCRIPT = """
import json, math, sys
import torch, torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
from cloudai_mbridge.training import cpu
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.initialize import initialize_megatron
from cloudai_mbridge.training.setup import build_model
from cloudai_mbridge.training.optim import build_optimizer
from cloudai_mbridge.training.startup.prepare import prepare
from cloudai_mbridge.training.utils.train_utils import calc_params_l2_norm

def build(data):
    config = ConfigContainer.from_dict(data)
    prepare(config)
    initialize_megatron(config)
    model = build_model(config)
    with torch.no_grad():  # norms and biases have equal values: Megatron draws some of them from each rank's generator
        for p in (p for chunk in model for p in chunk.parameters() if p.dim() == 1):
            p.fill_(0.5)
    optimizer = build_optimizer(config, model)
    return config, model, optimizer

def leave():
    destroy_num_microbatches_calculator()
    mpu.destroy_model_parallel()

def definition(data):  # one process holds the whole model: sqrt of the sum of squares
    config, model, _ = build(data)
    norm = math.sqrt(sum(p.double().square().sum().item() for chunk in model for p in chunk.parameters()))
    leave()
    return norm

cpu.install()
dist.init_process_group("gloo")
result = {}
for name, (whole, sharded) in json.load(open(sys.argv[1])).items():
    with cpu.megatron_device():
        expected = definition(whole)
        config, model, optimizer = build(sharded)
        halves = {id(p): p for chunk in model for p in chunk.parameters() if hasattr(p, "main_param")}.values()
        for p in halves:  # so that the main parameters differ from the model's
            if p.main_param is not None:
                p.main_param.data.mul_(2)
        norm = calc_params_l2_norm(model, config.model)
        copied = calc_params_l2_norm(model, config.model, force_create_fp32_copy=True)
        leave()
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, (norm, copied, len(halves)))
    result[name] = (expected, every)
if dist.get_rank() == 0:
    print("RESULT " + json.dumps(result))
dist.barrier()
dist.destroy_process_group()
"""

MOE = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": 64}
BIAS = {"moe_shared_expert_intermediate_size": None, "add_bias_linear": True}
TIED = {"share_embeddings_and_output_weights": True}
BF16 = {"dtype": "bf16"}
TP2, PP2, VP2, EP2 = (
    {f"{name}_parallel_size": 2}
    for name in ("tensor_model", "pipeline_model", "virtual_pipeline_model", "expert_model")
)
ETP1 = {"expert_tensor_parallel_size": 1}
SP = {"sequence_parallel": True}
SHARDED = {"use_distributed_optimizer": True}

Layout = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]  # architecture, layout, optimizer
ON_TWO: dict[str, Layout] = {
    "tp2": ({"add_bias_linear": True}, TP2, {}),
    "tp2 sp bf16": (BF16, TP2 | SP, {}),
    "pp2": ({}, PP2, {}),
    "pp2 tied": (TIED, PP2, {}),
    "pp2 vp2 tied": (TIED, PP2 | VP2, {}),
    "cp2 bf16 sharded": (BF16, {"context_parallel_size": 2}, SHARDED),
    "dp2 sharded": ({}, {}, SHARDED),
    "dp2 bf16": (BF16, {}, {}),
    "dp2 bf16 sharded": (BF16, {}, SHARDED),
    "ep2": (MOE, EP2, {}),
    "ep2 bf16 sharded": (MOE | BF16, EP2, SHARDED),
    "tp2 ep2 etp1": (MOE | BIAS, TP2 | SP | EP2 | ETP1, {}),
    "tp2 etp2 moe": (MOE, TP2 | SP, {}),
    "pp2 dense stage first": (MOE | {"moe_layer_freq": [0, 0, 1, 1]}, PP2, {}),
}
ON_FOUR: dict[str, Layout] = {
    "tp2 pp2": ({}, TP2 | PP2, {}),
    "tp2 pp2 tied bf16": (BF16 | TIED, TP2 | PP2, {}),
    "tp2 dp2 bf16 sharded": (BF16, TP2, SHARDED),
    "tp2 ep2 etp2": (MOE, TP2 | SP | EP2, {}),
    "tp2 ep2 etp1 dp2 bf16 sharded": (MOE | BF16, TP2 | SP | EP2 | ETP1, SHARDED),
    "tp2 etp2 dp2 moe bf16 sharded": (MOE | BF16, TP2 | SP, SHARDED),
    "ep2 pp2 bf16": (MOE | BF16, EP2 | PP2, {}),
    "dp4 bf16 sharded twice": (BF16, {}, SHARDED | {"num_distributed_optimizer_instances": 2}),
}


@pytest.mark.parametrize(("processes", "layouts"), [(2, ON_TWO), pytest.param(4, ON_FOUR, marks=pytest.mark.long)])
def test_the_norm_of_every_layout(
    processes: int, layouts: dict[str, Layout], ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Any
) -> None:
    cases = {name: [_data(tiny, layout[0], {}, {}), _data(tiny, *layout)] for name, layout in layouts.items()}
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    done = ranks(processes, SCRIPT, "cases.json")
    results = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))[7:])
    assert set(results) == set(layouts)
    for name, (expected, every) in results.items():
        is_half = "bf16" in name
        for norm, copied, num_halves in every:
            assert bool(num_halves) == is_half, name
            assert norm == pytest.approx(expected * (2 if is_half else 1), rel=1e-6), name
            assert copied == pytest.approx(expected, rel=1e-6), name


def _data(tiny: Callable[..., Any], architecture: Any, layout: Any, optimizer: Any) -> dict[str, Any]:
    ddp = {name: value for name, value in optimizer.items() if name.startswith("num_")}
    own = {name: value for name, value in optimizer.items() if not name.startswith("num_")}
    base = {"lr": 1e-3, "min_lr": 1e-4}
    return tiny({"model": architecture | layout, "optimizer": base | own, "ddp": ddp})


@pytest.mark.kept_ranks
def test_the_loop_gathers_what_other_ranks_have_updated(train: Callable[..., Any]) -> None:
    """With the overlapped gather, fp32 parameters are stale after a step until the next one reads them."""
    norms = []
    for overlap in (False, True):
        overlaps = {"overlap_param_gather": overlap}
        sections = {
            "train": {"train_iters": 3},
            "optimizer": {"lr": 1e-2, **SHARDED, **overlaps},
            "ddp": {"overlap_grad_reduce": overlap, **overlaps},
            "logger": {"log_params_norm": True},
        }
        norms.append([record["params_norm"] for record in train(2, sections).records])
    assert len(set(norms[0])) == 3
    assert norms[1] == norms[0]


def test_shared_parameters() -> None:
    import torch

    param: Any = torch.nn.Parameter(torch.ones(1))
    assert param_is_not_shared(param)
    param.shared = False
    assert param_is_not_shared(param)
    param.shared = True
    assert not param_is_not_shared(param)
