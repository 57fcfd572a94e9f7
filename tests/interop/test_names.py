"""Names, signatures, defaults and tables of the loop are those of Megatron-Bridge, which scripts are written for.

They are asked of the real modules of 0.3 and 0.6, with the Megatron-Core of each. `name_differences.toml` lists what
differs on purpose.
"""

import difflib
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.upstream.tables import MODULES
from tests.interop.conftest import BRIDGE_0_3, BRIDGE_0_6, REPOSITORY, tree
from tests.interop.test_performance_recipes import CORE_0_6

HERE = Path(__file__).parent
LISTED = tomllib.loads((HERE / "name_differences.toml").read_text(encoding="utf-8"))
DIFFERENCES: dict[str, str] = {
    **{f"{module}.{name}": "absent" for module, names in LISTED["absent"].items() for name in names.split()},
    **LISTED["signature"],
}
# Modules that scripts import, as upstream calls them
LOOP = (
    *("callbacks", "checkpointing", "comm_overlap", "config", "eval", "fault_tolerance", "finetune", "gpt_step"),
    *("forward_step_func_types", "initialize", "inprocess_restart", "losses", "mixed_precision", "nvrx_straggler"),
    *("optim", "pretrain", "profiling", "setup", "state", "tokenizers.config", "tokenizers.tokenizer", "train"),
    *(f"utils.{name}_utils" for name in ("checkpoint", "config", "flop", "log", "omegaconf", "packed_seq", "train")),
    *("utils.sig_utils", "utils.theoretical_memory_utils"),
)
# Private names that scripts call or replace all the same
PRIVATE = (
    *("_finish_train", "_should_skip_and_handle_iteration", "_dummy_train_step", "_handle_mxfp8_param_buffer_copy"),
    *("_ensure_model_list", "_freeze_parameter_if_present", "_register_linear_for_last_layer_mapping"),
    *("_MoeMetricFanoutWriter", "_MoeMetricFanoutWriter._sanitize", "_MoeMetricFanoutWriter.add_scalar"),
    *("_build_moe_metric_writer", "_ConfigContainerBase"),
)
# Modules elsewhere -> the names that are served of them
SERVED = {module: names for module, homes in MODULES.items() if (names := " ".join(homes.values()).split())}
RELEASES = (BRIDGE_0_6, BRIDGE_0_3)
Tables = dict[str, Any]


def _ask(release: str, package: str, modules: dict[str, Any], *launcher: str) -> Tables:
    """Run real_names.py with the Megatron-Core of a release."""
    paths = [str(HERE), str(REPOSITORY)]
    if release == BRIDGE_0_6:
        if not (CORE_0_6 / "megatron/core").is_dir():
            pytest.skip(f"{CORE_0_6.name} is not installed beside the environment's Megatron-Core")
        paths.insert(0, str(CORE_0_6))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "real_names.py"), package, *launcher],
        input=json.dumps(modules),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: Tables = json.loads(done.stdout)
    return found


def _is_compared(name: str) -> bool:
    is_public = not any(part.startswith("_") for part in name.split("."))
    return name in PRIVATE or (is_public and name not in ("T", "TYPE_CHECKING"))


@pytest.fixture(scope="module")
def both() -> dict[str, tuple[Tables, Tables]]:
    """Return the tables of upstream and of our loop for each release."""
    found = {}
    loop = {f"training.{name}": None for name in LOOP}
    for release in RELEASES:
        theirs = _ask(release, "megatron.bridge", {**loop, **SERVED}, str(tree(release)))
        for module in loop:
            names = theirs["names"][module]
            theirs["names"][module] = {name: names[name] for name in names if _is_compared(name)}
        found[release] = theirs, _ask(release, "cloudai_mbridge", {name: [*theirs["names"][name]] for name in loop})
    return found


def difference(theirs: Any, ours: Any) -> str:
    """Return in what our signature differs: -removed +added, in order; "absent" if there is no such name."""
    if ours is None:
        return "absent"
    if not isinstance(theirs, list) or not isinstance(ours, list):
        return "" if not isinstance(theirs, list) else "another object"
    before, after = ([" = ".join(map(str, each)) for each in signature] for signature in (theirs, ours))
    changes = [line for line in difflib.ndiff(before, after) if line[0] in "-+"]
    return ", ".join(f"{line[0]}{line[2:]}" for line in changes)


def test_names_and_signatures(both: dict[str, tuple[Tables, Tables]]) -> None:
    """Each is that of a release; where it is of none, the smallest difference is listed."""
    found: dict[str, str] = {}
    for theirs, ours in both.values():
        for module, names in ours["names"].items():
            for name in names:
                full = f"{module.removeprefix('training.')}.{name}"
                text = difference(theirs["names"][module][name], names[name])
                found[full] = min(found.get(full, text), text, key=len)
    different = {name: text for name, text in found.items() if text}
    print(f"{len(found)} names of upstream's loop, of which {len(different)} are absent or differ")
    changed = {name for name in {*different, *DIFFERENCES} if different.get(name) != DIFFERENCES.get(name)}
    assert not changed, "\n".join(f'"{name}" = {json.dumps(different.get(name, ""))}' for name in sorted(changed))


def test_number_formats(both: dict[str, tuple[Tables, Tables]]) -> None:
    """All of 0.6, with every field; what 0.3 has of it is the same there."""
    theirs, ours = both[BRIDGE_0_6]
    assert ours["precision"] == theirs["precision"]
    assert ours["recipes"] == theirs["recipes"]
    assert len(theirs["recipes"]) == 28
    older, ours = both[BRIDGE_0_3]
    for name, values in older["recipes"].items():
        assert values.items() <= ours["recipes"][name].items(), name


def test_overlapped_communication(both: dict[str, tuple[Tables, Tables]]) -> None:
    """But for `fp8_buf` of a pipeline: upstream's default is the tuple (False,), which is true."""
    theirs, ours = both[BRIDGE_0_6]
    assert ours["overlap"] == theirs["overlap"]
    layers = [layer for layers in theirs["presets"].values() for layer in layers.values() if layer]
    for layer in layers:
        layer["fp8_buf"] = False if layer.get("fp8_buf") == [False] else layer.get("fp8_buf")
    for layer in (layer for layers in ours["presets"].values() for layer in layers.values() if layer):
        layer.setdefault("fp8_buf", None)
    assert ours["presets"] == theirs["presets"]
    assert len(theirs["presets"]) == 19


def test_served_names_are_upstreams(both: dict[str, tuple[Tables, Tables]]) -> None:
    """Each name that another module serves here is in the real one, in one release at least."""
    real = [theirs["names"] for theirs, _ in both.values()]
    assert [
        f"{module}.{name}"
        for module, names in SERVED.items()
        for name in names
        if all(known[module][name] is None for known in real)
    ] == []
