"""`mbridge init` writes a scenario that runs unchanged, with its test and system; `mbridge init ci` what gates it."""

import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime, timedelta
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from cloudai_mbridge import pipeline
from cloudai_mbridge.commands.options import COMPLETE_GPU, COMPLETE_RECIPE, PATH
from cloudai_mbridge.commands.setup.schema import schema_files, schema_line
from cloudai_mbridge.errors import OK, BadInput, counted
from cloudai_mbridge.estimate.hardware import Gpu, find_gpu, gpu_named
from cloudai_mbridge.files.documents import render_toml
from cloudai_mbridge.files.replace import require_writable, write_text
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.slurm_values import format_time_limit
from cloudai_mbridge.models.test_definition import TEMPLATE
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.schedulers.slurm.partitions import PartitionNodes, find_nodes
from cloudai_mbridge.training.process.provenance import output_of
from cloudai_mbridge.tune.ranking import rank
from cloudai_mbridge.tune.space import search_request

FORCE: Callable[..., Any] = click.option("--force", is_flag=True, help="Overwrite files that exist.")


def write_files(files: Mapping[Path, str], *, force: bool) -> None:
    """Write all files and print their names. BadInput: a file exists without force; nothing is written."""
    new = {path: text for path, text in files.items() if not (path.is_file() and path.read_bytes() == text.encode())}
    there = [str(path) for path in new if path.is_symlink() or path.exists()]
    if there and not force:
        verb = "exist" if len(there) > 1 else "exists"
        raise BadInput(f"{', '.join(there)}: {verb} already; nothing was written; --force overwrites")
    for path in new:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise BadInput(f"{path.parent}: is not a directory; move what is there, or write elsewhere") from None
        require_writable(path)
    for path, text in new.items():
        write_text(path, text)
    for path in files:
        click.echo(visible(f"{'written' if path in new else 'unchanged'}: {path}"))


def ignore_results(name: str) -> None:
    """Add a directory below this one to .gitignore, unless git ignores it already. Without a repository: nothing."""
    if output_of("git", "rev-parse", "--is-inside-work-tree") != "true" or output_of("git", "check-ignore", f"{name}/"):
        return
    path = Path(".gitignore")
    if path.exists() and not path.is_file():
        return
    text = path.read_bytes() if path.exists() else b""
    with path.open("ab") as file:
        file.write((b"\n" if text and not text.endswith(b"\n") else b"") + f"{name}/\n".encode())
    click.echo(f"{'changed' if text else 'written'}: {path}: git ignores {name}/")


def require_points(system: Path, scenario: Path, tests_dir: Path | None) -> pipeline.Prepared:
    """Return the plan of a scenario on a system; BadInput: an invalid file, or no point left by the rules."""
    prepared = pipeline.plan(pipeline.Request(system, scenario, tests_dir, None))
    if not prepared.plan.runs:
        reasons = dict.fromkeys(str(violation) for point in prepared.plan.rejected for violation in point.violations)
        raise BadInput(f"the scenario has no point that would run: {'; '.join(reasons)}")
    return prepared


def options_of(system: Path, scenario: Path, tests_dir: Path | None) -> str:
    """Return the options of `mbridge run` that name the files, quoted for a shell."""
    return shlex.join(pipeline.Request(system, scenario, tests_dir, None).options)


TEMPLATES = resources.files("cloudai_mbridge.commands.setup") / "ci_files"
SCRIPT, POLICY, BASELINE = Path("ci/performance.sh"), Path("ci/policy.toml"), Path("ci/baseline.toml")
COMMENT = Path("ci/comment.py")
# Text of the templates, replaced in the written files
_OPTIONS = "--system-config system.toml --tests-dir test_defs --test-scenario scenario.toml"
_DAY = "2027-01-31"
_DAYS = timedelta(days=14)
_GITLAB, _GITLAB_CHANGE = "ci/performance.gitlab-ci.yml", "ci/performance-merge-request.gitlab-ci.yml"
_JENKINS_CHANGE = "Jenkinsfile.pull-request"
# Of each hosting: its files with their templates, and the remaining steps
WORKFLOWS: Mapping[str, tuple[Mapping[str, str], str]] = {
    "github": (
        {
            ".github/workflows/performance.yml": "github.yml",
            ".github/workflows/performance-pull-request.yml": "github-pull-request.yml",
        },
        "require approval of workflows of forks in the repository's settings (Actions, General)",
    ),
    "gitlab": (
        {_GITLAB: "gitlab.yml", _GITLAB_CHANGE: "gitlab-merge-request.yml"},
        "change the tags in them, make a schedule, set the masked variable COMMENT_TOKEN to a project access token"
        f" (api), and add to .gitlab-ci.yml:\n  include: [{_GITLAB}, {_GITLAB_CHANGE}]",
    ),
    "jenkins": (
        {"Jenkinsfile": "Jenkinsfile", _JENKINS_CHANGE: "Jenkinsfile.pull-request"},
        f"set OWNER/NAME in {_JENKINS_CHANGE}, make a multibranch pipeline with it, and store a token that may comment"
        " as the secret text performance-comment",
    ),
}


