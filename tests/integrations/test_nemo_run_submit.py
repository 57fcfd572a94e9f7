"""What NeMo-Run's driver says is read whatever its bytes are; it is not NeMo-Run itself here."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cloudai_mbridge.errors import ToolFailure
from cloudai_mbridge.integrations import nemo_run, nemo_run_driver
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.schedulers.interface import Submission, SubmitOutcomeUnknown
from tests.golden import Sentence

pytestmark = pytest.mark.process

SYSTEM = SlurmSystem.model_validate(
    {"name": "c", "scheduler": "slurm", "default_partition": "main", "partitions": [{"name": "main"}]}
)
SAYS = "import os, sys; os.write(1, {out!r}); os.write(2, {err!r}); sys.exit({code})"


def submit(monkeypatch: pytest.MonkeyPatch, directory: Path, **said: Any) -> str:
    run: Any = SimpleNamespace(key="t/p/0", secret_env={}, exclude_nodes=(), array="")
    monkeypatch.setattr(nemo_run, "_DRIVER", ("-c", SAYS.format(**said)))
    (directory / run.key).mkdir(parents=True, exist_ok=True)
    return nemo_run.NemoRunSlurmClient(SYSTEM).submit(Submission("0" * 16, (run,)), directory)[run.key]


def test_a_job_is_not_lost_for_a_byte_that_is_not_utf_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert submit(monkeypatch, tmp_path, out=b"caf\xe9\n123\n", err=b"\xff\n", code=0) == "123"


def test_a_refusal_in_another_encoding_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(SubmitOutcomeUnknown, match=r"NeMo-Run: sbatch: error: caf\ufffd"):
        submit(monkeypatch, tmp_path, out=b"", err=b"sbatch: error: caf\xe9\n", code=1)


def test_a_driver_that_cannot_be_started_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, sentence: Sentence
) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    with pytest.raises(ToolFailure) as told:
        submit(monkeypatch, tmp_path, out=b"", err=b"", code=0)
    sentence(told)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("can_cancel", [True, False])
def test_a_held_job_that_cannot_be_released_is_cancelled_or_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], can_cancel: bool
) -> None:
    programs = {"scontrol": "printf 'caf\\351' >&2; exit 1", "scancel": 'echo "$1" > cancelled'}
    for name, script in list(programs.items())[: 1 + can_cancel]:
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert not nemo_run_driver._release("7")
    end = "the job has been cancelled" if can_cancel else "job 7 is held and could not be cancelled"
    assert capsys.readouterr().err == f"scontrol update JobId=7 Requeue=0: caf\ufffd; {end}\n"
    assert (tmp_path / "cancelled").exists() == can_cancel


def test_without_scontrol_a_held_job_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], sentence: Sentence
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not nemo_run_driver._release("7")
    sentence(capsys.readouterr().err)
