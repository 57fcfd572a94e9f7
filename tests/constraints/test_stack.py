"""Rule E14: the software that trains is asked before the job is, and what cannot be asked rejects nothing."""

import copy
import itertools
import sys
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.constraints import stack as rule
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.presets import loop_preset
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.recipes.presets import fields_since, sections_of
from cloudai_mbridge.sweep.checked import recipe_of, with_recipe
from cloudai_mbridge.training.compat import stack as compat
from cloudai_mbridge.training.compat.stack import ENGINE, Stack
from cloudai_mbridge.training.compat.versions import RELEASES, TESTED, installed_version
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.schema import check_section_values
from cloudai_mbridge.training.schema.packages import MODULES
from tests.golden import Sentence

ASK = rule.e14_the_stack_has_what_the_point_needs
SLURM = SlurmSystem(name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}], gpu_type="gb200")
ALL = frozenset({ENGINE, *MODULES})
EXPERTS = {"model_recipe_name": "qwen3_30b_a3b", "compute_dtype": "fp8_mx", "num_gpus": 8}


def _point(system: System | None = SLURM, env: dict[str, str] | None = None, **given: Any) -> Point:
    values = {"launcher": "embedded", "max_steps": 5, "gpu_type": "gb200", **EXPERTS, **given}
    args = ResolvedCmdArgs.model_validate(values)
    preset = loop_preset(args, args.gpu_type)
    recipe = recipe_of(args, preset)
    return Point(with_recipe(args, recipe, preset=preset), system, recipe, variable=(env or {}).get)


def _on(monkeypatch: pytest.MonkeyPatch, release: str, *missing: str) -> None:
    """Let the job's interpreter have a release of Megatron-Core, and all packages but some."""
    found = Stack("/nodes/python", TESTED[release], ALL - {*missing})
    monkeypatch.setattr(rule, "stack_of", lambda python, variables: found)


