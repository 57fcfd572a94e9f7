"""Megatron-Core's recipe of quantization by layer, in a form that files can give."""

from dataclasses import dataclass, field
from typing import Any

from megatron.core.quantization import quant_config


@dataclass
class GlobMatcher(quant_config.GlobMatcher):  # type: ignore[misc]
    """The layers whose path matches the pattern take this key's settings."""

    pattern: str
    config_key: str


@dataclass
class RecipeConfig(quant_config.RecipeConfig):  # type: ignore[misc]
    """The first matcher that fits a layer decides."""

    matchers: list[GlobMatcher] = field(default_factory=list)
    config_dict: dict[str, Any] = field(default_factory=dict)

    def finalize(self) -> None:
        """Check that every matcher names settings. Raises ValueError."""
        for matcher in self.matchers:
            if matcher.config_key not in self.config_dict:
                raise ValueError(
                    f"model.quant_recipe: {matcher.config_key!r} of {matcher.pattern!r} is none of"
                    f" {', '.join(self.config_dict)}"
                )

    @property
    def configs(self) -> dict[str, Any]:
        """The settings under the name that Megatron-Core reads."""
        return self.config_dict
