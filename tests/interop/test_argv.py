"""400 random configurations: our command line of the launcher equals the real CloudAI's, but for docs/launcher.md."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import toml
from cloudai.parser import Parser
from cloudai.workloads.megatron_bridge.megatron_bridge import MegatronBridgeCmdArgs
from cloudai.workloads.megatron_bridge.slurm_command_gen_strategy import MegatronBridgeSlurmCommandGenStrategy

from cloudai_mbridge.megatron_bridge import start_launcher
from cloudai_mbridge.models.loading import load_scenario, load_system
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.plan.checks import resolve_groups, unknown_states
from cloudai_mbridge.plan.launcher_command import launcher_words
from cloudai_mbridge.plan.run_plan import plan_run
from cloudai_mbridge.sweep.expand import expand
from tests.figures import Figure
from tests.interop.random_tomls import Files, files

CONFIGURATIONS = 400
MOST_POINTS = 2  # of a sweep
FIELDS = {name: field.annotation for name, field in MegatronBridgeCmdArgs.model_fields.items()}
SHELL = {"HOME": "/home/me", "SCRATCH": "/scratch/of-mine"}  # what both command lines refer to
STEP = 10  # one in so many is dry-run in full


@dataclass(frozen=True)
class Pair:
    """One point's command line by CloudAI and by us."""

    made: Files
    directory: Path
    theirs: list[str]
    ours: list[str]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> list[Pair]:
    """Return the command lines of the first points of every configuration."""
    directory = tmp_path_factory.mktemp("argv")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_TOKEN", "hf_0f-the-environment")
        for name, value in SHELL.items():
            patch.setenv(name, value)
        patch.chdir(directory)
        (directory / "image.sqsh").touch()
        return [pair for seed in range(CONFIGURATIONS) for pair in _pairs(directory / str(seed), seed)]


def _pairs(directory: Path, seed: int) -> Iterator[Pair]:
    made = files(seed, FIELDS)
    _write(directory, made)
    for theirs, ours in zip(_theirs(directory), _ours(directory), strict=True):
        yield Pair(made, directory, theirs, ours)


def _write(directory: Path, made: Files) -> None:
    (directory / "test").mkdir(parents=True)
    system = {**made.system, "install_path": str(directory / "install"), "output_path": str(directory / "out")}
    (directory / "system.toml").write_text(toml.dumps(system))
    (directory / "scenario.toml").write_text(toml.dumps({"name": "s", "Tests": [made.entry]}))
    if made.by_name:
        (directory / "test/t.toml").write_text(toml.dumps(made.test))


def _theirs(directory: Path) -> Iterator[list[str]]:
    """Have CloudAI write its script for each point, and return the launcher's arguments in it."""
    parser = Parser(directory / "system.toml", hook_root=directory / "none")
    system, _, scenario = parser.parse(directory / "test", directory / "scenario.toml")
    assert scenario
    (test_run,) = scenario.test_runs
    launcher = f"{directory}/install/Megatron-Bridge__v0.3.0/scripts/performance/setup_experiment.py"
    for i, point in enumerate((test_run.all_combinations or [{}])[:MOST_POINTS]):
        run = test_run.apply_params_set(point) if point else test_run
        run.output_path = directory / "out" / str(i)
        MegatronBridgeSlurmCommandGenStrategy(system, run).gen_exec_command()
        (script,) = run.output_path.glob("cloudai_megatron_bridge_submit_and_parse_jobid.sh")
        (line,) = re.findall(r"^NEMORUN_HOME=.* (?=>>\"\$LOG\")", script.read_text(), re.MULTILINE)
        layout = run.test.cmd_args.pipeline_model_parallel_layout
        yield _by_bash(_quoted(line.partition(f" {launcher} ")[2], layout))


def _quoted(line: str, layout: str | None) -> str:
    """Quote a layout, after checking that no shell takes it as CloudAI writes it."""
    if layout is None or f" {layout} " not in line:
        return line
    parsed = subprocess.run(["bash", "-n", "-c", line], capture_output=True, check=False)
    assert parsed.returncode or "|" in layout
    return line.replace(f" {layout} ", f" {shlex.quote(layout)} ")


