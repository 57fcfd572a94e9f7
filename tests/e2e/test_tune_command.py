"""`mbridge tune`, as a user calls it."""

import json
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.models.toml_source import read_toml
from tests.cases import every
from tests.golden import Sentence

REPOSITORY = Path(__file__).parents[2]
SEARCH = ("tune", "--recipe", "llama3_70b", "--gpu", "gb200", "--num-gpus", "64")
PRICES = """name = "c"
scheduler = "local"
gpu_type = "gb200"
[prices]
currency = "EUR"
gb200 = 10.5
"""


def test_the_table(mbridge: Any) -> None:
    done = mbridge(*SEARCH, "--precision", "fp8_mx", "--top", "4")
    assert done.returncode == 0, done.stderr
    for words in ("batch 256 x 8192 tokens", "│ 4 │", "90 % interval", "published for 26.04.01: tp2 pp4", "held out"):
        assert words in done.stdout, words
    assert "│ 5 │" not in done.stdout


def test_the_first_is_written_as_a_test_that_verifies(mbridge: Any, tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    done = mbridge(*SEARCH, "--write", "2", path, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr == f"written: {path}\n"
    second = json.loads(done.stdout)["best"][1]
    assert second["rank"] == 2
    assert second["step_time_90_s"] == [0, None]  # no row of this recipe in bf16 on a gb200
    (known,) = json.loads(mbridge(*SEARCH, "--precision", "fp8_cs", "--top", "1", "--json").stdout)["best"]
    assert known["step_time_90_s"][0] < known["step_time_s"] < known["step_time_90_s"][1]
    checked = mbridge("verify-configs", path)
    assert checked.returncode == 0, checked.stderr
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(f'name = "s"\n[[Tests]]\nid = "best"\ntest_name = "{read_toml(path).data["name"]}"\n')
    system = ("--system-config", REPOSITORY / "systems/gb200.toml", "--output-dir", tmp_path / "out")
    planned = mbridge("dry-run", "--test-scenario", scenario, "--tests-dir", tmp_path, *system)
    assert "1 run accepted, 0 points rejected" in planned.stdout, planned.stderr
    assert len(list(tmp_path.rglob("launcher.sh"))) == 1
    args = second["args"]
    sizes = [f"--{name}={args[name]}" for name in ("tp", "pp", "cp", "vp")]
    batch = [f"--mbs={args['mb']}", f"--gbs={args['gb']}", *(["--fsdp"] if args.get("use_megatron_fsdp") else [])]
    same = mbridge("estimate", "--recipe=llama3_70b", "--gpu=gb200", "--num-gpus=64", *sizes, *batch, "--json")
    estimated = json.loads(same.stdout)
    assert estimated["step_time_s"] == pytest.approx(second["step_time_s"])
    peak = max(stage["total"] for stage in estimated["memory"]["stages"])
    assert peak / 2**30 == pytest.approx(second["peak_memory_gib"])


@pytest.mark.parametrize(("num_gpus", "batch"), [(64, 256), (16, 64), (72, 288)])
def test_the_batch_follows_the_gpus(mbridge: Any, num_gpus: int, batch: int) -> None:
    """Also where the preset's own sizes, tp4 pp4 cp2, do not divide them."""
    done = mbridge("tune", "--recipe=llama3_70b", "--gpu=h100", f"--num-gpus={num_gpus}", "--top=1", "--json")
    assert json.loads(done.stdout)["best"][0]["args"]["gb"] == batch


def test_prices_come_from_the_system(mbridge: Any, tmp_path: Path) -> None:
    system = tmp_path / "system.toml"
    system.write_text(PRICES)
    search = ("tune", "--recipe", "llama3_8b", "--num-gpus", "8", "--system-config", system, "--max-steps", "50")
    assert "EUR for 50 steps" in mbridge(*search).stdout
    best = json.loads(mbridge(*search, "--json").stdout)["best"][0]
    assert best["cost"] == pytest.approx(10.5 * best["gpu_hours"])


@every(
    "args",
    [
        ("--recipe", "lama3_8b", "--gpu", "h100", "--num-gpus", "8"),
        ("--recipe", "llama3_8b", "--gpu", "gb20", "--num-gpus", "8"),
        ("--recipe", "llama3_8b", "--num-gpus", "8"),
        ("--recipe", "llama3_8b", "--gpu", "h100"),
        ("--recipe", "llama3_8b", "--gpu", "h100", "--num-gpus", "0"),
        ("--recipe", "llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--precision", "nvfp4"),
        ("--replay", "t.csv"),
        (),
        ("--recipe=llama3_8b", "--gpu=h100", "--num-gpus=7", "--gbs=3"),
        ("--recipe=llama3_8b", "--gpu=h100", "--num-gpus=8", "--max-gpu-hours=nan"),
        ("--recipe", "llama3_8b", "--gpu=h100", "--num-gpus=8", "--max-trials=1"),
        ("--max-trials", "1", "--time-limit", "abc"),
        ("--recipe", "llama31_405b", "--gpu", "h100", "--num-gpus", "8"),
        ("--recipe", "llama3_8b", "--gpu", "cpu", "--num-gpus", "2"),
        ("--recipe", "llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--write", "1", "/no/where.toml"),
        ("--recipe", "llama3_8b", "--gpu", "h100", "--num-gpus", "8", "--write", "1", "/etc/hostname"),
    ],
)
def test_mistakes_are_one_line(mbridge: Any, sentence: Sentence, args: tuple[str, ...]) -> None:
    done = mbridge("tune", *args)
    assert done.returncode == 2
    sentence(done.stderr)
    assert "Traceback" not in done.stderr
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())
