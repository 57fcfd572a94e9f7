"""What CloudAI's parser takes loads here and gives a plan, but for what the documentation lists."""

import contextlib
import logging
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cloudai.configurator.env_params import validate_domain_randomization_active
from cloudai.core import Parser

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.loading import load_scenario, load_system
from cloudai_mbridge.plan import ScenarioPlan
from cloudai_mbridge.plan.build import build_plan
from cloudai_mbridge.plan.launchers import refuse_unknown_options
from tests.figures import Figure
from tests.interop.schema_variants import Files, cloudais_files, variants

DOCUMENT = Path(__file__).parents[2] / "docs" / "coming-from-cloudai.md"
NUM_TAKEN = 300
# The first words of an entry of the documented list, and what such a refusal says.
ON_PURPOSE = {
    "Unknown keys of `cmd_args`": r"cmd_args\.\S+: unknown key",
    "Empty list as an axis": r"\[\] is empty",
    "`cmd_args.time_limit` that is not": r"cmd_args\.time_limit: .*is (not a time limit|longer than Slurm)",
    "Options and values that the launcher": r"has no such option|is unknown to the launcher",
    "Counts that make no sense": r"must be greater than|max_steps = -?\d+ trains nothing",
    "Non-finite numbers": r"must be a finite number",
    "Variable names that no shell can export": r"is not a name of an environment variable",
    "Lists and tables in `global_env_vars`": r"global_env_vars\.\S+: .*must be a valid string or a valid integer",
    "Credentials in `extra_cmd_args`": r"would put a credential into a script|(may hold|holds) a credential",
    "Short options in `extra_srun_args`": r"cannot reach the upstream launcher; write long options",
    "An empty `default_partition` or `install_path`": r"default_partition: '' must be|install_path is missing",
    "A measurement window without steps": r"exclude_start_steps = \d+ leaves no step to measure",
    "Hooks of other templates": r"training would start unchecked",
    "`dependencies` on a test of another template": r"and not run by this tool; remove the dependency",
    "Circular dependencies": r"cyclic dependency",
    "Control characters": r"must not contain (control|a NUL)",
    "Values that become a part of a mount": r"(pyxis|enroot|NeMo-Run|the launcher) (separates|splits|reads|puts)",
    "Systems that cannot run the launcher": r"submits Slurm jobs; use a Slurm|is not supported; use one of",
    "Files that are not TOML": r"not valid TOML",
}

Taken = Callable[[Files], bool]


@pytest.fixture
def is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Taken:
    """Ask the real CloudAI, as its `run` and `dry-run` do before they look at the system."""
    monkeypatch.setenv("HF_TOKEN", "hf_interop")
    monkeypatch.setattr(logging.root, "disabled", True)
    logging.disable(logging.CRITICAL)

    def ask(files: Files) -> bool:
        files.write(tmp_path)
        parser = Parser(tmp_path / "system/system.toml", tmp_path / "hook")
        with contextlib.redirect_stdout(None):
            try:
                _, _, scenario = parser.parse(tmp_path / "test", tmp_path / "scenario/scenario.toml")
                assert scenario is not None
                validate_domain_randomization_active(scenario)
            except (SystemExit, Exception):
                return False
        return True

    return ask


@pytest.fixture(autouse=True)
def _logging_again() -> Any:
    yield
    logging.disable(logging.NOTSET)


def plan(directory: Path) -> ScenarioPlan:
    """Plan what `Files.write` wrote."""
    system = load_system(directory / "system/system.toml")
    found = build_plan(load_scenario(directory / "scenario/scenario.toml", directory / "test"), system)
    refuse_unknown_options(found.runs, system)
    return found


def refusal(directory: Path) -> str:
    try:
        plan(directory)
    except BadInput as error:
        return str(error)
    return ""


