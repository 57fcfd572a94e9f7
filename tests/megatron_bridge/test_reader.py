"""Presets are read from source: nothing of a repository is run."""

from pathlib import Path
from textwrap import dedent

from cloudai_mbridge.megatron_bridge.preset_rows import PresetRow
from tests.interop.presets.configured import layout_text
from tests.interop.presets.reader import read_source


def rows_of(clone: Path) -> dict[tuple[str, str, str, int], PresetRow]:
    source = read_source(clone)
    assert source
    return {(row.recipe, row.compute_dtype, row.variant, row.num_gpus): row for row in source.rows}


def test_sizes_are_joined_from_defaults_replacements_and_other_names(clone: Path) -> None:
    rows = rows_of(clone)
    assert set(rows) == {
        ("toy", "bf16", "v1", 16),
        ("toy", "bf16", "large_scale", 64),
        ("toy", "fp8_cs", "v1", 16),
        ("toy", "fp8_cs", "v2", 16),
        ("plain", "bf16", "", 16),
    }
    row = rows["toy", "bf16", "v1", 16]
    assert (row.family, row.task, row.gpu) == ("toy", "pretrain", "h100")
    assert (
        row.values.items()
        >= {"tp": 2, "pp": 1, "gb": 32, "mb": 1, "seq_length": 4096, "moe_a2a_overlap": False}.items()
    )
    assert rows["plain", "bf16", "", 16].values["gb"] == 48
    changed = rows["toy", "fp8_cs", "v2", 16]  # its builder has a batch of its own for it
    assert (changed.values["gb"], changed.base_gb) == (40, 32)
    assert "cp" not in row.values  # depends on the machine
    assert rows["plain", "bf16", "", 16].values["cp"] == 1


def test_the_name_of_a_flat_preset_is_its_key(flat_clone: Path) -> None:
    source = read_source(flat_clone)
    assert source
    assert source.is_flat
    rows = rows_of(flat_clone)
    assert rows["toy", "bf16", "", 32].values.items() >= {"tp": 2, "gb": 64, "seq_length": 8192}.items()
    assert rows["toy", "bf16", "large", 64].values["tp"] == 4


def test_the_largest_flat_preset_is_the_default_unless_another_is_listed(flat_clone: Path) -> None:
    defaults = {key for key, row in rows_of(flat_clone).items() if row.is_default}
    assert defaults == {("toy", "bf16", "", 32), ("toy", "bf16", "large", 64), ("small", "fp8_cs", "", 8)}


def test_what_is_no_preset_is_left_out(clone: Path, tmp_path: Path) -> None:
    assert read_source(tmp_path) is None
    family = clone / "scripts/performance/configs/broken"
    family.mkdir()
    (family / "__init__.py").write_text("def (:\n")
    assert len(rows_of(clone)) == 5


def test_number_formats_may_have_a_name(clone: Path) -> None:
    """As in 0.6: the launcher takes the keys of a dictionary, here of fewer formats than there are presets for."""
    parser = clone / "scripts/performance/argument_parser.py"
    text = parser.read_text().replace('["bf16", "fp8_cs"]', "DTYPES.keys()")
    parser.write_text("DTYPES = {'bf16': 1}\n" + dedent(text))
    assert {dtype for _, dtype, _, _ in rows_of(clone)} == {"bf16"}
    parser.unlink()
    assert rows_of(clone) == {}


def test_layouts_are_written_in_short_form() -> None:
    stages = [["embedding", "decoder"], *[["decoder"] * 2] * 3, ["decoder", "mtp", "loss"]]
    assert layout_text(stages) == "Et|(t*2|)*3tmL"
    assert layout_text([["embedding", "decoder", "loss"]]) == "EtL"
    assert layout_text([["decoder"]] * 3) == "(t|)*2t"
