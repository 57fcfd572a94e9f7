"""`mbridge sweep plan` and `mbridge sweep explain`."""

import csv
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.commands import console
from cloudai_mbridge.commands.plan.sweep import sweep_plan
from cloudai_mbridge.estimate.hardware import gpu_named
from cloudai_mbridge.estimate.request import NO_GPU
from tests.cases import every
from tests.golden import Sentence


@pytest.fixture
def files(repository: Path) -> list[str | Path]:
    return [
        *("--system-config", repository / "systems/local.toml", "--tests-dir", repository / "test_defs"),
        *("--test-scenario", repository / "conf/scenarios/gpt_tiny_sweep.toml"),
    ]


def test_plan_counts_points_and_rules(mbridge: Any, files: list[str]) -> None:
    done = mbridge("sweep", "plan", *files, "--show", "2")
    assert done.returncode == 0, done.stderr
    assert [line.strip() for line in done.stdout.splitlines()] == [
        "sweep: tp(2) x pp(2) x mb(3)",
        "12 points, 6 accepted, 6 rejected",
        "C01 rejects 3",
        "C03 rejects 3",
        "C04 rejects 6",
        f"not predicted for 6: {NO_GPU}",
        "details: mbridge rule C01 C03 C04",
        "accepted tp1-pp1-mb1",
        "accepted tp1-pp1-mb2",
        "... and 4 more",
    ]


@pytest.mark.parametrize(("system", "number"), [("gb200", 19), ("gb300", 19), ("h100", 14)])
def test_what_upstream_ships_for_a_gpu_fits(mbridge: Any, repository: Path, system: str, number: int) -> None:
    done = mbridge(
        *("sweep", "plan", "--system-config", repository / f"systems/{system}.toml", "--format", "csv"),
        *("--tests-dir", repository / "test_defs", "--test-scenario", repository / f"conf/scenarios/{system}.toml"),
    )
    points, gpu = list(csv.DictReader(done.stdout.splitlines())), gpu_named(system)
    assert [point["status"] for point in points] == ["accepted"] * number
    assert all(float(point["peak_memory_gib"]) < (gpu.memory_gib or 0) for point in points)


