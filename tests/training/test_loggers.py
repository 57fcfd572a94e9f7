"""The report of a step: console, record and the real services, offline; two pipeline stages with gloo.

The steps are made up, so that every number is known; groups, timers, services and their files are real.
"""

import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.reporting.loggers import check_loggers, close_loggers, flat, run_config
from tests.cases import every

SECRET = "this-must-not-be-seen"

SCRIPT = """
import json, math, sys, time
import torch, torch.distributed as dist
from cloudai_mbridge.training import cpu
cpu.install()
from cloudai_mbridge.training.config.container import ConfigContainer
from cloudai_mbridge.training.initialize import initialize_megatron
from cloudai_mbridge.training.reporting.loggers import close_loggers
from cloudai_mbridge.training.startup.prepare import prepare
from cloudai_mbridge.training.state import GlobalState
from cloudai_mbridge.training.reporting.reports import flops_per_step
from cloudai_mbridge.training.utils.train_utils import training_log
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import destroy_num_microbatches_calculator, update_num_microbatches

LOSSES = [1.0, 2.0, math.inf, 4.0, 5.0, math.nan, math.nan, 3.0, -1.0, -1.0]
SKIPPED = (3, 7, 8)  # the last two are a whole interval

class Parameter(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(2))
        self.w.main_grad = torch.tensor([3.0, 4.0])

def say(mark, what):
    print(f"{mark} {json.dumps(what)}\\n", end="", flush=True)  # in one write, among those of the other rank

def run(name):
    data = json.load(open(name))
    dist.barrier()
    cfg = ConfigContainer.from_dict(data)
    prepare(cfg)
    initialize_megatron(cfg)
    state, is_last = GlobalState(cfg=cfg), dist.get_rank() == dist.get_world_size() - 1
    progress, totals, flag, history, flops = state.train_state, {}, True, [], []
    state.timers("interval-time", log_level=0).start(barrier=True)
    for step, loss in enumerate(LOSSES, 1):
        update_num_microbatches(progress.consumed_train_samples, consistency_check=True)
        timer = state.timers("forward-backward", log_level=1)
        timer.start()
        time.sleep(0.01)
        timer.stop()
        progress.step = step
        progress.consumed_train_samples += 4 if step == 1 and cfg.train.rampup_batch_size else 8
        history.append(float(step))
        flops.append(flops_per_step(state, 32))
        flag = training_log(
            {"lm loss": torch.tensor(loss)} if is_last else {},
            totals, 1e-3 * step if not is_last else None, 0.5, 2.0, flag, int(step in SKIPPED), 1.25, 7.5, 3,
            cfg, state, history, [Parameter()], log_max_attention_logit=11.5, loaded_iteration=0, seq_length=32,
        )
    say("DONE", [dist.get_rank(), flag, flops])
    loggers = (state.tensorboard_logger, state.wandb_logger, state.mlflow_logger, state.comet_logger)
    say("OPEN", [dist.get_rank(), name, [each is not None for each in loggers]])
    close_loggers(*loggers)
    close_loggers(None, *loggers[1:])
    destroy_num_microbatches_calculator()
    mpu.destroy_model_parallel()
    dist.barrier()

dist.init_process_group("gloo")
with cpu.megatron_device():
    for name in sys.argv[1:]:
        run(name)
dist.destroy_process_group()
"""

READ_BACK = """
import glob, json, sys, zipfile
result = {}
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
events = EventAccumulator("tb", size_guidance={"scalars": 0})
events.Reload()
result["tensorboard"] = {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

from wandb.proto import wandb_internal_pb2

def records(path):  # of W&B's offline file: LevelDB's log format after a header of seven bytes
    data, at, whole = open(path, "rb").read(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            yield record
            whole = b""

series, config = {}, {}
for record in records(glob.glob("wb/wandb/offline-run-*/*.wandb")[0]):
    if record.WhichOneof("record_type") == "run":
        config.update({u.key: json.loads(u.value_json) for u in record.run.config.update})
        result["wandb names"] = [record.run.project, record.run.display_name]
    if record.WhichOneof("record_type") == "history":
        items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
        for key, value in items.items():
            series.setdefault(key, []).append((items["_step"], value))
result["wandb"], result["wandb config"] = series, config

import mlflow
client = mlflow.MlflowClient(sys.argv[1])
experiment = client.get_experiment_by_name("an experiment")
run = client.search_runs([experiment.experiment_id])[0]
result["mlflow"] = {
    key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics
}
result["mlflow params"], result["mlflow tags"] = run.data.params, run.data.tags
result["mlflow run"] = [run.info.run_name, run.info.status]

comet = {}
for path in glob.glob("comet/*.zip"):
    with zipfile.ZipFile(path) as archive:
        text = archive.read("messages.json").decode()
    for line in text.splitlines():
        message = json.loads(line)
        metric = message.get("payload", {}).get("metric")
        if metric:
            comet.setdefault(metric["metricName"], []).append((metric["step"], float(metric["metricValue"])))
    result["comet text"] = text
result["comet"] = comet
print("RESULT " + json.dumps(result))
"""

