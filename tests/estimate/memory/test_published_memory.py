"""Every published configuration ran, so none of them is held back; but for those that cannot have run as printed."""

from collections.abc import Iterator

import pytest

from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.headline import DEFAULT_LIMIT, Headline, MemoryLimit, headline_estimator
from cloudai_mbridge.estimate.published import PublishedRow, read_published
from cloudai_mbridge.estimate.request import EstimateRequest
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.recipes.apply import with_recipe_defaults
from tests.benchmarks.published_presets import of_preset
from tests.figures import Figure
from tests.golden import Sentence

# container, recipe, GPU -> why the row as printed cannot be what ran
IMPOSSIBLE = {
    ("25.09", "deepseek_v3", "gb200"): "pp 8 x ep 64 = 512 expert ranks on 256 GPUs",
    ("26.02.01", "llama3_70b", "gb300", "fp8_mx"): "no virtual stages and mbs 2: 26.02 and 26.04 print vp 5 and mbs 1",
    ("25.11", "gpt_oss_120b", "h100"): "GA 2 is printed, gbs / (mbs x dp) is 8: GBS, MBS and GA are another GPU's",
}
# What the preset switches on has no model, so that the figure is an upper bound
UPPER_BOUND = {("nemotron_3_5_lightning", "h100"): "fine-grained offloading of the experts; 72 GiB by its card"}
# states and activations above 0.9 of the memory, all terms below 1: tuned to the edge
TIGHT = {("llama3_70b", "gb200", "fp8_cs")}


def _is_impossible(row: PublishedRow) -> bool:
    key = (row.container, row.recipe, row.args.gpu_type)
    if row.recipe == "deepseek_v3":
        return key in IMPOSSIBLE and (row.args.ep or 1) * (row.args.pp or 1) > row.args.num_gpus
    return key in IMPOSSIBLE or (*key, row.args.compute_dtype) in IMPOSSIBLE


@pytest.fixture(scope="module")
def headlines() -> list[tuple[PublishedRow, Headline]]:
    kept = headline_estimator()

    def answers() -> Iterator[tuple[PublishedRow, Headline]]:
        for row in read_published():
            recipe = load_recipe(row.recipe)
            args = with_recipe_defaults(row.args, recipe)  # as a user's test resolves it
            if row.is_card:
                args = args.model_copy(update=of_preset(args, row.container))
            yield row, kept(EstimateRequest(recipe, args, gpu_named(row.args.gpu_type)))

    return list(answers())


def test_published_configurations_are_not_held_back(
    headlines: list[tuple[PublishedRow, Headline]], figure: Figure
) -> None:
    found = [(row, headline) for row, headline in headlines if not _is_impossible(row)]
    found = [(row, headline) for row, headline in found if (row.recipe, row.args.gpu_type) not in UPPER_BOUND]
    shares = sorted((headline.peak_memory_gib or 9e9) / (headline.gpu_memory_gib or 1) for _, headline in found)
    tight = {
        (row.recipe, row.args.gpu_type, row.args.compute_dtype)
        for row, headline in found
        if (headline.memory_share or 9) > DEFAULT_LIMIT.share
    }
    over = sum(share > DEFAULT_LIMIT.share for share in shares)
    figure(
        f"published: {len(shares)} rows, median {shares[len(shares) // 2]:.2f}, worst {shares[-1]:.2f}"
        f" of the memory; {over} above {DEFAULT_LIMIT.share}, {len(tight)} configurations without assumed terms"
    )
    assert len(shares) == 151 + 11
    assert [row.label for row, headline in found if headline.exceeds(DEFAULT_LIMIT)] == []
    assert shares[-1] < 1
    assert tight == TIGHT  # held back if they were not known to have run


def test_rows_that_cannot_be_do_not_fit(headlines: list[tuple[PublishedRow, Headline]], sentence: Sentence) -> None:
    found = [(row, headline) for row, headline in headlines if _is_impossible(row)]
    assert len(found) == len(IMPOSSIBLE)
    for row, headline in found:
        if row.recipe == "deepseek_v3":
            sentence(headline.why[0])
        else:
            assert headline.exceeds(MemoryLimit(1.0))
