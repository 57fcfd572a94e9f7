"""From log lines to step records."""

from cloudai_mbridge.logs.parser import LogParser, LogSummary, StepRecord, read_log

__all__ = ["LogParser", "LogSummary", "StepRecord", "read_log"]
