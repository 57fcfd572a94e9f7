"""Recordings of a training run: profiler traces, memory history, tensor statistics."""

import importlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_TE_FEATURES = "transformer_engine.debug.features"


@dataclass(kw_only=True)
class ProfilingConfig:
    """The profiler, its ranks, and its steps `[profile_step_start, profile_step_end)`."""

    use_nsys_profiler: bool = False
    profile_step_start: int = 10
    profile_step_end: int = 12
    use_pytorch_profiler: bool = False
    pytorch_profiler_collect_shapes: bool = False
    pytorch_profiler_collect_callstack: bool = False
    pytorch_profiler_collect_chakra: bool = False
    profile_ranks: list[int] = field(default_factory=list)  # empty: every rank
    record_memory_history: bool = False
    memory_snapshot_path: str = "snapshot.pickle"
    record_shapes: bool = False
    nvtx_ranges: bool = False

    def finalize(self) -> None:
        """Raise AssertionError for two profilers, a negative step, or an end before the start."""
        start, end = self.profile_step_start, self.profile_step_end
        assert not (self.use_nsys_profiler and self.use_pytorch_profiler), (
            "use_nsys_profiler and use_pytorch_profiler are both set: enable one of them"
        )
        assert start >= 0, f"profile_step_start={start} is negative"
        assert end >= 0, f"profile_step_end={end} is negative"
        assert end >= start, f"profile_step_end={end} is before profile_step_start={start}"


@dataclass(kw_only=True)
class TensorInspectConfig:
    """Transformer Engine's debug features: statistics and checks of tensors inside its layers."""

    enabled: bool = False
    features: dict[str, Any] | str | Path | None = None  # the feature table, or the path of its YAML file
    feature_dirs: list[str] | None = None  # directories that define the features
    allow_custom_feature_dirs: bool = False
    log_dir: str | None = None
    init_training_step: int = 0

    def finalize(self) -> None:
        """Point `feature_dirs` at the features that Transformer Engine ships, if none are named and it has any."""
        if self.enabled and not self.feature_dirs:
            self.feature_dirs = shipped_features() or self.feature_dirs


def shipped_features() -> list[str]:
    """Return the directories of Transformer Engine's own features; empty without any."""
    try:
        return [str(path) for path in importlib.import_module(_TE_FEATURES).__path__]
    except Exception as error:
        # A broken Transformer Engine raises far more than ImportError, and features may yet be named elsewhere
        logger.debug("no installed debug features: importing %s failed: %r", _TE_FEATURES, error)
        return []


def should_profile_rank(config: ProfilingConfig | None, rank: int) -> bool:
    """Return whether `rank` is profiled: it is listed, or the list is empty."""
    return config is not None and (not config.profile_ranks or rank in config.profile_ranks)


def has_window(config: ProfilingConfig, first_step: int = 0) -> bool:
    """Return whether any step is profiled by a run that starts with `first_step` steps done."""
    return max(config.profile_step_start, first_step) < config.profile_step_end


def is_speaker(config: ProfilingConfig, rank: int) -> bool:
    """Return whether `rank` is the one profiled rank that reports for all of them."""
    return rank == min(config.profile_ranks, default=0)
