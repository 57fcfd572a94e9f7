"""`mbridge verify-configs`: verify configuration files without running anything."""

import errno
import os
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import click

from cloudai_mbridge.commands.console import print_json, show_error
from cloudai_mbridge.commands.options import ALLOW_UNKNOWN, JSON, PATH, RULES
from cloudai_mbridge.constraints import RuleSet, Violation
from cloudai_mbridge.constraints.rule_docs import details_hint
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.files.documents import json_object
from cloudai_mbridge.files.run_files import walk_without_runs
from cloudai_mbridge.megatron_bridge.release import megatron_bridge_of
from cloudai_mbridge.models.loading import (
    HOOK_DIR,
    ForeignSystem,
    ForeignTemplate,
    LoadedTest,
    TestFiles,
    Warn,
    find_test_files,
    find_tests_among,
    is_baseline,
    is_scenario,
    is_system,
    load_scenario,
    load_system,
    load_test_definition,
    naming_file,
    template_of,
    with_path,
)
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem, System
from cloudai_mbridge.models.test_definition import TEMPLATE
from cloudai_mbridge.models.toml_source import TomlSource, read_toml
from cloudai_mbridge.plan.checks import unlisted_partition
from cloudai_mbridge.plan.launchers import LAUNCHERS, num_steps_of
from cloudai_mbridge.plan.run_plan import plan_run
from cloudai_mbridge.plan.values import notes_on_images, problems_of_values
from cloudai_mbridge.sweep.checked import checked_points
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import pinned_by, software_note

_Count = Callable[[Path, LoadedTest], str]  # checks the points of a test, and counts them
# Without a system file, the launcher's options are checked for this system.
_ANY_SYSTEM = SlurmSystem.model_validate(
    dict(name="any", scheduler="slurm", install_path="install", default_partition="any", partitions=[{"name": "any"}])
)


@dataclass(frozen=True)
class Finding:
    """Result of checking one file. is_foreign: it is CloudAI's and not this tool's, and was not checked."""

    path: Path
    kind: str
    is_good: bool
    text: str
    is_foreign: bool = False


def verify(
    configs: Sequence[Path],
    system_config: Path | None,
    tests_dir: Path | None,
    warn: Warn | None = None,
    hook_dir: Path | None = None,
    rules: RuleSet = RuleSet.RELEASE,
) -> Iterator[Finding]:
    """Check files, and every TOML below directories that is not part of a run; a file that is given twice once.

    Scenarios look for their tests in `tests_dir`, else in the directory and among the files that are given.
    hook_dir: default: CloudAI's, or the subdirectory `hook` of a given directory. Raises BadInput if a path does not
    exist or holds no TOML, or the system file is wrong.
    """
    directories = [path for path in configs if path.is_dir()]
    links: dict[Path, Finding] = {}
    files: dict[Path, None] = {}
    for given in configs:
        # a search for TOML files skips dangling links, links in circles and linked directories. .#: an editor's lock
        paths = walk_without_runs(given)[0] if given in directories else []
        own = [path for path in paths if path.suffix == ".toml" and path.is_file()] if given in directories else [given]
        found = (_link(path) for path in paths if path.is_symlink() and not path.name.startswith(".#"))
        own_links = {finding.path: finding for finding in found if finding is not None}
        if not own and not own_links:
            raise BadInput(f"{given}: holds no TOML file; check the path")
        links |= own_links
        files |= dict.fromkeys(own)
    hooks = hook_dir or (HOOK_DIR if HOOK_DIR.is_dir() or not directories else directories[0] / "hook")
    system = load_system(system_config) if system_config else None
    once = lru_cache(maxsize=None)(warn) if warn else None  # once per key, however many scenarios name its test
    if tests_dir is not None or (not directories and len(files) == 1):
        tests = find_test_files(tests_dir, skip_broken=True)
    else:
        tests = find_tests_among(files, next(iter(directories), None), skip_broken=True)
    count = partial(_count, system=system, rules=rules)
    verifiers: dict[str, Callable[[Path], str]] = {
        "system": _verify_system,
        "scenario": lambda path: _verify_scenario(path, tests, once, hooks, count),
        "policy": _describe_policy,
        "baseline": _describe_baseline,
        "test": lambda path: _verify_test(path, once, count),
    }
    yield from links.values()
    yield from (_finding(path, verifiers) for path in files)


