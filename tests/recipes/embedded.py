"""The recipes that the embedded loop trains."""

from cloudai_mbridge.recipes import load_recipe, recipe_names
from cloudai_mbridge.training.compat.versions import installed_release


def embedded_recipes() -> list[str]:
    """Return those of which the installed Megatron-Core has the layers: 0.16 cannot predict with hybrid models."""
    names = [name for name in recipe_names() if not load_recipe(name).not_embedded]
    if installed_release() != "0.16":
        return names
    return [name for name in names if "/" not in (load_recipe(name).default("model", "hybrid_layer_pattern") or "")]
