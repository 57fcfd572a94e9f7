"""Find the directories of runs, and one of them by its name."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from cloudai_mbridge.errors import BadInput, counted, shown
from cloudai_mbridge.files.run_files import IS_ROOT_NAME, ROOT_FILES, index_path, recorded_runs, started_at
from cloudai_mbridge.files.text import visible
from cloudai_mbridge.plan.read import is_dry_run

LATEST = "latest"
RESULTS_VARIABLE = "MBRIDGE_RESULTS"
_RESULTS = Path("results")  # the default output_path of a system
_MOST_NAMED = 5


def find_run(name: str) -> Path:
    """Return the newest run of this user that is not a dry run, or the run whose name begins with `name`.

    A name never refers to another user's run: `resume` executes the files in a directory.

    BadInput: no match, or several.
    """
    runs = find_runs()
    if name == LATEST:
        found = [run for run in runs if _is_own(run)]
        if latest := next((run for run in found if not is_dry_run(run)), None):
            return latest
        dry = f" but {counted(len(found), 'dry run')}" if found else ""
        raise BadInput(f"{LATEST}: you have no runs{dry}; {_where()}")
    found = [run for run in runs if run.name == name] or [run for run in runs if run.name.startswith(name)]
    if found and not (own := [run for run in found if _is_own(run)]):
        raise BadInput(f"{shown(name)}: {visible(str(found[0]))} is another user's run; give its path")
    if not found:
        raise BadInput(f"{shown(name)}: no such path, and no run with this prefix; {_where()}")
    if len(own) > 1:
        raise BadInput(f"{shown(name)}: {_several(own)}")
    return own[0]


def _several(runs: list[Path]) -> str:
    if len({run.name for run in runs}) == 1:
        return f"{len(runs)} runs have this name: {_listed(map(str, runs))}; give the path of one"
    return f"ambiguous: the prefix of {len(runs)} runs: {_listed(run.name for run in runs)}; give more of the name"


def _listed(names: Iterable[str]) -> str:
    first, *others = map(visible, names)
    more = [f"and {len(others) - _MOST_NAMED + 1} more"] if len(others) >= _MOST_NAMED else []
    return ", ".join([first, *others[: _MOST_NAMED - 1], *more])


def _where() -> str:
    """Return the searched places and the remedy, as text."""
    places = [f"{visible(place)} ({counted(len(runs), 'run')})" for place, runs in _places()]
    if not os.environ.get(RESULTS_VARIABLE):
        places.append(f"${RESULTS_VARIABLE} (not set)")
    return f"looked in {', '.join(places)}; give the directory that `mbridge run` printed"


def find_runs(directory: Path | None = None) -> list[Path]:
    """Return the directories of runs, newest first: in a directory, or all that a name can refer to.

    BadInput: the directory cannot be read.
    """
    if directory is not None:
        if not os.path.isdir(directory):
            raise BadInput(f"{directory}: no such directory; give one that holds runs")
        found = _runs_in(directory)
    else:
        found = [run for _, runs in _places() for run in runs]
    return sorted(dict.fromkeys(found), key=started_at, reverse=True)


def _places() -> Iterator[tuple[str, list[Path]]]:
    """Yield the searched places, with their runs."""
    for directory in (_RESULTS, os.environ.get(RESULTS_VARIABLE)):
        if directory:
            yield os.path.abspath(directory), _runs_in(directory)
    if (index := index_path()) is not None:
        yield str(index), _real_runs(map(str, recorded_runs()))


def _runs_in(directory: str | Path) -> list[Path]:
    try:
        names = sorted(os.listdir(directory))
    except OSError:
        return []
    return _real_runs(os.path.join(directory, name) for name in names)


def _real_runs(paths: Iterable[str]) -> list[Path]:
    """Return the paths that lead to directories of runs, without links."""
    real = [Path(os.path.realpath(path)) for path in paths if os.path.isdir(path)]
    return [path for path in real if IS_ROOT_NAME.fullmatch(path.name) or os.path.isfile(path / ROOT_FILES.plan)]


def _is_own(root: Path) -> bool:
    try:
        return os.stat(root).st_uid == os.geteuid()
    except OSError:
        return False
