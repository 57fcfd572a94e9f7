"""Render all files of a run."""

import json
from importlib.resources import files as files_of

from cloudai_mbridge.launch.script import LAUNCHER_START, render_local_script, render_slurm_script
from cloudai_mbridge.launch.toml_text import render_toml
from cloudai_mbridge.megatron_bridge import launcher
from cloudai_mbridge.megatron_bridge.launcher.script import render_launcher_script
from cloudai_mbridge.models.system import SlurmSystem, System
from cloudai_mbridge.plan import POINT_FILES, RunPlan


def render(plan: RunPlan, system: System) -> dict[str, str]:
    """Return the files of a run: name -> text. No file holds a credential."""
    files = {POINT_FILES.definition: render_toml(plan.definition)}
    if plan.upstream is not None:
        assert isinstance(system, SlurmSystem)
        starter = (files_of(launcher) / "start_launcher.py").read_text(encoding="utf-8")
        files[POINT_FILES.launcher_starter] = starter
        return files | {POINT_FILES.launcher_script: render_launcher_script(plan, system, LAUNCHER_START)}
    files[POINT_FILES.training_config] = json.dumps(plan.training_config, indent=2) + "\n"
    if isinstance(system, SlurmSystem):
        return files | {POINT_FILES.slurm_script: render_slurm_script(plan, system)}
    return files | {POINT_FILES.local_script: render_local_script(plan, system)}
