"""Runs on a machine whose host name does not resolve, that has no network, or IPv6 only: in namespaces of their own.

What `make run` does on such a machine is in test_local_run.py.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

NAME = "no-such-host"
SERVER = Path(__file__).with_name("name_server.py")
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
NAMED = f"hostname {NAME}"
LOOPBACK_ONLY = f"{NAMED} && ip link set lo up"
ONE_POINT = """
name = "one"
[[Tests]]
id = "one"
name = "one"
description = "two ranks"
test_template_name = "MegatronBridge"
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = {ranks}
tp = {ranks}
max_steps = 4
"""
GUARD_S = 500  # against a hang

InNamespace = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def in_namespace(repository: Path, namespace: Callable[[str, str], list[str]]) -> InNamespace:
    """Run a command in namespaces after the lines that set them up; skip where this user may not."""

    def run(
        kinds: str, setup: str, command: list[Any], env: Mapping[str, str] | None = None
    ) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [*namespace(kinds, setup), *map(str, command)],
            env={**os.environ, **(env or {})},
            cwd=repository,
            capture_output=True,
            text=True,
            timeout=GUARD_S,
            check=False,
        )

    return run


def mbridge_run(directory: Path, ranks: int = 2) -> list[Any]:
    (directory / "system.toml").write_text('name = "here"\nscheduler = "local"\n')
    (directory / "scenario.toml").write_text(ONE_POINT.format(ranks=ranks))
    files = [f"--system-config={directory}/system.toml", f"--test-scenario={directory}/scenario.toml"]
    return [sys.executable, "-m", "cloudai_mbridge", "run", *files, f"--output-dir={directory}/out"]


def assert_trained(done: "subprocess.CompletedProcess[str]", out: Path) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*/report.json")
    report = json.loads(path.read_text())
    assert report["summary"]["success"] == 1
    assert all(point["steps"] for point in report["points"] if point["verdict"] == "success")


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_no_network_and_proxies(in_namespace: InNamespace, tmp_path: Path, ranks: int) -> None:
    proxies = dict.fromkeys(PROXIES, "http://127.0.0.1:9")  # the port that discards: nothing listens there
    done = in_namespace("--uts --net", LOOPBACK_ONLY, mbridge_run(tmp_path, ranks), proxies)
    assert_trained(done, tmp_path / "out")


@pytest.mark.long
def test_ipv6_only(in_namespace: InNamespace, tmp_path: Path) -> None:
    setup = f"{LOOPBACK_ONLY} && ip address add ::1/128 dev lo 2>/dev/null; ip address del 127.0.0.1/8 dev lo"
    probe = "ip -6 -oneline address show dev lo | grep -q ::1"
    done = in_namespace("--uts --net", f"{setup} && {probe}", mbridge_run(tmp_path))
    assert_trained(done, tmp_path / "out")


def test_the_host_name_is_never_asked_for(in_namespace: InNamespace, tmp_path: Path) -> None:
    """A name server that does not answer would cost ten seconds for each such question."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    setup = f"{LOOPBACK_ONLY} && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    queries = tmp_path / "queries"
    command = [sys.executable, SERVER, queries, *mbridge_run(tmp_path)]
    done = in_namespace("--uts --net --mount", setup, command)
    assert_trained(done, tmp_path / "out")
    assert NAME not in queries.read_text()


def test_training_alone_asks_for_no_name(in_namespace: InNamespace, tmp_path: Path) -> None:
    """One process without torchrun: gloo would resolve the host name."""
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.53\n")
    setup = f"{LOOPBACK_ONLY} && mount --bind {tmp_path}/resolv.conf /etc/resolv.conf"
    queries = tmp_path / "queries"
    text = (
        "from cloudai_mbridge.recipes.container import container_data\n"
        "from cloudai_mbridge.training.config import ConfigContainer\n"
        "from cloudai_mbridge.training.gpt_step import forward_step\n"
        "from cloudai_mbridge.training.pretrain import pretrain\n"
        "model = dict(num_layers=1, hidden_size=16, ffn_hidden_size=32, num_attention_heads=2, vocab_size=64,"
        " seq_length=8, dtype='fp32')\n"
        "sections = dict(model=model, train=dict(train_iters=2, micro_batch_size=1, global_batch_size=1),"
        " optimizer=dict(lr=1e-3))\n"
        "config = ConfigContainer.from_dict(container_data(sections))\n"
        "config.logger.save_config_filepath = None\n"
        "pretrain(config, forward_step)\n"
    )
    done = in_namespace("--uts --net --mount", setup, [sys.executable, SERVER, queries, sys.executable, "-c", text])
    assert done.returncode == 0, done.stdout + done.stderr
    assert queries.read_text() == ""