def test_the_document_does_not_depend_on_the_hash_seed(
    mbridge: Any, files: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Points that break several rules at once."""
    printed = set()
    for seed in range(4):
        monkeypatch.setenv("PYTHONHASHSEED", str(seed))
        done = mbridge("sweep", "plan", *files, "--json")
        assert done.returncode == 0, done.stderr
        printed.add(done.stdout)
    assert len(printed) == 1


@pytest.mark.parametrize("point", ["tp2-pp1-mb3", "mb=3,tp=2,pp=1"])
def test_explain_says_what_every_rule_says(mbridge: Any, files: list[str], point: str) -> None:
    done = mbridge("sweep", "explain", *files, "sweep", point)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert "  C04 cmd_args.gb: 8 is not divisible by mb*dp = 3 (gb=8, mb=3, dp=1); use a multiple of 3" in lines
    assert any(" rules hold: C01 C02 " in line and " E01 E02 " in line for line in lines)
    assert "  memory is not judged: only points that break no rule are estimated" in lines


def test_explain_an_accepted_point(mbridge: Any, files: list[str]) -> None:
    assert mbridge("sweep", "explain", *files, "sweep", "tp1-pp1-mb1").returncode == 0


@pytest.mark.parametrize(
    "arguments",
    [("swep", "tp=1"), ("sweep", "cp=1"), ("sweep", "tp9")],
    ids=["swep", "cp is not an axis", "no point tp9"],
)
def test_mistakes(mbridge: Any, files: list[str], sentence: Sentence, arguments: tuple[str, ...]) -> None:
    done = mbridge("sweep", "explain", *files, *arguments)
    assert done.returncode == 2
    sentence(done.stderr)
    assert len(done.stderr.splitlines()) == 1


SYSTEM = """name = "c"
scheduler = "slurm"
default_partition = "p"
gpus_per_node = 4
gpu_type = "gb200"
[[partitions]]
name = "p"
[prices]
currency = "EUR"
gb200 = 10.5
"""
SCENARIO = """name = "s"
[[Tests]]
id = "a"
name = "a"
description = "d"
test_template_name = "MegatronBridge"
{run}
[Tests.cmd_args]
launcher = "megatron_bridge"
model_family_name = "llama"
model_recipe_name = "llama3_70b"
num_gpus = 64
tp = [1, 2, 4]
pp = [1, 2, 4]
cp = 1
mb = 1
gb = 256
max_steps = 50
{args}
[Tests.sweep]
{sweep}
"""


@pytest.fixture
def plan(mbridge: Any, tmp_path: Path) -> Any:
    """Plan a sweep on GB200: plan("--format", "csv", sweep="max_gpu_hours = 1")."""

    def run(*options: str, run: str = "", args: str = "", sweep: str = "", system: str = SYSTEM) -> Any:
        (tmp_path / "system.toml").write_text(system)
        (tmp_path / "scenario.toml").write_text(SCENARIO.format(run=run, args=args, sweep=sweep))
        files = ("--system-config", tmp_path / "system.toml", "--test-scenario", tmp_path / "scenario.toml")
        return mbridge("sweep", "plan", *files, *options)

    return run


def _rows(done: Any) -> list[dict[str, str]]:
    assert done.returncode in (0, 1), done.stderr
    return list(csv.DictReader(done.stdout.splitlines()))


def test_plan_estimates_points_of_a_known_gpu(plan: Any) -> None:
    done = plan()
    assert done.returncode == 0, done.stderr
    assert "9 points, 5 accepted, 0 rejected, 4 held back" in done.stdout
    assert "GPU-hours of steps, " in done.stdout
    assert " EUR" in done.stdout
    assert "held back tp1-pp1: " in done.stdout
    assert "weights" in done.stdout.split("held back tp1-pp1: ")[1].splitlines()[0]
    rows = _rows(plan("--format", "csv"))
    assert len(rows) == 9
    for row in rows:
        assert (float(row["memory_share"]) > 0.9) == (row["status"] == "held back")
        assert float(row["cost"]) == pytest.approx(10.5 * float(row["gpu_hours"]), rel=1e-4)
        assert float(row["gpu_hours"]) == pytest.approx(64 * 50 * float(row["step_time_s"]) / 3600, rel=1e-4)


def test_points_at_risk_are_included_on_request(plan: Any) -> None:
    assert "9 points, 9 accepted, 0 rejected\n" in plan("--include-oom-risk").stdout
    assert "held back" not in plan("--include-oom-risk").stdout
    assert "9 points, 9 accepted" in plan("--memory-share", "9").stdout
    assert plan("--memory-share", "0.01").returncode == 1
    assert "9 points, 9 accepted" in plan(sweep="memory_share = 9.0").stdout


def test_summary_lists_no_points(plan: Any) -> None:
    done = plan("--format", "summary")
    assert "held back" in done.stdout
    assert "tp1" not in done.stdout


def test_informative_points_come_first(plan: Any) -> None:
    grid, rows = (_rows(plan("--format", "csv", *order)) for order in ((), ("--order", "informative")))
    assert sorted(row["point"] for row in rows) == sorted(row["point"] for row in grid)
    leading = [row for row in rows if row["status"] == "accepted"][:4]
    speeds = [float(row["tokens_per_s_per_gpu"]) for row in leading]
    assert speeds == sorted(speeds, reverse=True)
    assert rows[: len(leading)] == leading  # what is held back never leads
    assert rows == _rows(plan("--format", "csv", sweep='order = "informative"'))


def _shown(done: Any) -> list[str]:
    """Return the names of the accepted points in the table, in order."""
    assert done.returncode == 0, done.stderr
    return [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│ tp")]


def test_the_fastest_points_are_shown_first(plan: Any) -> None:
    """By the step time; where points differ in tokens or GPUs by tokens/s/GPU. Other orders are those of the walk."""
    rows = [row for row in _rows(plan("--format", "csv")) if row["status"] == "accepted"]
    fastest = [row["point"] for row in sorted(rows, key=lambda row: float(row["step_time_s"]))]
    assert fastest != [row["point"] for row in rows]
    done = plan("--show", "3")
    assert _shown(done) == _shown(plan("--show", "3", "--order", "time")) == fastest[:3]
    assert "  fastest first, by predicted step time:" in done.stdout
    assert _shown(plan("--show", "3", "--order", "grid")) == [row["point"] for row in rows][:3]
    document = json.loads(plan("--show", "3", "--json").stdout)
    assert [each["label"] for each in document["tests"][0]["examples"]][:3] == fastest[:3]
    leading = [row["point"] for row in _rows(plan("--format", "csv", sweep='order = "informative"'))][:2]
    assert _shown(plan("--show", "2", sweep='order = "informative"')) == leading
    refused = plan("--format", "csv", "--order", "time")
    assert (refused.returncode, "sort by step_time_s" in refused.stderr) == (2, True)


def test_steps_of_different_work_are_ordered_by_their_rate(plan: Any) -> None:
    """The half batch has the shorter step, and the lower rate, as a larger part of it is the bubble."""
    done = plan("--show", "99", args="seq_length = [4096, 8192]")
    assert "fastest first, by predicted tokens/s/GPU:" in done.stdout
    lines = [line.split("│") for line in done.stdout.splitlines() if line.startswith("│ tp")]
    rates = [int(cells[4]) for cells in lines]
    assert rates == sorted(rates, reverse=True)
    times = [float(cells[3]) for cells in lines]
    assert times != sorted(times)


def test_cut_names_show_the_axes_on_which_the_points_differ(plan: Any, mbridge: Any, tmp_path: Path) -> None:
    more = 'recompute_modules = ["core_attn", "mlp"]\nactivation_offload_layers = [0]\nmoe_a2a_overlap = [false]\n'
    more += "first_k_dense_replace = [1, 2]\nseq_length = [8192]"
    done = plan("--show", "4", args=more)
    assert done.returncode == 0, done.stderr
    (intro,) = (line for line in done.stdout.splitlines() if ", each with " in line)
    shared = intro.partition(", each with ")[2].removesuffix(":")
    assert {"activation_offload_layers=0", "moe_a2a_overlap=false", "seq_length=8192"} <= set(shared.split(","))
    rows = [line.split("│")[1].strip() for line in done.stdout.splitlines() if line.startswith("│")]
    assert "tp=" in rows[0]
    assert not any("activation" in name for name in rows)
    held = next(line for line in done.stdout.splitlines() if line.startswith("  held back, of "))
    assert "seq_length=8192" in held
    axes = dict(part.split("=") for part in shared.split(","))
    own = {"tp": "4", "pp": "4", "recompute_modules": "mlp", "first_k_dense_replace": "2"}
    files = ("--system-config", tmp_path / "system.toml", "--test-scenario", tmp_path / "scenario.toml")
    point = ",".join(f"{name}={value}" for name, value in (axes | own).items())
    explained = mbridge("sweep", "explain", *files, "a", point)
    assert explained.stdout.startswith("a/"), explained.stderr


def test_a_plan_counts_its_points_on_a_terminal(
    plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a terminal alone, on standard error; the line is gone in the end."""
    plan()
    files = ["--system-config", f"{tmp_path}/system.toml", "--test-scenario", f"{tmp_path}/scenario.toml"]
    monkeypatch.setattr(console, "_PATIENCE_S", 0.0)
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda is_terminal=is_terminal: is_terminal)
        for options in ((), ("--order", "informative")):
            assert sweep_plan.main([*files, *options], standalone_mode=False) == 0
            shown = capsys.readouterr()
            assert shown.err == ("\ra: 0 of 9 points" + "\r\x1b[K") * is_terminal * (1 + bool(options))
            assert "of 9 points" not in shown.out


