"""Ten thousand mutated files and overrides: each is read and comes back, or is a ConfigError of one line.

Nothing is ever executed or imported: an audit hook watches while the mutants are read, and planted canaries (commands,
a module that writes a file when it is imported) stay silent.
"""

import copy
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.figures import Figure

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    import torch
    from megatron.core import activations

    import cloudai_mbridge.training.models.other_providers as other_providers
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.config.text.overrides import apply_overrides
    from cloudai_mbridge.training.config.text.serialization import from_dict, from_yaml, to_dict, to_yaml
    from cloudai_mbridge.training.config.text.yaml_text import dump_yaml, parse_json, parse_yaml
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.schema import check_section_values, load_schema
    from cloudai_mbridge.training.schema.forms import read_section
    from cloudai_mbridge.training.schema.known_names import CLASS_PATHS, FUNCTIONS

assert activations
assert other_providers

CANARY = "mbridge_canary_module"
HANG_S = 10
# Everything that would run a program, compile text or load an object
_WATCHED = ("os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "subprocess.Popen", "compile", "exec")
_WATCHED += ("pickle.find_class", "socket.connect", "ctypes.dlopen", "os.remove", "os.rename", "shutil.rmtree")
_is_armed = False
_events: list[str] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _is_armed and (event in _WATCHED or (event == "import" and CANARY in str(arguments[0]))):
        _events.append(f"{event}: {arguments!r}"[:200])


sys.addaudithook(_hook)  # hooks cannot be taken away: this one sleeps outside `_watch`


@contextmanager
def _watch() -> Iterator[None]:
    global _is_armed
    _events.clear()
    _is_armed = True
    try:
        yield
    finally:
        _is_armed = False
    assert not _events


@dataclass
class Part:
    size: int = 1
    names: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Small:
    """One field of every kind: quick to build, so that most mutants go here."""

    count: int
    rate: float = 0.5
    flag: bool = False
    name: str | None = None
    style: Literal["cosine", "linear"] = "cosine"
    freq: int | list[int] = 1
    blend: tuple[list[str], list[float] | None] | None = None
    table: dict[str, Any] | None = None
    free: Any = None
    path: str | Path | None = None
    dtype: torch.dtype = torch.float32
    stop: signal.Signals = signal.SIGTERM
    method: Callable[..., Any] | None = None
    part: Part = field(default_factory=Part)
    maybe: Part | None = None


# A mutation may be a `_target_` of Megatron-Bridge: what it cannot be then is dropped
DROPPED = "ignore:keys of Megatron-Bridge:UserWarning"

SMALL = """\
count: 3
rate: 1.0e-05
flag: true
name: "a b"
style: linear
freq: [1, 0, 1]
blend: [[a, b], [0.3, 0.7]]
table: {a: 1, b: [x, null], c: {d: .inf}}
free: &x [1, {k: v}]
path: {_target_: pathlib.PosixPath, _args_: [/data]}
dtype: {_target_: torch.bfloat16, _call_: false}
stop: {_target_: signal.Signals, _call_: true, _args_: [10], _name_: SIGUSR1}
method: {_target_: torch.nn.init.normal_, _partial_: true, _args_: [], mean: 0.0, std: 0.02}
part:
  size: 4
  names:
  - one
  - two
maybe: null
"""
WHOLE = """\
_target_: megatron.bridge.training.config.ConfigContainer
train: {train_iters: 10, micro_batch_size: 1, global_batch_size: 8, exit_signal: SIGTERM}
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  num_layers: 2
  hidden_size: 64
  num_attention_heads: 4
  activation_func: {_target_: torch.nn.functional.silu, _call_: false}
optimizer: {lr: 1.0e-4}
scheduler: {lr_decay_style: cosine}
dataset: {_target_: MockGPTDatasetConfig, seq_length: 128, random_seed: 1}
logger: {log_interval: 1}
tokenizer: {tokenizer_type: NullTokenizer}
checkpoint: {save: /ckpt}
mixed_precision: bf16_mixed
profiling: null
"""
OVERRIDES = [
    "train.train_iters=20",
    "model.num_layers=4",
    "~profiling",
    "~comm_overlap",
    "model.bf16=true",
    "dataset.blend=[[a,b],[0.3,0.7]]",
    'logger.tensorboard_dir="a b"',
    "train.rampup_batch_size=[16,8,300]",
    "optimizer.lr=3e-4",
    "train.exit_signal=SIGUSR1",
    "model.params_dtype=torch.bfloat16",
    "tokenizer.hf_tokenizer_kwargs.use_fast=true",
    "ft.enable_ft_package=true",
    "comm_overlap={tp_comm_overlap: true}",
    "mixed_precision={_target_: MixedPrecisionConfig, bf16: true}",
    "model.activation_func=torch.nn.functional.silu",
]


def _fragments(trap: Path) -> list[str]:
    """Return what mutants are made of: canaries first, then the letters of the formats."""
    targets = [
        *("os.system", "subprocess.Popen", "builtins.eval", "builtins.exec", "builtins.__import__", "posix.system"),
        *(f"{CANARY}.fire", f"{CANARY}", f".{CANARY}.fire", f"..{CANARY}.fire", f"cloudai_mbridge.{CANARY}.fire"),
        *(f"cloudai_mbridge.training.config...{CANARY}", f"megatron.bridge.training.config.{CANARY}", "importlib"),
        *("torch.load", "torch.hub.load", "torch.nn.functional.silu.__globals__", "pathlib.Path.unlink", "tuple"),
        *("TrainingConfig", "torch.bfloat16", "signal.Signals", "Part", f"{__name__}.Part", *list(CLASS_PATHS)[:3]),
    ]
    calls = [f"{{_target_: {target}, _args_: ['touch {trap}']}}" for target in targets]
    tags = [
        f"!!python/object/apply:os.system ['touch {trap}']",
        f"!!python/object/new:subprocess.Popen [[touch, {trap}]]",
        f"!!python/module:{CANARY} ''",
        f"!!python/name:{CANARY}.fire ''",
        "!!python/tuple [1, 2]",
        "!<tag:yaml.org,2002:python/none> x",
    ]
    texts = [
        *(f"__import__('os').system('touch {trap}')", f"__import__('{CANARY}')", "${oc.env:HOME}", "${x}", "{{x}}"),
        *("_target_: ", "_args_: ", "_call_: ", "_partial_: true", "_name_: ", "__class__", "_private: 1", "<<: *x"),
        *("&x ", "*x", "&y [*y]", "!!str ", "? ", "--- ", "...", "%TAG ! x", "|\n", ">-\n", "@", "`", "\t", "\r", "#"),
        *("null", "~", "true", "yes", "1e999", ".nan", "-.inf", "010", "0x", "1_0", "9" * 30, "1.5", "-", "''"),
        *(": ", "- ", "[", "]", "{", "}", ",", "\n", "\n  ", '"', "'", "\\", "\x00", "\x85", "\ud800", "\U0001f600"),
        *('"\\UFFFFFFFF"', '"\\xZZ"', "[" * 70, "{a: " * 70, "=", "~", "+", ".", "..", " ", "𝟙", "٣"),
    ]
    return calls + [f"_target_: {target}" for target in targets] + targets + tags + texts


def _mutate(text: str, fragments: list[str], rng: random.Random) -> str:
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice((0, 0, 1, 1, 4, 20)))
        lines = text.split("\n")
        match rng.randrange(6):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:start] + rng.choice(fragments) + text[end:]
            case 2:  # the value of a line
                row = rng.randrange(len(lines))
                lines[row] = lines[row].partition(":")[0] + ": " + rng.choice(fragments)
                text = "\n".join(lines)
            case 3:  # a line twice, or elsewhere
                lines.insert(rng.randrange(len(lines) + 1), rng.choice(lines))
                text = "\n".join(lines)
            case 4:  # indented
                row = rng.randrange(len(lines))
                lines[row] = " " * rng.randrange(4) + lines[row].lstrip()
                text = "\n".join(lines)
            case _:
                text = text[:start] + text[end : end + 8] + text[start:end] + text[end + 8 :]
    return text


