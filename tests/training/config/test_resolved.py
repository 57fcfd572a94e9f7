"""What is written beside a run's results holds no secret."""

import pytest

pytest.importorskip("megatron.core")

from cloudai_mbridge.recipes.container import container_data
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.config.text.serialization import resolved_yaml


def test_no_secret_is_written() -> None:
    model = {
        "num_layers": 1,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "seq_length": 16,
    }
    config = ConfigContainer.from_dict(
        container_data({"model": model, "train": {"train_iters": 1, "micro_batch_size": 1, "global_batch_size": 1}})
    )
    config.logger.comet_api_key = "s3cret-1"
    config.logger.mlflow_tracking_uri = "https://user:s3cret-2@host/path"
    config.tokenizer.hf_tokenizer_kwargs = {"token": "s3cret-3", "use_fast": True}
    text = resolved_yaml(config)
    assert "s3cret" not in text
    assert "https://host/path" in text
    assert "use_fast" in text
    assert config.logger.mlflow_tracking_uri == "https://user:s3cret-2@host/path"
    assert config.tokenizer.hf_tokenizer_kwargs["token"] == "s3cret-3"
