"""Notifications of a run's end, as configured by the scenario: a command, a webhook."""

from cloudai_mbridge.completion.hook import completion

__all__ = ["completion"]
