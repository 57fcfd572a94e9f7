"""Every known failure is told by its lines and by nothing that only looks like it; the cause beats its symptoms."""

import re
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import pytest

from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from cloudai_mbridge.schedulers.slurm.commands import classify
from cloudai_mbridge.training.process.log_lines import (
    RUN_MARK,
    StepReport,
    render_iteration,
    render_record,
    render_step_record,
    render_step_time,
)
from cloudai_mbridge.verdict.triage import (
    EndState,
    Entry,
    Failure,
    FailureKind,
    load_catalogue,
    load_states,
    parse_catalogue,
    triage,
)
from tests.cases import every
from tests.golden import Sentence

CATALOGUE = load_catalogue()
EXAMPLES = [
    pytest.param(entry, line, id=f"{entry.id}-{i}") for entry in CATALOGUE for i, line in enumerate(entry.examples)
]
COUNTEREXAMPLES = [
    pytest.param(line, id=f"{entry.id}-{i}") for entry in CATALOGUE for i, line in enumerate(entry.counterexamples)
]
STATES = [pytest.param(state, id=state.id) for state in load_states()]

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"
NODE_DEAD = "srun: error: Node failure on gb200-7"
NAN = "FloatingPointError: the loss of a micro-batch is nan over 128 tokens"
REFUSED = (
    "RuntimeError: Rank 1, node gb200-2, device 1, iteration 3: Unexpected result nan "
    "(message='found NaN in local forward loss calculation')"
)
TIME_LIMIT = "slurmstepd: error: *** JOB 1 ON gb200-1 CANCELLED AT 2026-11-21T04:33:33 DUE TO TIME LIMIT ***"
# What the others print when a rank dies
NOISE = (
    "[rank1]:[E1206 18:44:12.7 ProcessGroupNCCL.cpp:607] [Rank 1] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=5, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600013 milliseconds before timing out.",
    "gb200-2:5:9 [1] misc/socket.cc:538 NCCL WARN Net : Connection closed by remote peer gb200-1<47861>",
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:10895",
    "torch.distributed.elastic.multiprocessing.api.SignalException: Process 4321 got signal: 15",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "srun: error: gb200-2: task 1: Exited with exit code 1",
    "srun: error: gb200-3: task 2: Killed",
)

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def _write(*lines: str, name: str = "stdout.txt") -> Path:
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return _write


def _triage(path: Path, state: str = "FAILED", reason: str = "") -> Failure:
    text, _, signal = reason.partition("; signal ")
    failure = triage(JobStatus(state, classify(state), signal=int(signal or 0) or None, reason=text), [path])
    assert failure is not None
    return failure


@every(("entry", "line"), EXAMPLES)
def test_an_example_is_triaged_to_its_entry(write: Write, entry: Entry, line: str) -> None:
    failure = triage(None, [write(line)])
    assert failure is not None
    assert (failure.id, failure.kind, failure.title, failure.remedy) == (
        entry.id,
        entry.kind,
        entry.title,
        entry.remedy,
    )
    assert len(failure.evidence) == 1


def test_no_driver_at_all_is_not_taken_for_an_old_one(write: Write, sentence: Sentence) -> None:
    """CUDA reports both in the same words."""
    failure = _triage(write("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version"))
    assert failure.title == "The node's NVIDIA driver is missing, or too old"
    sentence(failure.remedy)


@every("line", COUNTEREXAMPLES)
def test_a_counterexample_matches_no_entry(write: Write, line: str) -> None:
    assert [entry.id for entry in CATALOGUE if entry.search(line)] == []
    assert triage(None, [write(line)]) is None


@every("entry", [pytest.param(entry, id=entry.id) for entry in CATALOGUE])
def test_every_entry_is_complete(entry: Entry) -> None:
    assert len(entry.examples) >= 2
    assert entry.counterexamples
    assert entry.patterns
    for text in (entry.title, entry.remedy):
        assert text
        assert "\n" not in text
    assert len(entry.title) <= 60


@every("entry", [pytest.param(entry, id=entry.id) for entry in CATALOGUE])
def test_every_pattern_has_an_example(entry: Entry) -> None:
    """A pattern that no example needs is one that nobody has seen match."""
    lines = [re.sub(r"^(?:\[rank\d\]|\d): ", "", line) for line in entry.examples]
    for pattern in entry.patterns:
        assert any(pattern.search(line) for line in lines), pattern


