"""Two ranks write two lines of each step: lost, merged, or of a dead attempt, a step has its own numbers or none."""

import random
from dataclasses import dataclass, replace

import pytest

from cloudai_mbridge.logs import LogParser, LogSummary
from tests.cases import every


@dataclass(frozen=True)
class _Step:
    """What a step's two lines contain. Its time grows by 3 % a step, more than two clocks differ."""

    step: int
    seconds: float
    rate: float
    loss: float

    @property
    def time(self) -> str:
        return f"Step Time : {self.seconds:.2f}s GPU utilization: {self.rate:.1f}MODEL_TFLOP/s/GPU"

    @property
    def iteration(self) -> str:
        return (
            f" [2026-05-06 07:08:09] iteration {self.step:8d}/      12 | consumed samples:           64 |"
            f" elapsed time per iteration (ms): {self.seconds * 1000:.1f} | learning rate: 1.0E-04 |"
            f" global batch size:    64 | lm loss: {self.loss:.6E} | loss scale: 1.0 | grad norm: 1.500 |"
            " number of skipped iterations:   0 | number of nan iterations:   0 |"
        )


STEPS = [_Step(step, round(4 * 1.03**step, 4), 700.0 - step, 9.0 - step / 4) for step in range(1, 13)]
ALL = [(s.step, s.seconds, s.rate, s.loss) for s in STEPS]


def _lines(*steps: _Step) -> list[str]:
    return [line for step in steps for line in (step.time, step.iteration)]


def _parse(text: str) -> LogSummary:
    parser = LogParser(has_records=False)
    parser.feed(text.encode())
    return parser.finish()


def _read(*lines: str) -> list[tuple[int, float | None, float | None, float | None]]:
    steps = _parse("\n".join(lines)).steps
    return [(s.step, s.step_time_s and round(s.step_time_s, 4), s.tflops_per_gpu, s.loss) for s in steps]


def test_the_finer_step_time_counts() -> None:
    slow = [replace(step, seconds=round(0.0041 + 0.0001 * i, 4)) for i, step in enumerate(STEPS)]
    assert [time for _, time, *_ in _read(*_lines(*slow))] == [step.seconds for step in slow]


@every("at", [0, 4, 11])
@every("is_reversed", [False, True])
def test_two_ranks_lines_that_became_one(at: int, is_reversed: bool) -> None:
    pairs = [_lines(step) for step in STEPS]
    merged = "".join(reversed(pairs[at]) if is_reversed else pairs[at])
    assert _read(*[line for pair in [*pairs[:at], [merged, ""], *pairs[at + 1 :]] for line in pair]) == ALL
    neighbours = _lines(*STEPS)  # of two steps
    neighbours[2 * at + 1 : 2 * at + 3] = ["".join(neighbours[2 * at + 1 : 2 * at + 3])]
    assert _read(*neighbours) == ALL


@every("first", [1, 3, 4])
@every("is_even", [False, True])
def test_an_attempt_that_died_between_its_two_lines(first: int, is_even: bool) -> None:
    steps = [replace(step, seconds=0.5) for step in STEPS] if is_even else STEPS
    dead = replace(steps[3], rate=1.0, seconds=0.5 if is_even else 20.0)
    summary = _parse("\n".join([*_lines(*steps[:3]), dead.time, "RuntimeError: NCCL", *_lines(*steps[first - 1 :])]))
    assert [(s.step, s.step_time_s, s.tflops_per_gpu, s.loss) for s in summary.steps] == [
        (s.step, pytest.approx(s.seconds), s.rate, s.loss) for s in steps
    ]
    if first < 3:
        assert f"the run started again at step {first}" in summary.notes


@every("at", [0, 6, 11])
def test_a_line_that_is_lost_moves_no_other(at: int) -> None:
    lines, step = _lines(*STEPS), STEPS[at]
    without_time = lines[: 2 * at] + lines[2 * at + 1 :]
    assert _read(*without_time) == [*ALL[:at], (step.step, step.seconds, None, step.loss), *ALL[at + 1 :]]
    without_iteration = lines[: 2 * at + 1] + lines[2 * at + 2 :]
    alone = (step.step, round(step.seconds, 2), step.rate, None)
    assert _read(*without_iteration) == [*ALL[:at], alone, *ALL[at + 1 :]]


