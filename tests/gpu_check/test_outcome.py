"""Parts end as passed, failed or skipped, and do not stop each other."""

import json
import time
from dataclasses import replace
from pathlib import Path

from cloudai_mbridge.gpu_check.kit import Device, Figures, Kit, PartFailed, PartSkipped
from cloudai_mbridge.gpu_check.run import (
    Outcome,
    Part,
    needs_gpu,
    needs_known_gpu,
    needs_transformer_engine,
    run_and_write,
    run_parts,
)
from tests.golden import Sentence


def good(kit: Kit) -> Figures:
    return {"x": 1.5}


def bad(kit: Kit) -> Figures:
    raise PartFailed("the losses\ndiffer", {"difference": 0.5})


def broken(kit: Kit) -> Figures:
    raise KeyError("metrics")


def absent(kit: Kit) -> Figures:
    raise PartSkipped("no such thing here")


NEVER = float("inf")
PARTS = [Part(run.__name__, 60, run) for run in (bad, broken, absent, good)]


def ends(outcomes: list[Outcome]) -> dict[str, tuple[str, str]]:
    return {outcome.name: (outcome.status, outcome.reason) for outcome in outcomes}


def test_every_part_runs_whatever_the_others_do(kit: Kit) -> None:
    assert ends(list(run_parts(PARTS, kit, NEVER))) == {
        "bad": ("failed", "the losses differ"),
        "broken": ("failed", "KeyError: 'metrics'"),
        "absent": ("skipped", "no such thing here"),
        "good": ("passed", ""),
    }


def test_a_failed_part_keeps_its_figures(kit: Kit) -> None:
    assert next(run_parts(PARTS, kit, NEVER)).figures == {"difference": 0.5}


def test_no_part_starts_when_the_time_is_used_up(kit: Kit) -> None:
    for status, reason in ends(list(run_parts(PARTS, kit, 0.0))).values():
        assert (status, reason) == ("skipped", "the time of all parts is used up")


def test_a_deadline_is_the_parts_own_or_that_of_all(kit: Kit) -> None:
    seen: list[float] = []

    def note(kit: Kit) -> Figures:
        seen.append(kit.deadline)
        return {}

    start = time.monotonic()
    list(run_parts([Part("short", 10, note), Part("long", 10**6, note)], kit, start + 1000, patience=2))
    short, long = seen
    assert short - start >= 20
    assert long == start + 1000


def test_what_a_part_needs_skips_it_by_name(kit: Kit, h100: Kit) -> None:
    parts = [Part(need.__name__, 60, good, need) for need in (needs_gpu, needs_known_gpu, needs_transformer_engine)]
    found = ends(list(run_parts(parts, kit, NEVER)))
    assert set(found.values()) == {("skipped", "no GPU that torch can use")}
    assert {status for status, _ in ends(list(run_parts(parts, h100, NEVER))).values()} == {"passed"}
    without = Kit(kit.work, replace(h100.device, no_transformer_engine="not probed"))
    assert ends(list(run_parts(parts[2:], without, NEVER))) == {
        "needs_transformer_engine": ("skipped", "no Transformer Engine: not probed")
    }


def test_the_file_is_whole_after_each_part(kit: Kit, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    found = []

    def look(kit: Kit) -> Figures:
        found.append(list(json.loads(out.read_text())["parts"]))
        return {}

    run_and_write([PARTS[0], Part("look", 60, look)], kit, out, NEVER)
    assert found == [["bad"]]
    data = json.loads(out.read_text())
    assert data["version"] == 1
    assert data["parts"]["bad"]["status"] == "failed"
    assert data["parts"]["look"]["status"] == "passed"
    assert data["device"]["gpu"] is None


def test_a_gpu_that_torch_cannot_use_is_a_failure_where_there_is_nvidia_smi(tmp_path: Path, sentence: Sentence) -> None:
    kit = Kit(tmp_path, Device(no_gpu="torch is a CPU build", has_nvidia_smi=True))
    (outcome,) = run_parts([Part("a", 60, good, needs_known_gpu)], kit, NEVER)
    assert outcome.status == "failed"
    sentence(outcome.reason)
