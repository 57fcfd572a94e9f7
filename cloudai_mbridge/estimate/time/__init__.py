"""The time of a step: an analytic model for ranking points, calibrated on published rows. docs/models.md."""
