"""Compare the rules with Megatron-Core itself, over exhaustive grids of small points.

Two grids: of layouts, which are built and run, and of features that the loop does not do yet (CUDA graphs, overlapped
all-to-all) or that exclude each other, for which Megatron-Core's configuration is asked.

Megatron-Core is asked for real: process groups, configuration, model and one forward pass of the schedule are built in
this process for one rank of any world size, over torch's fake process-group backend, whose collectives move no data.
"""

import itertools
import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from cloudai_mbridge.constraints import check  # noqa: E402
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs  # noqa: E402
from cloudai_mbridge.models.system import LocalSystem  # noqa: E402
from cloudai_mbridge.recipes import Recipe, load_recipe  # noqa: E402
from cloudai_mbridge.recipes.apply import settings_of, training_config, with_recipe_defaults  # noqa: E402
from cloudai_mbridge.training.compat.versions import installed_release  # noqa: E402
from tests.constraints.overridden import overridden_points  # noqa: E402
from tests.figures import Figure  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore")]

_MODEL = {
    "num_layers": 4,
    "hidden_size": 32,
    "ffn_hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": 128,
    "make_vocab_size_divisible_by": 32,
    "seq_length": 16,
}
_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "allgather",  # all-to-all needs token counts that are real
}
_LATENT = {
    "multi_latent_attention": True,
    "num_query_groups": None,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
}
MODELS = {
    "dense": {},
    "odd": {"num_layers": 6, "num_attention_heads": 6, "num_query_groups": 3, "hidden_size": 48, "ffn_hidden_size": 36},
    "experts": _EXPERTS,
    "latent": _LATENT,
}
LOCAL = LocalSystem(name="here", scheduler="local")
# Of points with overrides
_HYBRID = {**_EXPERTS, "hybrid_layer_pattern": "*-*E", "transformer_impl": "local"}
OVERRIDDEN = {**MODELS, "hybrid": _HYBRID}


def recipe(name: str) -> Recipe:
    model = {key: value for key, value in (_MODEL | OVERRIDDEN[name]).items() if value is not None}
    return Recipe(name, "", "", "", {"model": model, "train": {"micro_batch_size": 1}, "optimizer": {"lr": 1e-3}})


def grid(name: str) -> Iterator[dict[str, Any]]:
    """Yield all combinations; expert sizes vary where there are experts, else only once out of place."""
    expert_sizes = [(1, None), (2, None), (2, 1), (4, 1), (3, 1)] if name == "experts" else [(1, None), (2, 1)]
    axes = {
        "num_gpus": (1, 2, 4, 8, 16),
        "tp": (1, 2, 3, 4),
        "pp": (1, 2, 4),
        "vp": (None, 2, 3),
        "cp": (1, 2),
        "seq_length": (16, 18),
        "gb": (16, 12),
    }
    for values in itertools.product(*axes.values()):
        for ep, et in expert_sizes:
            point = {**dict(zip(axes, values, strict=True)), "ep": ep, "et": et}
            yield {key: value for key, value in point.items() if value is not None}