def entry_of(text: str) -> str:
    """Return the entry of the documented list that a refusal belongs to, "" if none."""
    return next((entry for entry, pattern in ON_PURPOSE.items() if re.search(pattern, text)), "")


def test_seeded_variants(cloudai_source: Path, is_taken: Taken, tmp_path: Path, figure: Figure) -> None:
    counts: Counter[str] = Counter()
    unexpected = []
    for files in variants(cloudai_source, seed=13):
        counts["tried"] += 1
        if not is_taken(files):
            continue
        counts["taken by CloudAI"] += 1
        if text := refusal(tmp_path):
            counts[entry_of(text) or "not on the list"] += 1
            if not entry_of(text):
                unexpected.append(f"{files.name}: {text}")
        if counts["taken by CloudAI"] == NUM_TAKEN:
            break
    figure(f"{dict(counts)}")
    assert not unexpected, "\n".join(unexpected)
    assert counts["taken by CloudAI"] == NUM_TAKEN


def test_the_list_is_documented() -> None:
    section = DOCUMENT.read_text().split("## Refused")[1].split("\n## ")[0]
    entries = re.findall(r"^\| (.+?) \|", section, flags=re.MULTILINE)
    documented = [entry for entry in entries if entry not in ("What", "---")]
    assert [next((name for name in ON_PURPOSE if entry.startswith(name)), entry) for entry in documented] == list(
        ON_PURPOSE
    )


def test_cloudais_own_files(cloudai_source: Path, is_taken: Taken, tmp_path: Path) -> None:
    assert is_taken(cloudais_files(cloudai_source))
    found = plan(tmp_path)
    assert len(found.runs) == 1


# Forms that one value of a palette cannot show


def _scenario(**keys: Any) -> Callable[[Files], None]:
    return lambda files: files.scenario["Tests"][0].update(keys)


def _test(**keys: Any) -> Callable[[Files], None]:
    return lambda files: files.test.update(keys)


