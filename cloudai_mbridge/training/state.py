"""What a run carries from step to step."""

from dataclasses import dataclass, field

from cloudai_mbridge.training.config.container import ConfigContainer


@dataclass
class TrainState:
    """Progress counters: optimizer steps done and sequences consumed."""

    step: int = 0
    consumed_train_samples: int = 0


@dataclass
class GlobalState:
    """The run's configuration and progress."""

    cfg: ConfigContainer
    train_state: TrainState = field(default_factory=TrainState)
