"""The forward step: who gets the state, what a stage takes of a micro-batch, and what the model makes of it."""

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Optional

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")

from cloudai_mbridge.logs import read_log  # noqa: E402
from cloudai_mbridge.training.data.packed_batch import sequence_bounds, sequence_lengths, zigzag_index  # noqa: E402
from cloudai_mbridge.training.state import GlobalState  # noqa: E402
from cloudai_mbridge.training.step import maybe_inject_state, needs_global_state_injection, prepare_forward_step_func  # noqa: E402

# ---- state injection


def plain(data_iterator: Any, model: Any) -> Any:
    return data_iterator, model


def with_plan(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    return data_iterator, model, return_schedule_plan


def with_state(state: Any, data_iterator: Any, model: Any) -> Any:
    return state, data_iterator, model


def with_all(state: Any, data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> Any:
    return state, data_iterator, model, return_schedule_plan


def asking(annotation: Any) -> Any:
    """Return a step whose first parameter has an annotation."""

    def step(s: Any, data_iterator: Any, model: Any) -> Any:
        return s, data_iterator, model

    step.__annotations__["s"] = annotation
    return step


def global_state(global_state: Any, data_iterator: Any, model: Any) -> Any:
    return global_state, data_iterator, model


def last(data_iterator: Any, model: Any, s: GlobalState) -> Any:
    return s, data_iterator, model


def keyword_only(data_iterator: Any, model: Any, *, s: GlobalState) -> Any:
    return s, data_iterator, model


def middle(data_iterator: Any, s: GlobalState, model: Any) -> Any:
    return s, data_iterator, model


def positional_only(data_iterator: Any, model: Any, s: GlobalState, /) -> Any:
    return s, data_iterator, model


def anything(*args: GlobalState) -> Any:
    return args


def later_name(data_iterator: Any, state: Any) -> Any:
    return data_iterator, state


def list_of_states(state_list: list[GlobalState], model: Any) -> Any:
    return state_list, model


class Functor:
    def __call__(self, state: GlobalState, data_iterator: Any, model: Any) -> Any:
        return state, data_iterator, model


ANNOTATIONS = (
    GlobalState,
    Optional[GlobalState],  # noqa: UP045
    Optional["GlobalState"],
    GlobalState | None,
    "cloudai_mbridge.training.state.GlobalState",
    Annotated[GlobalState, "the run's"],
    type("GlobalState", (), {}),  # the same class of another package
)
WANTED = (*map(asking, ANNOTATIONS), global_state, with_state, last)
UNWANTED = (plain, with_plan, anything, later_name, list_of_states, max, "no function")


@every("function", [*WANTED, keyword_only, with_all, Functor(), partial(with_all, model=2)])
def test_state_is_given_to_who_asks_for_it(function: Any) -> None:
    state = GlobalState()
    assert needs_global_state_injection(function) is True
    prepared = prepare_forward_step_func(function, state)
    assert prepared is not function
    arguments = ("iterator",) if isinstance(function, partial) else ("iterator", "model")
    assert prepared(*arguments)[:2] == (state, "iterator")
    again = prepare_forward_step_func(prepared, GlobalState())
    assert again is prepared, "it has its state"


@every("function", UNWANTED)
def test_the_others_stay_as_they_are(function: Any) -> None:
    assert needs_global_state_injection(function) is False
    assert prepare_forward_step_func(function, GlobalState()) is function


def test_a_schedule_plan_may_be_asked_for_and_the_caller_may_decide() -> None:
    state = GlobalState()
    assert prepare_forward_step_func(with_all, state)(1, 2, return_schedule_plan=True) == (state, 1, 2, True)
    assert prepare_forward_step_func(with_plan, state)(1, 2, return_schedule_plan=True) == (1, 2, True)
    assert maybe_inject_state(with_state, state, needs_injection=False) is with_state
    assert maybe_inject_state(anything, state, needs_injection=True)(1, 2) == (state, 1, 2)
    assert maybe_inject_state(plain, state) is plain
    bound = partial(last, s=state)
    assert needs_global_state_injection(bound) is False
    assert prepare_forward_step_func(bound, GlobalState())(1, 2)[0] is state


@pytest.mark.parametrize("function", [middle, positional_only])
def test_a_place_that_cannot_be_bound_is_refused(sentence: Sentence, function: Any) -> None:
    with pytest.raises(TypeError) as caught:
        prepare_forward_step_func(function, GlobalState())
    sentence(caught)


# ---- packed rows


@every(
    ("rows", "expected"),
    [
        ({"cu_seqlens": [[0, 3, 8, -1, -1]]}, [0, 3, 8]),
        ({"cu_seqlens": [[0, 3, 8, 8, 9]], "cu_seqlens_argmin": torch.tensor([[3]])}, [0, 3, 8]),
        ({"cu_seqlens": [0, 3, 8, 8]}, [0, 3, 8]),  # padded as Megatron-Core pads the bounds of documents
        ({"cu_seqlens": [[0, 3]]}, [0, 3, 8]),  # what is behind the last bound is a sequence, too
    ],
)
def test_bounds_of_packed_sequences(rows: dict[str, Any], expected: list[int]) -> None:
    rows = {**rows, "tokens": torch.zeros(1, 8), "cu_seqlens": torch.tensor(rows["cu_seqlens"])}
    bounds = sequence_bounds(rows)
    assert bounds is not None
    assert (bounds.tolist(), bounds.dtype) == (expected, torch.int32)


@every(
    ("tokens", "bounds"),
    [
        (torch.zeros(2, 8), [[0, 8], [0, 8]]),
        (torch.zeros(1, 8), [[0, 5, 3]]),
        (torch.zeros(1, 8), [[0, 9]]),
        (torch.zeros(1, 8), [[1, 8]]),
        (torch.zeros(1, 8), [[-1, -1]]),
    ],
)
def test_wrong_bounds_are_refused(sentence: Sentence, tokens: Any, bounds: list[Any]) -> None:
    with pytest.raises(ValueError) as caught:
        sequence_bounds({"tokens": tokens, "cu_seqlens": torch.tensor(bounds)})
    sentence(caught)


def test_context_parallel_ranks_share_every_packed_sequence(sentence: Sentence) -> None:
    bounds = torch.tensor([0, 4, 12], dtype=torch.int32)
    assert zigzag_index(bounds, 2, 0).tolist() == [0, 3, 4, 5, 10, 11]
    assert zigzag_index(bounds, 2, 1).tolist() == [1, 2, 6, 7, 8, 9]
    with pytest.raises(ValueError) as caught:
        zigzag_index(torch.tensor([0, 4, 10]), 2, 0)
    sentence(caught)


@every(
    ("rows", "lengths"),
    [
        ({}, None),
        ({"cu_seqlens": [[0, 3, 8, -1]]}, [3, 5]),
        ({"cu_seqlens": [[0, 4, 8]], "cu_seqlens_unpadded": [[0, 3, 7, -1]]}, [3, 4]),
        ({"cu_seqlens_q": [0, 3, 8]}, [3, 5]),
        ({"cu_seqlens_q": [0, 3, 7], "cu_seqlens_q_padded": [0, 4, 8]}, [3, 4]),
    ],
)
def test_the_lengths_that_attention_works_in(rows: dict[str, Any], lengths: list[int] | None) -> None:
    batch = {"tokens": torch.zeros(1, 8), **{name: torch.tensor(value) for name, value in rows.items()}}
    found = sequence_lengths(batch)
    assert (None if found is None else found.tolist()) == lengths
    ends = rows.get("cu_seqlens_q_padded", rows.get("cu_seqlens_q"))
    assert ends is None or sequence_bounds(batch).tolist() == ends


# ---- on ranks

SCRIPT = """
import json, sys
import torch, torch.distributed as dist
from megatron.core import parallel_state as mpu
from cloudai_mbridge.training import cpu, gpt_step
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step, get_batch
from cloudai_mbridge.training.initialize import initialize
from cloudai_mbridge.training.setup import build_model
from cloudai_mbridge.training.data.packed_batch import zigzag_index
from cloudai_mbridge.training.startup.prepare import prepare
from cloudai_mbridge.training.state import GlobalState

BOUNDS = [0, 16, 40, 64]


def rows():
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, 500, (1, 65), generator=generator)
    return {
        "tokens": tokens[:, :-1].clone(), "labels": tokens[:, 1:].clone(),
        "loss_mask": (torch.arange(64) % 3 > 0).float()[None], "position_ids": torch.arange(64)[None],
    }


def packed():
    places = torch.cat([torch.arange(b - a) for a, b in zip(BOUNDS, BOUNDS[1:])])[None]
    bounds = torch.tensor([[*BOUNDS, -1]], dtype=torch.int32)
    return {**rows(), "position_ids": places, "cu_seqlens": bounds, "cu_seqlens_argmin": torch.tensor([[4]])}


def one_of_them(a, b):
    return {key: value[:, a:b] for key, value in packed().items() if not key.startswith("cu_")}


def losses(batch):
    "Per-token losses and what the loss function makes of them."
    with torch.no_grad():
        output, loss_function = forward_step(state, iter([batch]), model)
        total, tokens, _ = loss_function(output)
    return output[0].tolist(), total.item(), tokens.item()


def names(batch):
    return sorted(name for name, value in batch._asdict().items() if value is not None)


def alone():
    found["whole"] = losses(rows())
    batch = rows()
    with torch.no_grad():
        found["direct"] = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])[0].tolist()
    found["apart"] = [losses(one_of_them(a, b)) for a, b in zip(BOUNDS, BOUNDS[1:])]
    found["packed"] = losses(packed())
    cfg.model.is_hybrid_model, given = True, []  # of Mamba layers the arguments only
    make = gpt_step.get_packed_seq_params
    gpt_step.get_packed_seq_params = lambda batch: given.append(batch) or make(batch)
    losses({**one_of_them(0, 64), "cu_seqlens_q": torch.tensor(BOUNDS), "max_seqlen_q": 24})
    cfg.model.is_hybrid_model, gpt_step.get_packed_seq_params = False, make
    found["hybrid"] = [given[0]["total_tokens"], given[0]["cu_seqlens"].tolist(), given[0]["max_seqlen"]]
    found["timed"] = state.timers("batch-generator").elapsed() > 0
    try:
        forward_step(state, iter([rows()]), model, return_schedule_plan=True)
    except AssertionError as error:
        found["plan"] = str(error)
    cfg.rerun_state_machine.check_for_nan_in_loss = False
    cfg.rerun_state_machine.check_for_spiky_loss = True
    found["checks"] = forward_step(state, iter([rows()]), model)[1].keywords
    cfg.dataset.skip_getting_attention_mask_from_dataset = True
    masked = {**rows(), "attention_mask": torch.ones(1, 1, 64, 64)}
    found["unmasked"] = names(get_batch(iter([masked]), cfg))
    cfg.dataset.skip_getting_attention_mask_from_dataset = False
    found["masked"] = names(get_batch(iter([masked]), cfg))
    for is_first, is_last, use_mtp in ((1, 0, 0), (0, 0, 0), (0, 1, 0), (0, 1, 1)):
        batch = get_batch(iter([packed()]), cfg, bool(use_mtp), is_first=bool(is_first), is_last=bool(is_last))
        found[f"stage {is_first}{is_last}{use_mtp}"] = names(batch)
    found["no data"] = names(get_batch(None, cfg))
    found["longest"] = [get_batch(iter([{**packed(), **more}]), cfg).max_seqlen
                        for more in ({}, {"max_seqlen": torch.tensor([[64]])}, {"max_seqlen": torch.tensor([[8]])})]


def shared():
    found["whole"], found["packed"] = losses(rows()), losses(packed())
    batch = get_batch(iter([rows()]), cfg)
    found["places"] = batch.position_ids[0].tolist()
    found["packed places"] = zigzag_index(torch.tensor(BOUNDS), 2, dist.get_rank()).tolist()
    mpu.destroy_model_parallel()
    mpu.initialize_model_parallel(pipeline_model_parallel_size=2)
    cfg.dataset.skip_getting_attention_mask_from_dataset = True
    found["stage"] = names(get_batch(iter([rows()]), cfg))


if __name__ == "__main__":
    cpu.install()
    cfg = ConfigContainer.from_yaml("config.json")
    with cpu.megatron_device():
        prepare(cfg)
        initialize(cfg)
        found = {}
        state = GlobalState(cfg)
        (model,) = build_model(cfg)
        {"alone": alone, "shared": shared}[sys.argv[1]]()
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print("FOUND", json.dumps(everyone))
    dist.destroy_process_group()
"""


def _found(
    ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path, processes: int, part: str, **model: Any
) -> list[dict[str, Any]]:
    sections = {"model": model, "logger": {"timing_log_level": 2}}
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    done = ranks(processes, SCRIPT, part)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    found: list[dict[str, Any]] = json.loads(line.removeprefix("FOUND "))
    return found


def _close(first: list[float], second: list[float]) -> bool:
    return first == pytest.approx(second, abs=2e-5)


def test_a_micro_batch_on_one_rank_and_shared_by_two(
    ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path
) -> None:
    (one,) = _found(ranks, tiny, tmp_path, 1, "alone")
    output, total, tokens = one["whole"]
    assert output == one["direct"]
    mask = [i % 3 > 0 for i in range(64)]
    assert (total, tokens) == (pytest.approx(sum(x for x, seen in zip(output, mask, strict=True) if seen)), sum(mask))
    assert one["timed"]
    assert "overlap_moe_expert_parallel_comm" in one["plan"]
    assert one["checks"] == {"check_for_nan_in_loss": False, "check_for_spiky_loss": True}
    everything = ["labels", "loss_mask", "position_ids", "tokens"]
    assert (one["unmasked"], one["masked"]) == (everything, ["attention_mask", *everything])
    assert one["stage 100"] == ["cu_seqlens", "max_seqlen", "position_ids", "tokens"]
    assert one["stage 000"] == ["cu_seqlens", "max_seqlen"]
    assert one["stage 010"] == ["cu_seqlens", "labels", "loss_mask", "max_seqlen"]
    assert one["stage 011"] == ["cu_seqlens", "labels", "loss_mask", "max_seqlen", "position_ids", "tokens"]
    assert one["no data"] == []
    assert one["longest"] == [24, 64, 24]
    # packed: each sequence as if it were alone, and not as if all were one
    assert _close(one["packed"][0], [loss for each in one["apart"] for loss in each[0]])
    assert not _close(one["packed"][0][16:], output[16:])
    assert one["hybrid"] == [64, [0, 16, 40, 64], 24]
    # context parallel: every rank has its share of the same losses
    two = _found(ranks, tiny, tmp_path, 2, "shared", context_parallel_size=2)
    assert [rank["places"] for rank in two] == [[*range(16), *range(48, 64)], [*range(16, 48)]]
    for key, places in (("whole", "places"), ("packed", "packed places")):
        for rank in two:
            assert _close(rank[key][0], [one[key][0][i] for i in rank[places]]), key
        assert sum(rank[key][1] for rank in two) == pytest.approx(one[key][1], rel=1e-5)
        assert sum(rank[key][2] for rank in two) == one[key][2]
    assert [rank["stage"] for rank in two] == [["position_ids", "tokens"], ["labels", "loss_mask"]]


def test_tokens_predicted_further_ahead_on_the_last_stage(train: Callable[..., Any], tmp_path: Path) -> None:
    """The last stage embeds the tokens again for them, so it reads what only the first one does otherwise."""
    sections = {
        "model": {"num_layers": 2, "mtp_num_layers": 1},
        "train": {"train_iters": 3, "micro_batch_size": 1, "global_batch_size": 4},
        "validation": {"eval_iters": 2, "eval_interval": 2},
    }
    one = train(1, sections)
    two = train(2, sections, "model.pipeline_model_parallel_size=2")
    for first, second in zip(one.records, two.records, strict=True):
        assert set(first["losses"]) == {"lm loss", "mtp_1 loss"}
        assert second["losses"] == pytest.approx(first["losses"], abs=1e-4)
        assert second["grad_norm"] == pytest.approx(first["grad_norm"], abs=1e-4)
    results = [[line for line in done.stdout.splitlines() if "validation loss at" in line] for done in (one, two)]
    values = [[float(line.split("value: ")[1].split(" ")[0]) for line in lines] for lines in results]
    assert len(values[0]) >= 2, "at step 2 and at the end"
    assert values[1] == pytest.approx(values[0], abs=1e-4)


DIVERGING = {"model": {"num_layers": 2}, "optimizer": {"lr": 1e30, "min_lr": 0.0}, "scheduler": {"lr_warmup_iters": 0}}


def test_without_nan_checks_the_log_shows_a_loss_that_is_not_a_number(train: Any, tmp_path: Path) -> None:
    """As recipes are: the host does not wait for the loss of each micro-batch. A verdict fails such a log."""
    done = train(1, DIVERGING)
    assert len(done.records) == 10
    (tmp_path / "log.txt").write_text(done.stdout)
    assert math.isnan(read_log(tmp_path / "log.txt").steps[-1].loss or 0.0)
    assert "number of nan iterations:   1 |" in done.stdout


def test_a_loss_that_is_not_a_number_ends_the_run(train: Callable[..., Any]) -> None:
    done = train(1, {**DIVERGING, "rerun_state_machine": {"check_for_nan_in_loss": True}}, code=1)
    assert len(done.records) < 10
    said = [line for line in done.stderr.splitlines() if "RuntimeError: " in line]
    assert ["found NaN in local forward loss" in line or "found Inf in local" in line for line in said] == [True]
