"""The space of a search: it has what was published, and nothing whose sizes do not fit together."""

import pytest

from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.published import PublishedRow, read_published
from cloudai_mbridge.models.cmd_args import Launcher, ResolvedCmdArgs
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.tune.ranking import sizes_of
from cloudai_mbridge.tune.space import ALL_LAYERS, Options, ParallelSizes, SearchRequest

# 512 expert ranks on 256 GPUs, and accumulations that contradict the batch (docs/models.md)
_CANNOT_HAVE_RUN = {("25.09", "deepseek_v3", "gb200"), ("25.11", "gpt_oss_120b", "h100")}
_ROWS = [
    row
    for row in read_published()
    if row.args.task == "pretrain" and (row.container, row.recipe, row.args.gpu_type) not in _CANNOT_HAVE_RUN
]


def request_of(row: PublishedRow) -> SearchRequest:
    args = row.args
    assert args.gb is not None
    assert args.seq_length is not None
    gpu = gpu_named(args.gpu_type)
    return SearchRequest(load_recipe(row.recipe), gpu, args.num_gpus, args.gb, args.seq_length)


@pytest.mark.long
def test_it_has_every_published_configuration() -> None:
    spaces: dict[tuple[object, ...], set[tuple[ParallelSizes, bool]]] = {}
    missing = []
    for row in _ROWS:
        args = row.args
        key = (row.recipe, args.gpu_type, args.num_gpus, args.gb, args.seq_length)
        if key not in spaces:
            spaces[key] = set(request_of(row).layouts())
        if (sizes_of(args), bool(args.use_megatron_fsdp)) not in spaces[key]:
            missing.append((row.container, *key, sizes_of(args), args.use_megatron_fsdp))
    assert len(_ROWS) > 100
    assert not missing


@pytest.mark.parametrize(("recipe", "num_gpus", "gbs"), [("llama3_8b", 24, 96), ("qwen3_30b_a3b", 48, 192)])
def test_sizes_divide_what_they_must(recipe: str, num_gpus: int, gbs: int) -> None:
    request = SearchRequest(load_recipe(recipe), gpu_named("h100"), num_gpus, gbs, 4096)
    layouts = list(request.layouts())
    assert len(set(layouts)) == len(layouts) > 100
    for sizes, is_sharded in layouts:
        tp, pp, cp, vp, ep, et, mb = sizes
        dp, rest = divmod(num_gpus, tp * pp * cp)
        assert rest == 0
        assert gbs % (mb * dp) == 0
        assert num_gpus % (ep * et * pp) == 0
        assert request.model.num_attention_heads % tp == 0
        assert tp <= 8, "within the NVLink domain"
        assert pp > 1 or vp == 1
        assert not is_sharded or (pp, cp, vp) == (1, 1, 1)


def test_the_embedded_loop_takes_back_what_a_layout_cannot_have() -> None:
    """Unlike upstream's launcher, where a preset's stays. Sharded layouts are in the space of both."""
    dense = SearchRequest(load_recipe("llama3_70b"), gpu_named("gb200"), 64, 256, 8192, launcher=Launcher.EMBEDDED)
    staged = dense.cmd_args(ParallelSizes(2, 4, 1, 5, 1, 1, 1), Options(Precision.BF16))
    assert (staged["use_megatron_fsdp"], staged["activation_offload_layers"]) == (False, 0)
    sharded = dense.cmd_args(ParallelSizes(1, 1, 1, 1, 1, 1, 1), Options(Precision.BF16, use_megatron_fsdp=True))
    assert sharded["use_megatron_fsdp"] is True
    assert any(is_sharded for _, is_sharded in dense.layouts())
    assert "activation_offload_layers" not in sharded, "as the preset has it"
    experts = SearchRequest(load_recipe("qwen3_30b_a3b"), gpu_named("gb200"), 8, 512, 4096, launcher=Launcher.EMBEDDED)
    mxfp8 = Options(Precision.FP8_MX)
    assert experts.cmd_args(ParallelSizes(1, 1, 1, 1, 1, 1, 1), mxfp8)["moe_a2a_overlap"] is False
    assert experts.cmd_args(ParallelSizes(1, 2, 1, 1, 4, 1, 1), mxfp8)["moe_a2a_overlap"] is False
    assert "moe_a2a_overlap" not in experts.cmd_args(ParallelSizes(1, 1, 1, 1, 8, 1, 4), mxfp8)


def test_what_is_recomputed_is_in_the_arguments() -> None:
    request = SearchRequest(load_recipe("llama3_8b"), gpu_named("h100"), 8, 128, 8192)
    sizes = ParallelSizes(1, 2, 1, 4, 1, 1, 1)
    plain = request.cmd_args(sizes, Options(Precision.BF16))
    assert not {"recompute_modules", "recompute_num_layers", "use_megatron_fsdp", "ep", "et"} & plain.keys()
    assert request.cmd_args(sizes, Options(Precision.BF16, recompute="mlp"))["recompute_modules"] == "mlp"
    assert request.cmd_args(sizes, Options(Precision.BF16, recompute=ALL_LAYERS))["recompute_num_layers"] == 4
    ResolvedCmdArgs.model_validate(plain)
