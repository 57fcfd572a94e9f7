"""Whose records count: those with the token of the run's job, wherever they stand."""

import json

import pytest

from cloudai_mbridge.logs import LogParser, LogSummary
from cloudai_mbridge.training.process.log_lines import RUN_MARK, STEP_MARK, render_record, run_token
from tests.cases import every

TOKEN, OTHER = "0123456789abcdef", "fedcba9876543210"


def _record(step: int, token: str | None = TOKEN, loss: float = 5.0) -> str:
    values = {"step": step, "step_time_s": 0.5, "tflops_per_gpu": 9.0, "losses": {"lm loss": loss}}
    return render_record(STEP_MARK, values, token) + "\n"


def _parse(text: str, token: str | None = TOKEN) -> LogSummary:
    parser = LogParser(token)
    parser.feed(text.encode())
    return parser.finish()


def _steps(text: str, token: str | None = TOKEN) -> list[tuple[int, float | None]]:
    return [(step.step, step.loss) for step in _parse(text, token).steps]


def test_injected_records_are_left_out_and_noted() -> None:
    log = _record(1) + _record(2, None, 1.0) + _record(2) + _record(9, OTHER) + _record(3, OTHER, 1.0)
    assert _steps(log) == [(1, 5.0), (2, 5.0)]
    assert _parse(log).notes == ("3 records that are not of this run's job were left out",)


def test_a_record_of_the_run_drops_what_came_before_without_the_token() -> None:
    head = render_record(RUN_MARK, {"device": "a lie"}) + "\n" + _record(1, None, 1.0) + _record(2, None, 1.0)
    log = _parse(head + render_record(RUN_MARK, {"device": "H100"}, TOKEN) + "\n" + _record(1))
    assert [(step.step, step.loss) for step in log.steps] == [(1, 5.0)]
    assert log.run == {"version": 1, "device": "H100"}


def test_records_of_a_loop_without_tokens_count() -> None:
    assert _steps(_record(1, None) + _record(2, None)) == [(1, 5.0), (2, 5.0)]


def test_records_of_another_job_alone_are_none() -> None:
    assert _steps(_record(1, OTHER)) == []


def test_every_record_counts_where_the_token_is_not_known() -> None:
    assert _steps(_record(1, None) + _record(2, OTHER), token=None) == [(1, 5.0), (2, 5.0)]


def test_a_job_within_a_job_has_both_tokens() -> None:
    assert _steps(_record(1, f"{OTHER} {TOKEN}")) == [(1, 5.0)]


@every("before", ["saw ", "rank 0 said: ", "'", "10: x: ", "h:9:9 [0] NCCL INFO Channel 00/0 : 0["])
@every("after", ["", "h:9:9 [1] NCCL INFO comm 0x"])
def test_the_token_proves_a_record_wherever_it_stands(before: str, after: str) -> None:
    log = _parse(_record(1) + before + _record(2).rstrip("\n") + after + "\n" + _record(3))
    assert [(step.step, step.loss) for step in log.steps] == [(1, 5.0), (2, 5.0), (3, 5.0)]
    assert log.notes == ()


@pytest.mark.parametrize("token", [None, OTHER])
def test_a_record_without_the_token_in_the_middle_of_a_line_is_none(token: str | None) -> None:
    log = _parse(_record(1) + "saw " + _record(2, token))
    assert [step.step for step in log.steps] == [1]
    assert log.notes == ("1 damaged records were left out",)


def test_records_of_several_ranks_on_one_line_all_count() -> None:
    run = render_record(RUN_MARK, {"device": "H100"}, TOKEN)
    log = _parse(run + _record(1) + _record(2)[:30] + _record(3).rstrip("\n") + _record(4))
    assert ([step.step for step in log.steps], log.run["device"]) == ([1, 3, 4], "H100")
    assert log.notes == ("1 damaged records were left out",)


@every("before", ["3: ", "[default0]:", "[rank1]: ", "50 %\r", "\x00\x00", "0: [default0]: "])
def test_labels_of_ranks_and_what_a_progress_bar_wrote_over_may_stand_before_it(before: str) -> None:
    assert _steps(before + _record(1)) == [(1, 5.0)]


