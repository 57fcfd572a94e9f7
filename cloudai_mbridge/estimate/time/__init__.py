"""The time of a step: an analytic model for ranking points, calibrated on published rows. docs/models.md."""

from cloudai_mbridge.estimate.time.calibration import load_calibration
from cloudai_mbridge.estimate.time.model import TimeModel, step_time_s, time_model, why_no_time

__all__ = ["TimeModel", "load_calibration", "step_time_s", "time_model", "why_no_time"]
