"""The largest attention logit: logged, bounded by `qk_clip`, and refused where Megatron-Core would clip wrongly."""

from typing import Any

import pytest

from tests.golden import Sentence

torch = pytest.importorskip("torch")

from cloudai_mbridge.recipes.container import container_data  # noqa: E402
from cloudai_mbridge.training.config import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.startup.prepare import refuse_unsupported  # noqa: E402
from tests.training.conftest import TINY, Finished, Train  # noqa: E402

SMALL = {"num_layers": 2, "hidden_size": 32, "ffn_hidden_size": 32, "num_attention_heads": 2}
LATENT: dict[str, Any] = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 16}
LATENT |= {"qk_pos_emb_head_dim": 8, "v_head_dim": 16}


def _logits(done: Finished) -> list[float | None]:
    return [record["max_attention_logit"] for record in done.records]


@pytest.mark.kept_ranks
@pytest.mark.process
@pytest.mark.parametrize(
    ("processes", "model"),
    [(1, {}), (2, {}), (1, {"dtype": "bf16"}), (2, {**LATENT, "tensor_model_parallel_size": 2})],
    ids=["one", "dp2", "bf16", "latent tp2"],
)
def test_logits_are_bounded(train: Train, processes: int, model: dict[str, Any]) -> None:
    sections = {
        "model": {**SMALL, "init_method_std": 0.5, **model},
        "train": {"train_iters": 4, "global_batch_size": 4},
    }
    plain = train(processes, sections)
    logged = train(processes, sections, "logger.log_max_attention_logit=True")
    clipped = train(processes, sections, "model.qk_clip=True", "model.qk_clip_threshold=1.0")
    assert _logits(plain) == [None] * 4
    assert logged.losses == plain.losses
    first, *others = _logits(clipped)
    assert first == _logits(logged)[0]
    assert first > 2
    assert all(0.5 < logit < 1.5 for logit in others if logit)
    assert min(logit for logit in _logits(logged) if logit) > 2
    assert clipped.losses[1] == plain.losses[1]
    assert clipped.losses[4] != plain.losses[4]


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("model.tensor_model_parallel_size", 2, "with tensor_model_parallel_size = 2"),
        ("optimizer.use_distributed_optimizer", True, "use_distributed_optimizer"),
    ],
)
def test_where_megatron_would_scale_other_weights(sentence: Sentence, place: str, value: Any, words: str) -> None:
    config = ConfigContainer.from_dict(container_data(TINY))
    config.model.qk_clip = config.model.bf16 = True
    refuse_unsupported(config)
    section, _, name = place.partition(".")
    setattr(getattr(config, section), name, value)
    with pytest.raises(ConfigError, match=words) as caught:
        refuse_unsupported(config)
    sentence(caught)