class Megatron:
    """Asks Megatron-Core whether one rank of a point can be built and run."""

    def __init__(self) -> None:
        from cloudai_mbridge.training import cpu

        cpu.install()
        torch.set_num_threads(1)  # the models are tiny, and other tests want a core too
        self._world = self._rank = 0

    def refusal(self, sections: dict[str, Any], world_size: int, rank: int = 0) -> str | None:
        """Return Megatron-Core's words, or None if it takes the point."""
        from megatron.core import parallel_state
        from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        self._join(world_size, rank)
        try:
            self._run(sections)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            parallel_state.destroy_model_parallel()
            destroy_num_microbatches_calculator()
            MTPLossLoggingHelper.tracker.clear()
            for name in [name for name in os.environ if name.startswith("NVTE_")]:  # a model's choice of kernels
                del os.environ[name]
        return None

    def leave(self) -> None:
        """Leave no process group to the tests that follow."""
        import torch.distributed as dist

        if self._world:
            dist.destroy_process_group()

    def _join(self, world_size: int, rank: int) -> None:
        import torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore

        if (self._world, self._rank) != (world_size, rank):
            if self._world:
                dist.destroy_process_group()
            dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
            self._world, self._rank = world_size, rank

    def _run(self, sections: dict[str, Any]) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.tensor_parallel import random as mrandom

        from cloudai_mbridge.training.config import ConfigContainer, runtime_config_update
        from cloudai_mbridge.training.cpu import megatron_device
        from cloudai_mbridge.training.gpt_step import forward_step
        from cloudai_mbridge.training.initialize import initialize_megatron
        from cloudai_mbridge.training.setup import build_model
        from cloudai_mbridge.training.startup.prepare import adapt_to_device
        from cloudai_mbridge.training.state import GlobalState

        config = ConfigContainer.from_dict(sections)
        config.rerun_state_machine.check_for_nan_in_loss = False  # what was not moved holds anything
        adapt_to_device(config)
        runtime_config_update(config)
        mrandom._CUDA_RNG_STATE_TRACKER.reset()
        initialize_megatron(config)
        _check_split(config.model)
        with megatron_device():
            model = build_model(config)
            iterators = [self._batches(config) for _ in model]
            get_forward_backward_func()(
                forward_step_func=_OncePerChunk(partial(forward_step, GlobalState(config))),
                data_iterator=iterators if len(model) > 1 else iterators[0],
                model=model,
                num_microbatches=get_num_microbatches(),
                seq_length=config.model.seq_length,
                micro_batch_size=config.train.micro_batch_size,
                forward_only=True,
            )

    def _batches(self, config: Any) -> Iterator[dict[str, Any]]:
        tokens = torch.zeros(config.train.micro_batch_size, config.model.seq_length, dtype=torch.long)
        while True:
            batch = dict.fromkeys(("tokens", "labels", "position_ids"), tokens) | {"loss_mask": torch.ones_like(tokens)}
            yield batch


class _OncePerChunk:
    """The forward step, which a chunk of the model runs once: all micro-batches of a point have the same shapes."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._results: dict[int, Any] = {}

    def __call__(self, batches: Iterator[Any], chunk: Any) -> Any:
        if id(chunk) not in self._results:
            self._results[id(chunk)] = self._step(batches, chunk)
        return self._results[id(chunk)]


def _check_split(model: Any) -> None:
    """Raise ValueError if Megatron-Core builds another number of layers than asked for, over all stages."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    if model.pipeline_model_parallel_layout is not None or getattr(model, "hybrid_layer_pattern", None):
        return
    virtual = model.virtual_pipeline_model_parallel_size
    chunks = itertools.product(range(model.pipeline_model_parallel_size), range(virtual) if virtual else [None])
    built = sum(get_num_layers_to_build(model, vp_stage=stage, pp_rank=rank) for rank, stage in chunks)
    if built != model.num_layers:
        raise ValueError(f"{built} of {model.num_layers} layers are built")


_SHARES = (30, pytest.param(1, marks=pytest.mark.drill))


