"""Every refusal of the estimates is a rule's, or of the training configuration: no point is accepted and impossible."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudai_mbridge.estimate
from cloudai_mbridge.constraints import check
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import find_gpu
from cloudai_mbridge.estimate.headline import headline_estimator
from cloudai_mbridge.estimate.request import EstimateRequest
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.recipes.apply import settings_of, training_config, with_recipe_defaults
from cloudai_mbridge.recipes.load import recipe_for
from tests.cases import every

PACKAGE = Path(cloudai_mbridge.estimate.__file__).parent
CONFIG = "training configuration"
# Places that raise BadInput -> how many, and a point for each, or why no point of a sweep gets there
Case = tuple[str, dict[str, Any], dict[str, str]]
OF_OPTIONS, OF_UNKNOWN = "an option of a command", "says that something is unknown"
LORA = {"task": "lora", "tp": 2, "num_gpus": 2, "pretrained_checkpoint": "/w"}
PLACES: dict[str, tuple[Case, ...] | str] = {
    "architecture._check_sizes": (
        ("M02", {}, {"model.num_attention_heads": "0"}),
        ("M02", {}, {"model.kv_channels": "-1"}),
        ("M02", {"num_layers": 200_000}, {}),
        ("M02", {"vocab_size": 0}, {}),
        ("M02", {"num_moe_experts": -1, "model_recipe_name": "moe_tiny"}, {}),
    ),
    "architecture._overrides": ((CONFIG, {}, {"model.num_layers": "1.5"}), (CONFIG, {}, {"model.seq_length": "64"})),
    "architecture._read": (
        (CONFIG, {}, {"model.num_query_groups": "two"}),
        (CONFIG, {}, {"model.account_for_loss_in_pipeline_split": "1"}),
    ),
    "memory.adapter_parameters._chosen": (
        (
            "E13",
            {**LORA, "model_recipe_name": "moe_tiny"},
            {"peft._target_": "cloudai_mbridge.training.peft.config.DoRA"},
        ),
    ),
    "memory.adapter_parameters._dim": (
        ("E13", LORA, {"peft.dim": "31"}),
        (
            "E13",
            {**LORA, "model_recipe_name": "moe_tiny", "ep": 2},
            {"peft.dim": "6", "peft.normalize_moe_lora": "true", "model.moe_router_topk": "4"},
        ),
    ),
    "memory.arguments.layout_of": (("E02", {"compute_dtype": "fp7"}, {}),),
    "memory.layout.Adapters.__post_init__": (
        ("E13", LORA, {"peft.dim": "0"}),
        (CONFIG, LORA, {"peft.share_expert_adapters": "7"}),
    ),
    "memory.layout.adapters_of": ((CONFIG, LORA, {"peft.target_modules": "linear_qkv"}),),
    "memory.layout.Recompute.__post_init__": (
        (CONFIG, {"recompute_num_layers": 2}, {"model.recompute_method": "blocks"}),
        ("M12", {"recompute_num_layers": -1}, {}),
    ),
    "memory.layout.ParallelLayout.__post_init__": (
        ("M02", {"cp": -1}, {}),
        ("C01", {"num_gpus": 3, "tp": 2}, {}),
        ("M07", {"num_gpus": 2, "ep": 4, "model_recipe_name": "moe_tiny"}, {}),
        ("C04", {"gb": 3, "num_gpus": 2}, {}),
        ("M32", {"num_gpus": 4, "num_distributed_optimizer_instances": 3}, {}),
        (
            "M32",
            {"model_recipe_name": "moe_tiny", "num_gpus": 4, "ep": 4, "num_distributed_optimizer_instances": 2},
            {"optimizer.use_distributed_optimizer": "true"},
        ),
        ("M32", {"num_gpus": 2, "num_distributed_optimizer_instances": -1}, {}),
    ),
    "memory.parameters._explicit": (
        ("C02", {"pp": 2, "num_gpus": 2, "pipeline_model_parallel_layout": "Ettt|ttL"}, {}),
        ("C02", {"pp": 2, "num_gpus": 2, "pipeline_model_parallel_layout": "Ett|ttL"}, {"model.mtp_num_layers": "1"}),
    ),
    "memory.parameters._even": (
        ("C02", {"pp": 3, "num_gpus": 3}, {}),
        ("C08", {"pp": 2, "num_gpus": 2, "vp": 3}, {}),
        ("C02", {"pp": 2, "num_gpus": 2}, {"model.account_for_loss_in_pipeline_split": "true"}),
        ("C02", {"pp": 2, "num_gpus": 2}, {"model.num_layers_in_first_pipeline_stage": "4"}),
        ("C08", {"pp": 2, "num_gpus": 2, "vp": 2}, {"model.num_layers_in_last_pipeline_stage": "1"}),
        (
            "C02",
            {"pp": 2, "num_gpus": 2, "num_layers": 3},
            {"model.num_layers_in_first_pipeline_stage": "2", "model.account_for_embedding_in_pipeline_split": "true"},
        ),
    ),
    "request._read_override": ((CONFIG, {}, {"ddp.grad_reduce_in_fp32": "maybe"}),),
    "request._recompute": (
        (CONFIG, {}, {"model.recompute_method": "all"}),
        (CONFIG, {}, {"model.recompute_granularity": "half"}),
        (CONFIG, {}, {"model.recompute_num_layers": "0"}),
    ),
    "request.EstimateRequest.architecture": (
        ("M31", {"model_recipe_name": "moe_tiny"}, {"model.moe_router_topk": "99"}),
    ),
    "time.model.TimeModel._real_parts": (("C04", {"gb": 4, "mb": 8}, {}),),
    "request.EstimateRequest.layout_of": OF_UNKNOWN,
    "hardware.gpu_named": OF_OPTIONS,
    "hardware.precision_named": OF_OPTIONS,
    "point.estimate_point": OF_OPTIONS,
    "point.times_of": OF_UNKNOWN,
    "proxy.proxy": OF_OPTIONS,
    "time.calibration.years": OF_OPTIONS,
    "time.model.TimeModel.step_time_s": "a time beyond a float",
    "time.model.time_model": OF_UNKNOWN,
}
CASES = [case for cases in PLACES.values() if not isinstance(cases, str) for case in cases]


def places() -> Iterator[str]:
    """Yield where the estimates raise BadInput, such as memory.layout.Adapters.__post_init__."""
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        yield from _raising(ast.parse(path.read_text(encoding="utf-8")), module)


def _raising(node: ast.AST, where: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Raise) and ast.unparse(child).startswith("raise BadInput("):
            yield where
        is_named = isinstance(child, ast.FunctionDef | ast.ClassDef)
        yield from _raising(child, f"{where}.{child.name}" if is_named else where)  # type: ignore[attr-defined]


def test_every_refusal_of_the_estimates_is_listed() -> None:
    found = Counter(places())
    assert found.keys() == PLACES.keys(), (
        "a new BadInput needs a rule, and a point here; what only lacks a model is NotModelled"
    )


@every(("rule", "given", "extra"), CASES)
def test_what_the_estimates_refuse_is_rejected(rule: str, given: dict[str, Any], extra: dict[str, str]) -> None:
    base = {"launcher": "embedded", "model_recipe_name": "gpt_tiny", "max_steps": 2, "num_gpus": 1, "mb": 1, "gb": 8}
    args = ResolvedCmdArgs.model_validate({**base, **given})
    recipe = recipe_for(args.model_recipe_name, args.task)
    args = with_recipe_defaults(args, recipe)
    request = EstimateRequest(recipe, args, find_gpu("h100"), extra=extra)
    assert headline_estimator()(request).why, "the estimates do not refuse it"
    violations = {each.rule_id for each in check(args, recipe=recipe, settings=settings_of(extra)).violations}
    if rule != CONFIG:
        assert rule in violations
        return
    try:
        training_config(recipe, args, extra)
    except BadInput:
        return
    raise AssertionError(f"the training configuration is valid; rules: {violations}")