def test_templates_name_their_gpu(mbridge: Any, repository: Path, tmp_path: Path) -> None:
    """Each of the shipped systems predicts and fills in presets; without gpu_type, the plan says what is missing."""
    (tmp_path / "scenario.toml").write_text(OF_A_TEMPLATE)
    for name in ("h100", "gb200", "gb300"):
        system = repository / "systems" / f"{name}.toml"
        files = ("--test-scenario", tmp_path / "scenario.toml")
        done = mbridge("sweep", "plan", "--system-config", system, *files)
        assert f": llama3_70b pretrain {name} bf16" in done.stdout, done.stdout + done.stderr
        assert "not predicted" not in done.stdout
        bare = tmp_path / "system.toml"
        bare.write_text(system.read_text().replace(f'gpu_type = "{name}"', ""))
        done = mbridge("sweep", "plan", "--system-config", bare, *files)
        assert "names the GPU; set gpu_type, such as 'h100'" in done.stdout
        assert "no preset fills in what is not set: the GPU is not named; set gpu_type in the system" in done.stdout


OF_A_TEMPLATE = """name = "s"
[[Tests]]
id = "a"
name = "a"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "llama3_70b"
num_gpus = 64
max_steps = [20, 40]
"""


def test_max_gpu_hours_counts_what_is_predicted(plan: Any) -> None:
    done = plan(sweep="max_gpu_hours = 40")
    assert "within the sweep's limits: the first 2" in done.stdout
    assert "predicted, with 300 s of start-up" in done.stdout
    unknown = plan(sweep="max_gpu_hours = 40", args='gpu_type = "b9"', run='time_limit = "00:15:00"')
    assert "within the sweep's limits: the first 2" in unknown.stdout  # 64 GPUs for a quarter of an hour
    assert "predicted, with" not in unknown.stdout
    assert "not predicted for 9: cmd_args.gpu_type: 'b9' is not a GPU with known figures" in unknown.stdout
    neither = plan(sweep="max_gpu_hours = 40", args='gpu_type = "b9"')
    assert (neither.returncode, "needs a time_limit" in neither.stderr) == (2, True)


