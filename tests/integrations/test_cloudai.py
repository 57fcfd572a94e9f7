"""The workload in CloudAI's registry, as far as it can be seen without CloudAI; tests/interop has the real one."""

import subprocess
import sys
import time
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from cloudai_mbridge.integrations.cloudai import TEMPLATE, _add, _by_verdict, failed_points, main, register
from tests.golden import Sentence


def test_without_cloudai_it_says_so_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cloudai", None)
    result = register()
    assert not result
    assert "install NVIDIA's CloudAI" in result.message
    assert len(result.message.splitlines()) == 1
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 3
    assert capsys.readouterr().err == f"error: {result.message}\n"


def test_another_registry_is_refused_with_what_it_lacks(sentence: Sentence) -> None:
    with pytest.raises(Exception) as caught:
        _add(object(), None)
    sentence(caught)
    functions = ("add_test_definition", "add_command_gen_strategy", "add_report", "update_runner")
    maps: dict[str, Any] = {name: {} for name in ("systems_map", "runners_map", "test_definitions_map")}
    registry = types.SimpleNamespace(**dict.fromkeys(functions, lambda *_: None), **maps)
    names = ("EmbeddedTestDefinition", "EmbeddedSlurmStrategy", "EmbeddedStandaloneStrategy", "EmbeddedReport")
    classes = types.SimpleNamespace(**dict.fromkeys(names))
    with pytest.raises(Exception) as caught:
        _add(registry, classes)
    sentence(caught)
    registry.test_definitions_map[TEMPLATE] = object
    assert _add(registry, classes)


@pytest.mark.parametrize(("code", "failed", "expected"), [(0, False, 0), (0, True, 1), (3, True, 3)])
def test_the_exit_code_is_cloudai_s_unless_a_point_failed(
    code: int, failed: bool, expected: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(failed_points, "results/points/0", failed)
    with pytest.raises(SystemExit) as end:
        _by_verdict(lambda: sys.exit(code))()
    assert end.value.code == expected
    assert ("1 of 1 points failed" in capsys.readouterr().err) == (expected == 1)


@pytest.mark.process
def test_killing_a_standalone_job_leaves_no_process(tmp_path: Path) -> None:
    """CloudAI kills the one process that it knows, with SIGKILL; ranks have sessions of their own."""
    (tmp_path / "run.sh").write_text("setsid sleep 600 &\necho ready\nsleep 600\n")
    first = subprocess.Popen([sys.executable, "-m", "cloudai_mbridge.integrations.standalone", str(tmp_path)])
    wait_for(lambda: (tmp_path / "stdout.txt").exists() and "ready" in (tmp_path / "stdout.txt").read_text())
    parent = psutil.Process(first.pid)
    try:
        wait_for(lambda: names_of(parent.children(recursive=True)).count("sleep") == 2)
        ours = parent.children(recursive=True)
    finally:
        first.kill()
        first.wait()
    _, alive = psutil.wait_procs(ours, timeout=600)
    assert not alive


@pytest.mark.process
def test_a_standalone_job_ends_with_the_script_s_exit_code(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("exit 7\n")
    command = [sys.executable, "-m", "cloudai_mbridge.integrations.standalone", str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == 7


def names_of(processes: list[psutil.Process]) -> list[str]:
    """Their names, without those that have ended in between."""
    names = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            names.append(process.name())
    return names


def wait_for(is_true: Any, timeout_s: float = 600.0) -> None:
    end = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)
