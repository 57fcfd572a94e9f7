"""Every rule: the last value that is legal, the first that is not, and what it says without an input."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest

from cloudai_mbridge.constraints import check
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.megatron.placement import Placement, num_nodes, place
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System

LOCAL = LocalSystem(name="here", scheduler="local")
SLURM = SlurmSystem(name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}])
SLURM4 = SLURM.model_copy(update={"gpus_per_node": 4})


def _point(system: System | None = None, nodes: int | None = None, **args: Any) -> Point:
    return Point(ResolvedCmdArgs.model_validate(args), system, None, nodes)


def _id(rule: Callable[..., object]) -> str:
    return rule.__name__.split("_")[0].upper()


BY_ID = {_id(rule): rule for rule in RULES}

# id -> (last legal, first illegal, not evaluated or None if the rule always has its inputs)
BOUNDARIES: dict[str, tuple[Point, Point, Point | None]] = {
    "C01": (_point(num_gpus=8, tp=8), _point(num_gpus=9, tp=8), None),
    "C03": (_point(num_gpus=8, tp=8), _point(num_gpus=7, tp=8), None),
    "C04": (_point(num_gpus=8, mb=2, gb=16), _point(num_gpus=8, mb=2, gb=17), None),
    "M01": (_point(SLURM4, 2, num_gpus=8), _point(SLURM4, 2, num_gpus=10), _point(num_gpus=8)),
    "E01": (
        _point(launcher="embedded", use_megatron_fsdp=False),
        _point(launcher="embedded", use_megatron_fsdp=True),
        None,
    ),
    "E02": (
        _point(launcher="embedded", compute_dtype="fp32"),
        _point(launcher="embedded", compute_dtype="fp8_mx"),
        None,
    ),
    "E03": (_point(launcher="embedded", max_steps=1), _point(launcher="embedded", max_steps=0), None),
}


def test_every_rule_is_tested_here() -> None:
    assert set(BOUNDARIES) == set(BY_ID)
    assert len(BY_ID) == len(RULES)


@pytest.mark.parametrize("rule_id", BY_ID)
def test_a_rule_is_documented(rule_id: str) -> None:
    doc = inspect.getdoc(BY_ID[rule_id]) or ""
    assert doc.splitlines()[0].endswith(".")
    for word in ("Pass: ", "Fail: ", "Source: "):
        assert word in doc


@pytest.mark.parametrize("rule_id", BOUNDARIES)
def test_the_last_legal_value_passes(rule_id: str) -> None:
    assert BY_ID[rule_id](BOUNDARIES[rule_id][0]) is None


@pytest.mark.parametrize("rule_id", BOUNDARIES)
def test_the_first_illegal_value_fails(rule_id: str) -> None:
    answer = BY_ID[rule_id](BOUNDARIES[rule_id][1])
    assert isinstance(answer, Violation)
    assert answer.rule_id == rule_id
    assert answer.operands
    text = str(answer)
    assert text.startswith(f"{rule_id} {answer.where}: ")
    assert all(f"{name}={value}" in text for name, value in answer.operands.items())
    assert answer.remedy in text


@pytest.mark.parametrize("rule_id", [rule_id for rule_id, points in BOUNDARIES.items() if points[2]])
def test_without_its_input_a_rule_gives_no_verdict(rule_id: str) -> None:
    answer = BY_ID[rule_id](BOUNDARIES[rule_id][2])
    assert isinstance(answer, NotEvaluated)
    assert answer.rule_id == rule_id
    assert answer.missing


@pytest.mark.parametrize(
    ("rule_id", "args", "passes"),
    [
        # constraint 1: tp*pp*cp divides the GPUs
        ("C01", dict(num_gpus=16, tp=2, pp=2, cp=2), True),
        ("C01", dict(num_gpus=12, tp=8), False),
        ("C01", dict(num_gpus=8), True),
        ("C01", dict(num_gpus=8, tp=0, pp=0, cp=0), True),
        ("C01", dict(num_gpus=16, tp=-8), True),  # a negative product passes the modulo; 3 then fails
        ("C01", dict(num_gpus=16, tp=-2, pp=-2), True),  # two negatives pass both
        ("C01", dict(num_gpus=0, tp=8), True),
        ("C01", dict(num_gpus=4, tp=8), False),
        # constraint 3: there is at least one replica
        ("C03", dict(num_gpus=8, tp=8), True),
        ("C03", dict(num_gpus=4, tp=8), False),
        ("C03", dict(num_gpus=16, tp=-8), False),
        ("C03", dict(num_gpus=16, tp=-2, pp=-2), True),
        ("C03", dict(num_gpus=0), False),
        # constraint 4: the global batch is whole micro-batches on every rank
        ("C04", dict(num_gpus=8, tp=2, mb=2, gb=16), True),
        ("C04", dict(num_gpus=8, tp=2, mb=2, gb=20), False),
        (
            "C04",
            dict(num_gpus=8, mb=1, gb=24, use_megatron_fsdp=True, num_distributed_optimizer_instances=2),
            False,
        ),
        ("C04", dict(num_gpus=8, mb=1, gb=32, use_megatron_fsdp=True, num_distributed_optimizer_instances=2), True),
        ("C04", dict(num_gpus=8, mb=1, gb=24, num_distributed_optimizer_instances=2), True),  # only under FSDP
        ("C04", dict(num_gpus=8, mb=1, gb=24, use_megatron_fsdp=True), True),
        ("C04", dict(num_gpus=8, mb=1, gb=24, use_megatron_fsdp=True, num_distributed_optimizer_instances=0), True),
        ("C04", dict(num_gpus=8, mb=0, gb=3), True),
        ("C04", dict(num_gpus=8, mb=3, gb=0), True),
        ("C04", dict(num_gpus=8, gb=3), True),
        ("C04", dict(num_gpus=8, mb=3), True),
        ("C04", dict(num_gpus=4, tp=8, mb=1, gb=8), False),  # no replica: the divisor is 0
    ],
)
def test_cloudais_examples_and_edge_cases(rule_id: str, args: dict[str, Any], passes: bool) -> None:
    assert (not isinstance(BY_ID[rule_id](_point(**args)), Violation)) is passes


def test_the_message_names_every_operand_and_a_remedy() -> None:
    answer = BY_ID["C04"](_point(num_gpus=8, tp=2, mb=2, gb=100))
    assert str(answer) == (
        "C04 cmd_args.gb: 100 is not divisible by mb*dp = 8 (gb=100, mb=2, dp=4); use a multiple of 8"
    )


def test_every_broken_rule_is_reported() -> None:
    result = check(
        ResolvedCmdArgs(launcher="embedded", num_gpus=4, tp=8, mb=1, gb=8, compute_dtype="nvfp4", max_steps=0), LOCAL
    )
    assert [violation.rule_id for violation in result.violations] == ["C01", "C03", "C04", "E02", "E03"]
    assert not result.passed


def test_a_rule_that_lacked_an_input_is_listed() -> None:
    result = check(ResolvedCmdArgs(num_gpus=8))
    assert result.passed
    assert "M01" in [item.rule_id for item in result.not_evaluated]


@pytest.mark.parametrize(
    ("rule_id", "args"),
    [
        ("E01", dict(use_megatron_fsdp=True)),
        ("E02", dict(compute_dtype="fp8_mx")),
        ("E03", dict(max_steps=0)),
    ],
)
def test_the_upstream_launcher_is_not_bound_by_ours(rule_id: str, args: dict[str, Any]) -> None:
    assert BY_ID[rule_id](_point(launcher="megatron_bridge", **args)) is None


def test_no_step_count_is_no_step() -> None:
    assert isinstance(BY_ID["E03"](_point(launcher="embedded", max_steps=None)), Violation)


@pytest.mark.parametrize("field", ["wandb_key", "hf_token"])
def test_a_violation_never_shows_a_credential(field: str) -> None:
    result = check(ResolvedCmdArgs.model_validate({"launcher": "embedded", field: "S3CRET"}), LOCAL)
    assert "S3CRET" not in repr(result.violations)
    assert "S3CRET" not in " ".join(str(violation) for violation in result.violations)


# Placement


@pytest.mark.parametrize(
    ("system", "nodes", "args", "expected"),
    [
        (LOCAL, None, dict(num_gpus=4), Placement(1, 4)),
        (SLURM4, None, dict(num_gpus=4), Placement(1, 4)),
        (SLURM4, None, dict(num_gpus=8), Placement(2, 4)),
        (SLURM4, None, dict(num_gpus=3), Placement(1, 3)),
        (SLURM4, 4, dict(num_gpus=8), Placement(4, 2)),
        (SLURM4, None, dict(num_gpus=8, gpus_per_node=2), Placement(4, 2)),
        (SLURM, None, dict(num_gpus=8), Placement(1, 8)),
    ],
)
def test_ranks_spread_over_as_few_nodes_as_take_them(
    system: System, nodes: int | None, args: dict[str, Any], expected: Placement
) -> None:
    point = _point(system, nodes, **args)
    assert BY_ID["M01"](point) is None
    assert place(point) == expected


@pytest.mark.parametrize(
    ("system", "nodes", "args"),
    [
        (SLURM4, 1, dict(num_gpus=5)),
        (SLURM4, 3, dict(num_gpus=8)),
        (SLURM4, 0, dict(num_gpus=8)),
        (SLURM4, -1, dict(num_gpus=8)),
        (SLURM4, None, dict(num_gpus=0)),
        (SLURM4, None, dict(num_gpus=5)),  # two nodes, five ranks: not even
        (LOCAL, None, dict(num_gpus=-1)),
        (LOCAL, None, dict(num_gpus=4, gpus_per_node=2)),
    ],
)
def test_what_does_not_fit_is_refused(system: System, nodes: int | None, args: dict[str, Any]) -> None:
    assert isinstance(BY_ID["M01"](_point(system, nodes, **args)), Violation)


def test_this_machine_is_one_node() -> None:
    assert num_nodes(_point(LOCAL, None, num_gpus=64)) == 1
