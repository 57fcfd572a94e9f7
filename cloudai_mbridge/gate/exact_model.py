"""The strictness of the gate's own files."""

from pydantic import ConfigDict

from cloudai_mbridge.models.base import StrictModel


class ExactModel(StrictModel):
    """Takes no text for a number, and no number that is not finite."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)
