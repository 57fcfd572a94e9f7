"""Write data/launchers.toml: python -m cloudai_mbridge.megatron_bridge.launcher.extract VERSION=DIR...

Each DIR is a repository of Megatron-Bridge at VERSION's tag; its own package_info.py may say another patch version.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from cloudai_mbridge.megatron_bridge.launcher.argument_parser import Option, read_options

PATH = "scripts/performance/setup_experiment.py"
_HEADER = """\
# Launchers of Megatron-Bridge: options, their values and defaults. Written by
#   python -m cloudai_mbridge.megatron_bridge.launcher.extract VERSION=DIR...
# from scripts/performance/argument_parser.py of https://github.com/NVIDIA-NeMo/Megatron-Bridge at the releases' tags.
# 0.6 has a second entry, scripts/training/train.sh, for library recipes; this tool starts the one named by `path`.
"""


def main(given: Iterable[str]) -> None:
    """Print the data of these repositories, oldest release first."""
    releases: list[tuple[str, dict[str, Option]]] = []
    for version, _, directory in (argument.partition("=") for argument in given):
        releases.append((version, read_options(Path(directory, PATH).with_name("argument_parser.py"))))
    heads = [f"launcher.{json.dumps(version)} = {{path = {json.dumps(PATH)}}}" for version, _ in releases]
    print(_HEADER + "\n".join([*heads, "", "options = [", *_lines(releases), "]"]))


def _lines(releases: list[tuple[str, dict[str, Option]]]) -> Iterator[str]:
    """Yield each form of each option once, with the releases that have it so."""
    having: dict[Option, list[str]] = {}
    for version, options in releases:
        for option in options.values():
            having.setdefault(option, []).append(version)
    for option in sorted(having, key=lambda option: option.name):
        yield f"  {{{', '.join([*_items(option), f'releases = {json.dumps(having[option])}'])}}},"


def _items(option: Option) -> Iterator[str]:
    for key, value in asdict(option).items():
        if value not in ("", (), None):
            yield f"{key} = {json.dumps(value)}"


if __name__ == "__main__":
    main(sys.argv[1:])
