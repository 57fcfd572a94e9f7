"""What a container of configurations can do: Megatron-Bridge's base class, for containers of a user's own."""

from pathlib import Path
from typing import Any, Self


class _ConfigContainerBase:
    """Plain data, YAML and JSON of a dataclass, and back.

    The reader and writer are imported where they are used: a run that is configured in code needs no YAML library.
    """

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, with each section's class under `_target_`."""
        from cloudai_mbridge.training.config import serialization

        return serialization.to_dict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """Build a container from what `to_dict` returns.

        Raises:
            ConfigError: an unknown class or key, or a missing key.
        """
        from cloudai_mbridge.training.config import serialization

        return serialization.from_dict(cls, data)

    def to_yaml(self, yaml_path: str | Path | None = None) -> str:
        """Return the container as YAML, written to `yaml_path` too where one is given."""
        from cloudai_mbridge.training.config import serialization

        return serialization.to_yaml(self, yaml_path)

    @classmethod
    def from_yaml(cls, yaml_path: str | Path) -> Self:
        """Read a container from a file that `to_yaml` wrote.

        Raises:
            ConfigError: an unreadable file, or what `from_dict` refuses.
        """
        from cloudai_mbridge.training.config import serialization

        return serialization.from_yaml(cls, yaml_path)

    def print_yaml(self) -> None:
        """Print the container as YAML."""
        print(self.to_yaml(), end="")


__all__ = ["_ConfigContainerBase"]