MODEL = {"pipeline_model_parallel_size": 2}
EVERYWHERE: dict[str, Any] = {
    "log_interval": 2,
    "log_throughput": True,
    "timing_log_level": 1,
    "tensorboard_dir": "tb",
    "wandb_project": "a project",
    "wandb_exp_name": "a run",
    "wandb_save_dir": "wb",
    "mlflow_experiment": "an experiment",
    "mlflow_run_name": "a run",
    "mlflow_tags": {"team": "x"},
    "comet_api_key": None,
    "log_timers_to_tensorboard": True,
    "log_world_size_to_tensorboard": True,
    "log_memory_to_tensorboard": True,
    "log_l2_norm_grad_to_tensorboard": True,
    "log_runtime_to_tensorboard": True,
    "log_throughput_to_tensorboard": True,
    "throughput_window_size": 3,
    "save_config_filepath": None,
}
COMET_ALONE = {"log_interval": 5, "comet_project": "c", "comet_experiment_name": "d", "comet_api_key": SECRET}


class Report:
    """What two runs have printed and logged; the lines are of the first one, which reports five times."""

    def __init__(self, stdout: str, stderr: str, directory: Path, logged: dict[str, Any]) -> None:
        self.directory, self.logged, self.text = directory, logged, stdout + stderr
        self.lines = stdout.splitlines()
        self.records = [json.loads(line[13:]) for line in self.lines if line.startswith("MBRIDGE_STEP ")][:5]
        self.step_times = [line for line in self.lines if line.startswith("Step Time")][:5]
        self.iterations = [line for line in self.lines if "] iteration " in line][:5]

    def of_ranks(self, mark: str) -> list[Any]:
        """Return what the ranks say of themselves, in the order of runs and ranks."""
        said = [json.loads(line.partition(" ")[2]) for line in self.lines if line.startswith(f"{mark} ")]
        return sorted(said[:2]) + sorted(said[2:])


@pytest.fixture(scope="module")
def run_once() -> dict[str, Report]:
    return {}