@click.command()
@click.option("--github", is_flag=True, help="Also workflows for GitHub Actions.")
@click.option("--gitlab", is_flag=True, help="Also jobs for GitLab.")
@click.option("--jenkins", is_flag=True, help="Also Jenkinsfiles.")
@click.option("--system-config", "system", type=PATH, default="system.toml", show_default=True, help="System TOML.")
@click.option("--test-scenario", "scenario", type=PATH, default="scenario.toml", show_default=True, help="Its TOML.")
@click.option("--tests-dir", type=PATH, help="Directory of the test TOMLs; default: test_defs, or the scenario's.")
@FORCE
def ci(system: Path, scenario: Path, tests_dir: Path | None, *, force: bool, **workflows: bool) -> int:
    """Write a script that runs and gates the scenario, its policy, and the workflows of a CI. Run it in the repository.

    A baseline that exists is never overwritten. Until the first one is promoted, for two weeks at most, good runs are
    enough for a green night. The workflow of a pull request posts the gate's summary as its comment.
    """
    for path, option in ((system, "--system-config"), (scenario, "--test-scenario")):
        if not path.exists():
            raise BadInput(f"{path}: no such file; write one with `mbridge init`, or name yours with {option}")
    places = (scenario.parent / "test_defs", Path("test_defs"))
    tests_dir = tests_dir or next(filter(Path.is_dir, places), None)
    wanted = [WORKFLOWS[name] for name, is_wanted in workflows.items() if is_wanted]
    is_local = require_points(system, scenario, tests_dir).system.is_one_machine
    day = datetime.now(UTC).date() + _DAYS
    files = {
        SCRIPT: _template("performance.sh").replace(_OPTIONS, options_of(system, scenario, tests_dir)),
        POLICY: _template("policy_local.toml" if is_local else "policy.toml"),
        **({} if BASELINE.exists() else {BASELINE: _template("baseline.toml").replace(_DAY, str(day))}),
        **({COMMENT: _template("comment.py")} if wanted else {}),
        **{Path(path): _template(template) for templates, _ in wanted for path, template in templates.items()},
    }
    write_files({**files, **schema_files(Path(), "policy")}, force=force)
    if BASELINE not in files:
        click.echo(f"kept: {BASELINE}")
    for _, todo in wanted:
        click.echo(todo)
    click.echo(f"Commit them. Next:\n  sh {SCRIPT}")
    return OK


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


_STEPS, _WARMUP_STEPS = 30, 10
_CPU_RANKS = 2  # for a machine without a known GPU
_TIME_LIMIT_S = 1800.0
_RESULTS = "results"

# A key of a table: its value, None to leave it out, and its meaning
_Row = tuple[str, Any, str]
_MEANINGS = {
    "launcher": "this package's loop; megatron_bridge: Megatron-Bridge's own script",
    "gpu_type": "what estimates are for",
    "model_recipe_name": "`mbridge list` has all of them",
    "compute_dtype": "number format of the matmuls",
    "num_gpus": "ranks of the whole job",
    "tp": "tensor parallelism; a list such as [1, 2] is an axis of a sweep",
    "pp": "pipeline parallelism",
    "cp": "context parallelism",
    "vp": "virtual pipeline stages on a rank",
    "ep": "expert parallelism",
    "et": "tensor parallelism of the experts",
    "mb": "sequences in a micro-batch",
    "gb": "sequences in a step",
    "seq_length": "tokens in a sequence",
    "max_steps": "steps of a run",
}


class _WithCommands(click.Group):
    """A command with commands of its own: the first word is one of them, or everything is for the command itself."""

    allow_extra_args = False
    allow_interspersed_args = True

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        if args and args[0] in self.commands:
            return self.commands[args[0]].make_context(f"{info_name} {args[0]}", args[1:], parent, **extra)
        return super().make_context(info_name, args, parent, **extra)


