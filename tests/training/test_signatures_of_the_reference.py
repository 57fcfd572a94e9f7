"""Calls as scripts for Megatron-Bridge make them, by position and by its names."""

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from tests.golden import Sentence

pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from cloudai_mbridge.training import profiling
from cloudai_mbridge.training.checkpointing import load_checkpoint
from cloudai_mbridge.training.comm_overlap import CommOverlapConfig
from cloudai_mbridge.training.config import CheckpointConfig, ConfigContainer, ProfilingConfig, TokenizerConfig
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.gpt_step import Batch, get_batch
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.tokenizers.tokenizer import build_tokenizer


def test_strict_is_the_fifth_argument_of_load_checkpoint() -> None:
    names = list(inspect.signature(load_checkpoint).parameters)
    assert names[4:] == ["strict", "checkpointing_context", "skip_load_to_model_and_opt"]


def test_the_profilers_are_handed_over_by_name() -> None:
    calls: list[str] = []
    profiler = SimpleNamespace(step=lambda: calls.append("step"), stop=lambda: calls.append("stop"))
    config = ProfilingConfig(use_pytorch_profiler=True, profile_step_start=1, profile_step_end=2, profile_ranks=[0])
    profiling.handle_profiling_step(config, 1, 0, pytorch_prof=profiler)
    profiling.handle_profiling_stop(config, 2, 0, pytorch_prof=profiler, nsys_nvtx_context=None)
    assert calls == ["step", "stop"]


def test_a_batch_has_the_ten_fields_of_the_reference_in_its_order() -> None:
    fields = "tokens labels loss_mask attention_mask position_ids cu_seqlens cu_seqlens_argmin max_seqlen"
    assert Batch._fields == (*fields.split(), "cu_seqlens_unpadded", "cu_seqlens_unpadded_argmin")
    batch = get_batch(None, None, is_first=False, is_last=False, pg_collection=object())
    assert list(batch) == [None] * 10


def test_a_tokenizer_from_its_own_section(sentence: Sentence) -> None:
    assert build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=100)).vocab_size == 100
    with pytest.raises(ConfigError, match=r"tokenizer\.vocab_size:") as caught:
        build_tokenizer(TokenizerConfig(tokenizer_type="NullTokenizer"))
    sentence(caught)


def test_the_state_builds_its_tokenizer_when_asked(tiny: Any) -> None:
    state = GlobalState(ConfigContainer.from_dict(tiny()))
    assert state.tokenizer.vocab_size == 512
    assert state.tokenizer is state.tokenizer
    state.reset_for_restart()
    state.tokenizer = other = object()
    assert state.tokenizer is other


@pytest.mark.parametrize(("save", "is_async"), [("ckpt", True), ("ckpt", False), (None, True)])
def test_the_worker_of_saves_in_the_background(save: str | None, is_async: bool, tiny: Any) -> None:
    config = ConfigContainer.from_dict(tiny())
    config.checkpoint = CheckpointConfig(save=save, async_save=is_async)
    state = GlobalState(config)
    state.initialize_async_checkpoint_worker()
    queue = state.async_calls_queue
    assert (queue is not None) is (save is not None and is_async)
    state.initialize_async_checkpoint_worker()
    assert state.async_calls_queue is queue


def test_what_the_user_set_for_overlap_is_an_object() -> None:
    config = CommOverlapConfig(tp_comm_overlap=True, wgrad_deferral_limit=3)
    config.finalize()
    user = config.user_comm_overlap_cfg
    assert user is not None
    assert (user.tp_comm_overlap, user.wgrad_deferral_limit, user.bucket_size) == (True, 3, None)
    config.finalize()
    assert config.user_comm_overlap_cfg is user
