"""Do the ranks of a step wait for each other forever? Their logs are replayed, as tools that check MPI programs do.

Every collective needs the same call, with the same type and size, of all ranks of its group. A send needs its receive:
without a buffer, as NCCL does with long messages, and again with buffers. Calls of one communicator run in order, on a
stream of their own; a rank's own work goes on at once if the call is asynchronous, and waits where the log says so.
Sends and receives issued one by one have a communicator for each pair of ranks, those of a batch run together on that
of their group.

A rank that was not run does what the nearest one of its pipeline stage does, with its groups moved along. Sends to it
and receives from it count as met.

What cannot be seen: hangs that depend on values (other counts of tokens by expert, a rank that has no more data),
kernels that wait for each other across communicators because a GPU runs no more of them at once, and what happens
between steps. The logs are of as many micro-batches as were run: further ones repeat the same.
"""

from bisect import bisect_left
from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from cloudai_mbridge.training.dry.log import Call, Issue, Log, Wait
from cloudai_mbridge.training.dry.places import Layout

_DIMENSIONS = ("tp", "cp", "dp")
_Communicator = tuple[str, int]  # group, and the other rank; -1: all of it


@dataclass(frozen=True)
class Hang:
    """Two ranks whose calls don't match, or of which one waits for the other.

    calls: of both; None: it makes no further call that matters. micro_batch: that the first one works on. buffered: it
    hangs even if sends are buffered. chain: the ranks that wait for each other in turn, the first for the second.
    """

    ranks: tuple[int, int]
    calls: tuple[Call | None, Call | None]
    reason: str
    micro_batch: int | None
    chain: tuple[int, ...] = ()
    buffered: bool = True

    def document(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "ranks": list(self.ranks),
            "calls": [None if each is None else str(each) for each in self.calls],
            "reason": self.reason,
            "micro_batch": self.micro_batch,
            "chain": list(self.chain),
            "buffered": self.buffered,
        }


def match(logs: Mapping[int, Log], layout: Layout) -> Hang | None:
    """Return the first place where a step hangs, None if all calls match. layout: of the whole world."""
    hang = _Replay(logs, layout, has_buffers=False).run()
    if hang is None:
        return None
    buffered = _Replay(logs, layout, has_buffers=True).run()
    return Hang(hang.ranks, hang.calls, hang.reason, hang.micro_batch, hang.chain, buffered is not None)


class _Mismatch(Exception):
    def __init__(self, hang: Hang) -> None:
        super().__init__(hang.reason)
        self.hang = hang


class _Queue:
    """Issues of one rank on one communicator. done: those that have ended; the next one runs if it was issued.

    collectives: their places among the issues; of messages in batches, every rank has a number of its own.
    """

    __slots__ = ("collectives", "done", "issues")

    def __init__(self) -> None:
        self.issues: list[Issue] = []
        self.collectives: list[int] = []
        self.done = 0

    def add(self, issue: Issue) -> None:
        if issue.calls[0].peer is None:
            self.collectives.append(len(self.issues))
        self.issues.append(issue)

    @property
    def number(self) -> int:
        """The number of collectives before the next issue."""
        return bisect_left(self.collectives, self.done)

    def collective(self, number: int) -> Issue | None:
        """Return the collective of this number, None if the rank has not come to it."""
        place = self.collectives[number] if number < len(self.collectives) else len(self.issues)
        return self.issues[place] if place <= self.done and place < len(self.issues) else None

    @property
    def head(self) -> Issue | None:
        return self.issues[self.done] if self.done < len(self.issues) else None


class _Rank:
    """One rank of the replay: where it stands in its log."""

    def __init__(self, log: Log) -> None:
        self.rank, self.groups = log.rank, log.groups
        self.entries = list(log)
        self.at = 0
        self.finished: set[int] = set()
        self.queues: defaultdict[_Communicator, _Queue] = defaultdict(_Queue)
        self.pending: dict[int, list[Call]] = {}  # of a batch, the calls that have not met theirs
        self.micro_batch: int | None = None