def test_a_system_without_prices_says_so(plan: Any) -> None:
    done = plan(system=SYSTEM.partition("[prices]")[0])
    assert "no cost: the system has no [prices]" in done.stdout
    done = plan(system=SYSTEM.replace("gb200 = 10.5", "h100 = 3"))
    assert "[prices] has none for gb200" in done.stdout


def test_a_gpu_without_a_price_is_not_in_the_cost(plan: Any) -> None:
    done = plan(args='gpu_type = ["gb200", "gb300"]', sweep="memory_share = 9")
    assert "EUR for 9 of 18 points (system 'c': [prices] has none for gb300)" in done.stdout


def test_a_budget_for_nothing_is_no_success(plan: Any) -> None:
    done = plan(sweep="max_gpu_hours = 0.001")
    assert (done.returncode, "within the sweep's limits: none" in done.stdout) == (1, True)
    assert plan("--format", "csv", sweep="max_gpu_hours = 0.001").returncode == 1


def test_a_limit_of_memory_that_cannot_be_checked_holds_back(plan: Any) -> None:
    for sweep, options in (("memory_share = 0.9", ()), ("", ("--memory-share", "0.9"))):
        done = plan(*options, sweep=sweep, args='gpu_type = "gb20"')
        assert done.returncode == 1
        assert "9 points, 0 accepted, 0 rejected, 9 held back" in done.stdout
        assert "memory cannot be predicted: cmd_args.gpu_type: 'gb20' is not a GPU with known figures" in done.stdout
    rows = _rows(plan("--format", "csv", args='gpu_type = "gb20"'))
    assert {(row["status"], row["why"]) for row in rows} == {
        ("accepted", "cmd_args.gpu_type: 'gb20' is not a GPU with known figures")
    }


def test_an_override_that_belongs_into_the_arguments(
    plan: Any, mbridge: Any, tmp_path: Path, sentence: Sentence
) -> None:
    extra = 'repeats = 1\n[Tests.extra_cmd_args]\n"model.seq_length" = "64"\n'
    done = plan(sweep=extra)
    assert "not predicted for 9: " in done.stdout  # upstream takes it, the estimate does not
    scenario = tmp_path / "scenario.toml"
    scenario.write_text(scenario.read_text().replace('"megatron_bridge"', '"embedded"'))
    for command in ("plan",), ("plan", "--format", "csv"):
        refused = mbridge("sweep", *command, "--system-config", tmp_path / "system.toml", "--test-scenario", scenario)
        assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
        sentence(refused.stderr)


@every(
    "price",
    [
        "gb200 = 1\nGB200 = 2",
        "per_gpu_hour = {gb200 = -1}",
        "gb200 = 'much'",
        "gb200 = -1",
        "gb200 = true",
        "gb200 = nan",
        "currency = 3",
    ],
)
def test_wrong_prices(plan: Any, sentence: Sentence, price: str) -> None:
    done = plan(system=SYSTEM.partition("currency")[0] + price + "\n")
    assert done.returncode == 2
    sentence(done.stderr)
    assert len(done.stderr.splitlines()) == 1


@every(
    ("options", "words"),
    [
        (("--memory-share", "0"), "--memory-share"),
        (("--memory-share", "much"), "--memory-share"),
        (("--memory-share", "nan"), "--memory-share"),
        (("--memory-share", "inf"), "--memory-share"),
        (("--order", "best"), "--order"),
        (("--format", "xml"), "--format"),
        (("--flops-formula", "x"), "--flops-formula"),
        (("--show", "-1"), "--show"),
    ],
)
def test_wrong_options(plan: Any, options: tuple[str, ...], words: str) -> None:
    done = plan(*options)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


GRAPHS = """
gpu_type = "h100"
cuda_graph_impl = "transformer_engine"
cuda_graph_scope = "attn"
recompute_modules = "core_attn"
[[Tests.git_repos]]
url = "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git"
commit = "{commit}"
"""


