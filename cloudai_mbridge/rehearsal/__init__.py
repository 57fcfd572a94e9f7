"""Rehearsal of accepted points: their ranks are built by the training program itself before a GPU is asked for."""

from cloudai_mbridge.rehearsal.record import Refusal, Rehearsal, RehearsalVerdict, RehearsedPoint
from cloudai_mbridge.rehearsal.run import Progress, Step, rehearse

__all__ = ["Progress", "Refusal", "Rehearsal", "RehearsalVerdict", "RehearsedPoint", "Step", "rehearse"]
