"""A vision transformer and its patch mergers. Training FLOPs of a batch, not per token."""

from dataclasses import dataclass
from typing import Any

from cloudai_mbridge.training.flops.quantities import read


@dataclass(frozen=True)
class VisionPatches:
    """Patches of a batch, before merging.

    total, squared: sums over the sequences within which patches attend to each other (an image, a frame of a video).
    merged_tokens: number of tokens after merging.
    """

    total: Any
    squared: Any
    merged_tokens: Any


def vision_config_of(model: Any) -> Any:
    """Return the model's, or its thinker's, vision configuration; None: it sees nothing."""
    return read(model, "vision_config") or read(read(model, "thinker_config"), "vision_config")


def equal_images(model: Any, batch_size: int, patches: int) -> VisionPatches:
    """Return a batch's patches as if every sample had one image and all were equal."""
    each = patches / batch_size if batch_size > 0 else patches
    merged = each // read(vision_config_of(model), "spatial_merge_size", 2) ** 2
    return VisionPatches(batch_size * each, batch_size * each**2, batch_size * merged)


def vit_flops(model: Any, patches: VisionPatches) -> Any:
    """Return the training FLOPs of the vision tower; 0 without one. Its attention is not causal."""
    vision = vision_config_of(model)
    if vision is None:
        return 0
    h, depth, width = (read(vision, name, 0) for name in ("hidden_size", "depth", "intermediate_size"))
    layers = depth * ((8 * h**2 + 4 * h * width) * patches.total + 4 * h * patches.squared)
    merged = h * read(vision, "spatial_merge_size", 2) ** 2
    out = read(vision, "out_hidden_size", model.hidden_size)
    mergers = (1 + _deepstack_levels(model, vision)) * patches.merged_tokens * (2 * merged**2 + 2 * merged * out)
    return 3 * (layers + mergers)


def _deepstack_levels(model: Any, vision: Any) -> int:
    """Return how many further levels of the tower are merged."""
    for owner in (vision, model, read(model, "thinker_config")):
        if (indexes := read(owner, "deepstack_visual_indexes")) is not None:
            return len(indexes)
    return 0
