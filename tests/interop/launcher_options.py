"""Write data/launchers.toml: python -m tests.interop.launcher_options VERSION=DIR...

Each DIR is a repository of Megatron-Bridge at VERSION's tag; its package_info.py may have another patch version.
"""

import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from cloudai_mbridge.files.documents import one_per_line, render_toml
from cloudai_mbridge.megatron_bridge.launcher_options import Option, read_options

PATH = "scripts/performance/setup_experiment.py"
_HEADER = """\
# Launchers of Megatron-Bridge: options, their values and defaults. Written by
#   python -m tests.interop.launcher_options VERSION=DIR...
# from scripts/performance/argument_parser.py of https://github.com/NVIDIA-NeMo/Megatron-Bridge at the releases' tags.
# 0.6 has a second entry, scripts/training/train.sh, for library recipes; this tool starts the one named by `path`.
"""


def main(given: Iterable[str]) -> None:
    """Print the data of these repositories, oldest release first."""
    releases: list[tuple[str, dict[str, Option]]] = []
    for version, _, directory in (argument.partition("=") for argument in given):
        releases.append((version, read_options(Path(directory, PATH).with_name("argument_parser.py"))))
    paths = {version: {"path": PATH} for version, _ in releases}
    print(_HEADER + render_toml({"options": one_per_line(_options(releases)), "launcher": paths}), end="")


def _options(releases: list[tuple[str, dict[str, Option]]]) -> Iterator[dict[str, Any]]:
    """Yield each form of each option once, with the releases that have this form."""
    having: dict[Option, list[str]] = {}
    for version, options in releases:
        for option in options.values():
            having.setdefault(option, []).append(version)
    for option in sorted(having, key=lambda option: option.name):
        items = {key: value for key, value in asdict(option).items() if value not in ("", (), None)}
        yield {**items, "releases": having[option]}


if __name__ == "__main__":
    main(sys.argv[1:])
