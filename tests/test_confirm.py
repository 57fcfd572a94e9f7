"""Which runs confirm a finished run, from which files, and on which nodes. Slurm is a fake here."""

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.console import SteadyConsole
from cloudai_mbridge.commands.gate import confirm
from cloudai_mbridge.commands.run.watch import observer_for as live_observer_for
from cloudai_mbridge.errors import BadInput, ToolFailure
from cloudai_mbridge.files.run_files import recorded_runs
from cloudai_mbridge.files.text import slug
from cloudai_mbridge.megatron_bridge.launcher_plan import Repo, UpstreamPlan
from cloudai_mbridge.models.loading import load_system
from cloudai_mbridge.models.system import LocalSystem
from cloudai_mbridge.plan import RunPlan, ScenarioPlan
from cloudai_mbridge.plan.read import read_plan
from cloudai_mbridge.runner import Journal, Observer
from cloudai_mbridge.runner.clock import PlainObserver
from cloudai_mbridge.runner.lock import driver_lock
from cloudai_mbridge.schedulers.interface import JobClass, JobStatus
from tests.golden import RUN_TIME, Sentence

pytestmark = pytest.mark.process

SLURM = """name = "c"
scheduler = "slurm"
default_partition = "main"
gpus_per_node = 4
executor = "{executor}"
global_env_vars = {{ A_TOKEN = "S3CRET", B = "it's $(id) \\u007f" }}
[[partitions]]
name = "main"
nodes = ["n[1-2]", "n3"]
"""
LOCAL = 'name = "l"\nscheduler = "local"\nglobal_env_vars = { A_TOKEN = "S3CRET" }\n'
SCENARIO = """name = "a scenario"
[runner]
max_parallel = 7
hang_timeout_s = 77.5
[[Tests]]
id = "sweep"
name = "s"
description = "it's \\"quoted\\" \\\\ \U0001f600 {{x}}"
test_template_name = "MegatronBridge"
iterations = {iterations}
exclude_nodes = ["n9"]
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
compute_dtype = "fp32"
num_gpus = 2
max_steps = 10
lr = 1e-05
mb = [1, 2, 3]
gb = 8
[Tests.extra_cmd_args]
"rng.seed" = "7"
[Tests.extra_env_vars]
C = ["one two", "three"]
[[Tests]]
id = "later test"
name = "l"
description = "waits"
test_template_name = "MegatronBridge"
num_nodes = 2
dependencies = [{{ type = "start_post_comp", id = "sweep" }}]
[Tests.cmd_args]
launcher = "embedded"
model_recipe_name = "gpt_tiny"
num_gpus = 2
max_steps = 10
"""
UPSTREAM = """name = "a scenario"
[[Tests]]
id = "sweep"
name = "u"
description = "d"
test_template_name = "MegatronBridge"
iterations = {iterations}
exclude_nodes = ["n9"]
[Tests.cmd_args]
model_family_name = "llama"
model_recipe_name = "llama3_8b"
num_gpus = 4
hf_token = "S3CRET"
container_image = "nvcr.io#nvidia/nemo:26.02"
tp = [1, 2]
[[Tests.git_repos]]
url = "https://example.org/Megatron-Bridge.git"
commit = "v0.3.0"
mount_as = "/opt/Megatron-Bridge"
[Tests.extra_cmd_args]
bare = ""
"model.seq_length" = "4096"
"""


class Fake:
    """A cluster of three nodes that submits nothing."""

    def __init__(self, nodes: Iterable[str] = ("n1", "n2", "n3"), unhealthy: Iterable[str] = ()) -> None:
        self.nodes, self.unhealthy, self.is_silent, self.is_dumb = set(nodes), set(unhealthy), False, False

    def preflight(self) -> None:
        if self.is_silent:
            raise ToolFailure("Slurm does not answer")

    def unhealthy_nodes(self, nodes: str) -> dict[str, str]:
        assert nodes == "n[1-2],n3"
        return dict.fromkeys(self.unhealthy, "drained")

    def num_usable_nodes(self, exclude: Iterable[str]) -> int | None:
        return None if self.is_dumb else len(self.nodes - set(exclude))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(pipeline, "scheduler_for", lambda *_: made)
    monkeypatch.setenv("A_TOKEN", "S3CRET")
    monkeypatch.setenv("HF_TOKEN", "S3CRET")
    return made


