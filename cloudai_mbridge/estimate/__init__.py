"""FLOPs, memory, time and cost of a point, before any GPU second is spent. Never imports torch."""