@every("at", [1, 2, 6, 10])
@every("iteration_first", [False, True])
def test_of_steps_that_take_equally_long_a_lost_line_moves_no_other(at: int, iteration_first: bool) -> None:
    """Then times tell nothing, and the order of a step's two lines does."""
    steps = [replace(step, seconds=round(0.3 + step.step / 10000, 4)) for step in STEPS]
    pairs = [[step.iteration, step.time] if iteration_first else [step.time, step.iteration] for step in steps]
    for lost in (0, 1):
        lines = [line for number, pair in enumerate(pairs) for i, line in enumerate(pair) if (number, i) != (at, lost)]
        rates = {number: rate for number, _, rate, _ in _read(*lines)}
        is_time = (lost == 1) is iteration_first
        assert rates == {step.step: None if is_time and step is steps[at] else step.rate for step in steps}


@every("cut", range(1, 320, 7))
def test_a_line_that_is_cut_has_no_half_numbers(cut: int) -> None:
    lines = _lines(*STEPS)
    for number in (8, 9):
        torn = [*lines[:number], lines[number][:cut] + lines[number + 1], *lines[number + 2 :]]
        for found in _read(*torn):
            whole = ALL[found[0] - 1]
            assert all(value in (None, said, round(said, 2)) for value, said in zip(found, whole, strict=True))


def _shuffled(chance: random.Random, steps: list[_Step]) -> list[tuple[bool, _Step]]:
    """Return lines in an order in which two ranks with buffers of some length write them."""
    streams = [[(True, step) for step in steps], [(False, step) for step in steps]]
    length, lines = chance.choice([1, 1, 3, 50]), []
    while any(streams):
        for stream in chance.sample(streams, 2):
            lines += stream[:length]
            del stream[:length]
    return lines


def test_no_step_has_the_numbers_of_another() -> None:
    """300 logs with one to three attempts, of which one line in ten is lost."""
    chance = random.Random(41)
    read = 0
    for _ in range(300):
        attempts = [STEPS[: chance.randint(1, 12)] for _ in range(chance.randint(0, 2))] + [STEPS]
        lines = [line for attempt in attempts for line in _shuffled(chance, attempt)]
        kept = [step.time if is_time else step.iteration for is_time, step in lines if chance.random() > 0.1]
        for step, seconds, rate, loss in _read(*kept):
            true = STEPS[step - 1]
            assert seconds in (true.seconds, round(true.seconds, 2))
            assert rate in (None, true.rate)
            assert loss in (None, true.loss)
            read += 1
    assert read > 3400


def test_a_long_log_is_read_in_linear_time() -> None:
    steps = [replace(STEPS[i % 12], step=i + 1) for i in range(3000)]
    lines = _lines(*steps)
    del lines[5]
    assert len(_parse("\n".join(lines)).steps) == 3000


@pytest.mark.parametrize("copies", [2, 3])
def test_an_iteration_line_of_several_ranks_is_one_step(copies: int) -> None:
    """As where the first and the last rank print it, or a log has a job's output twice."""
    lines = [line for step in STEPS for line in (step.time, *[step.iteration] * copies)]
    assert _read(*lines) == ALL


def test_colours_within_a_line_hide_nothing() -> None:
    text = "\n".join(_lines(*STEPS))
    coloured = text.replace("iteration", "\x1b[1;36miteration\x1b[0m").replace(": ", ":\x1b[K \x1b[32m")
    assert _parse(coloured) == _parse(text)


@every("written", ["0.0", "-4000.0", "nan", "inf"])
def test_a_time_that_no_clock_gives_is_not_measured(written: str) -> None:
    lines = _lines(*STEPS)
    lines[5] = lines[5].replace(f"(ms): {STEPS[2].seconds * 1000:.1f}", f"(ms): {written}")
    assert _read(*lines) == [*ALL[:2], (3, round(STEPS[2].seconds, 2), STEPS[2].rate, STEPS[2].loss), *ALL[3:]]


def test_a_rate_of_zero_gives_way_to_one_that_was_measured() -> None:
    lines = [
        line.replace("learning rate", f"throughput per GPU (TFLOP/s/GPU): {step.rate} | learning rate")
        for step in STEPS
        for line in (replace(step, rate=0.0).time, step.iteration)
    ]
    assert _read(*lines) == ALL
