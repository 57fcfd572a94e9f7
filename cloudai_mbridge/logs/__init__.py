"""From log lines to step records."""

from cloudai_mbridge.logs.mbridge import extract_mbridge_metrics, stream_mbridge_metrics
from cloudai_mbridge.logs.parser import LogParser, LogSummary, StepRecord, read_log

__all__ = [
    "LogParser",
    "LogSummary",
    "StepRecord",
    "extract_mbridge_metrics",
    "read_log",
    "stream_mbridge_metrics",
]
