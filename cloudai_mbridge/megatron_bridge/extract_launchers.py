"""Write data/launchers.toml: python -m cloudai_mbridge.megatron_bridge.extract_launchers VERSION=DIR...

Each DIR is a repository of Megatron-Bridge at VERSION's tag; its own package_info.py may say another patch version.
"""

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

from cloudai_mbridge.megatron_bridge.argument_parser import Option, read_options

PATH = "scripts/performance/setup_experiment.py"
_HEADER = """\
# Launchers of Megatron-Bridge: options, their values and defaults. Written by
#   python -m cloudai_mbridge.megatron_bridge.extract_launchers VERSION=DIR...
# from scripts/performance/argument_parser.py of https://github.com/NVIDIA-NeMo/Megatron-Bridge at the releases' tags.
# 0.6 has a second entry, scripts/training/train.sh, for library recipes; this tool starts the one named by `path`.
"""
# From utils/utils.py beside the parser: get_workload_base_config (0.3 to 0.5), _recipe_variant_suffix (0.6)
_VERSIONED = "version of a preset, v1 or v2; without it v2, or v1 where the preset has no v2"
_NAMED = "name of a preset such as large_scale; without it, and for v1 and v2, the preset without a suffix"


def main(given: Iterable[str]) -> None:
    """Print the data of these repositories, oldest release first."""
    releases: list[tuple[str, dict[str, Option]]] = []
    for version, _, directory in (argument.partition("=") for argument in given):
        source = Path(directory, PATH).with_name("argument_parser.py").read_text(encoding="utf-8")
        releases.append((version, read_options(source)))
    print(_HEADER + "\n".join([*map(_head, releases), "", "options = [", *_lines(releases), "]"]))


def _head(release: tuple[str, dict[str, Option]]) -> str:
    version, options = release
    variant = _VERSIONED if options["config_variant"].default == "v2" else _NAMED
    facts = {"path": PATH, "config_variant": variant}
    return f"launcher.{json.dumps(version)} = {{{', '.join(f'{key} = {json.dumps(facts[key])}' for key in facts)}}}"


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
        if value not in ("", (), None, False):
            yield f"{key} = {json.dumps(value)}"


if __name__ == "__main__":
    main(sys.argv[1:])
