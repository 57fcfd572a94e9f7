"""What a loss function reports is what is logged, also if it shares its memory with the loss."""

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

from cloudai_mbridge.training.losses import create_masked_next_token_loss_function, masked_next_token_loss  # noqa: E402
from cloudai_mbridge.training.step import with_own_reports  # noqa: E402

SCRIPT = """
import json, sys
import torch
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.gpt_step import forward_step
from cloudai_mbridge.training.pretrain import pretrain


def mean(copy, with_count):
    def step(state, data_iterator, model):
        output, function = forward_step(state, data_iterator, model)
        mask = function.args[0]

        def loss(output):
            value = (output * mask).sum() / mask.sum()
            reported = value.detach().clone() if copy else value.detach()
            return (value, mask.sum().int(), {"lm loss": reported}) if with_count else (value, {"lm loss": reported})

        return output, loss

    return step


if __name__ == "__main__":
    config = ConfigContainer.from_dict(json.load(open("config.json")))
    pretrain(config, mean(sys.argv[1] == "copy", sys.argv[2] == "count"))
"""


@pytest.mark.parametrize("count", ["count", "none"])
def test_a_detached_loss_is_logged_whole(count: str, tiny: Any, ranks: Any, tmp_path: Any) -> None:
    import json

    sections = {
        "model": {"num_layers": 1, "hidden_dropout": 0.0},
        "train": {"train_iters": 2, "global_batch_size": 4},
        "optimizer": {"lr": 0.0, "min_lr": 0.0},
        "validation": {"eval_iters": 1, "eval_interval": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(tiny(sections)))
    copied, shared = (ranks(1, SCRIPT, how, count) for how in ("copy", "share"))
    assert shared.losses == copied.losses
    assert all(5 < loss < 8 for loss in shared.losses.values())  # ln 512, not a quarter of it
    assert _evaluated(shared) == _evaluated(copied) != []


def _evaluated(done: Any) -> list[str]:
    return [line for line in done.stdout.splitlines() if line.startswith(" validation loss")]


def test_only_what_is_shared_is_copied() -> None:
    loss = torch.ones(2).sum()
    other = torch.tensor([1.0, 2.0])
    step = with_own_reports(lambda *_: (None, lambda output: (loss, {"a": loss.detach(), "b": other, "c": 3})))
    _, function = step(None, None)
    value, reports = function(None)
    value /= 4
    assert value is loss
    assert (float(reports["a"]), reports["b"] is other, reports["c"]) == (2.0, True, 3)


def test_other_results_pass_through() -> None:
    collected = {"logits": 1}
    step = with_own_reports(lambda *_: ("plan", lambda output, non_loss_data: collected))
    output, function = step(None, None)
    assert output == "plan"
    assert function(None, non_loss_data=True) is collected
    assert with_own_reports(lambda *_: ("output", None))(None, None) == ("output", None)


def test_the_loss_function_of_a_mask() -> None:
    mask, losses = torch.tensor([[1.0, 0.0, 1.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    function = create_masked_next_token_loss_function(mask, check_for_nan_in_loss=False, check_for_spiky_loss=False)
    loss, tokens, reports = function(losses)
    expected = masked_next_token_loss(mask, losses, check_for_nan_in_loss=False)
    assert (float(loss), int(tokens), reports["lm loss"].tolist()) == (4.0, 2, [4.0, 2.0])
    assert float(expected[0]) == float(loss)
