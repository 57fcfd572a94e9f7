"""Replays: what a table means, what is wrong with one, and what a search makes of it."""

import csv
import importlib
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.tune.measured import Space, read_table
from tests.benchmarks.replay.__main__ import replay
from tests.benchmarks.replay.case import Case, case_of, read_cases
from tests.benchmarks.replay.play import play, random_order, trials_to, without_prior
from tests.cases import every
from tests.golden import Sentence

MODEL = {"num_layers": 24, "hidden_size": 2048, "num_attention_heads": 16, "num_query_groups": 16}
MODEL |= {"ffn_hidden_size": 8192, "vocab_size": 51200}
SHARED = {"gpu": "a100", "num_gpus": 8, "gbs": 32, "seq_length": 2048, "cp": 1, "vp": 1, "ep": 1}


def write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    return path


def layouts() -> list[dict[str, Any]]:
    """Return layouts whose times are the time model's with twice the communication, and the largest out of memory."""
    rows = []
    for tp in (1, 2, 4, 8):
        for pp in (1, 2, 4):
            for mbs in (1, 2, 4):
                if 8 % (tp * pp) == 0 and 32 % (mbs * 8 // (tp * pp)) == 0:
                    rows.append({**SHARED, **MODEL, "tp": tp, "pp": pp, "mbs": mbs, "step_time_s": 1.0})
    return rows


@pytest.fixture(scope="module")
def space(tmp_path_factory: pytest.TempPathFactory) -> Space:
    path = write_table(tmp_path_factory.mktemp("replay") / "t.csv", layouts())
    (bare,) = read_table(path)
    rows = layouts()
    for written, (layout, _) in zip(rows, bare.rows, strict=True):
        groups = time_model(bare.model_of(layout.tp), bare.gpu, bare.precision).groups(layout)
        busy = 1.6 * groups.compute + 2 * groups.memory + 2 * groups.links
        seconds = max(busy, 3 * groups.launches) * (1 + groups.bubble) + groups.data_parallel + groups.optimizer
        written["step_time_s"] = "OOM" if (layout.tp, layout.mbs) == (1, 4) else round(seconds, 5)
    (space,) = read_table(write_table(path, rows))
    return space


def test_a_table_is_read_as_it_is_written(space: Space) -> None:
    assert space.name == "24 layers of 2048 on 8 a100, batch 32 x 2048"
    assert len(space.rows) == len(layouts())
    assert {seconds for layout, seconds in space.rows if (layout.tp, layout.mbs) == (1, 4)} == {None}


def test_predictions_belong_to_a_table(space: Space, case: Case) -> None:
    assert case.best_s == min(seconds or math.inf for _, seconds in space.rows)
    assert case.groups is not None
    assert case.shares is not None
    assert len(case.groups) == len(case.shares) == len(space.rows)
    assert case.coordinates[0]["mbs"] == space.rows[0][0].mbs


def test_rows_of_another_batch_or_model_are_another_space(tmp_path: Path) -> None:
    rows = layouts()[:3]
    rows += [{**row, "gbs": 64} for row in rows] + [{**row, "num_layers": 12} for row in rows]
    assert [len(space.rows) for space in read_table(write_table(tmp_path / "t.csv", rows))] == [3, 3, 3]


def test_a_recipe_says_the_sizes_of_the_model(tmp_path: Path) -> None:
    row = {**SHARED, "recipe": "llama3_8b", "gpu": "h100", "tp": 1, "pp": 2, "mbs": 1, "step_time_s": 3}
    (space,) = read_table(write_table(tmp_path / "t.csv", [row]))
    assert (space.name, space.model.num_layers) == ("llama3_8b on 8 h100, batch 32 x 2048", 32)


@pytest.fixture(scope="module")
def case(space: Space) -> Case:
    return case_of(space, space.gpu)


def test_the_search_needs_few_trials(case: Case) -> None:
    score = play(case)
    assert len(set(score.order)) == len(score.order) >= score.num_trials
    to_2_percent = score.trials_to(0.02)
    assert to_2_percent is not None
    assert to_2_percent <= 6
    assert score.num_trials < len(case.times)
    assert score.picked_s is not None
    assert case.best_s is not None
    assert score.picked_s <= case.best_s * 1.02


def test_baselines(case: Case) -> None:
    assert sorted(random_order(case, 1)) == list(range(len(case.times)))
    assert trials_to(case, without_prior(case, 0), 0.02) is not None
    assert random_order(case, 1) == random_order(case, 1) != random_order(case, 2)
    assert trials_to(case, random_order(case, 1), 1e9) in range(1, 1 + len(case.times))


@pytest.mark.parametrize("sampler", ["tpe", "gaussian_process"])
def test_optunas_samplers_try_every_row(case: Case, sampler: str) -> None:
    pytest.importorskip("optuna")
    module = importlib.import_module("tests.benchmarks.replay.optuna_samplers")
    few = replace(case, coordinates=case.coordinates[:5], times=(None, *case.times[1:5]))
    order = getattr(module, sampler)(few, seed=1)
    assert sorted(order) == list(range(5))
    assert order == getattr(module, sampler)(few, seed=1)


def test_a_space_in_which_nothing_fits_has_no_best(tmp_path: Path) -> None:
    rows = [{**row, "step_time_s": "oom"} for row in layouts()[:4]]
    (case,) = read_cases(write_table(tmp_path / "t.csv", rows), None)
    score = play(case)
    assert (case.best_s, score.picked_s, score.trials_to(0.05)) == (None, None, None)
    assert len(score.order) == 4


@every(
    "change",
    [
        {"tp": "0"},
        {"tp": "9" * 5000},
        {"gpu": "a" * 200_000},
        {"tp": "3"},
        {"mbs": ""},
        {"step_time_s": "nan"},
        {"step_time_s": "-1"},
        {"step_time_s": "1e300"},
        {"gpu": "a1000"},
        {"num_attention_heads": "17"},
        {"ep": "2"},
        {"num_moe_experts": "8"},
    ],
)
def test_a_wrong_value_is_named_with_its_line(tmp_path: Path, sentence: Sentence, change: dict[str, Any]) -> None:
    path = write_table(tmp_path / "t.csv", [{**layouts()[0], **change}])
    with pytest.raises(BadInput, match=r"t\.csv") as refused:
        read_table(path)
    sentence(refused, digits=r"9{100,}.*9{100,}")


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    path = write_table(tmp_path / "t.csv", layouts()[:1])
    path.write_text("".join(f"{line},{'tp' if n == 0 else '1'}\n" for n, line in enumerate(path.read_text().split())))
    with pytest.raises(BadInput, match="line 1:") as caught:
        read_table(path)
    sentence(caught)


def test_lines_of_spaces_are_no_rows(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", layouts()[:2])
    path.write_text(path.read_text().replace("\n", "\n  \n"))
    (space,) = read_table(path)
    assert len(space.rows) == 2


def test_a_number_format_that_the_gpu_lacks_is_named_with_its_space(tmp_path: Path, sentence: Sentence) -> None:
    rows = [{**row, "precision": "fp8_mx"} for row in layouts()[:2]]
    with pytest.raises(BadInput, match=r"t\.csv:") as caught:
        read_cases(write_table(tmp_path / "t.csv", rows), None)
    sentence(caught)


def test_a_row_that_is_cut_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", [dict(reversed(row.items())) for row in layouts()[:2]])
    path.write_text(path.read_text().rstrip()[:-30])
    with pytest.raises(BadInput, match=r"t\.csv: line 3: "):
        read_table(path)


def test_rows_of_one_layout_are_one_point(tmp_path: Path) -> None:
    one, other = layouts()[:2]
    times = (("oom", one), (3.0, one), (1.0, one), (8.0, one), ("oom", other), ("oom", other))
    rows = [{**layout, "step_time_s": seconds} for seconds, layout in times]
    (space,) = read_table(write_table(tmp_path / "t.csv", rows))
    assert [seconds for _, seconds in space.rows] == [3.0, None]


def test_a_missing_column_or_file_is_named(tmp_path: Path, sentence: Sentence) -> None:
    rows = [{name: value for name, value in layouts()[0].items() if name not in ("vp", "vocab_size")}]
    with pytest.raises(BadInput) as caught:
        read_table(write_table(tmp_path / "t.csv", rows))
    sentence(caught)
    with pytest.raises(BadInput) as caught:
        read_table(tmp_path / "nowhere.csv")
    sentence(caught)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(BadInput, match=r"binary\.csv"):
        read_table(tmp_path / "binary.csv")


def test_a_table_without_rows_or_that_is_none_is_refused(tmp_path: Path, sentence: Sentence) -> None:
    table = write_table(tmp_path / "t.csv", layouts()[:2])
    table.write_text(table.read_text().splitlines()[0])
    with pytest.raises(BadInput, match="line 1:") as caught:
        read_cases(table, None)
    sentence(caught)
    other = tmp_path / "t.tsv"
    other.write_text("gpu\tnum_gpus\n")
    with pytest.raises(BadInput, match=r"t\.tsv:") as caught:
        read_cases(other, None)
    sentence(caught)


def test_a_table_may_begin_with_a_byte_order_mark(tmp_path: Path) -> None:
    table = write_table(tmp_path / "t.csv", layouts()[:2])
    table.write_text(table.read_text(), encoding="utf-8-sig")
    assert len(read_table(table)[0].rows) == 2


def test_the_program(space: Space, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_table(tmp_path / "t.csv", [{**row, "step_time_s": i + 1.5} for i, row in enumerate(layouts())])
    replay(path, None)
    shown = capsys.readouterr().out
    assert "this search: to 5%" in shown
    assert "random order: to 5%" in shown
    with pytest.raises(BadInput):
        replay(tmp_path / "nowhere.csv", None)
