"""In a notebook's kernel: interrupting a cell cancels what it has submitted, and the kernel goes on."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cloudai_mbridge as mb
from cloudai_mbridge.errors import MBridgeError

manager = pytest.importorskip("jupyter_client.manager")
pytest.importorskip("ipykernel")
pytestmark = pytest.mark.process
TIMEOUT_S = 300

CELL = """
from pathlib import Path
import cloudai_mbridge as mb
run = mb.load("scenario.toml", system="system.toml").plan().run()
"""


def wait_for(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.1)


def reply_to(client: Any, cell: str) -> dict[str, Any]:
    while (message := client.get_shell_msg(timeout=TIMEOUT_S))["parent_header"].get("msg_id") != cell:
        continue
    content: dict[str, Any] = message["content"]
    return content


def test_interrupting_a_cell_cancels_its_runs(sweep: Callable[..., mb.Scenario], tmp_path: Path) -> None:
    sweep(wait_for=str(tmp_path / "never"))

    def is_running() -> bool:
        try:
            (root,) = (tmp_path / "results").glob("*")
            return "running" in mb.open_run(root).status().counts
        except (ValueError, MBridgeError):
            return False

    kernels, client = manager.start_new_kernel(cwd=str(tmp_path))
    try:
        cell = client.execute(CELL, stop_on_error=False)
        wait_for(is_running)
        kernels.interrupt_kernel()
        said = reply_to(client, cell)
        assert (said["status"], said["ename"]) == ("error", "Interrupted"), said
        assert said["evalue"] == "interrupted by SIGINT; running jobs were cancelled"
        cell = client.execute(
            "report = mb.open_run(next(Path('results').iterdir())).report(); assert report.counts['cancelled'] == 2"
        )
        said = reply_to(client, cell)
        assert said["status"] == "ok", said
    finally:
        client.stop_channels()
        kernels.shutdown_kernel(now=True)