@click.group(cls=_WithCommands, invoke_without_command=True, subcommand_metavar="")
@click.argument("directory", type=PATH, default=".")
@click.option(
    "--slurm/--local", "is_slurm", default=None, help="For this cluster, or machine; default: Slurm if there is sinfo."
)
@click.option("--partition", help="Slurm's partition; default: its default one.")
@click.option("--account", help="Slurm's account.")
@click.option("--nodes", "num_nodes", type=click.IntRange(min=1), help="Nodes of a run; default: 1.")
@click.option(
    "--recipe",
    shell_complete=COMPLETE_RECIPE,
    help="See `mbridge list`; default: llama3_8b on a known GPU, else gpt_tiny.",
)
@click.option("--gpu", shell_complete=COMPLETE_GPU, help="Such as gb200; default: from sinfo.")
@FORCE
def init(
    directory: Path,
    is_slurm: bool | None,
    partition: str | None,
    account: str | None,
    num_nodes: int | None,
    recipe: str | None,
    gpu: str | None,
    force: bool,
) -> int:
    """Write a test, a scenario and a system that run as they are into DIRECTORY (default: here).

    On a known GPU the layout is the first of `mbridge tune`. `mbridge init ci` writes what runs it every night.
    """
    if is_slurm is None:
        is_slurm = shutil.which("sinfo") is not None
    if not is_slurm and (partition or account or num_nodes):
        raise BadInput("--partition, --account and --nodes are for Slurm; leave them out, or add --slurm")
    found = find_nodes(partition) if is_slurm else None
    num_nodes = num_nodes or 1
    if found and num_nodes > found.num_nodes:
        raise BadInput(f"--nodes: {num_nodes} is more than the {found.num_nodes} of partition {found.partition!r}")
    device = gpu_named(gpu) if gpu else find_gpu(found.gpu_type) if found and found.gpu_type else None
    device = device if device and device.is_known else None
    per_node = (found.gpus if found else 0) or (device.gpus_per_node if device else 0)
    num_ranks = num_nodes * (per_node or _CPU_RANKS)
    model = load_recipe(recipe or ("llama3_8b" if device else "gpt_tiny"))
    cmd_args = _cmd_args(model, device, num_ranks, is_cpu=per_node == 0)
    limit = min(_TIME_LIMIT_S, (found.time_limit_s if found else None) or _TIME_LIMIT_S)
    texts = {
        "system": _slurm_system(found, account, device, per_node) if found else _LOCAL_SYSTEM,
        "scenario": _scenario(model.name, num_nodes, format_time_limit(limit)),
        "test": _test(model, cmd_args),
    }
    with TemporaryDirectory() as scratch:
        paths = _paths(Path(scratch), model.name)
        (Path(scratch) / "test_defs").mkdir()
        for name, text in texts.items():
            paths[name].write_text(text, encoding="utf-8")
        runs = require_points(paths["system"], paths["scenario"], paths["test"].parent).plan.runs
    paths = _paths(directory, model.name)
    files = {paths[name]: f"{schema_line(paths[name], directory, name)}{text}" for name, text in texts.items()}
    write_files({**files, **schema_files(directory, *texts)}, force=force)
    ignore_results(_RESULTS)
    options = options_of(paths["system"], paths["scenario"], paths["test"].parent)
    ci_options = "" if directory == Path() else f" {options}"  # the defaults
    place = f"partition {found.partition} of this Slurm cluster" if found else "this machine"
    click.echo(visible(f"{counted(len(runs), 'run')} of {model.name} on {place}. Next:"))
    for text in (f"mbridge run {options}", f"mbridge init ci{ci_options}    # to gate it every night"):
        click.echo(visible(f"  {text}"))
    return OK


init.add_command(ci)


def _paths(directory: Path, name: str) -> dict[str, Path]:
    return {
        "system": directory / "system.toml",
        "scenario": directory / "scenario.toml",
        "test": directory / "test_defs" / f"{name}.toml",
    }


