"""Turn plans into files and commands. Rendering is pure; one function writes."""

from cloudai_mbridge.launch.write import render, write_plan, write_runs

__all__ = ["render", "write_plan", "write_runs"]