@every(("entry", "line"), EXAMPLES)
def test_patterns_do_not_explode_on_a_hostile_line(entry: Entry, line: str) -> None:
    cut = line[: max(8, len(line) * 3 // 4)]
    hostile = (cut * (1 + (1 << 15) // len(cut)))[: 1 << 15]
    begin = time.process_time()
    for other in CATALOGUE:
        other.search(hostile)
    assert time.process_time() - begin < 2


@every(
    ("first", "expected"),
    [(OOM, "out_of_memory"), (ECC, "gpu_ecc"), (NODE_DEAD, "node_failure"), (NAN, "nan_loss"), (REFUSED, "nan_loss")],
)
@every("last", [False, True])
def test_the_cause_beats_its_symptoms_wherever_it_stands(write: Write, first: str, expected: str, last: bool) -> None:
    lines = (*NOISE * 50, first) if last else (first, *NOISE * 50)
    assert _triage(write(*lines)).id == expected


@every("entry", [pytest.param(entry, id=entry.id) for entry in CATALOGUE[4:]])
def test_broken_hardware_beats_everything(write: Write, entry: Entry) -> None:
    assert _triage(write(entry.examples[0], ECC)).id == "gpu_ecc"


def test_the_cause_may_stand_in_another_file(write: Write) -> None:
    failure = triage(None, [write(*NOISE), write("step 1", OOM, name="stderr.txt")])
    assert failure is not None
    assert failure.id == "out_of_memory"
    assert failure.evidence == (f"stderr.txt:2: {OOM}",)


def test_without_a_cause_the_symptom_of_the_highest_rank_counts(write: Write) -> None:
    assert _triage(write(*NOISE[:6])).id == "nccl_timeout"
    assert _triage(write(*NOISE[1:6])).id == "nccl_error"
    assert _triage(write(*NOISE[3:5], NOISE[5])).id == "rank_failed"
    assert triage(None, [write(*NOISE[3:5])]) is None


def test_a_dead_node_beats_the_logs_and_is_named_by_them(write: Write) -> None:
    failure = _triage(write(*NOISE, OOM, NODE_DEAD, NODE_DEAD), "NODE_FAIL")
    assert (failure.id, failure.kind) == ("job_node_fail", FailureKind.INFRASTRUCTURE)
    assert failure.nodes == ("gb200-7",)
    line = len(NOISE) + 2
    assert failure.evidence == (f"stdout.txt:{line}: {NODE_DEAD}", f"stdout.txt:{line + 1}: {NODE_DEAD}")


@every("state", STATES)
def test_a_state_says_it_alone_and_beats_symptoms(write: Write, state: EndState) -> None:
    for path in (write("all is well"), write(*NOISE)):
        failure = _triage(path, state.state, *state.examples[:1])
        assert (failure.id, failure.kind, failure.title) == (state.id, state.kind, state.title)
        assert failure.evidence == ()


@every("state", STATES)
def test_only_states_that_win_beat_a_cause(write: Write, state: EndState) -> None:
    assert _triage(write(OOM), state.state, *state.examples[:1]).id == (state.id if state.wins else "out_of_memory")


def test_a_reason_tells_its_entry(write: Write) -> None:
    path = write("all is well")
    for state in load_states():
        for reason in state.examples:
            assert _triage(path, state.state, reason).id == state.id, reason
    assert triage(JobStatus("FAILED", JobClass.FAILED, exit_code=1, reason="NonZeroExitCode"), [path]) is None


def test_the_lines_about_a_state_are_its_evidence(write: Write) -> None:
    failure = _triage(write(*NOISE, TIME_LIMIT), "TIMEOUT")
    assert failure.id == "job_timeout"
    assert failure.evidence == (f"stdout.txt:{len(NOISE) + 1}: {TIME_LIMIT}",)


def test_infrastructure_states_are_infrastructure_failures(write: Write) -> None:
    known = {state.state: state for state in load_states()}
    for state in ("NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "RECONFIG_FAIL", "PREEMPTED"):
        assert classify(state) is JobClass.INFRASTRUCTURE
        assert known[state].kind is FailureKind.INFRASTRUCTURE
        assert known[state].wins
    failure = triage(JobStatus("NEW_STATE", JobClass.INFRASTRUCTURE), [write(*NOISE)])
    assert failure is not None
    assert (failure.id, failure.kind) == ("job_infrastructure", FailureKind.INFRASTRUCTURE)


@pytest.mark.parametrize("status", [None, JobStatus("COMPLETED", JobClass.SUCCEEDED)])
def test_without_a_bad_state_only_the_logs_count(write: Write, status: JobStatus | None) -> None:
    assert triage(status, [write("all is well")]) is None
    failure = triage(status, [write(OOM)])
    assert failure is not None
    assert failure.id == "out_of_memory"


def test_slurm_may_add_to_a_state(write: Write) -> None:
    failure = triage(JobStatus("CANCELLED by 1000", JobClass.CANCELLED), [write("all is well")])
    assert failure is not None
    assert failure.id == "job_cancelled"


def test_nodes_are_unique_and_in_order(write: Write) -> None:
    lines = [f"srun: error: Task launch for StepId=1.0 failed on node n{i}: Unspecified error" for i in (3, 1, 3, 2)]
    assert _triage(write(*lines)).nodes == ("n3", "n1", "n2")


def test_evidence_is_short_and_printable(write: Write) -> None:
    failure = _triage(write("step 1", *[f"\x1b[31m[rank0]: {OOM}\x1b[0m \x00\x07 {'x' * 900}"] * 9))
    assert len(failure.evidence) == 5
    assert failure.evidence[0].startswith(f"stdout.txt:2: {OOM} \\x00\\x07 xxx")
    assert failure.evidence[4].startswith("stdout.txt:6: ")
    assert all(len(line) == 500 and line.isprintable() for line in failure.evidence)


def test_evidence_of_a_long_line_shows_the_match(write: Write) -> None:
    (line,) = _triage(write(f"{'x' * 5000} {ECC} {'y' * 5000}")).evidence
    assert ECC in line
    assert len(line) == 500


def test_a_progress_bar_hides_nothing(write: Write) -> None:
    failure = _triage(write("  0%|   | 0/9\r  4%|   | 1/9\rValueError: num_layers (7) is odd"))
    assert failure.id == "bad_configuration"
    assert failure.evidence == ("stdout.txt:1: ValueError: num_layers (7) is odd",)


def test_records_of_the_product_are_no_evidence(write: Write) -> None:
    quoted = render_record(RUN_MARK, {"note": OOM, "also": ECC})
    assert triage(None, [write(quoted, f"3: {quoted}")]) is None
    assert _triage(write(f"{NODE_DEAD}{quoted}")).id == "node_failure"


def test_a_hostile_log_is_survived(tmp_path: Path) -> None:
    path = tmp_path / "stdout.txt"
    noise = bytes(range(256)) * 400
    long = b"error " * (10 * 1024 * 1024 // 6)
    path.write_bytes(noise + b"\n" + long + ECC.encode() + b"\n\xff\xfe" + OOM.encode())
    failure = triage(None, [path])
    assert failure is not None
    assert failure.id == "out_of_memory"  # the error stands too far behind on its line
    number = noise.count(b"\n") + 3
    assert failure.evidence == (f"stdout.txt:{number}: \ufffd\ufffd{OOM}",)


def test_a_missing_file_is_empty(tmp_path: Path) -> None:
    assert triage(None, [tmp_path / "nowhere", tmp_path]) is None
    assert triage(None, []) is None


def test_a_healthy_log_matches_nothing(write: Write) -> None:
    reports = [
        StepReport(
            step=step,
            train_iters=50,
            step_time_s=1.234,
            tflops_per_gpu=612.3,
            consumed_samples=step * 512,
            global_batch_size=512,
            learning_rate=3e-4,
            loss_scale=1.0,
            losses={"lm loss": 12.5 / step, "mtp_1 loss": float("nan") if step == 9 else 1.0},
            grad_norm=1.5,
            num_zeros=0,
            skipped_iterations=0,
            nan_iterations=int(step == 9),
        )
        for step in range(1, 51)
    ]
    now = datetime(2026, 11, 21, 4, 33, 33)
    lines = [render_record(RUN_MARK, {"torch": "2.9", "fallbacks": ["apex is missing: error"], "nccl_timeout": 600})]
    lines += [line for r in reports for line in (render_step_time(r), render_iteration(r, now), render_step_record(r))]
    lines.append("[after training is done] datetime: 2026-11-21 04:33:33 ")
    path = write(*lines)
    assert triage(None, [path]) is None
    assert [entry.id for entry in CATALOGUE for line in lines[1:] if entry.search(line)] == []


GOOD = """
[[failure]]
id = "a"
kind = "application"
title = "t"
remedy = "r"
patterns = ["x"]

[[state]]
id = "b"
state = "S"
kind = "infrastructure"
title = "t"
remedy = "r"
topic = "a"
"""


@every(
    ("old", "new"),
    [
        ('id = "b"', 'id = "a"'),
        ('kind = "application"', 'kind = "cosmic"'),
        ('kind = "infrastructure"', 'kind = "cosmic"'),
        ('["x"]', '["("]'),
        ('patterns = ["x"]', ""),
        ('patterns = ["x"]', 'patterns = ["x"]\npattern = "y"'),
        ('topic = "a"', 'topic = "c"'),
    ],
)
def test_a_broken_catalogue_is_refused(sentence: Sentence, old: str, new: str) -> None:
    entries, states = parse_catalogue(GOOD)
    assert (len(entries), len(states)) == (1, 1)
    with pytest.raises(ValueError) as caught:
        parse_catalogue(GOOD.replace(old, new))
    sentence(caught, python=r"missing \), .*|Entry\.__init__.*|'cosmic' is not .*")


def test_the_node_that_lacks_a_program_is_named_by_its_task(write: Write) -> None:
    lines = ["slurmstepd: error: execve(): /opt/venv/bin/python: No such file or directory", NOISE[5]]
    failure = _triage(write(*lines))
    assert (failure.id, failure.nodes) == ("program_missing", ("gb200-2",))


@every("label", ["3: ", " 3: ", "   3: [rank3]: ", "12: "])
def test_labels_of_ranks_are_padded(write: Write, label: str) -> None:
    assert _triage(write(f"{label}RuntimeError: No CUDA GPUs are available")).id == "gpu_unavailable"
