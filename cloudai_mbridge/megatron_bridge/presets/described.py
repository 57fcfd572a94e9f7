"""What is said of a preset."""

from cloudai_mbridge.megatron_bridge.presets.find import UNSET, Preset, Resolved


def origin(preset: Preset) -> str:
    """Return where a value of a preset comes from, in a few words."""
    return f"preset {preset.name}, {preset.release.version}"


def describe(resolved: Resolved, overridden: frozenset[str] = frozenset()) -> str:
    """Return what the launcher fills in for a point and no override replaces; "" if that is nothing."""
    if resolved.preset is None or not resolved.from_preset:
        return ""
    filled_in = resolved.from_preset - overridden
    names = sorted(name for name in filled_in if getattr(resolved.args, name) not in UNSET)
    values = ", ".join(f"{name}={_text(getattr(resolved.args, name))}" for name in names)
    return f"{origin(resolved.preset)} ({resolved.preset.release.source}): {values}"


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
