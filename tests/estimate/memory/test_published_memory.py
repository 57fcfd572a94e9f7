"""Every published configuration ran, so its estimate has to fit on its GPU; the rest is named, with the reason."""

from pathlib import Path

import pytest

from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.memory import StageMemory, layout_of, memory_per_stage, worst_stage
from cloudai_mbridge.estimate.published import PublishedRow, read_published
from cloudai_mbridge.recipes import load_recipe

ROWS = read_published(Path(__file__).parents[2] / "data/published_performance.csv")

# container, recipe, GPU -> why the row as printed cannot be what ran
IMPOSSIBLE = {
    ("25.09", "deepseek_v3", "gb200"): "pp 8 x ep 64 = 512 expert ranks on 256 GPUs",
    ("26.02.01", "llama3_70b", "gb300"): "pp 4 without virtual stages, two sequences: the recipe has vp 5 and one",
    ("25.11", "gpt_oss_120b", "h100"): "four sequences: the recipe has one on these GPUs",
}


def _is_impossible(row: PublishedRow) -> bool:
    args = row.args
    return (row.container, row.recipe, args.gpu_type) in IMPOSSIBLE and (
        (args.ep or 1) * (args.pp or 1) > args.num_gpus
        or (row.recipe == "llama3_70b" and args.pp == 4 and args.mb == 2)
        or row.recipe == "gpt_oss_120b"
    )


def _estimate(row: PublishedRow) -> StageMemory:
    layout = layout_of(row.args, load_recipe(row.recipe), mtp_num_layers=row.mtp_num_layers)
    return worst_stage(memory_per_stage(row.architecture, layout))


def test_published_configurations_fit(capsys: pytest.CaptureFixture[str]) -> None:
    shares = []
    for row in ROWS:
        if not _is_impossible(row):
            memory = gpu_named(row.args.gpu_type).memory_gib * 2**30
            stage = _estimate(row)
            needed = stage.states + stage.activations
            shares.append((stage.total / memory, needed / memory, row.recipe, row.args.gpu_type))
    shares.sort()
    over = [share for share in shares if share[0] > 0.9]
    tight = {share[2:] for share in shares if share[1] > 0.9}
    with capsys.disabled():
        middle = shares[len(shares) // 2][0]
        print(f"\npublished: {len(shares)} rows, median share {middle:.2f}, {len(over)} above 0.9, worst {shares[-1]}")
    assert len(shares) == 151
    assert [share for share in shares if share[0] > 1] == []
    assert len(over) <= 19
    # without what is assumed rather than calculated, two configurations are above 0.9: see docs/memory.md
    assert tight == {("llama3_70b", "gb200"), ("qwen3_235b_a22b", "b200")}


@pytest.mark.parametrize(
    "row", [row for row in ROWS if _is_impossible(row)], ids=lambda row: f"{row.label} {row.container}"
)
def test_impossible_rows_do_not_fit(row: PublishedRow) -> None:
    from cloudai_mbridge.errors import BadInput

    if (row.args.ep or 1) * (row.args.pp or 1) > row.args.num_gpus:
        with pytest.raises(BadInput, match="not divisible"):
            _estimate(row)
    else:
        assert _estimate(row).total > gpu_named(row.args.gpu_type).memory_gib * 2**30
