"""Verify configuration files without running anything."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cloudai_mbridge.constraints import RuleSet
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.baseline import load_baseline
from cloudai_mbridge.gate.policy import is_policy, load_policy
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.load import (
    Warn,
    is_baseline,
    is_scenario,
    is_system,
    load_scenario,
    load_system,
    load_test_definition,
)
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import System
from cloudai_mbridge.models.test_definition import TEMPLATE, MegatronBridgeTestDefinition
from cloudai_mbridge.models.toml_source import read_toml
from cloudai_mbridge.recipes.apply import training_config
from cloudai_mbridge.sweep import Sweep, checked_points
from cloudai_mbridge.sweep.pinned import pinned_by


@dataclass(frozen=True)
class Finding:
    """What was found about one file."""

    path: Path
    kind: str
    is_good: bool
    text: str


def verify(
    configs: Path,
    system_config: Path | None,
    tests_dir: Path | None,
    warn: Warn | None = None,
    rules: RuleSet = RuleSet.RELEASE,
) -> Iterator[Finding]:
    """Check a file, or every TOML below a directory. Scenarios look for their tests in `tests_dir`, else in `configs`.

    Raises:
        BadInput: `configs` does not exist or holds no TOML, or the system file is wrong.
    """
    files = sorted(path for path in configs.rglob("*.toml") if path.is_file()) if configs.is_dir() else [configs]
    if not files:
        raise BadInput(f"{configs}: holds no TOML file; check the path")
    system = load_system(system_config) if system_config else None
    if tests_dir is None and configs.is_dir():
        tests_dir = configs
    for path in files:
        kind = "file"
        try:
            kind = _kind(path)
            yield Finding(path, kind, True, _verify_file(path, kind, system, tests_dir, warn, rules))
        except BadInput as error:
            yield Finding(path, kind, False, str(error))


def _kind(path: Path) -> str:
    source = read_toml(path)
    kinds = {"system": is_system, "scenario": is_scenario, "policy": is_policy, "baseline": is_baseline}
    return next((kind for kind, is_it in kinds.items() if is_it(source)), "test")


def _verify_file(
    path: Path, kind: str, system: System | None, tests_dir: Path | None, warn: Warn | None, rules: RuleSet
) -> str:
    if kind == "system":
        return f"system {load_system(path).name!r}"
    if kind == "scenario":
        loaded = load_scenario(path, tests_dir, warn)
        points = [_count(test.definition, test.run, system, rules) for test in loaded.tests]
        return f"scenario {loaded.scenario.name!r}: {'; '.join(points)}"
    if kind == "policy":
        return _describe_policy(path)
    if kind == "baseline":
        return f"baseline of {len(load_baseline(path).points)} points"
    template = read_toml(path).data.get("test_template_name", TEMPLATE)
    if template != TEMPLATE:
        return f"test of template {template!r}: not checked, this tool runs {TEMPLATE!r} only"
    definition = load_test_definition(path, warn)
    run = TestRun(id=definition.name, test_name=definition.name)
    return f"test {_count(definition, run, system, rules)}"


def _describe_policy(path: Path) -> str:
    loaded = load_policy(path)
    reference = loaded.baseline_path or loaded.history_path
    is_there = "" if reference and reference.exists() else ", which is not there yet"
    return f"policy {loaded.policy.name!r}: {len(loaded.policy.metrics)} metrics against {reference}{is_there}"


def _count(definition: MegatronBridgeTestDefinition, run: TestRun, system: System | None, rules: RuleSet) -> str:
    """Check every point; of an embedded test, a point that passes must also give a valid training config."""
    total = rejected = 0
    for point in checked_points(Sweep(definition, run), system, pinned_by(definition, system, rules)):
        total += 1
        if point.violations:
            rejected += 1
            continue
        _, args, recipe = point.resolve()
        if recipe is not None and args.launcher is Launcher.EMBEDDED:
            training_config(recipe, args, definition.extra_cmd_args)
    return f"{run.id!r} with {total} points, {rejected} of them rejected by a rule"