def _by_bash(line: str) -> list[str]:
    """Return the words that bash makes of a line."""
    done = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], capture_output=True, check=True)
    return done.stdout.decode().split("\0")[:-1]


def _ours(directory: Path) -> Iterator[list[str]]:
    system = load_system(directory / "system.toml")
    assert isinstance(system, SlurmSystem)
    loaded = load_scenario(directory / "scenario.toml", directory / "test")
    (test,) = resolve_groups(loaded, system, unknown_states).tests
    for point in itertools.islice(expand(test.definition, test.run), MOST_POINTS):
        words = launcher_words(plan_run(test, point, point.args, None, system, 0), system)
        yield _by_bash(" ".join(quoted for _, quoted in words))


# docs/launcher.md, "Differences from CloudAI's command line", number by number


def credentials_by_name(pair: Pair, argv: list[str]) -> list[str]:
    variables = {"-hf": "HF_TOKEN", "-wdk": "WANDB_API_KEY"}
    return [variables.get(before, word) for before, word in itertools.pairwise(["", *argv])]


def no_credential_in_the_environment(pair: Pair, argv: list[str]) -> list[str]:
    return list(without(argv, "-cb", lambda value: value.startswith("export SOME_API_KEY=")))


def gpu_always(pair: Pair, argv: list[str]) -> list[str]:
    place = argv.index("-p") + 2
    return argv if "-g" in argv else [*argv[:place], "-g", "gb200", *argv[place:]]


def quoted_values(pair: Pair, argv: list[str]) -> list[str]:
    """Take our form of a variable that a shell would split, after checking that CloudAI's does not survive one."""
    ours = {word.partition("=")[0]: word for word in pair.ours if word.startswith("export ")}
    special = re.compile(r"""[;'"\s]""")
    return [
        ours[word.partition("=")[0]] if word.startswith("export ") and special.search(word.partition("=")[2]) else word
        for word in argv
    ]


def joined_values(pair: Pair, argv: list[str]) -> list[str]:
    text = "\0".join(argv)
    return text.replace("\0--cuda-event-trace", "=--cuda-event-trace").split("\0")


def single_parameter(pair: Pair, argv: list[str]) -> list[str]:
    return [
        word + ";" if before == "--additional_slurm_params" and " " in word and ";" not in word else word
        for before, word in itertools.pairwise(["", *argv])
    ]


def arguments_that_act(pair: Pair, argv: list[str]) -> list[str]:
    """Take our two overrides, which stand between CloudAI's and the user's."""
    names = ("mixed_precision.fp8_recipe=", "ddp.num_distributed_optimizer_instances=")
    added = [word for word in pair.ours if word.startswith(names)]
    wanted = {"fp8_recipe", "num_distributed_optimizer_instances"} & pair.made.test["cmd_args"].keys()
    assert len(added) == len(wanted)
    place = argv.index("logger.log_memory_to_tensorboard=true") + 1
    return [*argv[:place], *added, *argv[place:]]


def absolute_paths(pair: Pair, argv: list[str]) -> list[str]:
    """Take our form of a path that is relative to where the command was started."""
    here = os.path.dirname(pair.directory)
    flags = ("-l", "-nh", "-cm")
    return [
        re.sub(r"(^|,)(?:\./)?(?=\w)", rf"\g<1>{here}/", word) if before in flags else word
        for before, word in itertools.pairwise(["", *argv])
    ]


DIFFERENCES: tuple[Callable[[Pair, list[str]], list[str]], ...] = (
    credentials_by_name,
    no_credential_in_the_environment,
    gpu_always,
    quoted_values,
    joined_values,
    single_parameter,
    arguments_that_act,
    absolute_paths,
)