@pytest.mark.parametrize("share", _SHARES, ids=["a thirtieth", "all"])
def test_rules_and_megatron_core_agree(share: int, figure: Figure, request: pytest.FixtureRequest) -> None:
    if "RANK" in os.environ:
        pytest.skip("needs a process without torchrun's variables")
    megatron = Megatron()
    request.addfinalizer(megatron.leave)
    counts: Counter[str] = Counter()
    false_accepts: list[str] = []
    false_rejects: list[str] = []
    points = [(point["num_gpus"], name, point) for name in MODELS for point in grid(name)]
    points = random.Random(1).sample(points, len(points) // share)
    points.sort(key=lambda entry: entry[0])  # a process group is made once per world size
    for world_size, name, point in points:
        args = ResolvedCmdArgs(launcher="embedded", compute_dtype="fp32", mb=1, max_steps=1, **point)
        args = with_recipe_defaults(args, recipe(name))
        violations = check(args, recipe=recipe(name)).violations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refusal = megatron.refusal(training_config(recipe(name), args, {}), world_size)
        counts["compared"] += 1
        counts["taken by both" if not violations and refusal is None else "refused by one or both"] += 1
        counts.update({v.rule_id for v in violations})
        if not violations and refusal is not None:
            false_accepts.append(f"{name} {point}: {refusal[:200]}")
        if refusal is None and (ours := [v for v in violations if v.rule_id.startswith("M")]):
            false_rejects.append(f"{name} {point}: {ours[0]}")
    figure(
        f"oracle: points compared {counts['compared']}, false accepts {len(false_accepts)}, "
        f"false rejects {len(false_rejects)}; {dict(sorted(counts.items()))}"
    )
    assert false_accepts[:5] == []
    assert false_rejects[:5] == []
    assert counts["compared"] >= 15_000 // share
    assert counts["taken by both"] > 600 // share


def _refused_by_some_rank(megatron: Megatron, recipe: Recipe, args: ResolvedCmdArgs, extra: dict[str, str]) -> bool:
    """Return whether a rank of any stage refuses a point: a width is wrong only where a layer has it."""
    pp = args.pp or 1
    ranks = (stage * (args.num_gpus // pp) for stage in range(pp))
    return any(megatron.refusal(training_config(recipe, args, extra), args.num_gpus, rank) for rank in ranks)


@pytest.mark.parametrize(
    ("number", "seed"), [(2000, 1), pytest.param(8000, 2, marks=pytest.mark.long)], ids=["2,000", "8,000"]
)
def test_rules_on_overridden_values_and_megatron_core_agree(
    number: int, seed: int, figure: Figure, request: pytest.FixtureRequest
) -> None:
    """Heads, groups, widths, routing, stages and layouts come by `extra_cmd_args`, in both directions."""
    if "RANK" in os.environ:
        pytest.skip("needs a process without torchrun's variables")
    megatron, core = Megatron(), installed_release()
    request.addfinalizer(megatron.leave)
    logging.disable(logging.CRITICAL)  # a traceback of each refusal
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    counts: Counter[str] = Counter()
    false_accepts: list[str] = []
    false_rejects: list[str] = []
    for name, point, extra, rank in overridden_points(number, seed):
        model = recipe(name)
        args = ResolvedCmdArgs(launcher="embedded", compute_dtype="fp32", mb=1, max_steps=1, **point)
        args = with_recipe_defaults(args, model)
        violations = check(args, LOCAL, model, core=core, settings=settings_of(extra)).violations
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            refusal = megatron.refusal(training_config(model, args, extra), args.num_gpus, rank)
            # C02 and C08 are Megatron-Core's rules, too; of a hybrid, 0.16 leaves a remainder of its layers out
            is_split = () if name == "hybrid" else ("C02", "C08")
            ours = [each for each in violations if each.rule_id[0] == "M" or each.rule_id in is_split]
            if refusal is None and ours and not _refused_by_some_rank(megatron, model, args, extra):
                false_rejects.append(f"{name} {point} {extra}: {ours[0]}")
        counts["taken by both" if not violations and refusal is None else "refused by one or both"] += 1
        counts.update({each.rule_id for each in violations})
        if not violations and refusal is not None:
            false_accepts.append(f"{name} {point} {extra}: {refusal[:200]}")
    figure(
        f"oracle: points with overrides compared {number}, false accepts {len(false_accepts)}, "
        f"false rejects {len(false_rejects)}; {dict(sorted(counts.items()))}"
    )
    assert false_accepts[:5] == []
    assert false_rejects[:5] == []
    assert counts["taken by both"] > number // 6
    assert {"C02", "C08", "M02", "M04", "M08", "M09", "M10", "M31", "M32", "M33"} <= counts.keys()


# Rules of CloudAI's on what a graph captures; C05, C11 and C12, on what runs beside it, refuse more
OF_GRAPHS = ("C13", "C14", "C15", "C16", "C17")
FEATURES: dict[str, tuple[Any, ...]] = {
    "model_recipe_name": ("gpt_tiny", "moe_tiny"),
    "recompute_modules": (None, "core_attn", "moe", "mlp", "shared_experts", "gdn_norm_out", "mhc", "core_attn,mlp"),
    "recompute_num_layers": (None, 1),
    "cuda_graph_impl": ("none", "local", "transformer_engine", "full_iteration"),
    "cuda_graph_scope": (
        *(None, "full_iteration", "attn", "mlp", "moe", "moe_router", "moe_preprocess", "attn,moe_router"),
    ),
    "moe_a2a_overlap": (False, True),
    "compute_dtype": ("bf16", "fp32"),
    "layout": ({}, {"ep": 2}, {"ep": 2, "pp": 2}, {"ep": 2, "pp": 2, "vp": 2}),
}


def feature_points() -> Iterator[dict[str, Any]]:
    for values in itertools.product(*FEATURES.values()):
        point = dict(zip(FEATURES, values, strict=True))
        layout = point.pop("layout")
        if point["model_recipe_name"] == "moe_tiny" or not (layout or point["moe_a2a_overlap"]):
            yield {**point, **layout}


def transformer_config(args: ResolvedCmdArgs) -> None:
    """Build Megatron-Core's configuration as the launcher of Megatron-Bridge sets its fields for these arguments."""
    from megatron.core.transformer import TransformerConfig

    from cloudai_mbridge.training.compat import cuda_graphs

    fields: dict[str, Any] = {"num_layers": 4, "hidden_size": 128, "num_attention_heads": 4, "add_bias_linear": False}
    fields |= {"gated_linear_unit": True, "hidden_dropout": 0.0, "attention_dropout": 0.0}
    fields |= {"pipeline_model_parallel_size": args.pp or 1, "virtual_pipeline_model_parallel_size": args.vp}
    if args.compute_dtype == "bf16":
        fields |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    else:
        fields |= {"pipeline_dtype": torch.float32}
    if args.model_recipe_name == "moe_tiny":
        fields |= {"num_moe_experts": 4, "moe_grouped_gemm": True, "moe_token_dispatcher_type": "alltoall"}
        fields |= {"moe_shared_expert_intermediate_size": 64, "expert_model_parallel_size": args.ep or 1}
    if args.recompute_num_layers:
        fields |= {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1}
    if args.recompute_modules:
        fields |= {"recompute_granularity": "selective", "recompute_modules": str(args.recompute_modules).split(",")}
    scopes = [] if args.cuda_graph_scope is None else str(args.cuda_graph_scope).split(",")
    implementation = args.cuda_graph_impl
    if cuda_graphs.HAS_NEW_NAMES and implementation == "local" and scopes == ["full_iteration"]:
        implementation = "full_iteration"
    if implementation == "full_iteration" and cuda_graphs.HAS_NEW_NAMES:
        scopes = [scope for scope in scopes if scope != "full_iteration"]
    if implementation != "none":
        fields |= {"cuda_graph_impl": implementation, cuda_graphs.FIELD: scopes}
    TransformerConfig(**fields, overlap_moe_expert_parallel_comm=args.moe_a2a_overlap)


def test_rules_and_megatron_cores_configuration_agree(figure: Figure) -> None:
    core = installed_release()
    counts: Counter[str] = Counter()
    false_accepts: Counter[str] = Counter()
    false_rejects: Counter[str] = Counter()
    for point in feature_points():
        args = ResolvedCmdArgs(launcher="embedded", num_gpus=8, mb=1, gb=8, gpu_type="h100", **point)
        recipe = load_recipe(point["model_recipe_name"])
        violations = [v for v in check(args, recipe=recipe, core=core).violations if v.rule_id[0] != "E"]
        try:
            transformer_config(args)
            refusal = None
        except (AssertionError, ValueError) as error:
            refusal = str(error)
        counts["compared"] += 1
        counts["taken by both" if not violations and refusal is None else "refused by one or both"] += 1
        counts.update({v.rule_id for v in violations})
        if not violations and refusal is not None:
            false_accepts[refusal[:120]] += 1
        if refusal is None and (ours := [v for v in violations if v.rule_id[0] == "M" or v.rule_id in OF_GRAPHS]):
            false_rejects[f"{ours[0]} {point}"] += 1
    figure(
        f"oracle: configurations compared {counts['compared']} with Megatron-Core {core},"
        f" false accepts {sum(false_accepts.values())}, false rejects {sum(false_rejects.values())};"
        f" {dict(sorted(counts.items()))}"
    )
    assert false_accepts.most_common(5) == []
    assert false_rejects.most_common(5) == []
    assert counts["taken by both"] > 30
