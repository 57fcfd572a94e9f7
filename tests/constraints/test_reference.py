"""Rules C01-C18 against the reference's predicates, written down here a second time, on random arguments."""

import random
from typing import Any

from cloudai_mbridge.constraints import check
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs

INTS = [None, 0, 1, 2, 3, 4, 5, 8, 12, 16, 64, -1, -2]
SCOPES = [
    *(None, "", "attn", "[attn]", "['attn', 'mlp']", "ATTN, moe_router", "moe", "moe,moe_router", "moe_preprocess"),
    *("moe_router,moe_preprocess", "full_iteration", '"[full_iteration]"', "full_iteration,full_iteration"),
    *("attn,mlp,moe", "attn,mlp,moe_router", "mamba", "none", "junk", ",,", "[]"),
]
MODULES = [
    *(None, "", "core_attn", "mlp", "moe", "moe_act", "shared_experts", "mla_up_proj", "layernorm", "[mlp,moe]"),
    "a,b",
]
CHOICES: dict[str, list[Any]] = {
    "num_gpus": [0, 1, 2, 4, 8, 12, 16, 64, 256, 1024],
    **dict.fromkeys(("tp", "pp", "cp", "vp", "ep", "et", "mb"), INTS),
    "gb": [None, 0, 8, 16, 20, 24, 128, 512],
    "use_megatron_fsdp": [None, True, False],
    "num_distributed_optimizer_instances": [None, 0, 1, 2, 4],
    "activation_offload_layers": [None, 0, 1, 2],
    "moe_a2a_overlap": [None, True, False],
    "cuda_graph_impl": [None, "", "none", "NULL", "local", " Local ", "transformer_engine", "te", "full_iteration"],
    "cuda_graph_scope": SCOPES,
    "recompute_modules": MODULES,
    "model_recipe_name": ["qwen3_30b_a3b", "deepseek_v3", "DeepSeekV3_x", "deepseek-v3", "my_deepseek_v3_lite"],
}


def options(text: str | None) -> list[str]:
    text = (text or "").strip().strip("\"'")
    if text[:1] == "[" and text[-1:] == "]":
        text = text[1:-1]
    return [t for part in text.split(",") if (t := part.strip().strip("\"'").lower())]


def failing(a: dict[str, Any]) -> set[int]:
    """Return the numbers of the constraints that fail, as the reference's table of predicates has them."""
    n, v, b, g, e, x = (a.get(k) for k in ("num_gpus", "vp", "mb", "gb", "ep", "et"))
    n = 8 if n is None else n
    t, p, c = (a.get(k) or 1 for k in ("tp", "pp", "cp"))
    fsdp, ndo = bool(a.get("use_megatron_fsdp")), a.get("num_distributed_optimizer_instances")
    d = n // (t * p * c) if t * p * c > 0 else 0
    impl = (a.get("cuda_graph_impl") or "").strip().lower()
    s, r = options(a.get("cuda_graph_scope")), options(a.get("recompute_modules"))
    enabled = impl not in ("", "none", "null")
    graphs = enabled and s != []
    offload, overlap = a.get("activation_offload_layers") or 0, bool(a.get("moe_a2a_overlap"))
    passes = {
        1: t * p * c != 0 and n % (t * p * c) == 0,
        3: d != 0,
        5: not (fsdp and graphs),
        6: not fsdp or (p == 1 and c == 1 and v in (None, 1)),
        7: x is None or e is None or (x * e * p != 0 and n % (x * e * p) == 0),
        9: not (ndo is not None and ndo > 1 and not fsdp),
        10: not (p > 1 and offload > 0),
        11: not (enabled and overlap),
        12: not (graphs and offload > 0),
        13: impl in ("", "none", "null", "transformer_engine", "local"),
        15: not {"moe", "moe_router"} <= set(s),
        16: "moe_preprocess" not in s or "moe_router" in s,
    }
    divisor = (b or 0) * d * ((ndo or 1) if fsdp else 1)
    passes[4] = not (b and g) or (divisor != 0 and g % divisor == 0)
    if impl == "local":
        passes[14] = s in ([], ["full_iteration"])
    elif impl == "transformer_engine":
        passes[14] = set(s) <= {"attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba"}
    clash = (
        ("attn" in s and {"core_attn", "mla_up_proj"} & set(r))
        or ("mlp" in s and "mlp" in r)
        or ("moe" in s and {"moe_act", "moe", "shared_experts"} & set(r))
        or ("moe_router" in s and {"moe", "shared_experts"} & set(r))
        or ("layernorm" in r and "attn" in s and "mlp" in s and ("moe" in s or "moe_router" in s))
    )
    passes[17] = not (s and r and clash)
    name = (a.get("model_recipe_name") or "").lower()
    if "deepseek_v3" in name or "deepseekv3" in name:
        split = (p, 1 if v is None else v)
        passes[18] = split in {(1, 1), (4, 1), (8, 1), (4, 2), (16, 1), (8, 2), (4, 4)}
    return {number for number, holds in passes.items() if not holds}


def test_the_same_constraints_fail_as_in_the_reference() -> None:
    draw = random.Random(20261121)
    seen: set[int] = set()
    for _ in range(20_000):
        chosen = {name: draw.choice(values) for name, values in CHOICES.items() if draw.random() < 0.5}
        args = {name: value for name, value in chosen.items() if value is not None}
        result = check(ResolvedCmdArgs.model_validate(args))
        ours = {int(v.rule_id[1:]) for v in result.violations if v.rule_id.startswith("C")}
        expected = failing(args)
        assert ours == expected, args
        seen |= expected
    assert seen == {1, 3, 4, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18}
