"""Launchers by release: how options are read from a parser's source, the shipped data, and what is refused."""

from pathlib import Path

from cloudai_mbridge.megatron_bridge.launcher_options import (
    LauncherOptions,
    Option,
    find_launcher,
    known_launchers,
    problems_of,
    read_options,
)
from cloudai_mbridge.megatron_bridge.release import Release, known_releases
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.plan.launcher_command import FLAGS
from tests.cases import every

PARSER = """
import argparse
from somewhere import not_there
GPUS = {"h100": 8, "vr200": 4}
DEFAULT = os.getenv("NEMO_HOME")
def parse_cli_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("-g", "--gpu", type=lower_str, choices=GPUS.keys(), required=True)
    group = parser.add_argument_group("more")
    mode = group.add_mutually_exclusive_group()
    mode.add_argument("--offline", action="store_true")
    mode.add_argument("-hf", "--hf_token", type=str)
    group.add_argument("--backend", type=lambda x: x, choices=["deepep", None], default=-1)
    parser.add_argument("-nh", "--nemo_home", default=DEFAULT, help=" ".join(["a", "b"]))
    parser.add_argument("positional")
    return parser
"""


def parser_in(clone: Path, text: str = PARSER) -> Path:
    """Write a clone's argument parser and return the file."""
    path = clone / "scripts/performance/argument_parser.py"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    return path


def test_options_are_read_from_source(tmp_path: Path) -> None:
    assert read_options(parser_in(tmp_path)) == {
        "gpu": Option(("-g", "--gpu"), "lower_str", choices=("h100", "vr200")),
        "offline": Option(("--offline",), action="store_true"),
        "hf_token": Option(("-hf", "--hf_token"), "str"),
        "backend": Option(("--backend",), "lambda", choices=("deepep", "None"), default="-1"),
        "nemo_home": Option(("-nh", "--nemo_home")),
    }


def _of(version: str) -> LauncherOptions:
    launcher = find_launcher(Release(version, "here"))
    assert launcher
    return launcher


def test_the_data_describe_every_known_release() -> None:
    assert [launcher.version for launcher in known_launchers()] == [known["version"] for known in known_releases()]
    for version, gpus, variant in (("0.3.0", "h100 b200 gb200 gb300 b300", "v2"), ("0.6.0", "vr200 r100", None)):
        assert set(gpus.split()) <= set(_of(version).options["gpu"].choices)
        assert _of(version).options["config_variant"].default == variant


def test_every_flag_of_ours_is_an_option_of_some_release() -> None:
    known = {flag for launcher in known_launchers() for option in launcher.options.values() for flag in option.flags}
    assert set(FLAGS.values()) <= known
    assert FLAGS.keys() <= ResolvedCmdArgs.model_fields.keys()


def test_what_a_release_lacks() -> None:
    argv = ["-g", "vr200", "--deterministic", "--nsys_extra_args=--offline", "-ms", "10", "--lr", "-1", "--data", "c4"]
    assert list(problems_of(argv, _of("0.6.0"))) == []
    known = "the launcher of Megatron-Bridge 0.3.0"
    assert list(problems_of([*argv, "--nonsense"], _of("0.3.0"))) == [
        (
            "-g",
            f"'vr200' is unknown to {known}; use one of h100, b200, gb200, gb300, b300;"
            " or pin a release that knows it: 0.4.0 or later",
        ),
        ("--deterministic", f"{known} has no such option; remove it, or pin a release that has it: 0.5.0 or later"),
        (
            "--data",
            f"'c4' is unknown to {known}; use one of mock, rp2, squad, squad_packed;"
            " or pin a release that knows it: 0.5.0 or later",
        ),
        ("--nonsense", f"{known} has no such option; remove it"),
    ]
    # as the launcher reads them: the one option ignores case
    assert not list(problems_of(["--domain", "LLM"], _of("0.3.0")))
    assert list(problems_of(["--task", "Pretrain"], _of("0.3.0")))


def test_an_installed_launcher_speaks_for_itself(tmp_path: Path) -> None:
    options = read_options(parser_in(tmp_path))
    for version in ("0.3.0", "9.0.0"):
        installed = find_launcher(Release(version, "here", tmp_path))
        assert installed
        assert installed.options == options


@every("text", ["def broken(", "", None])
def test_an_installed_launcher_that_cannot_be_read_leaves_the_data(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        parser_in(tmp_path, text)
    assert find_launcher(Release("0.3.0", "here", tmp_path)) == _of("0.3.0")
    assert find_launcher(Release("9.0.0", "here", tmp_path)) is None


def test_unknown_releases_are_not_judged() -> None:
    assert find_launcher(None) is None
    assert find_launcher(Release("9.0.0", "here")) is None
    assert _of("0.6.7").version == "0.6.0"