def test_rules_choose_whose_verdict_holds(plan: Any, mbridge: Any, tmp_path: Path) -> None:
    lifted = plan("--include-oom-risk", args=GRAPHS.format(commit="v0.3.0"))
    assert "C17 rejects" not in lifted.stdout
    assert "C17 lifted in 0.3" in lifted.stdout
    assert "C17 rejects 9" in plan("--rules", "cloudai", args=GRAPHS.format(commit="v0.3.0")).stdout
    assert "C17 rejects 9" in plan(args=GRAPHS.format(commit="0123abcd")).stdout  # of no known release
    plan(args=GRAPHS.format(commit="v0.3.0"))
    files = ("--system-config", tmp_path / "system.toml", "--test-scenario", tmp_path / "scenario.toml")
    explained = mbridge("sweep", "explain", *files, "--rules", "cloudai", "a", "tp=1,pp=1")
    assert explained.returncode == 1
    assert "  C17 cmd_args." in explained.stdout
    assert "  C17 lifted in 0.3" in mbridge("sweep", "explain", *files, "a", "tp=1,pp=1").stdout


BIG = """name = "s"
[[Tests]]
id = "a"
name = "a"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "llama3_70b"
compute_dtype = "bf16"
gpu_type = "h100"
num_gpus = 64
tp = [2, 4, 3]
pp = [4, 8]
mb = [1, 2]
gb = 128
seq_length = 8192
max_steps = 50
[Tests.extra_env_vars]
FLAG = ["=1+1", "b"]
[Tests.sweep]
max_points = 1
[[Tests]]
id = "status"
name = "b"
description = "d"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = ["bf16", "fp32"]
num_gpus = 8
"""


@pytest.fixture
def big(mbridge: Any, tmp_path: Path) -> Any:
    """Ask about a sweep that mostly does not fit: big("explain", "a", "tp=2")."""

    def run(command: str, *arguments: str) -> Any:
        (tmp_path / "system.toml").write_text(SYSTEM.replace("gb200", "h100"))
        (tmp_path / "scenario.toml").write_text(BIG)
        files = ("--system-config", tmp_path / "system.toml", "--test-scenario", tmp_path / "scenario.toml")
        return mbridge("sweep", command, *files, *arguments)

    return run


def test_explain_says_why_a_point_is_held_back(big: Any) -> None:
    done = big("explain", "a", "tp=2,pp=4,mb=1,env.FLAG=b")
    assert done.returncode == 1
    lines = [line.strip() for line in done.stdout.splitlines()]
    assert lines[0].endswith(": held back")
    assert any(line.startswith("memory: ") and "of 80 GiB on stage 0" in line and "weights" in line for line in lines)
    assert any(line.startswith("held back: it may need at most 0.9 of the GPU's memory") for line in lines)
    assert any(line.endswith("set [sweep] memory_share for that") for line in lines)
    assert len(lines) < 12
    accepted = big("explain", "--memory-share", "5", "a", "tp=2,pp=4,mb=1,env.FLAG=b")
    assert (accepted.returncode, "held back" in accepted.stdout) == (0, False)
    assert big("explain", "--include-oom-risk", "a", "tp=2,pp=4,mb=1,env.FLAG=b").returncode == 0


def test_explain_of_several_points_names_them(big: Any, sentence: Sentence) -> None:
    done = big("explain", "a", "tp=2,pp=4")
    assert done.returncode == 2
    sentence(done.stderr)
    sentence((many := big("explain", "a", "mb=1")).stderr)
    sentence(many.stderr)


def test_the_csv_has_every_point_with_its_coordinates_and_the_reason(big: Any) -> None:
    rows = _rows(big("plan", "--format", "csv", "--order", "grid"))
    own = [row for row in rows if row["test"] == "a"]
    assert {(row["tp"], row["pp"], row["mb"], row["env.FLAG"]) for row in own} == {
        (tp, pp, mb, flag) for tp in "243" for pp in "48" for mb in "12" for flag in ("'=1+1", "b")
    }
    assert {row["compute_dtype"] for row in rows if row["test"] == "status"} == {"bf16", "fp32"}
    assert not any(row["tp"] for row in rows if row["test"] == "status")
    for row in own:
        assert (row["status"] == "rejected") == (row["tp"] == "3") == bool(row["rules"])
        if row["status"] == "held back":
            assert "the limit is 0.9 of the GPU's memory" in row["why"]
        elif row["status"] == "over the limits":
            assert row["why"] == "beyond max_points = 1"
        elif row["status"] == "rejected":
            assert "M08" in row["rules"].split()
            assert "M08 cmd_args.tp: 64 heads are not divisible" in row["why"]
    assert [row["why"] for row in own if row["status"] == "accepted"] == [""]