def _link(path: Path) -> Finding | None:
    try:
        is_directory = stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if path.suffix != ".toml" and error.errno != errno.ELOOP:
            return None
        where = "in a circle" if error.errno == errno.ELOOP else "nowhere"
        text = f"{path}: is a link to {os.readlink(path)!r}, which leads {where}; fix or remove it"
        return Finding(path, "link", False, text)
    text = "is a link to a directory and was not followed; check that directory by itself"
    return Finding(path, "link", True, text) if is_directory else None


# The gate's modules are imported only if one of its files exists
def _is_policy(source: TomlSource) -> bool:
    from cloudai_mbridge.gate.policy import is_policy

    return is_policy(source)


_KINDS = {"system": is_system, "scenario": is_scenario, "policy": _is_policy, "baseline": is_baseline}


def _finding(path: Path, verifiers: Mapping[str, Callable[[Path], str]]) -> Finding:
    kind = "file"
    try:
        source = read_toml(path)
        kind = next((name for name, is_it in _KINDS.items() if is_it(source)), "test")
        return Finding(path, kind, True, verifiers[kind](path))
    except ForeignTemplate as error:
        return Finding(path, kind, True, ", ".join(error.names), is_foreign=True)
    except ForeignSystem:
        return Finding(path, kind, True, str(read_toml(path).data["scheduler"]), is_foreign=True)
    except BadInput as error:
        return Finding(path, kind, False, with_path(path, str(error)))


def summarize_foreign(findings: Iterable[Finding]) -> Iterator[str]:
    """Yield a line for every kind of unchecked file."""
    foreign = [finding for finding in findings if finding.is_foreign]
    for kind in dict.fromkeys(finding.kind for finding in foreign):
        names = [finding.text for finding in foreign if finding.kind == kind]
        each = sorted({name for text in names for name in text.split(", ")})
        yield f"{len(names)} {kind}{'s' if len(names) > 1 else ''} of {', '.join(each)}"


def _verify_system(path: Path) -> str:
    system = load_system(path)
    if unlisted := unlisted_partition(system):
        raise BadInput(f"{read_toml(path).where(('default_partition',))}: {unlisted.partition(': ')[2]}")
    return f"system {system.name!r}"


def _describe_baseline(path: Path) -> str:
    from cloudai_mbridge.gate.baseline import load_baseline

    return f"baseline of {counted(len(load_baseline(path).points), 'point')}"


def _verify_test(path: Path, warn: Warn | None, count: _Count) -> str:
    if (template := template_of(read_toml(path))) != TEMPLATE:
        raise ForeignTemplate(path, [template])
    definition = load_test_definition(path, warn)
    name = definition.name or "test"  # a name may be empty, an id may not
    return f"test {count(path, LoadedTest(TestRun(id=name, test_name=name), definition, path))}"


def _verify_scenario(path: Path, tests: TestFiles, warn: Warn | None, hooks: Path, count: _Count) -> str:
    """Check a scenario; if several files define a test that it names, with each of the files."""
    data = read_toml(path).data
    runs = data["Tests"] if isinstance(data["Tests"], list) else []
    named = [run["test_name"] for run in runs if isinstance(run, dict) and isinstance(run.get("test_name"), str)]
    texts: dict[str, None] = {}
    for files in tests.choices(named):
        loaded = load_scenario(path, files, warn, hooks)
        counts = []
        for test in loaded.tests:
            with naming_file(test):
                counts.append(count(path, test))
        texts["; ".join(counts)] = None
    several = {name: len(tests.by_name.get(name, ())) for name in named}
    notes = [f"; {number} files define {name!r}, each was tried" for name, number in several.items() if number > 1]
    return f"scenario {data.get('name')!r}: {' or '.join(texts)}{''.join(notes)}"