SYSTEM = SLURM.format(executor="mbridge")


def write(
    directory: Path, system: str = SYSTEM, iterations: int = 3, where: str = "out", scenario: str = SCENARIO
) -> Path:
    """Write what `mbridge dry-run` writes; return its root."""
    (directory / "system.toml").write_text(system)
    (directory / "scenario.toml").write_text(scenario.format(iterations=iterations), encoding="utf-8")
    files = (directory / "system.toml", directory / "scenario.toml")
    return pipeline.write(pipeline.plan(pipeline.Request(*files, None, directory / where)))


def end(root: Path, nodes: Mapping[str, str] | None = None) -> None:
    """Write down that all runs have ended; nodes: by a part of the key, n1 for all others."""
    with contextlib.closing(Journal(root / "journal.sqlite")) as journal:
        keys = [run.key for run in read_plan(root, needs_secrets=False).runs]
        journal.plan(keys)
        for number, key in enumerate(keys):
            had = next((each for part, each in (nodes or {}).items() if part in key), "n1")
            journal.intend([(key, 1)], "cafe")
            journal.submitted(key, 1, str(number))
            journal.saw(key, 1, JobStatus("COMPLETED", JobClass.SUCCEEDED, exit_code=0, nodes=had))
            journal.decided(key, "success", [])


def points_of(root: Path) -> list[str]:
    return list(dict.fromkeys(f"{run.test_id}/{run.label}" for run in read_plan(root, needs_secrets=False).runs))


@pytest.fixture
def root(tmp_path: Path, fake: Fake) -> Path:
    root = write(tmp_path)
    end(root)
    return root


def planned(root: Path, *points: str, repeats: int = 2) -> ScenarioPlan:
    return confirm.prepare(root, points, repeats)[0].plan


# The runs


def test_further_iterations_of_the_points_and_nothing_else(root: Path) -> None:
    sweep, *_, later = points_of(root)
    plan = planned(root, later, sweep, later)
    assert [run.iteration for run in plan.runs] == [1, 2, 3, 4]
    assert [run.key for run in plan.runs[2:]] == [f"{sweep}/3", f"{sweep}/4"]
    assert plan.runs[0].key == f"later_test-{plan.runs[0].key.split('-', 1)[1]}"
    assert {f"{run.test_id}/{run.label}" for run in plan.runs} == {sweep, later}
    assert plan.scenario == "a scenario"
    assert plan.tests == ("later test", "sweep")
    assert (plan.runner.max_parallel, plan.runs[0].hang_timeout_s) == (7, 77.5)
    assert not any(run.after_completion or run.after_start or run.end_with for run in plan.runs)
    assert [(run.array, run.array_index) for run in plan.runs] == [
        ("arrays/0", 0),
        ("arrays/0", 1),
        ("arrays/1", 0),
        ("arrays/1", 1),
    ]
    first = read_plan(root).runs[0]
    changed = {"key", "iteration", "exclude_nodes", "array", "array_index", "training_config", "definition"}
    new = plan.runs[2]
    assert {f.name for f in fields(RunPlan) if getattr(new, f.name) != getattr(first, f.name)} <= changed
    assert dict(new.secret_env) == {"A_TOKEN": "S3CRET"}


def test_confirming_a_confirmation_goes_on_counting(root: Path, tmp_path: Path) -> None:
    prepared, _ = confirm.prepare(root, points_of(root)[:1], 2)
    new = pipeline.write(replace(prepared, output_dir=tmp_path / "again"))
    end(new)
    assert [run.iteration for run in planned(new, points_of(root)[0]).runs] == [5, 6]


