"""Which ranks and which steps are profiled."""

from cloudai_mbridge.training.config.profiling import ProfilingConfig


def should_profile_rank(config: ProfilingConfig | None, rank: int) -> bool:
    """Return whether `rank` is profiled: it is listed, or none is."""
    return config is not None and (not config.profile_ranks or rank in config.profile_ranks)


def has_window(config: ProfilingConfig, first_step: int = 0) -> bool:
    """Return whether any step is profiled by a run that starts with `first_step` steps done."""
    return max(config.profile_step_start, first_step) < config.profile_step_end


def is_speaker(config: ProfilingConfig, rank: int) -> bool:
    """Return whether `rank` is the one profiled rank that says what concerns them all."""
    return rank == min(config.profile_ranks, default=0)
