"""What a checkpoint can be refused for."""

from cloudai_mbridge.training.errors import ConfigError


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, found, read or fitted into this run; the message starts with its path."""