def _test_of_release(commit: str, **keys: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files.test["git_repos"][0]["commit"] = commit
        files.test.update(keys)

    return change


def _text(name: str, old: str, new: str) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        import toml

        files.text[name] = toml.dumps(getattr(files, name)).replace(old, new)

    return change


def _inline(files: Files) -> None:
    files.scenario["Tests"] = [{"id": "inline", **files.test}]


def _hex(files: Files) -> None:
    files.test["cmd_args"]["num_gpus"] = 16
    _text("test", "num_gpus = 16", "num_gpus = 0x10")(files)


FORMS: dict[str, Callable[[Files], None]] = {
    "srun arguments of a test": _scenario(extra_srun_args="--reservation r --exclusive"),
    "reward of a test": _scenario(agent_reward_function="identity"),
    "reward": _test(agent_reward_function="negative"),
    "training report": _test(training_report={"exclude_start_steps": 2, "exclude_post_profiling_steps": 0}),
    "no env_params": _test(env_params={}),
    "home of models": lambda files: files.system.update(hf_home_path="/models"),
    "one excluded argument": _test(dse_excluded_args="cmd_args.cuda_graph_scope"),
    "index in an override": _test(extra_cmd_args={"a[2].b": "1"}),
    "launcher option as an override": _test_of_release("v0.3.1", extra_cmd_args={"--optimizer_type": "muon"}),
    "node group": _scenario(nodes=["partition_1:group_1:2"]),
    "all free nodes of a group": _scenario(nodes=["partition_1:group_2:max_avail"]),
    "node ranges": _scenario(nodes=["node-[001-002]"], exclude_nodes=["node-[003,005-006]"]),
    "nsys": _test(nsys={"trace": "cuda,nvtx", "extra_args": ["--stats=false"]}),
    "nsys of a scenario": _scenario(nsys={"enable": False}),
    "an installed repository": lambda files: files.test["git_repos"][0].update(installed_path="/x", mount_as="/opt/m"),
    "several repositories": lambda files: files.test["git_repos"].append(
        {"url": "https://github.com/NVIDIA/Megatron-LM.git", "commit": "main", "init_submodules": True}
    ),
    "repositories of a scenario": lambda files: _scenario(git_repos=files.test["git_repos"])(files),
    "no repositories of a scenario": _scenario(git_repos=[]),
    "variables of a scenario": _scenario(extra_env_vars={"A": "1", "B": ["1", "2"]}),
    "weights": _scenario(weight=3, sol=1.5, ideal_perf=2.0),
    "weights as text": _scenario(weight="3", sol="1.5", ideal_perf="2"),
    "a sweep of text": _scenario(cmd_args={"tp": ["1", "2"]}),
    "no nodes": _scenario(num_nodes=0),
    "an empty list of nodes": _scenario(num_nodes=[]),
    "an override in a key": _test(extra_cmd_args={"model.x=1": "", "model.y=1": "2", "dataset.label_key": "x"}),
    "time limit of the arguments": lambda files: files.test["cmd_args"].update(time_limit="10m"),
    "a sweep of nodes": _scenario(num_nodes=[1, 2]),
    "defined in the scenario": _inline,
    "hexadecimal": _hex,
    "Windows line ends": _text("test", "\n", "\r\n"),
    "comments": _text("scenario", "[[Tests]]", "[[Tests]] # the only one"),
    "spaces in a header": _text("scenario", "[[Tests]]", "[[ Tests ]]"),
    **{f"time limit {limit}": _scenario(time_limit=limit) for limit in ("10m", "1h", "2d", "90s", "1W", "1-02:03:04")},
    **{f"time limit {limit!r}": _scenario(time_limit=limit) for limit in ("", "00:30:00", "10:30", "1:2:3")},
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form(form: str, cloudai_source: Path, is_taken: Taken, tmp_path: Path) -> None:
    files = cloudais_files(cloudai_source)
    FORMS[form](files)
    assert is_taken(files)
    assert refusal(tmp_path) == ""


def _circle(files: Files) -> None:
    first = files.scenario["Tests"][0]
    files.scenario["Tests"] = [
        {**first, "id": one, "dependencies": [{"type": "start_post_comp", "id": other}]} for one, other in ("ab", "ba")
    ]


def _foreign_dependency(files: Files) -> None:
    nap = {"id": "nap", "name": "n", "description": "d", "test_template_name": "Sleep", "cmd_args": {"seconds": 1}}
    files.scenario["Tests"][0]["dependencies"] = [{"type": "start_post_comp", "id": "nap"}]
    files.scenario["Tests"].append(nap)


PASSWORD = "https://me:secret@example.com/Megatron-Bridge.git"
REFUSED: dict[str, Callable[[Files], None]] = {
    "Unknown keys of `cmd_args`": lambda files: files.test["cmd_args"].update(tpp=2),
    "Empty list as an axis": lambda files: files.test["cmd_args"].update(tp=[]),
    "`cmd_args.time_limit` that is not": lambda files: files.test["cmd_args"].update(time_limit="soon"),
    "Options and values that the launcher": lambda files: files.test["cmd_args"].update(offline=True),
    "Counts that make no sense": lambda files: files.test["cmd_args"].update(max_steps=0),
    "Non-finite numbers": lambda files: files.test["cmd_args"].update(lr=float("inf")),
    "Variable names that no shell can export": _test(extra_env_vars={"with-dash": "1"}),
    "Lists and tables in `global_env_vars`": lambda files: files.system["global_env_vars"].update(A=["1"]),
    "Credentials in `extra_cmd_args`": lambda files: files.test["git_repos"][0].update(url=PASSWORD),
    "Short options in `extra_srun_args`": lambda files: files.system.update(extra_srun_args="-N 2"),
    "An empty `default_partition` or `install_path`": lambda files: files.system.update(default_partition=""),
    "A measurement window without steps": lambda files: files.test.update(
        training_report={}, cmd_args={**files.test["cmd_args"], "max_steps": 5}
    ),
    "`dependencies` on a test of another template": _foreign_dependency,
    "Circular dependencies": _circle,
    "Control characters": lambda files: files.system.update(account="a\nb"),
    "Values that become a part of a mount": lambda files: files.test["cmd_args"].update(nemo_home="/cache/a,b"),
    "Systems that cannot run the launcher": lambda files: files.system.update(scheduler="standalone"),
    "Files that are not TOML": _text("test", "extra_container_mounts = []", "extra_container_mounts = [,]"),
}


@pytest.mark.parametrize("entry", [entry for entry in ON_PURPOSE if not entry.startswith("Hooks")])
def test_what_is_refused_on_purpose(entry: str, cloudai_source: Path, is_taken: Taken, tmp_path: Path) -> None:
    """An entry of the list that CloudAI refuses too would not belong there."""
    files = cloudais_files(
        cloudai_source, "standalone_system" if entry.startswith("Systems") else "example_slurm_cluster"
    )
    REFUSED[entry](files)
    assert is_taken(files)
    assert entry_of(refusal(tmp_path)) == entry


def test_cloudais_hook_is_refused_on_purpose(
    cloudai_source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_interop")
    files = cloudais_files(cloudai_source)
    files.scenario["pre_test"] = "nccl_test"
    files.write(tmp_path)
    scenario, hooks = tmp_path / "scenario/scenario.toml", cloudai_source / "conf/hook"
    _, _, found = Parser(tmp_path / "system/system.toml", hooks).parse(tmp_path / "test", scenario)
    assert found is not None
    assert found.test_runs[0].pre_test is not None
    with pytest.raises(BadInput) as refused:
        load_scenario(scenario, tmp_path / "test", hooks=hooks)
    assert entry_of(str(refused.value)).startswith("Hooks")
    assert load_scenario(scenario, tmp_path / "test", hooks=None).tests


@pytest.mark.parametrize("limit", ["10m", "1h", "2d", "90s", "3w", "25h", "1-02:03:04", "00:30:00", "10:30", "1:02:03"])
def test_time_limits_mean_the_same(limit: str) -> None:
    from cloudai.util import parse_time_limit as theirs

    from cloudai_mbridge.models.slurm_values import parse_time_limit, slurm_time

    assert parse_time_limit(slurm_time(limit)) == theirs(limit).total_seconds()


def test_two_tests_of_a_scenario(cloudai_source: Path, is_taken: Taken, tmp_path: Path) -> None:
    files = cloudais_files(cloudai_source)
    dependency = {"type": "start_post_comp", "id": "megatron_bridge_qwen_30b"}
    files.scenario["Tests"].append({**files.scenario["Tests"][0], "id": "second", "dependencies": [dependency]})
    assert is_taken(files)
    assert refusal(tmp_path) == ""


def test_templates_may_mix(cloudai_source: Path, is_taken: Taken, tmp_path: Path) -> None:
    files = cloudais_files(cloudai_source)
    nap = {"name": "nap", "description": "d", "test_template_name": "Sleep", "cmd_args": {"seconds": 1}}
    files.scenario["Tests"].append({"id": "nap", **nap})
    assert is_taken(files)
    found = plan(tmp_path)
    assert [run.test_id for run in found.runs] == ["megatron_bridge_qwen_30b"]
    assert any("nap (Sleep)" in note for note in found.notes)


def test_cloudais_whole_tree_verifies_calmly(cloudai_source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cloudai_mbridge.commands.plan.verify import summarize_foreign, verify

    monkeypatch.chdir(cloudai_source)
    findings = list(verify([Path("conf")], None, None))
    assert [finding.text for finding in findings if not finding.is_good] == []
    assert sum(not finding.is_foreign for finding in findings) >= 10
    assert len(list(summarize_foreign(findings))) <= 3
