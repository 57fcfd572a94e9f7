"""Number formats by the names of `cmd_args.compute_dtype`. CloudAI has "fp8" too: `fp8_recipe` divides it."""

FP8 = "fp8"
# The second halves of the names of FP8 formats, as Megatron-Core calls the recipes
FP8_RECIPES = {"cs": "tensorwise", "ds": "delayed", "mx": "mxfp8", "sc": "blockwise"}
# Formats that the embedded loop trains in; the second group needs Transformer Engine
IN_16_OR_32_BITS = ("bf16", "fp32")
QUANTIZED = (*(f"{FP8}_{short}" for short in FP8_RECIPES), "nvfp4")


def fp8_format(fp8_recipe: str) -> str | None:
    """Return fp8_cs for cs, fp8_cs or tensorwise; None for an unknown recipe."""
    text = fp8_recipe.lower().removeprefix(f"{FP8}_")
    return next((f"{FP8}_{short}" for short, name in FP8_RECIPES.items() if text in (short, name)), None)