@pytest.mark.parametrize("executor", ["mbridge", "nemo_run"])
def test_files_are_those_of_a_fresh_dry_run(tmp_path: Path, fake: Fake, executor: str) -> None:
    """Byte for byte, where no node is avoided."""
    fake.nodes = {"n1"}
    system = SLURM.format(executor=executor)
    root = write(tmp_path, system)
    end(root)
    compare_with_fresh(root, write(tmp_path, system, iterations=5, where="fresh"), tmp_path)


def test_files_are_those_of_a_fresh_dry_run_here(tmp_path: Path, fake: Fake) -> None:
    scenario = SCENARIO.replace('exclude_nodes = ["n9"]', "").replace("num_nodes = 2", "")
    root = write(tmp_path, LOCAL, scenario=scenario)
    end(root, {"": ""})
    compare_with_fresh(root, write(tmp_path, LOCAL, 5, "fresh", scenario), tmp_path)


Refused = Callable[..., None]


@pytest.fixture
def refused(sentence: Sentence) -> Refused:
    def check(root: Path, *points: str, repeats: int = 1, place: str | None = None) -> None:
        with pytest.raises(BadInput, match=place) as caught:
            confirm.confirm(root, points, repeats, _nobody)
        sentence(caught, time=RUN_TIME)
        assert "\n" not in str(caught.value)

    return check


def test_files_of_the_upstream_launcher_are_those_of_a_fresh_dry_run(
    tmp_path: Path, fake: Fake, refused: Refused
) -> None:
    system = f'install_path = "{tmp_path}/installed-here"\n{SYSTEM}'
    fake.nodes = set()
    root = write(tmp_path, system, scenario=UPSTREAM)
    end(root)
    compare_with_fresh(root, write(tmp_path, system, 5, "fresh", UPSTREAM), tmp_path, num_points=2)
    point = points_of(root)[0]
    fake.nodes = {"n1", "n2"}
    exclude(root, "n8")
    prepared, _ = confirm.prepare(root, [point], 1)
    new = pipeline.write(replace(prepared, output_dir=tmp_path / "newer"))
    assert "exclude=n9,n1,n8" in (new / point / "3" / "launcher.sh").read_text()
    (tmp_path / "installed-here").mkdir()  # an image that was installed since would be used by a further run
    (tmp_path / "installed-here" / f"{slug('nvcr.io#nvidia/nemo:26.02')}.sqsh").touch()
    refused(root, point, place=r"launcher\.sh: ")


def compare_with_fresh(root: Path, fresh: Path, directory: Path, num_points: int = 4) -> None:
    sweep = [point for point in points_of(root) if point.startswith("sweep/")]
    prepared, _ = confirm.prepare(root, sweep, 2)
    new = pipeline.write(replace(prepared, output_dir=directory / "new"))
    assert load_system(new / "system.toml") == load_system(fresh / "system.toml")
    assert len(sweep) == num_points
    for point in sweep:
        for iteration in ("3", "4"):
            files = {path.name: path.read_bytes() for path in (fresh / point / iteration).iterdir()}
            assert {path.name: path.read_bytes() for path in (new / point / iteration).iterdir()} == files
            assert len(files) >= 2
        assert sorted(path.name for path in (new / point).iterdir()) == ["3", "4"]
    assert not [path for path in new.rglob("*") if path.is_file() and b"S3CRET" in path.read_bytes()]


def test_avoided_nodes_are_the_only_other_line(root: Path, tmp_path: Path) -> None:
    fresh = write(tmp_path, iterations=5, where="fresh")
    point = points_of(root)[0]
    prepared, _ = confirm.prepare(root, [point], 1)
    new = pipeline.write(replace(prepared, output_dir=tmp_path / "new"))
    script = (new / point / "3" / "job.sbatch").read_text()
    assert "#SBATCH --exclude=n9,n1\n" in script
    expected = (fresh / point / "3" / "job.sbatch").read_text()
    assert script == expected.replace("--exclude=n9\n", "--exclude=n9,n1\n")


