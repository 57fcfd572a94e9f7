"""Statistics of tensors inside Transformer Engine's layers, gathered by the real nvdlfw_inspect."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nvdlfw_inspect")

from tests.transformer_engine.emulated_run import differences, train

FEATURES: dict[str, Any] = {
    "stats": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*linear_fc1.*"},
        "transformer_engine": {
            "LogTensorStats": {"enabled": True, "tensors": ["activation"], "stats": ["max", "min"], "freq": 2}
        },
    }
}


def test_statistics_of_every_second_step_and_the_same_losses(tmp_path: Path) -> None:
    plain = train("dense", {"dtype": "bf16"})
    inspect = {"enabled": True, "features": FEATURES, "log_dir": str(tmp_path)}
    others = {"tensor_inspect": inspect, "validation": {"eval_iters": 1}}
    inspected = train("dense", {"dtype": "bf16"}, others)
    assert differences(inspected.losses, plain.losses) == 0
    (log,) = (tmp_path / "nvdlfw_inspect_statistics_logs").glob("*.log")
    lines = [line for line in log.read_text().splitlines() if "_activation_max" in line]
    assert {int(line.split("iteration=")[1].split()[0]) for line in lines} == {0, 2}
