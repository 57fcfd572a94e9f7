"""Deadlocks planted into the logs of rehearsed ranks are found, with the right pair; whole logs match."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.training.dry.log import Call, Issue, Log, Wait
from cloudai_mbridge.training.dry.match import Hang, match
from cloudai_mbridge.training.dry.places import Layout
from tests.training.dry.test_rank import run_program
from tests.training.dry.test_step import EXPERTS, RANKS, SHARDED, container

pytestmark = pytest.mark.process
ORDER = ("tp", "cp", "dp", "pp")
Entries = list[Issue | Wait]


class World:
    """The logs of all ranks of a layout, to be changed."""

    def __init__(self, directory: Path, sizes: dict[str, int], model: dict[str, Any], ddp: dict[str, Any]) -> None:
        if not directory.exists():
            self.rehearse(directory, sizes, model, ddp)
        configured = json.loads((directory / "configured.json").read_text())
        self.layout = Layout(**configured["layout"], order=tuple(configured["order"]))
        self.logs = {n: Log.of_document(json.loads((directory / f"rank{n}.json").read_text())) for n in range(RANKS)}

    @staticmethod
    def rehearse(directory: Path, sizes: dict[str, int], model: dict[str, Any], ddp: dict[str, Any]) -> None:
        directory.mkdir()
        config = directory / "training.json"
        config.write_text(json.dumps(container(sizes, model, ddp)))
        ranks = ",".join(map(str, range(RANKS)))
        code, events = run_program(config, RANKS, "--level", "step", "--ranks", ranks, "--logs", str(directory))
        assert (code, events[-1]["event"]) == (0, "matched"), events[-1]
        (directory / "configured.json").write_text(json.dumps(events[1]))

    def entries(self, rank: int) -> Entries:
        return list(self.logs[rank])

    def match(self, **changed: Entries) -> Hang | None:
        """Match with the changed logs of some ranks, r3=..."""
        logs = dict(self.logs)
        for name, entries in changed.items():
            logs[int(name[1:])] = log_of(self.logs[int(name[1:])], entries)
        return match(logs, self.layout)


def log_of(before: Log, entries: Entries) -> Log:
    log, numbers = Log(before.rank, before.groups), {}
    for each in entries:
        if isinstance(each, Wait):
            if each.number in numbers:
                log.wait(numbers[each.number])
        else:
            numbers[each.number] = log.issue(list(each.calls), each.micro_batch)
    return log


def places(entries: Entries, wanted: Callable[[Call], bool]) -> list[int]:
    return [i for i, each in enumerate(entries) if isinstance(each, Issue) and any(map(wanted, each.calls))]


def changed(entries: Entries, place: int, **values: Any) -> Entries:
    issue = entries[place]
    assert isinstance(issue, Issue)
    calls = tuple(replace(call, **values) for call in issue.calls)
    return [*entries[:place], replace(issue, calls=calls), *entries[place + 1 :]]


def swapped(entries: Entries, one: int, other: int) -> Entries:
    result = list(entries)
    result[one], result[other] = result[other], result[one]
    return result


def without(entries: Entries, place: int) -> Entries:
    return entries[:place] + entries[place + 1 :]


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("dense") / "logs", {"tp": 2, "pp": 2}, {}, SHARDED)


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> World:
    sizes = {"tp": 2, "pp": 2, "vp": 2, "ep": 4, "etp": 1}
    return World(tmp_path_factory.mktemp("experts") / "logs", sizes, EXPERTS, {})


def found(hang: Hang | None, rank: int, other: int | set[int]) -> str:
    """Return what is wrong with a finding: it must name `rank`, and `other` or one of the others."""
    if hang is None:
        return "nothing is found"
    others = {other} if isinstance(other, int) else other
    pair = set(hang.ranks)
    return "" if rank in pair and pair - {rank} <= others and len(pair) == 2 else f"{hang.ranks}: {hang.reason}"


def in_group(*names: str) -> Callable[[Call], bool]:
    return lambda call: call.group in names


def kind(name: str, group: str | None = None) -> Callable[[Call], bool]:
    return lambda call: call.kind == name and group in (None, call.group)


def test_planted_deadlocks_are_found_with_the_right_pair(dense: World, experts: World) -> None:
    # tp2 pp2 dp2: rank 5 is stage 1, tp 1; its stage 0 is rank 1, its tp group 4 and 5, its dp group 5 and 7
    own = dense.entries(5)
    tp, data, pp = (places(own, in_group(name)) for name in ("tp", "dp_cp", "pp"))
    received = places(own, kind("recv"))
    one_less = own[: places(own, kind("send"))[-1]]
    # vp2 ep4 etp1: ranks 0 to 3 are stage 0, and its expert group
    routed = experts.entries(2)
    to_experts, counts = places(routed, kind("all_to_all")), places(routed, in_group("tp_ep"))
    unbatched = [
        replace(each, calls=tuple(replace(call, batched=False) for call in each.calls))
        if isinstance(each, Issue) and len(each.calls) == 1
        else each
        for each in own
    ]
    first = next(i for i in received if i + 1 < len(own))
    barrier = Issue(-1, (Call("world", "barrier", "", 0, 0),), None)
    world = list(range(RANKS))
    for log in dense.logs.values():
        log.groups["world"] = world
    with_barrier = {f"r{rank}": [*dense.entries(rank), barrier] for rank in range(RANKS) if rank != 5}
    ends = {n: places(dense.entries(n), in_group("dp_cp"))[0] for n in (4, 5)}
    cases: dict[str, tuple[Hang | None, int, int | set[int]]] = {
        "swapped collectives of one group": (dense.match(r5=swapped(own, tp[0], tp[-1])), 5, 4),
        "swapped collectives of two groups": (dense.match(r5=swapped(own, tp[-1], data[0])), 5, {4, 7}),
        "one call less": (dense.match(r5=without(own, tp[3])), 5, {4, 1}),
        "another type": (dense.match(r5=changed(own, tp[2], dtype="float32")), 5, 4),
        "another size": (dense.match(r5=changed(own, tp[2], elements=1)), 5, 4),
        "another size of a message": (dense.match(r5=changed(own, received[1], elements=7)), 5, 1),
        "another type of a message": (dense.match(r5=changed(own, pp[0], dtype="float32")), 5, 1),
        "one micro-batch less": (dense.match(r5=one_less), 5, {1, 4, 7}),
        "a send to another rank": (dense.match(r5=changed(own, places(own, kind("send"))[0], peer=0)), 5, {0, 1}),
        "a receive not in a batch": (dense.match(r5=unbatched), 5, 1),
        "no barrier": (dense.match(**with_barrier), 5, set(range(RANKS)) - {5}),
        "parameters before the last gradient": (dense.match(r5=swapped(own, data[0], data[-1])), 5, 7),
        "a receive before the one that is due": (dense.match(r5=[own[first], *own[first + 1 :], own[first]]), 5, 1),
        "other sizes among experts": (
            experts.match(r2=changed(routed, to_experts[4], splits=None, elements=8)),
            2,
            {0, 1, 3},
        ),
        "an expert group that counts once less": (experts.match(r2=without(routed, counts[1])), 2, {0, 1, 3, 6}),
        "a collective of a subset": (
            dense.match(**{f"r{n}": without(dense.entries(n), end) for n, end in ends.items()}),
            5,
            7,
        ),
    }
    cases["both send first"] = (_both_send_first(), 0, 1)
    wrong = {name: fault for name, case in cases.items() if (fault := found(*case))}
    assert wrong == {}, wrong
    assert len(cases) >= 12


def _both_send_first() -> Hang | None:
    layout, logs = Layout(1, 1, 2, 1, 1, 1, ORDER), {}
    for rank in (0, 1):
        logs[rank] = Log(rank, {"pp": [0, 1]})
        for kind_of in ("send", "recv"):
            logs[rank].issue([Call("pp", kind_of, "bfloat16", 8, 16, 1 - rank)], 0)
    hang = match(logs, layout)
    assert hang is not None
    assert not hang.buffered, "only long messages hang"
    return hang


def test_a_collective_after_different_numbers_of_messages() -> None:
    """The middle stage has two batches of messages, the ends have one, and all then meet in a broadcast."""
    layout, logs = Layout(1, 1, 3, 1, 1, 1, ORDER), {}
    message = ("pp", "bfloat16", 8, 16)
    for rank, calls in {0: [("send", 1)], 1: [("recv", 0), ("send", 2)], 2: [("recv", 1)]}.items():
        logs[rank] = Log(rank, {"pp": [0, 1, 2]})
        for kind_of, peer in calls:
            group, dtype, elements, size = message
            logs[rank].issue([Call(group, kind_of, dtype, elements, size, peer, batched=True)], 0)
        logs[rank].issue([Call("pp", "broadcast", "int32", 1, 4)], None)
    assert match(logs, layout) is None
