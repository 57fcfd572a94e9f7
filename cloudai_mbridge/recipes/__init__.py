"""Model architectures as data: one TOML per recipe under `data/`, in the sections of a training config."""

from cloudai_mbridge.recipes.load import Recipe, load_recipe, recipe_names

__all__ = ["Recipe", "load_recipe", "recipe_names"]
