"""The workload under CloudAI's names."""

import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cloudai_mbridge
from cloudai_mbridge import (
    JobStatusResult,
    MegatronBridgeCmdArgs,
    MegatronBridgeTestDefinition,
    extract_mbridge_metrics,
)
from cloudai_mbridge.integrations.workload import DockerImage, PythonExecutable
from cloudai_mbridge.logs import stream_mbridge_metrics
from cloudai_mbridge.models.test_definition import GitRepo
from tests.cases import every
from tests.golden import Sentence

BRIDGE = GitRepo(url="https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", commit="v0.3.0")
LINE = "Step Time : {}s GPU utilization: {}MODEL_TFLOP/s/GPU"


def definition(repos: list[GitRepo] | None = None, **args: Any) -> MegatronBridgeTestDefinition:
    repos = [BRIDGE] if repos is None else repos
    return MegatronBridgeTestDefinition(name="t", description="d", cmd_args=args, git_repos=repos)  # type: ignore[arg-type]


@every(
    ("text", "expected"),
    [
        (LINE.format("12.30", "917.4"), ([12.3], [917.4])),
        ("0: " + LINE.format("12.30", "917.4"), ([12.3], [917.4])),
        ("step time: 5 s, then gpu UTILIZATION: 6 TFLOP/s/GPU", ([5.0], [6.0])),
        (LINE.format("1.5e3", "1"), ([], [])),
        (LINE.format("-1", "1"), ([], [])),
        (LINE.format(".5", "1"), ([], [])),
        (LINE.format("nan", "nan"), ([], [])),
        (LINE.format("1", "2") + " " + LINE.format("3", "4"), ([1.0], [2.0])),
        ("Step Time : 1s GPU util " + LINE.format("3", "4"), ([1.0], [4.0])),
        ("Step Time : 1.0s GPU utili\nzation: 2.0MODEL_TFLOP/s/GPU", ([], [])),
        (LINE.format("1", "2") + "\r\n" + LINE.format("3", "4") + "\r\n", ([1.0, 3.0], [2.0, 4.0])),
        ("\0" + LINE.format("1", "2") + "\0\n", ([1.0], [2.0])),
        ("", ([], [])),
    ],
)
def test_the_reference_reading_of_a_log(text: str, expected: Any, tmp_path: Path) -> None:
    assert extract_mbridge_metrics(text) == expected
    (tmp_path / "log").write_text(text, newline="")
    assert stream_mbridge_metrics(tmp_path / "log") == expected


def test_the_last_ten_records_are_kept() -> None:
    text = "\n".join(LINE.format(i, i * 10) for i in range(1, 16))
    assert extract_mbridge_metrics(text) == ([float(i) for i in range(6, 16)], [float(i * 10) for i in range(6, 16)])


def test_bytes_that_are_not_utf8_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"\xff\xfe noise\n" + LINE.format(1, 2).encode() + b"\xff\n\xc3\n")
    assert stream_mbridge_metrics(tmp_path / "log") == ([1.0], [2.0])


def write_large_log(path: Path, megabytes: int) -> None:
    """Write noise with a record every mebibyte, and no line break at all in the middle mebibytes."""
    noise = (b"x" * 99 + b"\n") * ((1 << 20) // 100)
    with path.open("wb") as log:
        for i in range(megabytes):
            log.write(b"x" * len(noise) if megabytes // 2 <= i < megabytes // 2 + 8 else noise)
            log.write(b"\n" + LINE.format(i + 1, i + 2).encode() + b"\n")


def check_large_log(path: Path, megabytes: int) -> None:
    write_large_log(path, megabytes)
    tracemalloc.start()
    times, tflops = stream_mbridge_metrics(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert times == [float(i) for i in range(megabytes - 9, megabytes + 1)]
    assert tflops == [float(i + 1) for i in range(megabytes - 9, megabytes + 1)]
    assert peak < 40 << 20


def test_a_large_log_takes_no_more_memory(tmp_path: Path) -> None:
    check_large_log(tmp_path / "log", 80)


@pytest.mark.drill
def test_a_log_of_five_gigabytes(tmp_path: Path) -> None:
    check_large_log(tmp_path / "log", 5000)


def test_was_run_successful(tmp_path: Path) -> None:
    run, log = SimpleNamespace(output_path=tmp_path), tmp_path / "cloudai_megatron_bridge_launcher.log"
    test = definition()
    assert test.was_run_successful(run) == JobStatusResult(
        False, f"Megatron-Bridge launcher log not found in {tmp_path}."
    )
    log.write_text("".join(f"line {i}\n" for i in range(100)))
    result = test.was_run_successful(run)
    assert not result.is_successful
    assert "line 99" in result.error_message
    assert "line 60" in result.error_message
    assert "line 59" not in result.error_message
    log.write_text(LINE.format(1, 2) + "\nTraceback: golden values differ\n")
    assert test.was_run_successful(run) == JobStatusResult(True, "")


def test_installables() -> None:
    test = definition(container_image="nvcr.io#nvidia/nemo:26.02.00")
    mounted = BRIDGE.model_copy(update={"mount_as": "/opt/Megatron-Bridge"})
    run = GitRepo(url="https://github.com/NVIDIA-NeMo/Run.git", commit="main")
    assert test.installables == [DockerImage("nvcr.io#nvidia/nemo:26.02.00"), PythonExecutable(run), mounted]
    assert definition().installables == [PythonExecutable(run), mounted]


@pytest.mark.parametrize("mount", ["/opt/Megatron-Bridge", "/opt/Megatron-Bridge/"])
def test_the_repository_is_known_by_its_mount_too(mount: str) -> None:
    fork = GitRepo(url="https://example.com/fork.git", commit="x", mount_as=mount)
    assert definition([GitRepo(url="https://example.com/a.git", commit="y"), fork]).megatron_bridge_repo == fork


def test_without_megatron_bridge_there_is_nothing_to_run(sentence: Sentence) -> None:
    with pytest.raises(ValueError) as caught:
        definition([]).megatron_bridge_repo  # noqa: B018
    sentence(caught)


def test_constraint_check_is_the_c_rules(sentence: Sentence) -> None:
    assert definition(num_gpus=16, tp=2, pp=2, cp=2).constraint_check()
    assert not definition(num_gpus=12, tp=8).constraint_check(None, None)
    assert definition(num_gpus=8, tp=0).constraint_check()  # M02 would object, CloudAI does not
    with pytest.raises(TypeError, match="cmd_args: tp:") as caught:
        definition(tp=[1, 2]).constraint_check()
    sentence(caught)


@pytest.mark.parametrize("name", ["model_family_name", "model_recipe_name"])
def test_names_are_stripped_and_not_blank(sentence: Sentence, name: str) -> None:
    assert getattr(MegatronBridgeCmdArgs(**{name: "  qwen "}), name) == "qwen"
    assert getattr(MegatronBridgeCmdArgs(), name) == ""
    with pytest.raises(ValueError) as caught:
        MegatronBridgeCmdArgs(**{name: "  "})
    sentence(caught)


def test_other_names_are_not_made_up() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        cloudai_mbridge.nonsense  # noqa: B018
