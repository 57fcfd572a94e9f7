"""A configuration file, an override or a checkpoint that cannot be used; the message contains the reason."""


class ConfigError(ValueError):
    """A configuration file or an override that cannot be read; the message names the file or key and the remedy."""


class CheckpointError(ConfigError):
    """A checkpoint that cannot be written, found, read or fitted into this run; the message starts with its path."""