def test_the_token_comes_from_the_job() -> None:
    assert run_token({}) is None
    assert run_token({"SLURM_JOB_NAME": "bash"}) is None
    assert run_token({"SLURM_JOB_NAME": f"mbridge-t-mb1.5-0.{TOKEN}"}) == TOKEN
    assert run_token({"MBRIDGE_LOCAL_JOB": TOKEN}) == TOKEN
    two = f"mbridge-t.{TOKEN}.{OTHER}"  # a site has added a hash of its own
    assert run_token({"SLURM_JOB_NAME": two, "MBRIDGE_JOB_TOKEN": TOKEN}) == TOKEN
    assert run_token({"SLURM_JOB_NAME": f"a.{TOKEN}", "MBRIDGE_JOB_TOKEN": OTHER}) == TOKEN
    assert run_token({"MBRIDGE_LOCAL_JOB": OTHER, "SLURM_JOB_NAME": f"a.{TOKEN}"}) == f"{OTHER} {TOKEN}"


def test_a_run_by_hand_writes_no_token() -> None:
    assert json.loads(_record(1, None).partition(" ")[2]).get("token") is None


def test_a_long_line_of_half_matches_is_read_in_linear_time() -> None:
    log = _parse("Step Time : 1.0s " * 60_000 + "\n" + _record(1))
    assert [step.step for step in log.steps] == [1]


def test_a_record_in_the_log_of_the_upstream_launcher_is_not_of_the_run() -> None:
    parser = LogParser(TOKEN, has_records=False)
    parser.feed(b"Step Time : 1.50s GPU utilization: 400.0MODEL_TFLOP/s/GPU\n" + (_record(1) + _record(2)).encode())
    log = parser.finish()
    assert [(step.step, step.step_time_s) for step in log.steps] == [(1, 1.5)]
    assert (log.source, log.notes) == ("lines", ("2 records that are not of this run's job were left out",))


def test_a_log_begins_with_the_first_start_of_its_steps() -> None:
    """A run that is started again in one log goes on from its own checkpoint."""
    starts = [render_record(RUN_MARK, {"first_iteration": first}, TOKEN) + "\n" for first in (3, 5, 1)]
    assert _parse(starts[0] + _record(3) + _record(4) + starts[1] + _record(5)).run["first_iteration"] == 3
    assert _parse(starts[2] + _record(1) + starts[1] + _record(5)).run["first_iteration"] == 1
    assert _parse(starts[2] + starts[1] + _record(5)).run["first_iteration"] == 5, "the first start logged no step"
    assert _parse(render_record(RUN_MARK, {"first_iteration": 9}, OTHER) + "\n" + _record(1)).run == {}


_LOADED = "  successfully loaded checkpoint from /ckpt/a b [ t 1/2, p 1/1 ] at iteration 4"
_LINES = "[2026-01-01 00:00:00] iteration {}/ 6 | elapsed time per iteration (ms): 500.0 | lm loss: 5.0E+00 |\n"


@every(
    ("lines", "first"),
    [
        ((_LOADED,), 5),
        (("0: [rank0]: " + _LOADED,), 5),
        ((_LOADED.replace("4", "0"), _LOADED), 5),  # weights first
        ((_LOADED, "5", _LOADED.replace("at iteration 4", "at iteration 5")), 5),  # started again
        ((_LOADED.replace("at iteration 4", "at iteration x"),), None),
        ((_LOADED.replace("[ t 1/2, p 1/1 ] ", ""),), None),  # another program's
        (("successfully loaded checkpoint from somewhere",), None),
    ],
)
def test_where_the_upstream_launcher_goes_on(lines: tuple[str, ...], first: int | None) -> None:
    parser = LogParser(has_records=False)
    for line in lines:
        parser.feed((_LINES.format(line) if line == "5" else f"{line}\n").encode())
    assert parser.finish().run.get("first_iteration") == first
    own = LogParser(TOKEN)
    own.feed("\n".join(lines).encode())
    assert own.finish().run == {}, "the embedded loop has a record"