def without(argv: list[str], flag: str, is_unwanted: Callable[[str], bool]) -> Iterator[str]:
    words = iter(argv)
    for word in words:
        value = next(words) if word == flag else ""
        if not (word == flag and is_unwanted(value)):
            yield from (word, value) if word == flag else (word,)


def test_equal_but_for_the_documented_differences(pairs: list[Pair], figure: Figure) -> None:
    used: Counter[str] = Counter()
    same_but_credentials = 0
    for pair in pairs:
        expected = pair.theirs
        for difference in DIFFERENCES:
            changed = difference(pair, expected)
            used[difference.__name__] += changed != expected
            expected = changed
        assert pair.ours == expected
        same_but_credentials += pair.ours == credentials_by_name(pair, pair.theirs)
    figure(f"{CONFIGURATIONS} configurations, {len(pairs)} points: {len(pairs)} equal; {same_but_credentials} without")
    figure(f"any difference but the credentials' values; differences by use: {dict(used)}")
    assert all(used[difference.__name__] for difference in DIFFERENCES), "a difference that is never seen"


def test_the_real_launcher_takes_what_it_takes_of_cloudai(
    pairs: list[Pair], launcher_0_3: Path, tmp_path: Path, figure: Figure
) -> None:
    """Its argument parser for all of them; its whole dry run for every tenth."""
    parsed = _parse(launcher_0_3, [pair.theirs for pair in pairs]), _parse(launcher_0_3, [pair.ours for pair in pairs])
    refused = [pair.ours for theirs, ours, pair in zip(*parsed, pairs, strict=True) if theirs and not ours]
    figure(f"of {len(pairs)} command lines the parser takes {sum(parsed[0])} of CloudAI's, {sum(parsed[1])} of ours")
    assert not refused
    some = [pair for pair in pairs[::STEP] if "--list_config_variants" not in pair.ours]  # it asks and waits
    started = [_dry_run(launcher_0_3, [argv(pair) for pair in some], tmp_path / name) for name, argv in BOTH.items()]
    taken = [[code == 0 for code in codes()] for codes in started]
    figure(f"of {len(some)} dry runs end well {sum(taken[0])} of CloudAI's, {sum(taken[1])} of ours")
    assert sum(taken[0]) > 5
    assert not [pair.ours for theirs, ours, pair in zip(*taken, some, strict=True) if theirs and not ours]


BOTH: dict[str, Callable[[Pair], list[str]]] = {"theirs": lambda pair: pair.theirs, "ours": lambda pair: pair.ours}

_PARSE = """
import contextlib, io, json, sys
sys.path.insert(0, sys.argv[1])
from argument_parser import parse_cli_args
def takes(argv):
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            parse_cli_args().parse_known_args(argv)
    except (SystemExit, Exception):
        return False
    return True
print(json.dumps([takes(argv) for argv in json.load(sys.stdin)]))
"""


def _parse(launcher: Path, commands: list[list[str]]) -> list[bool]:
    argv = [sys.executable, "-c", _PARSE, str(launcher / "scripts/performance")]
    done = subprocess.run(argv, input=json.dumps(commands), capture_output=True, text=True, check=True)
    found: list[bool] = json.loads(done.stdout.splitlines()[-1])
    return found


def _dry_run(launcher: Path, commands: list[list[str]], directory: Path) -> Callable[[], list[int]]:
    """Start dry runs, one after another; return what waits for their exit codes."""
    directory.mkdir()
    (directory / "commands.json").write_text(json.dumps([["-d", *argv] for argv in commands]))
    script, starter = Path(__file__).with_name("launch_many.py"), start_launcher.__file__
    path = launcher / "scripts/performance/setup_experiment.py"
    process = subprocess.Popen(
        [sys.executable, script, path, starter, directory / "commands.json", directory],
        env={**os.environ, "NEMORUN_HOME": str(directory / "nemo_run"), "HF_TOKEN": "hf_x"},
    )

    def codes() -> list[int]:
        assert process.wait() == 0
        return list(json.loads((directory / "codes.json").read_text()))

    return codes
