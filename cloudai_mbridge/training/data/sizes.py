"""How many samples each split has to hold."""

from typing import NamedTuple

from cloudai_mbridge.training.config.container import ConfigContainer, required


class SplitSizes(NamedTuple):
    """Samples that the run draws from each split; None: all of them, once."""

    train: int
    valid: int | None
    test: int


def split_sizes(config: ConfigContainer) -> SplitSizes:
    """Return the samples of the whole run, evaluations at every `eval_interval` and at the end included."""
    train, validation = config.train, config.validation
    batch, iters = required(train.global_batch_size), train.train_iters or 0
    train_samples = iters * batch if train.train_samples is None else train.train_samples
    test_samples = (validation.eval_iters or 0) * batch
    evaluations = iters // validation.eval_interval + 1 if validation.eval_interval else 1
    return SplitSizes(
        train=train_samples,
        valid=None if validation.full_validation else evaluations * test_samples,
        test=test_samples,
    )
