"""Both loops on the same work: Megatron-Bridge's unedited YAML, each from the other's checkpoint, the same numbers.

Measured in FP32: losses equal to the last bit or within 5e-7, gradient norms within 1e-7, learning rates equal. The
weights come from one checkpoint: from a seed alone the loops draw other weights on a CPU.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.logs.parser import read_log
from tests.interop.bridge_loop.conftest import Beside

STEPS, SAVED, SAVED_BY_US = 8, 4, 6
TOLERANCE = 1e-6

_TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_EXPERTS = {
    **{"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128, "moe_aux_loss_coeff": 1e-2},
    **{"moe_router_load_balancing_type": "aux_loss", "moe_token_dispatcher_type": "alltoall"},
}
_LATENT = {
    **{"multi_latent_attention": True, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_head_dim": 16},
    **{"qk_pos_emb_head_dim": 8, "v_head_dim": 16, "rope_type": "rope"},
}
# name -> ranks, sections
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (1, {}),
    "dropout": (1, {"model": {"hidden_dropout": 0.1}}),
    "experts": (1, {"model": _EXPERTS}),
    "latent attention": (1, {"model": _LATENT, "layers": "ours"}),
    "vocabulary of the tokenizer": (
        1,
        {
            "model": {"vocab_size": 500, "make_vocab_size_divisible_by": 96},
            "tokenizer": {"vocab_size": 300, "use_tokenizer_vocab_size": True},
        },
    ),
    "tp2 with sequence parallelism, dropout": (2, {"model": {**_TP, "hidden_dropout": 0.1}, "layers": "ours"}),
    "pp2, dropout": (2, {"model": {"pipeline_model_parallel_size": 2, "hidden_dropout": 0.1}}),
    "ep2, dropout": (2, {"model": {**_EXPERTS, "expert_model_parallel_size": 2, "hidden_dropout": 0.1}}),
}


@pytest.mark.process
@pytest.mark.parametrize("name", CASES)
def test_each_goes_on_where_the_other_stopped(name: str, tmp_path: Path) -> None:
    ranks, sections = CASES[name]
    both = Beside(tmp_path, {**sections, "train": {"train_iters": STEPS}}, ranks)
    theirs = both.theirs(save=str(tmp_path / "theirs"), save_interval=SAVED)
    ours = _go_on_from_theirs(both, save="ours", save_interval=str(SAVED_BY_US))
    _compare(theirs["steps"], ours, range(SAVED + 1, STEPS + 1))
    _compare_logs(both)
    again = both.theirs(load=str(tmp_path / "ours"), ckpt_step=SAVED_BY_US)
    _compare(again["steps"], ours, range(SAVED_BY_US + 1, STEPS + 1))


@pytest.mark.process
def test_dp2_with_the_distributed_optimizer(tmp_path: Path) -> None:
    """One way: without Transformer Engine and Apex Megatron-Bridge cannot load its own state of that optimizer."""
    case = {"optimizer": {"use_distributed_optimizer": True}, "train": {"train_iters": STEPS}}
    both = Beside(tmp_path, case, ranks=2)
    theirs = both.theirs(save=str(tmp_path / "theirs"), save_interval=SAVED)
    _compare(theirs["steps"], _go_on_from_theirs(both), range(SAVED + 1, STEPS + 1))
    _compare_logs(both)


@pytest.mark.process
def test_evaluation(tmp_path: Path) -> None:
    """Without training both read validation and test data in order. During it, Megatron-Bridge shuffles the former."""
    both = Beside(tmp_path, {"train": {"train_iters": SAVED}, "validation": {"eval_interval": 2, "eval_iters": 2}})
    both.theirs(save=str(tmp_path / "theirs"), save_interval=SAVED)
    both.case = {**both.case, "validation": {"skip_train": True, "eval_iters": 2}}
    both.theirs(load=str(tmp_path / "theirs"))
    both.ours("theirs.yaml")
    trained, theirs, ours = (dict(_EVALUATION.findall(path.read_text())) for path in both.logs)
    assert ours.keys() == theirs.keys() == {"validation", "test"}
    for name, loss in theirs.items():
        assert float(ours[name]) == pytest.approx(float(loss), rel=0, abs=2 * TOLERANCE)
    assert trained["test"] == theirs["test"]


def _go_on_from_theirs(both: Beside, **checkpoint: str) -> list[dict[str, Any]]:
    load = f"checkpoint.load={both.directory / 'theirs'}"
    saves = {"save": "null", **checkpoint}
    more = [f"checkpoint.{name}={value}" for name, value in saves.items()]
    return both.ours("theirs.yaml", load, f"checkpoint.ckpt_step={SAVED}", *more)


def _compare(theirs: Sequence[dict[str, Any]], ours: Sequence[dict[str, Any]], steps: range) -> None:
    """Compare what each loop reports of these steps, before anything is rounded."""
    left, right = ({row["step"]: row for row in rows if row["step"] in steps} for rows in (theirs, ours))
    assert [*left] == [*right] == [*steps]
    for step in steps:
        one, other = left[step], right[step]
        pairs = [(one["losses"]["lm loss"], other["losses"]["lm loss"]), (one["grad_norm"], other["grad_norm"])]
        assert max(abs(a - b) for a, b in pairs) <= TOLERANCE, (step, pairs)
        assert one["learning_rate"] == other["learning_rate"], step


_EVALUATION = re.compile(r"validation loss at iteration \d+ on (\w+) set \|.*lm loss value: (\S+)")
_PARAMETERS = re.compile(r"parallel rank \([0, ]+\): (\d+)|\"parameters_on_rank_0\": (\d+)")


def _compare_logs(both: Beside) -> None:
    """Compare what is read from the lines of the first two runs."""
    theirs, ours = (read_log(path, has_records=False) for path in both.logs[:2])
    assert not theirs.fault
    assert not ours.fault
    rows = {row.step: row for row in theirs.steps}
    assert [*rows] == [*range(1, STEPS + 1)]
    assert [row.step for row in ours.steps] == [*range(SAVED + 1, STEPS + 1)]
    for row in ours.steps:
        other = rows[row.step]
        # both are rounded, to six digits and to three
        assert (row.loss, row.grad_norm) == (
            pytest.approx(other.loss, rel=0, abs=2 * TOLERANCE),
            pytest.approx(other.grad_norm, rel=0, abs=1.1e-3),
        )
        assert row.step_time_s
        assert rows[row.step].step_time_s
    texts = [path.read_text() for path in both.logs[:2]]
    their_size, our_size = (max(int(a or b) for a, b in _PARAMETERS.findall(text)) for text in texts)
    assert their_size == our_size