# The nodes


def avoided(root: Path, fake: Fake, *points: str) -> tuple[dict[str, tuple[str, ...]], str]:
    plan = planned(root, *points)
    return {f"{run.test_id}/{run.label}": run.exclude_nodes for run in plan.runs}, "\n".join(plan.notes)


def test_every_point_avoids_its_own_nodes(tmp_path: Path, fake: Fake) -> None:
    root = write(tmp_path)
    one, two, *_ = points_of(root)
    end(root, {f"{one}/0": "n1", f"{one}/1": "n[1,3]", two: "n2"})
    nodes, notes = avoided(root, fake, one, two)
    assert nodes == {one: ("n9", "n1", "n3"), two: ("n9", "n2")}
    assert f"{one}: avoids n1, n3, where its earlier runs were\n" in notes
    assert notes.startswith(f"further runs of {root.name}\n")


def test_slow_nodes_are_avoided_too(tmp_path: Path, fake: Fake) -> None:
    root = write(tmp_path)
    one, *_ = points_of(root)
    end(root, {f"{one}/0": "n1", f"{one}/1": "n1"})
    plan = confirm.prepare(root, [one], 1, ["n2", "n1"])[0].plan
    assert plan.runs[0].exclude_nodes == ("n9", "n1", "n2")
    assert f"{one}: avoids n1, where its earlier runs were, and n2, which the gate found slow" in plan.notes


@pytest.mark.parametrize("why", ["too_few", "unhealthy", "excluded"])
def test_the_same_nodes_where_there_are_no_others(tmp_path: Path, fake: Fake, why: str) -> None:
    root = write(tmp_path)
    one, two, *_ = points_of(root)
    end(root, {one: "n1", two: "n2"})
    if why == "too_few":
        fake.nodes = {"n1", "n9"}  # n9 is excluded by the scenario
    elif why == "unhealthy":
        fake.unhealthy = {"n2", "n3"}
    else:
        exclude(root, "n2", "n3")
    nodes, notes = avoided(root, fake, one)
    assert nodes == {one: ("n9",)}
    assert f"{one}: the cluster has no other nodes, so the same ones were used" in notes


def exclude(root: Path, *nodes: str) -> None:
    with contextlib.closing(Journal(root / "journal.sqlite")) as journal:
        for node in nodes:
            journal.exclude(node, "pre_test failed")


def test_a_point_on_many_nodes_needs_as_many_others(root: Path, fake: Fake) -> None:
    later = points_of(root)[-1]
    assert avoided(root, fake, later)[0] == {later: ("n1",)}
    fake.nodes = {"n1", "n2"}
    assert avoided(root, fake, later)[0] == {later: ()}


def test_points_with_the_same_note_share_it(root: Path, fake: Fake) -> None:
    one, two, *_ = points_of(root)
    assert f"{one}, {two}: avoids n1, where" in avoided(root, fake, one, two)[1]


def test_excluded_nodes_stay_excluded(root: Path) -> None:
    exclude(root, "n3")
    prepared, excluded = confirm.prepare(root, points_of(root)[:1], 1)
    assert excluded == {"n3": "pre_test failed"}
    assert prepared.plan.runs[0].exclude_nodes == ("n9", "n1")  # the runner excludes n3, and says why


@pytest.mark.parametrize("had", ["", "[bad"])
def test_nodes_that_nobody_knows(tmp_path: Path, fake: Fake, had: str) -> None:
    root = write(tmp_path)
    end(root, {"": had})
    nodes, notes = avoided(root, fake, points_of(root)[0])
    assert set(nodes.values()) == {("n9",)}
    assert "the nodes it ran on are unknown" in notes


def test_a_cluster_that_names_no_nodes(root: Path, fake: Fake) -> None:
    fake.is_dumb = True
    assert "the cluster's other nodes are unknown" in avoided(root, fake, points_of(root)[0])[1]