class _Replay:
    def __init__(self, logs: Mapping[int, Log], layout: Layout, *, has_buffers: bool) -> None:
        self.ranks = {rank: _Rank(log) for rank, log in logs.items()}
        self.layout, self.has_buffers = layout, has_buffers
        self.places = {rank: layout.place_of(rank) for rank in logs}
        self._nearest: dict[int, int | None] = {}
        self._members: dict[tuple[int, str], dict[int, int]] = {}
        self._sent: defaultdict[tuple[Any, ...], deque[Call]] = defaultdict(deque)
        self._awake: deque[int] = deque()
        self._is_awake: set[int] = set()

    def run(self) -> Hang | None:
        """Replay the logs; return where they stop."""
        for rank in self.ranks:
            self._wake(rank)
        try:
            while self._awake:
                rank = self._awake.popleft()
                self._is_awake.discard(rank)
                self._advance(self.ranks[rank])
        except _Mismatch as found:
            return found.hang
        stuck = [each for each in self.ranks.values() if self._waits_at(each) is not None]
        return self._explain(stuck) if stuck else None

    def _wake(self, rank: int) -> None:
        if rank in self.ranks and rank not in self._is_awake:
            self._is_awake.add(rank)
            self._awake.append(rank)

    # Representatives
    def nearest(self, rank: int) -> int | None:
        """Return the rank whose log stands for a rank: itself, or the nearest of its stage that was run."""
        if rank in self.ranks:
            return rank
        if rank not in self._nearest:
            place = self.layout.place_of(rank)
            same = [each for each, own in self.places.items() if own["pp"] == place["pp"]]
            spans = {name: max(getattr(self.layout, name) - 1, 1) for name in _DIMENSIONS}

            def distance(other: int) -> float:
                own = self.places[other]
                return sum((abs(own[name] - place[name]) / spans[name] for name in _DIMENSIONS), 0.0)

            self._nearest[rank] = min(same, key=distance, default=None)
        return self._nearest[rank]

    def _others(self, own: _Rank, group: str) -> dict[int, int]:
        """Return the ranks that stand for the others of a group, and one that each stands for."""
        key = own.rank, group
        if key not in self._members:
            found: dict[int, int] = {}
            for each in own.groups[group]:
                stands = None if each == own.rank else self.nearest(each)
                if stands is not None and (stands not in found or stands == each):
                    found[stands] = each
            found.pop(own.rank, None)
            self._members[key] = found
        return self._members[key]

    # One rank
    def _advance(self, own: _Rank) -> None:
        while self._go_on(own) | self._try_heads(own):
            pass

    def _go_on(self, own: _Rank) -> bool:
        """Walk through the log up to the first wait for what is not done; return whether anything was issued."""
        moved = False
        while own.at < len(own.entries):
            entry = own.entries[own.at]
            if isinstance(entry, Wait):
                if entry.number not in own.finished:
                    return moved
                own.finished.discard(entry.number)
            else:
                if entry.calls:
                    queue = own.queues[self._communicator(entry)]
                    queue.add(entry)
                    if len(entry.calls) > 1 or entry.calls[0].peer is not None:
                        own.pending[entry.number] = list(entry.calls)
                else:
                    own.finished.add(entry.number)
                own.micro_batch = entry.micro_batch
                moved = True
                if entry.calls and not entry.is_async:
                    own.entries[own.at] = Wait(entry.number)  # it goes on when this is done
                    self._wake_others(own, entry)
                    continue
                self._wake_others(own, entry)
            own.at += 1
        return moved

    def _wake_others(self, own: _Rank, issue: Issue) -> None:
        for call in issue.calls:
            if call.peer is None:
                for each in self._others(own, call.group):
                    self._wake(each)
            elif (other := self.nearest(call.peer)) is not None:
                self._wake(other)

    @staticmethod
    def _communicator(issue: Issue) -> _Communicator:
        first = issue.calls[0]
        is_alone = len(issue.calls) == 1 and first.peer is not None and not first.batched
        return (first.group, first.peer if is_alone and first.peer is not None else -1)

    def _try_heads(self, own: _Rank) -> bool:
        ended = False
        for communicator, queue in own.queues.items():
            while (head := queue.head) is not None:
                is_done = (
                    self._meet(own, communicator, head) if head.number in own.pending else self._gathered(own, head)
                )
                if not is_done:
                    break
                queue.done += 1
                own.finished.add(head.number)
                self._wake_others(own, head)
                ended = True
        return ended

    # Collectives
    def _gathered(self, own: _Rank, head: Issue) -> bool:
        """Return whether all ranks of a collective have come to it. _Mismatch: one makes another call there."""
        call = head.calls[0]
        number = own.queues[call.group, -1].number
        for stands, member in self._others(own, call.group).items():
            other = self.ranks[stands]
            queue = other.queues.get((call.group, -1))
            if queue is None or (theirs := queue.collective(number)) is None:
                return False
            if (reason := self._differ(own, call, other, member, theirs)) is not None:
                calls = (call, theirs.calls[0])
                raise _Mismatch(Hang((own.rank, stands), calls, reason, head.micro_batch))
        return True

    def _differ(self, own: _Rank, call: Call, other: _Rank, member: int, theirs: Issue) -> str | None:
        first = theirs.calls[0]
        if first.kind != call.kind or len(theirs.calls) > 1:
            return f"{call.kind} meets {first.kind} in group {call.group}"
        if first.dtype != call.dtype:
            return f"{call.kind} of {call.dtype} meets one of {first.dtype} in group {call.group}"
        if member == other.rank and other.groups.get(call.group) != own.groups[call.group]:
            return f"group {call.group} has other ranks"
        if call.splits is not None and first.splits is not None:
            if member != other.rank:
                return None  # balanced over all ranks, but for the rest
            ranks = own.groups[call.group]
            mine, its = ranks.index(own.rank), ranks.index(member)
            sent = call.splits[0][its], first.splits[1][mine]
            taken = call.splits[1][its], first.splits[0][mine]
            if sent[0] != sent[1] or taken[0] != taken[1]:
                return (
                    f"all_to_all sends {sent[0]} elements where {sent[1]} are expected, and {taken[1]} for {taken[0]}"
                )
            return None
        if first.elements != call.elements:
            return f"{call.kind} of {call.elements} elements meets one of {first.elements} in group {call.group}"
        return None

    # Sends and receives
    def _meet(self, own: _Rank, communicator: _Communicator, head: Issue) -> bool:
        """Let calls of an issue meet theirs; return whether all have."""
        pending = own.pending[head.number]
        for call in list(pending):
            meet = self._met_buffered if self.has_buffers else self._met
            if meet(own, communicator, call):
                pending.remove(call)
        if pending:
            return False
        del own.pending[head.number]
        return True

    def _met(self, own: _Rank, communicator: _Communicator, call: Call) -> bool:
        """Meet a call whose other side runs at this moment. That of a rank that was not run counts as met."""
        if (other := self.ranks.get(call.peer if call.peer is not None else -1)) is None:
            return True
        queue = other.queues.get((communicator[0], -1 if communicator[1] < 0 else own.rank))
        head = None if queue is None else queue.head
        wanted = "recv" if call.kind == "send" else "send"
        for each in () if head is None else other.pending.get(head.number, ()):
            if each.kind == wanted and each.peer == own.rank:
                self._compare(own, call, other, each)
                other.pending[head.number].remove(each)  # type: ignore[union-attr]
                self._wake(other.rank)
                return True
        return False

    def _met_buffered(self, own: _Rank, communicator: _Communicator, call: Call) -> bool:
        """Send into a buffer, or receive from one."""
        if call.peer not in self.ranks:
            return True
        place = (communicator[0], communicator[1] < 0)
        if call.kind == "send":
            self._sent[(*place, own.rank, call.peer)].append(call)
            self._wake(call.peer)
            return True
        box = self._sent[(*place, call.peer, own.rank)]
        if not box:
            return False
        self._compare(own, call, self.ranks[call.peer], box.popleft())
        return True

    def _compare(self, own: _Rank, call: Call, other: _Rank, theirs: Call) -> None:
        if (call.dtype, call.elements) != (theirs.dtype, theirs.elements):
            one, two = (f"{each.elements} {each.dtype}" for each in (call, theirs))
            reason = f"{call.kind} of {one} meets {theirs.kind} of {two} in group {call.group}"
            raise _Mismatch(Hang((own.rank, other.rank), (call, theirs), reason, own.micro_batch))

    # Why it stopped
    def _waits_at(self, own: _Rank) -> Issue | None:
        """Return the issue that a rank waits for, or that was never done; None if it has ended."""
        if own.at < len(own.entries):
            entry = own.entries[own.at]
            if isinstance(entry, Wait):
                for queue in own.queues.values():
                    if any(each.number == entry.number for each in queue.issues[queue.done :]):
                        return queue.head  # which runs before it
        return next((queue.head for queue in own.queues.values() if queue.head is not None), None)

    def _waits_for(self, own: _Rank) -> int | None:
        """Return a rank that has not come to what a rank waits for."""
        if (head := self._waits_at(own)) is None:
            return None
        if head.number in own.pending:
            left = own.pending[head.number][0]
            return None if left.peer is None else self.nearest(left.peer)
        call = head.calls[0]
        number = own.queues[call.group, -1].number
        late = []
        for stands in self._others(own, call.group):
            queue = self.ranks[stands].queues.get((call.group, -1))
            if queue is None or queue.collective(number) is None:
                late.append(stands)
        ended = [each for each in late if self._waits_at(self.ranks[each]) is None]
        return next(iter(ended or late), None)

    def _explain(self, stuck: list[_Rank]) -> Hang:
        """Follow who waits for whom to a rank that has ended, or around."""
        best: Hang | None = None
        for start in stuck:
            chain = [start.rank]
            while (following := self._waits_for(self.ranks[chain[-1]])) is not None and following not in chain:
                chain.append(following)
            if following is not None:
                chain = [*chain[chain.index(following) :], following]
            if len(chain) < 2:
                continue
            is_over = self._waits_at(self.ranks[chain[-1]]) is None
            first, second = (chain[-2], chain[-1]) if is_over else self._nearest_pair(chain)
            waiting, other = self._call_of(first), self._call_of(second)
            reason = "waits for a rank that makes no further call" if is_over else "wait for each other"
            hang = Hang((first, second), (waiting, other), reason, self.ranks[first].micro_batch, tuple(chain))
            if is_over:
                return hang
            best = best or hang
        if best is not None:
            return best
        own = stuck[0]
        return Hang((own.rank, own.rank), (self._call_of(own.rank), None), "a call is never met", own.micro_batch)

    def _nearest_pair(self, chain: list[int]) -> tuple[int, int]:
        """Return two ranks in a circle of ranks that wait: those that call in the same group, but not each other."""
        pairs = list(pairwise(chain))
        for one, other in pairs:
            calls = self._call_of(one), self._call_of(other)
            if calls[0] is not None and calls[1] is not None and calls[0].group == calls[1].group:
                return one, other
        return pairs[0]

    def _call_of(self, rank: int) -> Call | None:
        own = self.ranks[rank]
        if (head := self._waits_at(own)) is None:
            return None
        return own.pending[head.number][0] if own.pending.get(head.number) else head.calls[0]
