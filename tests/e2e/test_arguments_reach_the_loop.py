"""Arguments do in a real training what they say: checkpoints, profiler, data set, determinism, environment."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

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
deterministic = true
dump_env = true
offline = true
nemo_home = "{tmp_path}/cache"
save_config_filepath = "configs.yaml"
data = "c4"
c4_root = "{tmp_path}"
c4_train_shards = 7
index_mapping_dir = "{tmp_path}/index"
"""


def write_shards(directory: Path) -> None:
    """Write a training shard of C4, and the validation file, with 40 documents of random tokens each."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    for name in ("c4-train.en_7_text_document", "c4-validation-91205-samples.en_text_document"):
        builder = IndexedDatasetBuilder(str(directory / f"{name}.bin"), dtype=np.uint16)
        for _ in range(40):
            builder.add_document(torch.randint(0, 500, (200,)), [200])
        builder.finalize(str(directory / f"{name}.idx"))


@pytest.mark.filterwarnings("ignore:__array__ implementation")
def test_checkpoints_and_profiles(mbridge: Any, tmp_path: Path) -> None:
    (tmp_path / "system.toml").write_text(SYSTEM)
    (tmp_path / "scenario.toml").write_text(SCENARIO.replace("{tmp_path}", str(tmp_path)))
    write_shards(tmp_path)
    files = (f"--system-config={tmp_path}/system.toml", f"--test-scenario={tmp_path}/scenario.toml")
    done = mbridge("run", *files, f"--output-dir={tmp_path}/out", env={"HF_TOKEN": "n0ttobeseen"})
    assert done.returncode == 0, done.stdout + done.stderr
    (point,) = (tmp_path / "out").glob("*/t/single/0")
    assert [path.name for path in (point / "ckpt").glob("iter_*")] == ["iter_0000006"]
    assert len(list((point / "torch_profile").glob("rank-0.*"))) == 1
    saved = (point / "configs.yaml").read_text()
    assert "c4-train.en_7_text_document" in saved
    assert "deterministic_mode: true" in saved
    assert list((tmp_path / "index").iterdir()), "the blend was indexed"
    variables = (point / "env_local.log").read_text()
    assert "n0ttobeseen" not in variables
    for line in ("HF_HUB_OFFLINE='1'", f"NEMO_HOME='{tmp_path}/cache'", "NCCL_ALGO='Ring'"):
        assert line in variables
