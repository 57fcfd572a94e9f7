"""What makes two results comparable, and what does not."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.report import build_report
from cloudai_mbridge.report.facts import compare_by
from cloudai_mbridge.report.model import comparability_id
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.report.conftest import COMMIT, EMBEDDED, SLURM, TWO_LINES, UPSTREAM, UPSTREAM_LOG, ARun, a_log

RUN: dict[str, Any] = {
    **{"recipe": "gpt_tiny", "num_nodes": 1, "ranks_per_node": 2, "num_steps": 6, "warmup_steps": 2},
    **{"args": {"launcher": "embedded", "gb": 8, "tp": 2}, "coordinates": {"tp": 2}},
}
SAID = {"device": "H100", "dtype": "bf16", "backend": "nccl", "transformer_engine": True}


def _compared(
    tmp_path: Path, overrides: dict[str, str] | None = None, said: dict[str, Any] = SAID, **run: Any
) -> dict[str, Any]:
    lines = "".join(f'"{name}" = "{value}"\n' for name, value in (overrides or {}).items())
    (tmp_path / "test.toml").write_text(f'name = "n"\n[extra_cmd_args]\n{lines}')
    found = compare_by({**RUN, **run}, said, "here", tmp_path)
    assert found is not None
    return found


def test_the_fields(tmp_path: Path) -> None:
    assert _compared(tmp_path, {"optimizer.weight_decay": "0.05"})["fields"] == {
        **{"args.gb": 8, "args.tp": 2, "backend": "nccl", "device": "H100", "dtype": "bf16"},
        **{"extra.optimizer.weight_decay": "0.05", "launcher": "embedded", "num_nodes": 1, "num_steps": 6},
        **{"recipe": "gpt_tiny", "system": "here", "transformer_engine": True},
        **{"warmup_steps": 2, "world_size": 2},
    }


def test_the_id_is_of_the_fields_whatever_their_order() -> None:
    assert (
        comparability_id({"a": 1, "b": ["x", None, 0.5]})
        == comparability_id({"b": ["x", None, 0.5], "a": 1})
        == "7ea1787e91f0e374"
    )


def _with(tmp_path: Path, name: str, value: Any) -> str:
    return str(_compared(tmp_path, args={**RUN["args"], name: value})["id"])


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("task", "pretrain", "lora"),
        ("task", "sft", "lora"),
        ("gb", 8, 16),
        ("seq_length", 64, 128),
        ("gpu_type", "h100", "gb200"),
        ("compute_dtype", "bf16", "fp8_mx"),
        ("recompute_modules", ["core_attn"], ["mlp"]),
        ("enable_nsys", False, True),
        ("pytorch_profiler", None, True),
        ("save_dir", None, "/ckpt"),
        ("tokenizer_model", "a", "b"),
        ("vocab_size", 512, 1024),
        ("enable_vboost", False, True),
    ],
)
def test_what_defines_the_work_keeps_results_apart(tmp_path: Path, name: str, value: Any, other: Any) -> None:
    assert _with(tmp_path, name, value) != _with(tmp_path, name, other)


@pytest.mark.parametrize(
    ("name", "value", "other"),
    [
        ("container_image", "a.sqsh", "b.sqsh"),
        ("hf_token", "hf_a", "hf_b"),
        ("wandb_key", "a", "b"),
        ("wandb_experiment_name", "monday", "tuesday"),
        ("log_dir", "/a", "/b"),
        ("save_dir", "/a", "/b"),
        ("save_config_filepath", "/a", "/b"),
        ("time_limit", "00:10:00", "01:00:00"),
        ("nsys_trace", "cuda", "cuda,nvtx"),
        ("profiling_start_step", 1, 2),
        ("nemorun_version", "1", "2"),
    ],
)
def test_what_is_under_test_or_has_no_influence_does_not(tmp_path: Path, name: str, value: Any, other: Any) -> None:
    assert _with(tmp_path, name, value) == _with(tmp_path, name, other)


def test_a_profiler_that_is_on_counts_with_its_options(tmp_path: Path) -> None:
    def on(trace: str) -> Any:
        return _compared(tmp_path, args={"enable_nsys": True, "nsys_trace": trace})["id"]

    assert on("cuda") != on("cuda,nvtx")


@pytest.mark.parametrize(
    ("name", "value", "other", "is_same"),
    [
        ("optimizer.lr", "0.1", "0.2", False),
        ("logger.tensorboard_log_interval", "1", "10", False),
        ("logger.wandb_exp_name", "a", "b", True),
        ("+logger.tensorboard_dir", "/a", "/b", True),
        ("checkpoint.save", "/a", "/b", True),
        ("+checkpoint.save", "/a", "/b", True),
        ("model.moe_token_dispatcher_type", "alltoall", "flex", False),
        ("model.calculate_per_token_loss", "true", "false", False),
        ("model.moe_token_drop_policy", "probs", "position", False),
        ("model.linear_num_key_heads", "16", "32", False),
        ("model.apply_query_key_layer_scaling", "true", "false", False),
        ("logger.some_api_key", "a", "b", True),
        ("checkpoint.save_interval", "1", "2", False),
        ("dataset.num_tokens", "1", "2", False),
    ],
)
def test_overrides(tmp_path: Path, name: str, value: str, other: str, is_same: bool) -> None:
    first, second = (_compared(tmp_path, {name: each})["id"] for each in (value, other))
    assert (first == second) is is_same


def test_whether_checkpoints_are_written_counts(tmp_path: Path) -> None:
    assert _compared(tmp_path, {"checkpoint.save": "/a"})["fields"]["extra.checkpoint.save"] is True
    assert _compared(tmp_path)["id"] != _compared(tmp_path, {"checkpoint.save": "/a"})["id"]


@pytest.mark.parametrize(
    "name", ["logger.tensorboard_dir", "+logger.tensorboard_dir", "logger.wandb_project", "logger.comet_project"]
)
def test_whether_a_logger_is_on_counts(tmp_path: Path, name: str) -> None:
    assert _compared(tmp_path, {name: "/a"})["fields"][f"extra.{name.lstrip('+')}"] is True
    assert _compared(tmp_path, {name: "null"})["id"] == _compared(tmp_path)["id"]


@pytest.mark.parametrize(("name", "default"), [("task", "pretrain"), ("compute_dtype", "bf16"), ("save_dir", None)])
def test_an_argument_that_says_what_holds_anyway_does_not_count(tmp_path: Path, name: str, default: Any) -> None:
    assert _with(tmp_path, name, default) == _compared(tmp_path)["id"]


def test_the_default_number_format_is_the_same_as_none(tmp_path: Path) -> None:
    said = _compared(tmp_path, said={}, args={"compute_dtype": "bf16"})
    assert said == _compared(tmp_path, said={}, args={})
    assert said["fields"]["dtype"] == "bf16"


def test_an_argument_counts_once_whether_an_axis_has_it_or_not(tmp_path: Path) -> None:
    assert _compared(tmp_path, coordinates={})["id"] == _compared(tmp_path)["id"]


def test_a_credential_in_a_value_does_not_enter(tmp_path: Path) -> None:
    def with_user(user: str) -> Any:
        return _compared(
            tmp_path, {"logger.wandb_host": f"https://{user}@w.example"}, args={"dataset_root": f"s3://{user}@b"}
        )

    assert "hunter2" not in str(with_user("bob:hunter2"))
    assert with_user("bob:hunter2") == with_user("eve:x")


def test_a_variable_that_an_axis_varies_counts(tmp_path: Path) -> None:
    def at(value: str) -> Any:
        return _compared(tmp_path, coordinates={"NCCL_ALGO": value})["id"]

    assert at("Ring") != at("Tree")


def test_a_credential_that_an_axis_varies_does_not_enter(tmp_path: Path) -> None:
    found = _compared(tmp_path, coordinates={"MY_TOKEN": "NeverToBeSeen"}, args={"hf_token": "NeverToBeSeen"})
    assert "NeverToBeSeen" not in str(found)
    assert not any("token" in name.lower() for name in found["fields"])


def test_the_device_that_ran_it_comes_before_the_one_that_was_asked_for(tmp_path: Path) -> None:
    args = {"gpu_type": "h100", "compute_dtype": "fp8_mx"}
    assert _compared(tmp_path, args=args)["fields"]["device"] == "H100"
    fields = _compared(tmp_path, said={}, args=args)["fields"]
    assert (fields["device"], fields["dtype"], fields["backend"]) == ("h100", "fp8_mx", None)


@pytest.mark.parametrize(
    "text",
    [
        *(None, "damaged = ", 'extra_cmd_args = "x"', "[extra_cmd_args]\nx = 2020-01-01", "[extra_cmd_args]\nx = 1"),
        *(f"x = {'[' * 20_000}{']' * 20_000}", "x = " + "[" * 20_000),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_run_whose_definition_is_lost_can_be_compared_with_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "test.toml").write_text(text)
    assert compare_by(RUN, SAID, "here", tmp_path) is None


@pytest.mark.process
def test_a_real_report(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6))
    embedded.ended("t/mb2/0", a_log(6))
    first, second, rejected = build_report(embedded.root).points
    assert first.comparability is not None
    assert second.comparability is not None
    differing = {
        name for name, value in first.comparability["fields"].items() if value != second.comparability["fields"][name]
    }
    assert differing == {"args.mb"}
    assert rejected.comparability is None


@pytest.mark.process
def test_the_same_twice(tmp_path: Path) -> None:
    """Another directory, another day, another end."""
    runs = [ARun(tmp_path / name, EMBEDDED) for name in ("a", "b")]
    runs[0].ended("t/mb1/0", a_log(6))
    runs[1].ended("t/mb1/0", a_log(3), JobStatus("FAILED", JobClass.FAILED, exit_code=1))
    first, second = (build_report(run.root).points[0].comparability for run in runs)
    assert first == second


@pytest.mark.process
def test_the_upstream_launcher(tmp_path: Path, upstream: ARun) -> None:
    point = build_report(upstream.root).points[0]
    assert point.comparability is not None
    fields = point.comparability["fields"]
    assert (fields["launcher"], fields["recipe"], fields["device"]) == ("megatron_bridge", "unknown_here", "h100")
    assert (fields["extra.optimizer.lr"], fields["extra.dataset.num_tokens"]) == ("0.1", "7")
    assert not {"args.hf_token", "args.container_image"} & set(fields)
    assert "NeverToBeSeen" not in str(point)
    other = {**UPSTREAM, "git_repos": [{**UPSTREAM["git_repos"][0], "commit": COMMIT[::-1]}]}
    run = ARun(tmp_path / "other", other, SLURM)
    run.ended("t/single/0", TWO_LINES, log_name=UPSTREAM_LOG)
    assert build_report(run.root).points[0].comparability == point.comparability