def _run(**more: Any) -> RunPlan:
    values: dict[str, Any] = {field.name: () for field in fields(RunPlan) if field.default is field.default_factory}
    values |= {"key": "t/single/0", "test_id": "t", "label": "single", "iteration": 0, "num_nodes": 1}
    return RunPlan(**{**values, "secret_env": {}, **more})


PAST = {"t/single": ["n1"]}, {"n7": "unhealthy"}


def test_named_nodes_and_this_machine_are_used_again(root: Path, fake: Fake) -> None:
    system = pipeline.read(root).system
    named = _run(nodes=("n[1-2]",))
    assert confirm.avoid([named], system, fake, *PAST) == (  # type: ignore[arg-type]
        {"t/single": ()},
        ("t/single: its scenario names its nodes (n[1-2]); the same ones were used",),
    )
    _, notes = confirm.avoid([_run()], LocalSystem(name="l", scheduler="local"), fake, *PAST)  # type: ignore[arg-type]
    assert notes == ("t/single: this is the only machine, so the same one was used",)


def test_a_run_that_had_company_is_said_to_be_alone(root: Path, fake: Fake) -> None:
    system = pipeline.read(root).system
    _, notes = confirm.avoid([_run(after_start=("b",), end_with=("a",))], system, fake, *PAST)  # type: ignore[arg-type]
    assert "t/single: ran beside a, b, and runs without now" in notes


REPO = Repo("u", "c")


@pytest.mark.parametrize(
    ("params", "told"),
    [((), ("exclude=n1,n7",)), (("gres=gpu:4", "exclude=n9", "x"), ("gres=gpu:4", "x", "exclude=n9,n1,n7"))],
)
def test_the_upstream_launcher_is_told_too(params: tuple[str, ...], told: tuple[str, ...]) -> None:
    run = _run(upstream=UpstreamPlan({}, {}, 4, params, REPO, (), REPO))
    again = confirm.repeat(run, 3, ["n1"], ["n7"])
    assert again.upstream is not None
    assert again.upstream.slurm_params == told
    assert (again.exclude_nodes, again.key) == (("n1",), "t/single/3")
    named = confirm.repeat(replace(run, nodes=("n2",)), 3, [], ["n7"])
    assert named.upstream == run.upstream


# What is refused, and leaves nothing behind


@pytest.fixture
def nothing_new(root: Path) -> Iterator[None]:
    before = sorted(root.parent.iterdir())
    yield
    assert sorted(root.parent.iterdir()) == before


def _nobody(plan: ScenarioPlan, root: Path) -> AbstractContextManager[Observer]:
    raise AssertionError("nothing may be run")


