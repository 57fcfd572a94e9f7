"""Arguments of checkpoints and of the PyTorch profiler do in a real training what they say."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

SYSTEM = 'name = "l"\nscheduler = "local"\n'
SCENARIO = """
name = "s"
[[Tests]]
id = "t"
name = "t"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 1
max_steps = 6
save_dir = "ckpt"
save_interval = 3
most_recent_k = 1
pytorch_profiler = true
profiling_start_step = 2
profiling_stop_step = 4
profiling_ranks = "0"
"""


def test_checkpoints_and_profiles(mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text(SYSTEM)
    (tmp_path / "scenario.toml").write_text(SCENARIO)
    files = (f"--system-config={tmp_path}/system.toml", f"--test-scenario={tmp_path}/scenario.toml")
    done = mbridge("run", *files, f"--output-dir={tmp_path}/out")
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = (tmp_path / "out").glob("*/t/single/0")
    assert [path.name for path in (point / "ckpt").glob("iter_*")] == ["iter_0000006"]
    assert len(list((point / "torch_profile").glob("rank-0.*"))) == 1