def _cmd_args(recipe: Recipe, gpu: Gpu | None, num_ranks: int, *, is_cpu: bool) -> Mapping[str, Any]:
    """Return the arguments of the fastest layout by prediction; without data about the GPU, data parallelism alone."""
    if recipe.not_embedded:
        raise BadInput(f"--recipe: the embedded loop cannot build {recipe.not_embedded} of {recipe.name}; use another")
    if gpu is not None:
        request = search_request(
            None,
            recipe=recipe.name,
            gpu=gpu.name,
            num_gpus=num_ranks,
            precisions=("bf16",),
            gbs=None,
            seq_length=None,
            launcher=Launcher.EMBEDDED,
            max_steps=_STEPS,
        )
        if best := rank(request, 1).best:
            return best[0].cmd_args
        raise BadInput(
            f"no layout of {recipe.name} fits {counted(num_ranks, 'GPU')} of {gpu.name}; use more --nodes, or another"
            f" --recipe; `mbridge tune --recipe {recipe.name} --gpu {gpu.name} --num-gpus {num_ranks}` prints why"
        )
    batch = int(recipe.default("train", "global_batch_size"))
    return {
        "launcher": str(Launcher.EMBEDDED),
        "model_family_name": recipe.family,
        "model_recipe_name": recipe.name,
        "compute_dtype": "fp32" if is_cpu else "bf16",
        "num_gpus": num_ranks,
        "tp": 1,
        "pp": 1,
        "mb": 1,
        "gb": -(-batch // num_ranks) * num_ranks,
        "max_steps": _STEPS,
    }


def _table(rows: Iterable[_Row]) -> str:
    """Return the lines of a TOML table, with their meanings in a column."""
    lines = [(render_toml({key: value}).strip(), what) for key, value, what in rows if value is not None]
    width = max(len(line) for line, what in lines if what)
    return "".join(f"{line:<{width}}  # {what}\n" if what else f"{line}\n" for line, what in lines)


def _test(recipe: Recipe, cmd_args: Mapping[str, Any]) -> str:
    head: list[_Row] = [
        ("name", recipe.name, "scenarios name it as test_name"),
        ("description", recipe.description, "free text"),
        ("test_template_name", TEMPLATE, "CloudAI's name of this kind of test"),
    ]
    metrics: list[_Row] = [("warmup_steps", _WARMUP_STEPS, "left out of every statistic")]
    arguments = [(key, value, _MEANINGS.get(key, "")) for key, value in cmd_args.items()]
    return f"# What is trained\n{_table(head)}\n[metrics]\n{_table(metrics)}\n[cmd_args]\n{_table(arguments)}"


def _scenario(test: str, num_nodes: int, time_limit: str | None) -> str:
    rows: list[_Row] = [
        ("id", test, "names its results"),
        ("test_name", test, f"test_defs/{test}.toml"),
        ("num_nodes", num_nodes, "of each run"),
        ("iterations", 5, "runs: a first baseline needs five, a gate three"),
        ("time_limit", time_limit, "of each run"),
    ]
    head: list[_Row] = [("name", "performance", "names the directories of results")]
    return f"# What runs, how often\n{_table(head)}\n[[Tests]]\n{_table(rows)}"


_LOCAL_SYSTEM = "# Where it runs\n" + _table(
    [
        ("name", "local", "shown in reports"),
        ("scheduler", "local", "this machine, one run after the other"),
        ("output_path", _RESULTS, "where results go"),
    ]
)


def _slurm_system(nodes: PartitionNodes, account: str | None, gpu: Gpu | None, gpus_per_node: int) -> str:
    rows: list[_Row] = [
        ("name", nodes.partition, "shown in reports"),
        ("scheduler", "slurm", ""),
        ("output_path", _RESULTS, "where results go: on a file system that all nodes see"),
        ("default_partition", nodes.partition, "partition of the jobs"),
        ("gpus_per_node", gpus_per_node or None, "that a job requests"),
        ("gpu_type", gpu.name if gpu else None, "what estimates are for"),
        ("account", account, "whose time jobs use"),
        ("extra_sbatch_args", ["--exclusive"], "whole nodes: a neighbour would be part of the measurement"),
    ]
    hints = "" if account else '# account = "my_account"  # if this cluster requires one\n'
    hints += '# python_executable = "/shared/venv/bin/python"  # on the nodes; default: the one that runs mbridge\n'
    group: list[_Row] = [("name", "all", "scenarios may name nodes as PARTITION:all:2"), ("nodes", [nodes.names], "")]
    name = _table([("name", nodes.partition, "as sinfo describes it")])
    return f"# Where it runs\n{_table(rows)}{hints}\n[[partitions]]\n{name}\n[[partitions.groups]]\n{_table(group)}"