@pytest.mark.usefixtures("nothing_new")
class TestRefused:
    def test_no_runs(self, refused: Refused, root: Path) -> None:
        refused(root, *points_of(root), repeats=0)
        refused(root)

    def test_an_unknown_point(self, refused: Refused, root: Path) -> None:
        refused(root, "sweep/mb9")

    def test_no_directory_of_a_run(self, refused: Refused, root: Path, tmp_path: Path) -> None:
        refused(tmp_path, "sweep/mb1")

    def test_a_run_under_way(self, refused: Refused, root: Path) -> None:
        with driver_lock(root):
            refused(root, *points_of(root))

    def test_a_run_that_has_not_ended(self, refused: Refused, root: Path) -> None:
        with contextlib.closing(Journal(root / "journal.sqlite")) as journal:
            journal.reopen(read_plan(root).runs[0].key)
        refused(root, *points_of(root))

    def test_a_dry_run(self, refused: Refused, root: Path) -> None:
        (root / "journal.sqlite").unlink()
        refused(root, *points_of(root))

    def test_missing_credentials(self, refused: Refused, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("A_TOKEN")
        refused(root, *points_of(root))

    def test_a_missing_system(self, refused: Refused, root: Path) -> None:
        (root / "system.toml").unlink()
        refused(root, *points_of(root), place=r"system\.toml: ")

    def test_a_silent_cluster(self, root: Path, fake: Fake, sentence: Sentence) -> None:
        fake.is_silent = True
        with pytest.raises(ToolFailure) as caught:
            confirm.confirm(root, points_of(root), 1, _nobody)
        sentence(caught)

    @pytest.mark.parametrize("name", ["training.json", "test.toml", "job.sbatch"])
    @pytest.mark.parametrize("change", ["missing", "changed", "damaged"])
    def test_files_that_have_changed(self, refused: Refused, root: Path, name: str, change: str) -> None:
        path = root / points_of(root)[0] / "0" / name
        if change == "missing":
            path.unlink()
        elif change == "damaged":
            path.write_bytes(b"[\x00" if name.endswith("toml") else b"[")
        elif name == "training.json":
            path.write_text(json.dumps(json.loads(path.read_text())))  # the same data, but not ours
        else:
            path.write_text(path.read_text() + "# edited\n")
        refused(root, points_of(root)[0], place=rf"{name}: ")
        confirm.prepare(root, points_of(root)[1:], 1)  # other points are whole

    def test_a_directory_for_a_file(self, refused: Refused, root: Path) -> None:
        path = root / points_of(root)[0] / "0" / "job.sbatch"
        path.unlink()
        path.mkdir()
        refused(root, points_of(root)[0])
        shutil.rmtree(path)


# The whole


def test_the_plan_comes_after_the_excluded_nodes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory with a plan can be resumed, so everything else has to be there first."""
    exclude(root, "n3")
    seen = []

    def die(prepared: pipeline.Prepared, new: Path) -> None:
        if new.is_relative_to(root.parent):
            with contextlib.closing(Journal(new / "journal.sqlite")) as journal:
                seen.append((journal.excluded(), (new / "plan.json").exists()))
            raise KeyboardInterrupt
        real(prepared, new)

    real = pipeline.write_into
    monkeypatch.setattr(pipeline, "write_into", die)
    with pytest.raises(KeyboardInterrupt):
        confirm.confirm(root, points_of(root)[:1], 1, _nobody)
    assert seen == [({"n3": "pre_test failed"}, False)]


class Told:
    def __init__(self) -> None:
        self.words: list[str] = []

    def saw(self, run: RunPlan, status: JobStatus) -> None:
        raise AssertionError

    def decided(self, run: RunPlan, verdict: str, reasons: tuple[str, ...]) -> None:
        raise AssertionError

    def stopping(self) -> None:
        """Nothing."""

    def notice(self, text: str) -> None:
        self.words.append(text)


@pytest.mark.parametrize("ends", ["well", "badly"])
def test_the_directory_and_its_report(root: Path, monkeypatch: pytest.MonkeyPatch, ends: str) -> None:
    def execute(prepared: pipeline.Prepared, new: Path, observer: Observer) -> None:
        end(new)
        if ends == "badly":
            raise ToolFailure("the disk is full")

    monkeypatch.setattr(pipeline, "execute", execute)
    told, point = Told(), points_of(root)[0]
    with nullcontext() if ends == "well" else pytest.raises(ToolFailure):
        directory, notes = confirm.confirm(root, [point], 2, lambda plan, new: nullcontext(told))
        assert notes == tuple(told.words[1:])
        assert directory.parent == root.parent
    (new,) = set(root.parent.iterdir()) - {root}
    assert new.name.startswith("a_scenario-confirm-")
    assert recorded_runs()[-1] == new
    assert told.words[0] == f"2 more runs each of {point}: {new}"
    report = json.loads((new / "report.json").read_text())
    assert [each["key"] for each in report["points"]] == [f"{point}/3", f"{point}/4"]
    assert report["scenario"] == "a scenario"
    assert report["notes"] == told.words[1:]


def test_the_command_line_has_an_observer_that_fits(root: Path) -> None:
    observer_for: confirm.ObserverFor = partial(live_observer_for, SteadyConsole())
    with observer_for(read_plan(root), root) as observer:
        assert isinstance(observer, PlainObserver)
