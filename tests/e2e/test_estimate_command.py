"""`mbridge estimate` and `mbridge proxy`, as a user calls them."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every

LAYOUT = ("--num-gpus", "64", "--tp", "2", "--pp", "4", "--vp", "5", "--mbs", "1", "--gbs", "256")
PRICES = """name = "c"
scheduler = "local"
gpu_type = "gb200"
[prices]
currency = "EUR"
gb200 = 10.5
"""


def test_json_has_every_number(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", *LAYOUT, "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["flops_per_token"] > 4e11
    assert found["parameters"]["total"] == 70_553_706_496
    assert len(found["memory"]["stages"]) == 4
    for stage in found["memory"]["stages"]:
        assert stage["total"] == pytest.approx(sum(stage["terms"].values()))
    assert found["step_time_s"] == pytest.approx(sum(found["step_time_terms_s"].values()))
    assert found["tflops_per_gpu"] == pytest.approx(found["tokens_per_s_per_gpu"] * found["flops_per_token"] / 1e12)
    assert 0 < found["mfu"] < 1
    assert "median error" in found["step_time_error"]
    assert found["flops_formula"] == "megatron-bridge/new"


def test_the_table_names_the_terms(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "deepseek_v3", "--gpu", "gb200", "--ep", "8", "--precision", "FP8-MX")
    assert done.returncode == 9, done.stderr  # it does not fit
    assert "9 if the point does not fit" in " ".join(mbridge("estimate", "--help").stdout.split())
    for word in ("weights", "optimizer", "logits", "matmul_experts", "ep_comm", "FLOPs per token", "MFU", "held out"):
        assert word in done.stdout, word


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_what_does_not_fit_is_a_warning_and_an_exit_code(mbridge: Any, form: tuple[str, ...]) -> None:
    point = ("estimate", "--recipe", "llama31_405b", "--gpu", "gb200", "--num-gpus", "8", "--tp", "4", "--gbs", "8")
    done = mbridge(*point, *form)
    assert done.returncode == 9
    assert done.stderr.startswith("warning: the point does not fit: ")
    assert "on the fullest GPU, which has 185.0 GiB" in done.stderr
    assert '"fits": false' in done.stdout if form else "does not fit" in done.stdout


def test_what_fits_or_cannot_be_told_is_no_warning(mbridge: Any) -> None:
    for options in (("--gpu", "gb200", *LAYOUT), ()):
        done = mbridge("estimate", "--recipe", "llama3_70b", *options, "--json")
        assert (done.returncode, done.stderr) == (0, "")


def test_prices_come_from_the_system(mbridge: Any, tmp_path: Path) -> None:
    system = tmp_path / "system.toml"
    system.write_text(PRICES)
    args = ("estimate", "--recipe", "llama3_70b", *LAYOUT, "--system-config", system, "--max-steps", "100", "--json")
    found = json.loads(mbridge(*args).stdout)
    assert (found["gpu"], found["currency"], found["num_steps"]) == ("gb200", "EUR", 100)
    assert found["cost"] == pytest.approx(10.5 * found["gpu_hours"])


def test_what_is_not_known_has_a_reason(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "llama3_8b", "--gpu", "cpu", "--precision", "fp32", "--gbs", "4", "--json")
    found = json.loads(done.stdout)
    assert found["step_time_s"] is found["mfu"] is found["cost"] is None
    assert found["missing"]["mfu"] == "unknown peak of cpu"


@pytest.mark.parametrize("estimator", ["megatron-bridge/seed", "megatron-bridge/head"])
def test_reference_estimators(mbridge: Any, estimator: str) -> None:
    done = mbridge("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", *LAYOUT, "--memory-estimator", estimator)
    assert "Theoretical memory footprints: weight and optimizer=" in done.stdout


@every(
    ("args", "words"),
    [
        (("--recipe", "lama3_8b"), "did you mean 'llama3_8b'"),
        (("--recipe", "llama3_8b", "--gpu", "gb20"), "use one of"),
        (("--recipe", "llama3_8b", "--precision", "int4"), "use one of"),
        (("--recipe", "llama3_8b", "--gpu", "NVIDIA H100 PCIe"), "unknown GPU"),
        (("--recipe", "llama3_8b", "--tp", "0"), "--tp"),
        (("--recipe", "llama3_8b", "--tp", "many"), "--tp"),
        (("--recipe", "llama3_8b", "--flops-formula", "newest"), "--flops-formula: unknown FLOPs formula"),
        (("--recipe", "llama3_8b", "--memory-estimator", "mine"), "mine"),
        (("--recipe", "llama3_8b", "--recompute", "everything"), "everything"),
        (("--recipe", "llama3_8b", "--set", "x"), "KEY=VALUE"),
        (("--recipe", "llama3_8b", "--set", "wandb.api_key=1"), "credential"),
        (("--recipe", "llama3_8b", "--set", "model.num_attention_heads=0"), "is not a size; use 1 to"),
        (("--recipe", "llama3_8b", "--recompute", "full", "--recompute-num-layers", "2"), "exclude each other"),
        (("--recipe", "llama3_8b", "--system-config", "/nowhere.toml"), "/nowhere.toml"),
        (("--recipe", "llama3_8b", "--num-gpus", "3", "--tp", "2"), "C01"),
        ((), "--recipe"),
    ],
)
def test_mistakes_are_one_line(mbridge: Any, args: tuple[str, ...], words: str) -> None:
    done = mbridge("estimate", *args)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert all(line.startswith("error: ") for line in done.stderr.splitlines())


def test_every_broken_rule_is_listed(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "llama3_8b", "--tp", "3")
    assert done.returncode == 2
    assert {line.split()[1] for line in done.stderr.splitlines()} >= {"M08", "M09", "M10"}


def test_neither_torch_nor_numpy_is_loaded() -> None:
    code = (
        "import sys; from cloudai_mbridge.cli import cli\n"
        "cli.main(['estimate', '--recipe', 'deepseek_v3', '--gpu', 'gb200', '--json'], standalone_mode=False)\n"
        "bad = {'torch', 'numpy', 'megatron'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr


def test_a_proxy_can_be_planned(mbridge: Any, tmp_path: Path) -> None:
    path = tmp_path / "tests" / "proxy.toml"
    path.parent.mkdir()
    done = mbridge("proxy", "deepseek_v3", "--layers", "4", "--output", path)
    assert done.returncode == 0, done.stderr
    assert tomllib.loads(path.read_text())["cmd_args"]["num_layers"] == 4
    assert "4 of its 61 layers" in path.read_text()
    (tmp_path / "system.toml").write_text('name = "l"\nscheduler = "local"\n')
    (tmp_path / "scenario.toml").write_text('name = "s"\n[[Tests]]\nid = "p"\ntest_name = "deepseek_v3_4_layers"\n')
    files = ("--system-config", tmp_path / "system.toml", "--tests-dir", path.parent)
    files += ("--test-scenario", tmp_path / "scenario.toml", "--output-dir", tmp_path / "out")
    done = mbridge("dry-run", *files)
    assert done.returncode == 0, done.stdout + done.stderr
    again = mbridge("proxy", "deepseek_v3", "--layers", "4", "--output", path)
    assert (again.returncode, "exists" in again.stderr) == (2, True)


@every(("layers", "words"), [("62", "use 1 to 61"), ("0", "--layers"), ("x", "--layers")])
def test_proxies_that_cannot_be(mbridge: Any, layers: str, words: str) -> None:
    done = mbridge("proxy", "deepseek_v3", "--layers", layers)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_release_fills_in_what_is_not_said(mbridge: Any) -> None:
    point = ("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", "--num-gpus", "128", "--json")
    found = json.loads(mbridge(*point, "--release", "0.6.0").stdout)
    assert found["filled_in"].startswith("preset llama3_70b pretrain gb200 bf16, 0.6.0 (commit v0.6.0): ")
    assert (found["layout"]["use_megatron_fsdp"], found["layout"]["mbs"], found["layout"]["gbs"]) == (True, 1, 512)
    said = json.loads(mbridge(*point, "--release", "0.6.0", "--tp", "2", "--gbs", "64").stdout)
    assert (said["layout"]["tp"], said["layout"]["gbs"], said["layout"]["use_megatron_fsdp"]) == (2, 64, True)
    ours = json.loads(mbridge(*point).stdout)
    assert not ours.get("filled_in")
    assert not ours["layout"]["use_megatron_fsdp"]


def test_an_unknown_release_is_refused(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", "--num-gpus", "64", "--release", "0.9")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --release: '0.9' is not known; use one of 0.3.0, ")


def test_the_preset_is_that_of_the_gpu_that_is_estimated(mbridge: Any, tmp_path: Path) -> None:
    system = tmp_path / "system.toml"
    system.write_text('name = "c"\nscheduler = "local"\ngpu_type = "h100"\n')
    point = ("estimate", "--recipe", "llama3_70b", "--num-gpus", "64", "--release", "0.3.0")
    found = json.loads(mbridge(*point, "--system-config", system, "--json").stdout)
    assert found["filled_in"].startswith("preset llama3_70b pretrain h100 bf16 v2")
    nameless = mbridge(*point)
    assert nameless.returncode == 2
    assert "presets differ by GPU" in nameless.stderr


def test_recomputation_of_a_preset_cannot_be_switched_off(mbridge: Any) -> None:
    point = ("estimate", "--recipe", "deepseek_v3", "--gpu", "gb200", "--num-gpus", "256", "--release", "0.3.0")
    done = mbridge(*point, "--recompute", "none")
    assert done.returncode == 2
    assert "the launcher cannot switch that off" in done.stderr
