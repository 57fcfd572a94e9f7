"""How deep the code goes from the command line to sbatch, counted on the running code."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import cli
from cloudai_mbridge.errors import POINTS_FAILED
from cloudai_mbridge.schedulers.slurm import commands

MOST_FRAMES = 10
PRODUCT = str(Path(cli.__file__).parent)

SYSTEM = """
name = "cluster"
scheduler = "slurm"
default_partition = "main"
output_path = "results"
gpus_per_node = 1

[[partitions]]
name = "main"
"""
SCENARIO = """
name = "one"

[[Tests]]
id = "a"
name = "a"
description = "a"
test_template_name = "MegatronBridge"

[Tests.cmd_args]
launcher = "embedded"
model_family_name = "tiny"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 3
"""
REFUSAL = "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified\n"


def test_from_the_command_line_to_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "system.toml").write_text(SYSTEM)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    found: list[list[str]] = []

    def answer(argv: tuple[str, ...], **options: Any) -> Any:
        if argv[0] == "sbatch":
            found.append(_own_frames())
            return subprocess.CompletedProcess(argv, 1, "", REFUSAL)
        return subprocess.CompletedProcess(argv, 0, "main\n" if argv[0] == "sinfo" else "", "")

    monkeypatch.setattr(commands.subprocess, "run", answer)
    monkeypatch.chdir(tmp_path)
    files = ["--system-config", "system.toml", "--test-scenario", "scenario.toml"]
    monkeypatch.setattr(sys, "argv", ["mbridge", "run", *files])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == POINTS_FAILED
    (frames,) = found
    assert len(frames) <= MOST_FRAMES, "\n".join(frames)


def _own_frames() -> list[str]:
    """Return file and function of the product's frames, the innermost first."""
    frame, frames = sys._getframe(), []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PRODUCT):
            frames.append(f"{Path(frame.f_code.co_filename).relative_to(PRODUCT)} {frame.f_code.co_name}")
        frame = frame.f_back  # type: ignore[assignment]
    return frames
