"""`mbridge estimate` and `mbridge proxy`, as a user calls them."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

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
def test_what_does_not_fit_is_a_warning_and_an_exit_code(
    mbridge: Any, sentence: Sentence, form: tuple[str, ...]
) -> None:
    point = ("estimate", "--recipe", "llama31_405b", "--gpu", "gb200", "--num-gpus", "8", "--tp", "4", "--gbs", "8")
    point += ("--release", "none")
    done = mbridge(*point, *form)
    assert done.returncode == 9
    sentence(done.stderr)
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
    "args",
    [
        ("--recipe", "lama3_8b"),
        ("--recipe", "llama3_8b", "--gpu", "gb20"),
        ("--recipe", "llama3_8b", "--precision", "int4"),
        ("--recipe", "llama3_8b", "--gpu", "NVIDIA H100 PCIe"),
        ("--recipe", "llama3_8b", "--tp", "0"),
        ("--recipe", "llama3_8b", "--tp", "many"),
        ("--recipe", "llama3_8b", "--flops-formula", "newest"),
        ("--recipe", "llama3_8b", "--memory-estimator", "mine"),
        ("--recipe", "llama3_8b", "--recompute", "everything"),
        ("--recipe", "llama3_8b", "--set", "x"),
        ("--recipe", "llama3_8b", "--set", "wandb.api_key=1"),
        ("--recipe", "llama3_8b", "--set", "model.num_attention_heads=0"),
        ("--recipe", "llama3_8b", "--recompute", "full", "--recompute-num-layers", "2"),
        ("--recipe", "llama3_8b", "--system-config", "/nowhere.toml"),
        ("--recipe", "llama3_8b", "--num-gpus", "3", "--tp", "2"),
        (),
    ],
)
def test_mistakes_are_one_line(mbridge: Any, sentence: Sentence, args: tuple[str, ...]) -> None:
    done = mbridge("estimate", *args)
    assert done.returncode == 2
    sentence(done.stderr)
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


@every("layers", ["62", "0", "x"])
def test_proxies_that_cannot_be(mbridge: Any, sentence: Sentence, layers: str) -> None:
    done = mbridge("proxy", "deepseek_v3", "--layers", layers)
    assert done.returncode == 2
    sentence(done.stderr)


def test_a_release_fills_in_what_is_not_said(mbridge: Any) -> None:
    point = ("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", "--num-gpus", "128", "--json")
    found = json.loads(mbridge(*point, "--release", "0.6.0").stdout)
    assert found["filled_in"].startswith("preset llama3_70b pretrain gb200 bf16, 0.6.0 (commit v0.6.0): ")
    assert (found["layout"]["use_megatron_fsdp"], found["layout"]["mbs"], found["layout"]["gbs"]) == (True, 1, 512)
    said = json.loads(mbridge(*point, "--release", "0.6.0", "--tp", "2", "--gbs", "64").stdout)
    assert (said["layout"]["tp"], said["layout"]["gbs"], said["layout"]["use_megatron_fsdp"]) == (2, 64, True)
    by_default = json.loads(mbridge(*point).stdout)
    assert by_default["filled_in"].startswith(
        "preset llama3_70b pretrain gb200 bf16, 0.6.0 (the newest known release): "
    )
    assert by_default["layout"] == found["layout"]
    ours = json.loads(mbridge(*point, "--release", "none").stdout)
    assert (ours["filled_in"], ours["not_filled_in"].startswith("--release none; sizes that are not given are 1")) == (
        "",
        True,
    )
    assert not ours["layout"]["use_megatron_fsdp"]


def layout_of(found: dict[str, Any]) -> tuple[int, ...]:
    return tuple(found["layout"][name] for name in ("tp", "pp", "vp", "ep", "gbs"))


@every(
    ("options", "layout", "why"),
    [
        # the preset of just this recipe, GPU and count, and of a multiple of its GPUs
        (("deepseek_v3", "gb200", "--num-gpus", "256"), (1, 4, 4, 64, 4096), ""),
        (("deepseek_v3", "gb200"), (1, 4, 4, 64, 4096), ""),
        (("deepseek_v3", "gb200", "--num-gpus", "512", "--precision", "fp8_mx"), (1, 4, 4, 64, 8192), ""),
        # what is given replaces the preset's
        (("deepseek_v3", "gb200", "--num-gpus", "256", "--tp", "2", "--gbs", "2048"), (2, 4, 4, 64, 2048), ""),
        (("deepseek_v3", "gb200", "--ep", "64", "--etp", "1", "--pp", "4", "--vp", "4"), (1, 4, 4, 64, 4096), ""),
        # a preset with Megatron-FSDP, and sizes that this excludes: the sizes are what was asked for
        (
            ("llama3_70b", "gb200", "--num-gpus", "64", "--tp", "2", "--pp", "4", "--vp", "5", "--gbs", "256"),
            (2, 4, 5, 1, 256),
            "llama3_70b pretrain gb200 bf16 does not suit 64 GPUs: C06 ",
        ),
        # without a preset that suits the GPUs, the fastest layout that fits
        (("llama3_70b", "gb200", "--num-gpus", "24"), None, "does not suit 24 GPUs: it needs 19"),
        (("llama3_8b", "a100", "--num-gpus", "16"), None, "has no preset of llama3_8b with gpu = 'a100'"),
    ],
)
def test_a_point_without_sizes_has_those_of_a_preset_or_fits(
    mbridge: Any, options: tuple[str, ...], layout: tuple[int, ...] | None, why: str
) -> None:
    recipe, gpu, *others = options
    done = mbridge("estimate", "--recipe", recipe, "--gpu", gpu, *others, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["fits"]
    assert layout is None or layout_of(found) == layout
    assert why in found["not_filled_in"]
    assert bool(why) is not found["filled_in"].startswith(f"preset {recipe} pretrain {gpu} ")
    assert ("the layout is the fastest that fits" in found["not_filled_in"]) is (layout is None)


@every(
    ("options", "code"),
    [
        (("deepseek_v3", "h100", "--num-gpus", "32"), 9),
        (("deepseek_v3", "gb200", "--pp", "1"), 2),
        (("deepseek_v3", "gb200", "--pp", "1"), 2),
        (("deepseek_v3", "gb200", "--recompute", "none"), 2),
    ],
)
def test_no_sensible_point_is_a_clear_word(
    mbridge: Any, sentence: Sentence, options: tuple[str, ...], code: int
) -> None:
    recipe, gpu, *others = options
    done = mbridge("estimate", "--recipe", recipe, "--gpu", gpu, *others)
    assert (done.returncode, done.stdout) == (code, "")
    sentence(done.stderr)


def test_a_saving_without_a_model_leaves_open_whether_it_fits(mbridge: Any, sentence: Sentence) -> None:
    """The preset offloads activations of experts; with half of its experts' ranks even that may not suffice."""
    point = ("estimate", "--recipe", "nemotron_3_5_lightning", "--gpu", "h100", "--num-gpus", "8", "--ep", "4")
    done = mbridge(*point)
    assert done.returncode == 0
    sentence(done.stderr)
    assert "model.fine_grained_activation_offloading" in done.stderr
    assert "at most 10" in done.stdout
    assert "may not fit" in done.stdout
    found = json.loads(mbridge(*point, "--json").stdout)
    assert (found["fits"], found["memory"]["bound"]) == (None, "at most")
    assert "fine_grained_activation_offloading" in found["missing"]["fits"]


