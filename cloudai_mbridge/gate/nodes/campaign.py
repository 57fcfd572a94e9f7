"""A campaign: one test on every node, in rounds, until every node is known to be slow or normal.

In each round all nodes are put into new groups of as many as a run needs, so that every node runs in different company.
After a round, only groups with an undecided node are run again, with some others beside them to compare with. Each look
has its share of the false-alarm rate. The campaign remembers nothing: its rounds are in a file of the run's directory,
what was measured in the runs' files, so that another process can go on.
"""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from cloudai_mbridge.errors import BadInput, counted
from cloudai_mbridge.files.json_text import parse_json
from cloudai_mbridge.files.regular import read_regular
from cloudai_mbridge.gate.nodes.verdicts import NodeResult, NodeRun, NodesResult, NodeVerdict, judge_nodes
from cloudai_mbridge.plan import ROOT_FILES, RunPlan
from cloudai_mbridge.runner import Judge
from cloudai_mbridge.runner.context import Phase, Tracked
from cloudai_mbridge.runner.journal.journal import JournalEntry
from cloudai_mbridge.runner.search import Choice
from cloudai_mbridge.verdict import Judgement

Group = tuple[str, ...]
_TRIES = 20  # of a round's order, of which the one with the most new company is taken
# Runs of a round that are there to compare with, at least so many and this share of a round of all: fewer say little of
# how fast runs are
_FEWEST_OTHERS, _SHARE_OF_OTHERS = 6, 0.05
# Runs in all when these rounds are over: what two rounds leave open needs to know how noisy runs are, and how skewed
_FEWEST_AFTER = {3: 160}


@dataclass(frozen=True)
class Campaign:
    """rounds: of each, the keys of its runs. false_alarm_rate: of all looks together."""

    test_id: str
    rounds: tuple[tuple[str, ...], ...]
    false_alarm_rate: float
    slowdown: float


def plan_rounds(nodes: Sequence[str], per_run: int, rounds: int, rng: random.Random) -> list[list[Group]]:
    """Return the groups of every round. A node is in one of them, or in two where the groups do not come out even.

    BadInput: there are fewer nodes than a run needs.
    """
    if len(nodes) < max(per_run, 2):
        raise BadInput(f"--nodes: {counted(len(nodes), 'node')}; a campaign compares at least {max(per_run, 2)}")
    planned, company = [], set[frozenset[str]]()
    for _ in range(rounds):
        tries = [_groups(nodes, per_run, rng) for _ in range(_TRIES if per_run > 1 else 1)]
        pairs = [{frozenset((a, b)) for group in groups for a in group for b in group if a < b} for groups in tries]
        best = min(range(len(tries)), key=lambda i: len(pairs[i] & company))
        company |= pairs[best]
        planned.append(tries[best])
    return planned


def _groups(nodes: Sequence[str], per_run: int, rng: random.Random) -> list[Group]:
    order = rng.sample(list(nodes), len(nodes))
    groups = [tuple(order[start : start + per_run]) for start in range(0, len(order), per_run)]
    missing = per_run - len(groups[-1])
    return [*groups[:-1], (*groups[-1], *order[:missing])] if missing else groups


def judge_rounds(runs: Sequence[NodeRun], done: int, rounds: int, rate: float, slowdown: float) -> NodesResult:
    """Say of every node whether it is slow, after `done` of the rounds. rate: of false alarms, of the whole campaign.

    There is a look after each round, and what one of them calls slow stays slow: the looks share the rate.
    """
    named = dict[str, NodeResult]()
    for number in range(1, max(done, 1) + 1):
        known = [run for run in runs if run.round < number]
        share = share_of_rate(number, rounds)
        result = judge_nodes(known, false_alarm_rate=rate, slowdown=slowdown, share=share)
        named |= {node.node: node for node in result.slow}
    return result.with_slow(named)


def share_of_rate(done: int, rounds: int) -> float:
    """Return what the look after `done` of the rounds may use of the false-alarm rate.

    The more, the later: little can be told early. The first has none of it, as a node is not slow by one run.
    """
    return (done - 1) / sum(range(rounds)) if rounds > 1 else 1.0


def wanted_groups(groups: Sequence[Group], known: NodesResult | None, number: int, done: int) -> list[Group]:
    """Return the groups of a round to run: those with an undecided node, and some others to compare with.

    known: of the rounds before, None before the first. number: of the round, from 0. done: runs of the rounds before.
    """
    if known is None:
        return list(groups)
    verdicts = {node.node: node.verdict for node in known.nodes}
    of_group = [{verdicts.get(node, NodeVerdict.TOO_FEW) for node in group} for group in groups]
    needed = [group for group, those in zip(groups, of_group, strict=True) if NodeVerdict.TOO_FEW in those]
    normal = [group for group, those in zip(groups, of_group, strict=True) if those == {NodeVerdict.NORMAL}]
    slow = [group for group in groups if group not in needed and group not in normal]
    share = round(_SHARE_OF_OTHERS * len(groups))
    fewest = max(_FEWEST_OTHERS, share, _FEWEST_AFTER.get(number, 0) - done - len(needed))
    return needed + [*normal, *slow][:fewest] if needed else []


