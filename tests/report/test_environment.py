"""What a run ran on, from its record, its scheduler and its plan."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.report import build_report
from cloudai_mbridge.report.facts import definitions_of, image_of, machine_environment, run_environment
from cloudai_mbridge.training.process.provenance import git_state_of
from tests.report.conftest import COMMIT, URL, ARun, a_log

DIGEST = "sha256:" + "0123456789abcdef" * 4
TOLD = {
    **{"hostname": "login", "python": "3.12.1", "cuda": "12.9", "nccl": "2.27.5", "driver": "580.82", "device": "H100"},
    **{"git": {"commit": "c0ffee", "dirty": True}, "packages": {"torch": "2.9.0"}},
}


def _environment(nodes: str = "", said: Any = None, **run: Any) -> dict[str, Any]:
    return run_environment({"container_image": "", "upstream": None, **run}, nodes, {"environment": said or {}})


def test_what_the_training_says() -> None:
    assert _environment("gb200-[08-10,1]", TOLD) == {
        **{"device": "H100", "driver": "580.82", "cuda": "12.9", "nccl": "2.27.5", "python": "3.12.1"},
        **{"packages": {"torch": "2.9.0"}, "git": {"commit": "c0ffee", "dirty": True}},
        **{"nodes": ["gb200-08", "gb200-09", "gb200-10", "gb200-1"], "image": None, "repositories": []},
        **{"benchmark": None, "variables": {}},
    }


def test_nobody_has_said_anything() -> None:
    assert _environment() == {
        **{"device": None, "driver": None, "cuda": None, "nccl": None, "python": None},
        **{"packages": {}, "git": None, "nodes": [], "image": None, "repositories": []},
        **{"benchmark": None, "variables": {}},
    }


def test_on_this_machine_the_training_names_the_node() -> None:
    assert _environment("", TOLD)["nodes"] == ["login"]


def test_a_node_list_that_cannot_be_read_is_shown() -> None:
    assert _environment("n[1-")["nodes"] == ["n[1-"]


@pytest.mark.parametrize(
    ("reference", "name", "digest"),
    [
        ("nvcr.io#nvidia/nemo:25.09", "nvcr.io#nvidia/nemo:25.09", None),
        (f"nvcr.io/nvidia/nemo:25.09@{DIGEST}", "nvcr.io/nvidia/nemo:25.09", DIGEST),
        ("/images/nemo.sqsh", "/images/nemo.sqsh", None),
        (f"/images/{DIGEST}.sqsh", f"/images/{DIGEST}.sqsh", None),
        ("x@sha256:0123", "x@sha256:0123", None),
    ],
)
def test_an_image_has_a_digest_only_if_it_is_pinned(reference: str, name: str, digest: str | None) -> None:
    assert image_of(reference) == {"name": name, "digest": digest}
    assert image_of("") is None


@pytest.mark.process
def test_the_upstream_launchers_repositories(upstream: ARun) -> None:
    environment = build_report(upstream.root).points[0].environment
    assert environment["repositories"] == [
        {"url": URL, "commit": COMMIT},
        {"url": "https://github.com/NVIDIA-NeMo/Run.git", "commit": "main"},
    ]
    assert environment["image"] == {"name": "/images/mb.sqsh", "digest": None}
    assert environment["nodes"] == ["n1", "n2"]


def test_variables_and_the_benchmarks_checkout() -> None:
    env = {"NCCL_DEBUG": "WARN", "API_PASSWORD": "hunter2", "URL": "https://u:hunter2@x.example"}
    run = {"env": env, "recipe_env": {"A": "1"}, "secret_names": ["HF_TOKEN"], "container_image": "", "upstream": None}
    environment = run_environment(run, "", {}, {"commit": "c0ffee", "dirty": True})
    assert environment["variables"] == {
        **{"A": "1", "API_PASSWORD": "***", "HF_TOKEN": "***", "NCCL_DEBUG": "WARN", "URL": "***"}
    }
    assert environment["benchmark"] == {"commit": "c0ffee", "dirty": True}
    assert run_environment(run, "", {})["benchmark"] is None


@pytest.mark.process
def test_the_checkout_of_a_scenario_is_in_the_plan_and_the_report(tmp_path: Path) -> None:
    scenario = tmp_path / "conf" / "s.toml"
    scenario.parent.mkdir()
    scenario.write_text("")
    assert git_state_of(scenario) is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.com")
    for command in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "m")):
        subprocess.run([*git, *command], check=True)
    state = git_state_of(scenario)
    assert state is not None
    assert (len(state["commit"]), state["dirty"]) == (40, False)
    scenario.write_text("# changed")
    assert git_state_of(scenario) == {**state, "dirty": True}


@pytest.mark.process
def test_the_machine_that_wrote_it() -> None:
    machine = machine_environment()
    assert set(machine) == {"python", "platform", "hostname", "git", "packages"}
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))
    assert "cloudai-mbridge" in machine["packages"]


# What the numbers mean


@pytest.mark.parametrize(
    ("commit", "formula"),
    [
        (COMMIT, f"upstream@{COMMIT}"),
        ("v0.3.0", "upstream@v0.3.0"),
        ("0.2.0rc1", "upstream@0.2.0rc1"),
        ("main", None),
        ("r0.3.0-branch", None),
        ("", None),
    ],
)
def test_the_upstream_launchers_formula_is_known_if_it_is_pinned(commit: str, formula: str | None) -> None:
    run = {"upstream": {"megatron_bridge": {"commit": commit}}}
    assert definitions_of(run, {"flops_formula": "another"})["flops_formula"] == formula


@pytest.mark.process
def test_what_the_embedded_loop_says_of_its_numbers(embedded: ARun) -> None:
    embedded.ended("t/mb1/0", a_log(6))
    metrics = build_report(embedded.root).points[0].metrics
    assert metrics is not None
    assert (metrics.flops_formula, metrics.flops_per_step) == ("megatron-bridge/new", 2e9)
    assert (metrics.peak_memory_gib, metrics.memory_kind) == (1.75, "accelerator, reserved")
    assert metrics.tokens_per_step_per_gpu == 256.0


@pytest.mark.parametrize("flops", ["2e9", None, True, 0, -1, float("nan"), float("inf"), 10**400, [1]])
def test_flops_that_are_no_number_are_none(flops: Any) -> None:
    assert definitions_of({}, {"flops_per_step": flops})["flops_per_step"] is None
