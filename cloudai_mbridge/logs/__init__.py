"""Parsing of log lines into step records."""

from cloudai_mbridge.logs.parser import (
    PROFILED,
    SKIPPED,
    LogParser,
    LogSummary,
    StepRecord,
    extract_mbridge_metrics,
    read_log,
    stream_mbridge_metrics,
)

__all__ = [
    "PROFILED",
    "SKIPPED",
    "LogParser",
    "LogSummary",
    "StepRecord",
    "extract_mbridge_metrics",
    "read_log",
    "stream_mbridge_metrics",
]
