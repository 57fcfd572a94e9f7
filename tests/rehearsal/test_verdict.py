"""Verdicts on events of the program, and on its end: only what the job's own stack refuses is rejected."""

from typing import Any

from cloudai_mbridge.rehearsal.program import Ended
from cloudai_mbridge.rehearsal.record import RehearsalVerdict, RehearsedPoint
from cloudai_mbridge.rehearsal.run import _Software, verdict_of
from tests.cases import every
from tests.golden import Sentence
from tests.rehearsal.conftest import CONFIGURED, GOOD, REFUSED, START, UNUSABLE, built

BLANK = RehearsedPoint("t", "tp2", {"tp": 2}, 2, RehearsalVerdict.NOT_EVALUATED)
JOBS = _Software("/p/python", is_jobs=True)
IMAGE = _Software("/p/python", is_jobs=False, whose="the image's")
OWN_LIMIT = {**REFUSED, "kind": "NotImplementedError", "message": "Cannot copy out of meta tensor; no data!"}
NO_DRIVER = {**REFUSED, "kind": "ImportError", "message": "libcuda.so.1: cannot open shared object file"}
CRASH = {**REFUSED, "stage": "crash", "kind": "crash", "message": "exit code -9"}


def verdict(
    events: list[dict[str, Any]], code: int = 0, said: str = "", *, late: bool = False, software: _Software = JOBS
) -> RehearsedPoint:
    return verdict_of(BLANK, events, Ended(code, late, said), software, 1800)


def test_a_point_starts_only_if_every_rank_was_built() -> None:
    point = verdict(GOOD)
    assert (point.verdict, point.reason, point.ranks) == (RehearsalVerdict.STARTS, "", (0, 1))
    assert (point.stack, point.is_job_stack) == ("Megatron-Core 0.16.1, without Transformer Engine", True)
    assert point.states["parameters"] == 1001


@every(
    ("events", "end"),
    [
        (GOOD[:3], {}),
        (GOOD[:1], {}),
        ([], {}),
        (GOOD, {"code": 1, "said": "odd"}),
        ([], {"code": 1, "said": "No module named cloudai_mbridge.training.dry"}),
        (GOOD[:3], {"code": -9}),
        (GOOD[:3], {"code": -15, "late": True}),
        ([START], {"code": -15, "late": True}),
        ([UNUSABLE], {"code": 2}),
        ([*GOOD[:3], OWN_LIMIT], {"code": 1}),
        ([*GOOD[:3], CRASH], {"code": 1}),
        ([*GOOD[:3], NO_DRIVER], {"code": 1}),
        ([START, {**CONFIGURED, "ranks": "many"}], {}),
        ([START, {**CONFIGURED, "ranks": []}], {}),
    ],
)
def test_what_is_missing_or_odd_is_not_evaluated(
    events: list[dict[str, Any]], end: dict[str, Any], sentence: Sentence
) -> None:
    point = verdict(events, **end)
    assert point.verdict is RehearsalVerdict.NOT_EVALUATED
    sentence(point.reason)


def test_a_refusal_of_the_jobs_stack_has_its_own_words(sentence: Sentence) -> None:
    point = verdict([*GOOD[:3], CRASH, REFUSED, {**REFUSED, "rank": 3}], 1)
    assert point.verdict is RehearsalVerdict.REFUSED
    assert [each.rank for each in point.refusals] == [1, 3, 1]
    assert point.refusals[0].where[-1] == "megatron/core/b.py:2 g"
    sentence(point.reason)


def test_a_hang_is_a_refusal_with_both_calls(sentence: Sentence) -> None:
    hang = {"event": "hang", "ranks": [0, 3], "calls": ["send to 3", None], "reason": "no receive", "micro_batch": 2}
    point = verdict([*GOOD, hang], 1)
    assert (point.verdict, point.refusals[0].rank) == (RehearsalVerdict.REFUSED, 0)
    sentence(point.reason)


def test_ranks_beyond_the_distinct_ones_and_their_shards(sentence: Sentence) -> None:
    tiled = {"event": "tiled", "keys": 3, "problems": []}
    assert verdict([*GOOD, built(5), tiled]).reason == ""
    point = verdict([*GOOD, {**tiled, "problems": ["w: 2 of 4 values are in no shard"]}])
    assert point.verdict is RehearsalVerdict.STARTS
    sentence(point.reason)


def test_another_stack_rejects_nothing(sentence: Sentence) -> None:
    refused = verdict([*GOOD[:3], REFUSED], 1, software=IMAGE)
    assert refused.verdict is RehearsalVerdict.NOT_EVALUATED
    sentence(refused.reason)
    good = verdict(GOOD, software=IMAGE)
    assert (good.verdict, good.is_job_stack) == (RehearsalVerdict.STARTS, False)
    sentence(good.reason)


def test_unknown_events_and_keys_are_carried() -> None:
    step = {"event": "step", "rank": 0, "flops": 10**12}
    point = verdict([*GOOD[:2], built(0, new=[1]), built(1), step])
    assert point.verdict is RehearsalVerdict.STARTS
    assert point.others == (step,)
    assert point.built[0]["new"] == [1]


def test_a_rank_that_took_no_step_is_told(sentence: Sentence) -> None:
    left = {"event": "not_stepped", "rank": 0, "stage": "step", "kind": "NotKnown", "message": "a value is read"}
    point = verdict([*GOOD, left, {**left, "rank": 1}])
    assert point.verdict is RehearsalVerdict.STARTS
    sentence(point.reason)


def test_credentials_in_messages_are_redacted() -> None:
    told = {**REFUSED, "message": "cannot read https://ada:s3cret@host/x"}
    assert "s3cret" not in verdict([START, told], 1).reason