@every(
    ("options", "is_known", "words"),
    [
        (("deepseek_v3", "gb200", "--precision", "fp8_mx"), True, "others of its configuration are in the fit"),
        (("deepseek_v3", "gb200", "--precision", "fp8_mx", "--tp", "2"), True, "held out with its configuration"),
        (("qwen3_30b_a3b", "h100"), True, "(1 of both), each held out with its configuration"),
        (("llama3_70b", "h100"), False, "unknown: no published row is of llama3_70b on h100 in bf16; of "),
        (("llama3_8b", "h200", "--num-gpus", "8"), False, "unknown: no published row is of h200 in bf16; of "),
        (("llama3_8b", "h100", "--precision", "fp8_cs", "--num-layers", "4"), False, "are of other sizes; of "),
        (("llama3_8b", "h100", "--task", "sft"), False, "unknown: no published row of fine-tuning can be predicted"),
    ],
)
def test_the_error_is_that_of_rows_like_the_point(
    mbridge: Any, options: tuple[str, ...], is_known: bool, words: str
) -> None:
    recipe, gpu, *others = options
    found = json.loads(mbridge("estimate", "--recipe", recipe, "--gpu", gpu, *others, "--json").stdout)
    assert words in found["step_time_error"]
    assert (found["step_time_median_error"] is not None) is is_known
    if is_known:
        low, high = found["step_time_90_s"]
        assert low < found["step_time_s"] < high
    else:
        assert found["step_time_90_s"] is None


def test_an_unknown_release_is_refused(mbridge: Any) -> None:
    done = mbridge("estimate", "--recipe", "llama3_70b", "--gpu", "gb200", "--num-gpus", "64", "--release", "0.9")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: --release: '0.9' is not known; use one of 0.3.0, ")


def test_the_preset_is_that_of_the_gpu_that_is_estimated(mbridge: Any, tmp_path: Path, sentence: Sentence) -> None:
    system = tmp_path / "system.toml"
    system.write_text('name = "c"\nscheduler = "local"\ngpu_type = "h100"\n')
    point = ("estimate", "--recipe", "llama3_70b", "--num-gpus", "64", "--release", "0.3.0")
    found = json.loads(mbridge(*point, "--system-config", system, "--json").stdout)
    assert found["filled_in"].startswith("preset llama3_70b pretrain h100 bf16 v2")
    nameless = mbridge(*point)
    assert nameless.returncode == 2
    sentence(nameless.stderr)


def test_recomputation_of_a_preset_cannot_be_switched_off(mbridge: Any, sentence: Sentence) -> None:
    point = ("estimate", "--recipe", "deepseek_v3", "--gpu", "gb200", "--num-gpus", "256", "--release", "0.3.0")
    done = mbridge(*point, "--recompute", "none")
    assert done.returncode == 2
    sentence(done.stderr)