def test_the_release_and_the_packages_are_those_of_the_job(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    cases: tuple[tuple[str, tuple[str, ...], dict[str, Any], str], ...] = (
        ("0.19", (), {}, ""),
        (
            "0.16",
            (),
            {},
            "model.moe_hybridep_num_sms_preprocessing needs Megatron-Core 0.18 or newer, and /nodes/python",
        ),
        ("0.19", ("deep_ep",), {}, "needs the package deep_ep"),
        ("0.19", ("deep_ep",), {"moe_flex_dispatcher_backend": "None"}, ""),
        ("0.19", (ENGINE,), {}, "needs Transformer Engine, which /nodes/python lacks"),
        ("0.16", (ENGINE, "deep_ep"), {"use_recipes": True, "compute_dtype": "bf16"}, ""),
        ("0.19", ("mamba_ssm", "causal_conv1d"), {"model_recipe_name": "llama3_8b"}, ""),
        ("0.19", ("emerging_optimizers",), {"optimizer_type": "muon"}, "needs the Python package emerging-optimizers"),
        ("0.19", (), {"optimizer_type": "muon"}, ""),
        (
            "0.17",
            (),
            {"optimizer_type": "muon", "use_recipes": True},
            "optimizer.optimizer = 'muon' needs Megatron-Core 0.18",
        ),
    )
    for release, missing, given, expected in cases:
        _on(monkeypatch, release, *missing)
        answer = ASK(_point(**given))
        assert isinstance(answer, Violation) is bool(expected), (release, missing, given, answer)
        assert expected in str(answer)
        if expected:
            sentence(str(answer))


def test_unknown_software_rejects_nothing_and_is_named(monkeypatch: pytest.MonkeyPatch, sentence: Sentence) -> None:
    needs = "has Megatron-Core 0.18 or newer and deep_ep"
    cases: tuple[tuple[Point, str], ...] = (
        (_point(container_image="nemo.sqsh"), f"knowledge that the container {needs}"),
        (
            _point(SLURM.model_copy(update={"python_executable": "/nowhere/python"})),
            f"knowledge that /nowhere/python, which this machine cannot ask, {needs}",
        ),
        (_point(None), "system"),
    )
    for point, expected in cases:
        assert ASK(point) == NotEvaluated("E14", expected)
    assert ASK(_point(container_image="nemo.sqsh", use_recipes=True, compute_dtype="bf16")) is None, "it needs nothing"
    assert ASK(_point(launcher="megatron_bridge")) is None
    unsupported = Stack("/nodes/python", "0.15.0", ALL)
    monkeypatch.setattr(rule, "stack_of", lambda python, variables: unsupported)
    answer = ASK(_point())
    assert isinstance(answer, NotEvaluated)
    sentence(answer.missing)


def test_settings_that_a_release_lacks_are_those_that_its_job_refuses() -> None:
    """Every recipe and preset of two GPUs, asked of each release: the check of the training process decides."""
    seen = set()
    names = ("deepseek_v3", "gpt_oss_120b", "llama3_8b", "qwen3_235b_a22b", "nemotron_3_nano", "kimi_k2")
    for name, gpu, dtype in itertools.product(names, ("gb200", "h100"), ("bf16", "fp8_cs", "fp8_mx")):
        point = _point(model_recipe_name=name, gpu_type=gpu, compute_dtype=dtype, num_gpus=256)
        assert point.recipe is not None
        if point.recipe.not_embedded:
            continue
        data = training_config(point.recipe, point.args, {})
        for release in RELEASES:
            found = list(fields_since(sections_of(point.recipe, point.args, None, ()), release))
            try:
                check_section_values(copy.deepcopy(data), release=release)
                is_refused = False
            except ConfigError:
                is_refused = True
            assert bool(found) is is_refused, (name, gpu, dtype, release, found)
            seen.add(is_refused)
    assert seen == {True, False}


def test_extra_settings_are_checked_against_the_jobs_software(sentence: Sentence) -> None:
    point = _point(use_recipes=True, compute_dtype="bf16")
    assert point.recipe is not None
    newer = {"model.moe_hybridep_num_sms_preprocessing": "32"}
    cases: tuple[tuple[dict[str, str], str, frozenset[str], str], ...] = (
        (newer, "0.16", ALL, "needs Megatron-Core 0.18 or newer, and 0.16 trains here"),
        (newer, "0.18", ALL, ""),
        ({"ft.enable_ft_package": "true"}, "0.18", ALL - {"nvidia_resiliency_ext"}, "nvidia-resiliency-ext"),
        ({"ft.enable_ft_package": "true"}, "0.18", ALL, ""),
        ({"logger.log_energy": "true"}, "0.18", ALL - {"pynvml"}, "nvidia-ml-py"),
    )
    for extra, release, modules, expected in cases:
        data = training_config(point.recipe, point.args, extra)
        stack = Stack("/nodes/python", TESTED[release], modules)
        rule.refuse_unknown_settings(data, "the container")
        if not expected:
            rule.refuse_unknown_settings(data, stack)
            continue
        with pytest.raises(BadInput) as caught:
            rule.refuse_unknown_settings(data, stack)
        sentence(caught)


@pytest.mark.process
def test_an_interpreter_is_asked_once_and_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = compat.stack_of(sys.executable, {})
    assert own is not None
    assert own.core == installed_version()
    here = compat.stack_of(None, {})
    assert here is not None
    assert own.modules == here.modules

    clone = tmp_path / "clone" / "megatron" / "core"
    clone.mkdir(parents=True)
    (clone / "__init__.py").write_text("raise RuntimeError('it was imported')\n")
    (clone / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\nPRE_RELEASE = ''\n")
    (tmp_path / "clone" / "deep_ep.py").write_text("raise RuntimeError('it was imported')\n")
    other = compat.stack_of(None, {"PYTHONPATH": str(tmp_path / "clone")})
    assert other is not None
    assert (other.release, "deep_ep" in other.modules) == ("0.19", True)

    answers = {"fails": "exit 3", "says": "echo hello", "hangs": "exec sleep 600", "lists": "echo '[1]'"}
    monkeypatch.setattr(compat, "_TIMEOUT_S", 1.0)
    for name, does in answers.items():
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\necho x >> {tmp_path}/asked.{name}\n{does}\n")
        program.chmod(0o755)
        assert compat.stack_of(str(program), {}) is compat.stack_of(str(program), {}) is None
        assert (tmp_path / f"asked.{name}").read_text() == "x\n", "each is asked once"
    for name in ("missing", "python", str(tmp_path)):
        assert compat.stack_of(name, {}) is None


def test_on_this_machine_presets_fall_back() -> None:
    """As before: settings that the installed release lacks are left out, and the rule has nothing to say."""
    local = LocalSystem(name="here", scheduler="local")
    for given in ({}, {"use_recipes": True}):
        answer = ASK(_point(local, **given))
        assert not isinstance(answer, Violation) or "deep_ep" in str(answer)