def _check_message(error: ConfigError, start: str = "") -> None:
    """Demand one line of text that can be printed."""
    message = str(error)
    assert message
    assert message.splitlines() == [message]
    assert message.startswith(start)
    message.encode("utf-8")


def _read(cls: type, text: str) -> Any:
    """Read `text` as a `cls`; None where it is refused."""
    try:
        return from_dict(cls, parse_yaml(text))
    except ConfigError as error:
        _check_message(error)
        return None


@pytest.fixture(autouse=True)
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Plant a module, and return the file that it and the commands would make; neither may be there afterwards."""
    trap = tmp_path / "fired"
    (tmp_path / f"{CANARY}.py").write_text(
        f"from pathlib import Path\nPath({str(trap)!r}).touch()\ndef fire(*args):\n    return 1\n", encoding="utf-8"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)
    _read(ConfigContainer, WHOLE)  # annotations are evaluated once, before anybody watches
    _read(Small, SMALL)
    for path in load_schema()["classes"]:
        read_section(path, None)
    yield trap
    assert not trap.exists()
    assert not [name for name in set(sys.modules) - before if CANARY in name or name in ("this", "antigravity", "pty")]


def test_the_canaries_would_be_heard(trap: Path) -> None:
    with pytest.raises(AssertionError, match="compile"), _watch():
        eval("1 + 1")
    with pytest.raises(AssertionError, match=CANARY), _watch():
        __import__(CANARY)
    assert trap.exists()
    trap.unlink()
    del sys.modules[CANARY]


@pytest.mark.long
def test_mutated_small_files(trap: Path) -> None:
    rng, fragments, accepted = random.Random(20), _fragments(trap), 0
    with _watch():
        for _ in range(5500):
            built = _read(Small, _mutate(SMALL, fragments, rng))
            if built is not None:
                accepted += 1
                text = to_yaml(built)
                assert to_yaml(from_dict(Small, parse_yaml(text))) == text
    assert 500 < accepted < 5000  # both outcomes are exercised


@pytest.mark.drill
@pytest.mark.timeout(2 * 3600)
@pytest.mark.filterwarnings(DROPPED)
def test_ten_minutes_of_mutated_files(trap: Path, figure: Figure) -> None:
    """MBRIDGE_FUZZ_SEED and MBRIDGE_FUZZ_S as in tests/e2e/test_fuzz.py."""
    seed = first = int(os.environ.get("MBRIDGE_FUZZ_SEED") or random.randrange(1 << 30))
    end = time.monotonic() + float(os.environ.get("MBRIDGE_FUZZ_S", "600"))
    fragments, accepted, slowest = _fragments(trap), 0, 0.0
    with _watch():
        while time.monotonic() < end:
            rng = random.Random(seed)
            cls, text = rng.choice(((Small, SMALL), (ConfigContainer, WHOLE)))
            started = time.process_time()
            accepted += _read(cls, _mutate(text, fragments, rng)) is not None
            slowest = max(slowest, time.process_time() - started)
            assert slowest < HANG_S, seed
            seed += 1
    figure(f"YAML: {seed - first} mutants, seeds {first} to {seed - 1}, {accepted} accepted, slowest {slowest:.2g} s")


@pytest.mark.filterwarnings(DROPPED)
def test_mutated_container_files(trap: Path) -> None:
    rng, fragments, accepted = random.Random(21), _fragments(trap), 0
    with _watch():
        for _ in range(1500):
            built = _read(ConfigContainer, _mutate(WHOLE, fragments, rng))
            if built is not None:
                accepted += 1
                data = to_dict(built)
                assert to_dict(from_dict(ConfigContainer, data)) == data
    assert 100 < accepted < 1400


def test_mutated_overrides(trap: Path) -> None:
    rng, fragments, accepted = random.Random(22), _fragments(trap), 0
    start = _read(ConfigContainer, WHOLE)
    with _watch():
        for _ in range(1000):
            config = copy.deepcopy(start)
            override = _mutate(rng.choice(OVERRIDES), fragments, rng)
            try:
                apply_overrides(config, [override])
            except ConfigError as error:
                _check_message(error)
                assert config == start
                continue
            accepted += 1
            data = to_dict(config)
            assert to_dict(from_dict(ConfigContainer, data)) == data, override
    assert 30 < accepted < 970


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["os.system", CANARY, "torch.bfloat16", "signal.Signals", "Part", *FUNCTIONS]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["_target_", "_args_", "_call_", "_partial_", "_name_", "size", "names", "a", 1]), inner
        )
    ),
    max_leaves=12,
)
KEYS = st.sampled_from(["_target_", "_call_", *Small.__dataclass_fields__])
# The fixture's canaries may watch many examples at once
QUICK = settings(
    max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck), derandomize=True
)


@QUICK
@given(data=st.dictionaries(KEYS, PLAIN))
def test_any_plain_data_is_read_or_refused(data: dict[str, Any]) -> None:
    with _watch():
        try:
            built = from_dict(Small, {"count": 1, **data})
        except ConfigError as error:
            _check_message(error)
            return
        text = to_yaml(built)
        assert to_yaml(from_dict(Small, parse_yaml(text))) == text


@QUICK
@given(data=st.dictionaries(st.sampled_from([*ConfigContainer.__dataclass_fields__, "x"]), PLAIN))
def test_the_schema_check_takes_any_plain_data(data: dict[str, Any]) -> None:
    with _watch():
        for partial in (True, False):
            try:
                check_section_values(data, partial=partial)
            except ConfigError as error:
                _check_message(error)


@QUICK
@given(text=st.text(alphabet=st.characters() | st.sampled_from("[]{}:,-?&*!|>'\"%@`#~=\n\t \\"), max_size=60))
def test_any_text_is_read_or_refused(text: str) -> None:
    with _watch():
        for read in (parse_yaml, parse_json):
            try:
                data = read(text)
            except ConfigError as error:
                _check_message(error)
                continue
            assert dump_yaml(parse_yaml(dump_yaml(data))) == dump_yaml(data)


@pytest.mark.filterwarnings(DROPPED)
@pytest.mark.parametrize("content", [SMALL, WHOLE])
def test_random_bytes_in_a_file(content: str, tmp_path: Path) -> None:
    rng, path = random.Random(23), tmp_path / "config.yaml"
    for _ in range(200):
        raw = bytearray(content.encode())
        for _ in range(rng.randrange(1, 4)):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        path.write_bytes(raw)
        with _watch():
            try:
                from_yaml(Small if content == SMALL else ConfigContainer, path)
            except ConfigError as error:
                _check_message(error, start=f"{path}: ")