@pytest.fixture
def report(run_once: Any, ranks: Callable[..., Any], tiny: Callable[..., Any], tmp_path: Path) -> Report:
    for package in ("tensorboard", "wandb", "mlflow", "comet_ml"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if "report" not in run_once:
        uri = (tmp_path / "mlruns").as_uri()
        train = {"global_batch_size": 8, "micro_batch_size": 1, "rampup_batch_size": [4, 4, 4]}
        first = tiny({"model": MODEL, "logger": EVERYWHERE | {"mlflow_tracking_uri": uri}, "train": train})
        second = tiny({"model": MODEL, "logger": COMET_ALONE})
        for name, data in (("first.json", first), ("second.json", second)):
            (tmp_path / name).write_text(json.dumps(data))
        env = {
            "WANDB_MODE": "offline",
            "WANDB_API_KEY": SECRET,
            "WANDB_SILENT": "true",
            "COMET_START_ONLINE": "0",
            "COMET_OFFLINE_DIRECTORY": str(tmp_path / "comet"),
            "MLFLOW_ALLOW_FILE_STORE": "true",
        }
        done = ranks(2, SCRIPT, "first.json", "second.json", env=env)
        back = ranks(1, READ_BACK, uri, env=env)
        logged = json.loads(next(line for line in back.stdout.splitlines() if line.startswith("RESULT "))[7:])
        run_once["report"] = Report(done.stdout, done.stderr, tmp_path, logged)
    found: Report = run_once["report"]
    return found


@pytest.mark.long
def test_the_step_time_is_rank_0_s_line_and_the_record_s(report: Report) -> None:
    """Ten milliseconds of work per step, and the same time on both ranks."""
    for line, record in zip(report.step_times, report.records, strict=True):
        assert re.fullmatch(r"Step Time : \d+\.\d{2}s GPU utilization: \d+\.\dMODEL_TFLOP/s/GPU", line)
        assert f"{record['step_time_s']:.2f}s" in line
    assert all(0.01 < record["step_time_s"] < 1 for record in report.records[1:])


def test_the_record_follows_the_batch_and_the_sequence_of_the_step(report: Report) -> None:
    for _, _, flops in report.of_ranks("DONE")[:2]:
        assert flops == [flops[1] // 2, *flops[1:2] * 9]  # the ramp-up starts with half the batch
        for record in report.records:
            total = record["tflops_per_gpu"] * record["step_time_s"] * 2 * 1e12
            assert total == pytest.approx(flops[1], rel=1e-9)


def test_the_losses_are_means_over_the_steps_that_were_not_skipped(report: Report) -> None:
    """An interval that was skipped as a whole shows its last loss; NaN is in the record, and never hidden."""
    assert [record["step"] for record in report.records] == [2, 4, 6, 8, 10]
    assert [record["losses"]["lm loss"] for record in report.records] == [1.5, 4.0, "nan", 3.0, -1.0]
    assert [record["skipped_iterations"] for record in report.records] == [0, 1, 0, 2, 0]
    assert [record["nan_iterations"] for record in report.records] == [0, 1, 1, 1, 0]


def test_the_iteration_line(report: Report) -> None:
    assert re.fullmatch(
        r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        4/      10 \| consumed samples:           28 \|"
        r" elapsed time per iteration \(ms\): \d+\.\d \| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|"
        r" learning rate: 4\.000000E-03 \| global batch size:     8 \| lm loss: 4\.000000E\+00 \| loss scale: 2\.0 \|"
        r" grad norm: 1\.250 \| num zeros: 3 \| params norm: 7\.500 \| max attention logit: 11\.500 \|"
        r" number of skipped iterations:   1 \| number of nan iterations:   1 \|",
        report.iterations[1],
    )
    assert ["lm loss" in line for line in report.iterations] == [True, True, False, True, False]


def test_memory_is_reported_until_the_second_step(report: Report) -> None:
    theoretical = [line for line in report.lines if line.startswith("Theoretical memory footprints: weight and opt")]
    assert len(theoretical) == 2  # once per run
    assert [flag for _, flag, _ in report.of_ranks("DONE")] == [False] * 4


def test_the_timers_are_reported_in_milliseconds(report: Report) -> None:
    headers = [i for i, line in enumerate(report.lines) if line == "(min, max) time across ranks (ms):"]
    assert len(headers) == 5
    name, low, high = re.fullmatch(r"    (\S+ \.+): \(([\d.]+), ([\d.]+)\)", report.lines[headers[0] + 1]).groups()
    assert (name, len(name)) == ("forward-backward".ljust(17) + "." * 31, 48)
    assert 10 <= float(low) <= float(high) < 100


def test_only_the_last_rank_opens_loggers(report: Report) -> None:
    assert report.of_ranks("OPEN") == [
        [0, "first.json", [False] * 4],
        [1, "first.json", [True, True, True, False]],
        [0, "second.json", [False] * 4],
        [1, "second.json", [False, False, False, True]],
    ]


EVERY_STEP = {
    *("learning-rate", "decoupled-learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm"),
    *("num-zeros", "params-norm", "max-attention-logit", "l2_norm/grad/w", "l2_norm/grad/global"),
    *("time/remaining_estimate", "time/tokens", "time/samples", "time/batches", "time/total", "forward-backward-time"),
}
FULL_WINDOW = {
    *(f"throughput/{name}_per_sec" for name in ("batches", "samples", "tokens")),
    *(f"throughput/device/{name}_per_sec" for name in ("batches", "samples", "tokens")),
    *("throughput/micro_batch_size", "throughput/global_batch_size"),
}
LOG_STEPS = {"throughput/tflops/device", "throughput/tflops", "iteration-time"}
AGAINST_SAMPLES = {
    *("learning-rate", "batch-size", "lm loss", "loss-scale", "world-size", "grad-norm", "num-zeros", "params-norm"),
    "max-attention-logit",
}


@pytest.mark.parametrize("service", ["tensorboard", "wandb", "mlflow"])
def test_the_series_of_a_service(report: Report, service: str) -> None:
    series = {name: values for name, values in report.logged[service].items() if not name.startswith("_")}
    names = EVERY_STEP | FULL_WINDOW | LOG_STEPS
    if service == "tensorboard":
        names |= {f"{name} vs samples" for name in AGAINST_SAMPLES}
        assert [x for x, _ in series["lm loss vs samples"]] == [4, *range(12, 77, 8)]
    else:
        names |= {"samples vs steps"}
        assert [value for _, value in series["samples vs steps"]] == [4, *range(12, 77, 8)]
    if service == "mlflow":
        names = names - {"throughput/tflops/device"} | {"throughput/tflops_per_device"}
    assert set(series) == names
    for name in EVERY_STEP:
        assert [x for x, _ in series[name]] == list(range(1, 11)), name
    for name in FULL_WINDOW:
        assert [x for x, _ in series[name]] == list(range(3, 11)), name
    assert [x for x, _ in series["throughput/tflops"]] == [2, 4, 6, 8, 10]
    assert [value for _, value in series["learning-rate"]] == pytest.approx([1e-3 * i for i in range(1, 11)])
    assert [value for _, value in series["lm loss"]][:2] == [1.0, 2.0]
    assert [value for _, value in series["batch-size"]] == [4] + [8] * 9
    records = {record["step"]: record for record in report.records}
    for step, value in series["iteration-time"]:
        assert value == pytest.approx(records[step]["step_time_s"])
    for step, value in series["throughput/tflops"]:
        assert value == pytest.approx(records[step]["tflops_per_gpu"] * 2)


def test_comet_alone(report: Report) -> None:
    series = {name: values for name, values in report.logged["comet"].items() if not name.startswith(("sys.", "proc"))}
    assert set(series) == LOG_STEPS | {
        *("learning-rate", "decoupled-learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "num-zeros"),
        *("params-norm", "max-attention-logit"),
    }
    assert [x for x, _ in series["lm loss"]] == list(range(1, 11))
    assert [x for x, _ in series["iteration-time"]] == [5, 10]


def test_the_services_know_the_run(report: Report) -> None:
    logged = report.logged
    assert logged["wandb names"] == ["a project", "a run"]
    assert logged["wandb config"]["train"]["global_batch_size"] == 8
    assert logged["mlflow run"] == ["a run", "FINISHED"]
    assert logged["mlflow params"]["train.global_batch_size"] == "8"
    assert logged["mlflow tags"]["team"] == "x"
    assert '"seq_length"' in logged["comet text"] or "model.seq_length" in logged["comet text"]


def test_no_key_is_logged(report: Report) -> None:
    assert SECRET not in report.text
    assert SECRET not in json.dumps(report.logged)
    files = [Path(at, name) for at, _, names in os.walk(report.directory) for name in names if name != "second.json"]
    assert len(files) > 10
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]


class _Config(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return vars(self)


def test_secrets_are_masked() -> None:
    secret = {"comet_api_key": "k", "hf_token": "t", "password": "p", "aws_secret": "s", "empty_token": ""}
    plain = {"tokenizer_type": "Null", "token_count": "7", "num_tokens": 5, "api_key_count": 3}
    uri = {"mlflow_tracking_uri": "https://user:pw@host:5000/x", "paths": ["s3://key@bucket", "/a@b"]}
    shown = run_config(_Config(logger={**secret, **plain}, more={"deep": uri}))
    assert shown["logger"] == {**dict.fromkeys(secret, "***"), "empty_token": "", **plain}
    assert shown["more"]["deep"] == {
        "mlflow_tracking_uri": "https://***@host:5000/x",
        "paths": ["s3://***@bucket", "/a@b"],
    }
    assert flat({"a": {"b": 1, "c": {}}, "d": [2]}) == {"a.b": 1, "a.c": {}, "d": [2]}


SERVICES = [
    ("tensorboard_dir", "tensorboard", "tensorboard"),
    ("wandb_project", "wandb", "wandb"),
    ("mlflow_experiment", "mlflow", "mlflow"),
    ("comet_project", "comet_ml", "comet-ml"),
]


def _logger(**settings: Any) -> Any:
    nothing = dict.fromkeys([setting for setting, _, _ in SERVICES] + ["wandb_exp_name"])
    return SimpleNamespace(logger=SimpleNamespace(**{**nothing, **settings}))


@every(("setting", "package", "distribution"), SERVICES)
def test_a_missing_package_is_named(
    setting: str, package: str, distribution: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A package that Python has been told not to find."""
    monkeypatch.setitem(sys.modules, package, None)
    check_loggers(_logger())
    message = rf"logger\.{setting}='x': the package {package} .*pip install {distribution},"
    with pytest.raises(ConfigError, match=message):
        check_loggers(_logger(**{setting: "x"}))


def test_wandb_needs_a_name() -> None:
    pytest.importorskip("wandb")
    check_loggers(_logger(wandb_project="x", wandb_exp_name="y"))
    with pytest.raises(ConfigError, match=r"set logger\.wandb_exp_name"):
        check_loggers(_logger(wandb_project="x"))


def test_nothing_to_close() -> None:
    close_loggers(None, None, None, None)
