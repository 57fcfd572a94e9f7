"""Refuse what the pinned release's launcher does not know, before anything is submitted."""

from collections.abc import Iterable, Iterator

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.megatron_bridge.launcher.command_line import launcher_argv, release_of
from cloudai_mbridge.megatron_bridge.launcher.flags import FLAGS
from cloudai_mbridge.megatron_bridge.launcher.options import find_launcher, problems_of
from cloudai_mbridge.megatron_bridge.launcher.plan import LauncherRun
from cloudai_mbridge.models.system import System

_ARGUMENT = {flag: f"cmd_args.{name}" for name, flag in FLAGS.items()}


def refuse_unknown_options(runs: Iterable[LauncherRun], system: System) -> None:
    """Raise BadInput with one line for every option or value that a launcher lacks; unknown releases are not judged."""
    lines = [line for run in runs for line in unknown_options(run, system)]
    if lines:
        raise BadInput("\n".join(dict.fromkeys(lines)))


def unknown_options(run: LauncherRun, system: System) -> Iterator[str]:
    """Yield a line for every option or value that a run's launcher lacks."""
    if run.upstream is None:
        return
    assert system.scheduler == "slurm"
    launcher = find_launcher(release_of(run.upstream, system))
    if launcher is not None:
        for flag, problem in problems_of(launcher_argv(run, system), launcher):
            yield f"test {run.test_id!r}: {_ARGUMENT.get(flag, flag)}: {problem}"