def plan_campaign(
    template: RunPlan,
    nodes: Sequence[str],
    rounds: int,
    rng: random.Random,
    *,
    false_alarm_rate: float,
    slowdown: float,
) -> tuple[tuple[RunPlan, ...], Campaign]:
    """Return all runs that a campaign may need, and what has to be written beside their plan."""
    runs: list[RunPlan] = []
    keys: list[tuple[str, ...]] = []
    for groups in plan_rounds(nodes, template.num_nodes, rounds, rng):
        start = len(runs)
        runs += [_on(template, group, start + number) for number, group in enumerate(groups)]
        keys.append(tuple(run.key for run in runs[start:]))
    return tuple(runs), Campaign(template.test_id, tuple(keys), false_alarm_rate, slowdown)


def _on(template: RunPlan, group: Group, iteration: int) -> RunPlan:
    key = f"{template.key.rpartition('/')[0]}/{iteration}"
    return replace(template, key=key, iteration=iteration, nodes=group, array="", array_index=0)


def write_campaign(campaign: Campaign, root: Path) -> None:
    (root / ROOT_FILES.node_campaign).write_text(json.dumps({"version": 1, **asdict(campaign)}, indent=1) + "\n")


def read_campaign(root: Path) -> Campaign | None:
    """Return the campaign that a directory is of, None if it is an ordinary run. BadInput for a damaged one."""
    path = root / ROOT_FILES.node_campaign
    try:
        data = parse_json(read_regular(path))
        assert data.pop("version") == 1
        return Campaign(**{**data, "rounds": tuple(tuple(map(str, keys)) for keys in data["rounds"])})
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror}); start the campaign again") from None
    except (ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError):
        raise BadInput(f"{path}: is not what `mbridge nodes test` wrote; start the campaign again") from None


class NodeChooser:
    """Chooses the runs of a campaign, round by round."""

    def __init__(self, campaign: Campaign, judge: Judge) -> None:
        self._campaign, self._judge = campaign, judge
        self._judged: dict[tuple[str, int], Judgement] = {}
        self._looks: dict[tuple[int, int], NodesResult] = {}  # by rounds and runs

    def choose(self, runs: Sequence[Tracked], entry_of: Callable[[str], JournalEntry]) -> Choice:
        """Return what to submit now, and why nothing more will be."""
        by_key = {run.plan.key: run for run in runs}
        measured: list[NodeRun] = []
        known, done = None, 0
        for number, keys in enumerate(self._campaign.rounds):
            if number:
                known = self._known(measured, number)
            of_group = {by_key[key].plan.nodes: by_key[key] for key in keys if key in by_key}
            chosen = [of_group[group] for group in wanted_groups(list(of_group), known, number, done)]
            if not chosen:
                return Choice((), "every node is decided")
            if pending := [run.plan.key for run in chosen if run.phase is not Phase.ENDED]:
                return Choice(pending)
            measured += self._measured(number, chosen, entry_of)
            done += len(chosen)
        return Choice((), f"each node had its {counted(len(self._campaign.rounds), 'run')}")

    def why_end(self, run: RunPlan, step_times: Sequence[float]) -> str:
        """Return "": every run goes to its end."""
        return ""

    def _known(self, measured: Sequence[NodeRun], done: int) -> NodesResult:
        of = self._campaign
        if (done, len(measured)) not in self._looks:
            looked = judge_rounds(measured, done, len(of.rounds), of.false_alarm_rate, of.slowdown)
            self._looks[done, len(measured)] = looked
        return self._looks[done, len(measured)]

    def _measured(self, number: int, runs: Iterable[Tracked], entry_of: Callable[[str], JournalEntry]) -> list[NodeRun]:
        found = []
        for run in runs:
            if run.phase is Phase.ENDED and run.number:
                judgement = self._judgement(run, entry_of)
                if judgement.is_success and judgement.step_time_s:
                    found.append(NodeRun(f"round {number}", run.plan.nodes, judgement.step_time_s, round=number))
        return found

    def _judgement(self, run: Tracked, entry_of: Callable[[str], JournalEntry]) -> Judgement:
        key = run.plan.key, run.number
        if key not in self._judged:
            self._judged[key] = self._judge(run.plan, entry_of(run.plan.key))
        return self._judged[key]