def _describe_policy(path: Path) -> str:
    from cloudai_mbridge.gate.policy import load_policy

    loaded = load_policy(path)
    reference = loaded.baseline_path or loaded.history_path
    is_there = "" if reference and reference.exists() else ", which does not exist yet"
    return f"policy {loaded.policy.name!r}: {len(loaded.policy.metrics)} metrics against {reference}{is_there}"


def _count(path: Path, test: LoadedTest, *, system: System | None, rules: RuleSet) -> str:
    """Check every point; a valid point must also yield a valid training config, or options that its launcher has."""
    definition = test.definition
    is_pinned = megatron_bridge_of(definition) is not None
    slurm = _ANY_SYSTEM if system is None or system.is_one_machine or not system.install_path else system
    total, broken = 0, Counter[str]()
    rejected: list[tuple[Violation, ...]] = []
    seen: set[tuple[str, str]] = set()
    problems = dict.fromkeys(problems_of_values(test, system or _ANY_SYSTEM))
    unknown = Counter[str]()
    for point in checked_points(SweepSpace(definition, test.run), system, pinned_by(definition, system, rules)):
        total += 1
        if point.violations:
            rejected.append(point.violations)
            broken.update({violation.rule_id for violation in point.violations})
            continue
        unknown.update(point.unknown_software)
        resolved, args, recipe = point.resolve()
        launcher = LAUNCHERS[args.launcher]
        num_steps_of(test, args)
        launcher.training(test, args, recipe, system)
        if not launcher.has_script:
            values = {("launcher", "upstream"), *((name, str(value)) for name, value in point.coordinates.items())}
            if is_pinned and not values <= seen:  # each value once
                seen |= values
                problems |= dict.fromkeys(launcher.problems(plan_run(test, resolved, args, recipe, slurm, 0), slurm))
    if problems:
        raise BadInput("\n".join(f"{path}: {problem}" for problem in problems))
    if total and len(rejected) == total:
        by_rule = ", ".join(f"{rule} {count}" for rule, count in sorted(broken.items()))
        raise BadInput(
            f"{path}: test {test.run.id!r}: every one of its {counted(total, 'point')} is rejected by a rule,"
            f" so nothing would run: {by_rule}; the first: {rejected[0][0]}; {details_hint(broken)}"
        )
    missing_software = [software_note(missing, count) for missing, count in unknown.items()]
    notes = "".join(f"; {note}" for note in (*missing_software, *notes_on_images(test, system)))
    return f"{test.run.id!r} with {counted(total, 'point')}, {len(rejected)} of them rejected by a rule{notes}"


FINDINGS = json_object(
    "Findings", "Results of checking every file. If one is not good, the exit code is 2.", files=list[Finding]
)


@click.command("verify-configs")
@click.argument("configs", metavar="PATH...", type=PATH, nargs=-1, required=True)
@click.option("--system-config", type=PATH, help="Also check placement on this system.")
@click.option("--tests-dir", type=PATH, help="Where scenarios find their tests.")
@click.option("--hook-dir", type=PATH, help="Directory of the hooks' TOMLs; default: as for `run`.")
@ALLOW_UNKNOWN
@RULES
@JSON
def verify_configs(on_unknown_arg: Warn | None, as_json: bool, **options: Any) -> int:
    """Check TOML files, and all TOML files of directories but results of runs; nothing is run or written."""
    findings = []
    for finding in verify(**options, warn=on_unknown_arg):
        findings.append(finding)
        if not finding.is_good:
            show_error(finding.text)
        elif not finding.is_foreign and not as_json:
            click.echo(f"ok    {finding.path}: {finding.text}")
    if as_json:
        print_json({"files": findings}, FINDINGS)
    else:
        for line in summarize_foreign(findings):
            click.echo(f"skipped (not {TEMPLATE}): {line}")
    return OK if all(finding.is_good for finding in findings) else BadInput.exit_code
