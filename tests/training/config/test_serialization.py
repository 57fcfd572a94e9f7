"""Config objects to dict, YAML and JSON and back, and everything that a file may not do."""

import dataclasses
import enum
import functools
import json
import math
import signal
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from tests.cases import every
from tests.golden import Sentence
from tests.training.config.conftest import gpt_container

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    import torch
    from megatron.core.activations import squared_relu
    from megatron.core.optimizer.optimizer_config import OptimizerConfig as MCoreOptimizerConfig
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.utils import init_method_normal

    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.config.dataset import GPTDatasetConfig
    from cloudai_mbridge.training.config.dist import DistributedInitConfig
    from cloudai_mbridge.training.config.finetuning import FinetuningDatasetConfig, PackedSequenceSpecs
    from cloudai_mbridge.training.config.optimizer import OptimizerConfig
    from cloudai_mbridge.training.config.scheduler import SchedulerConfig
    from cloudai_mbridge.training.config.text.classes import class_path, describe_class
    from cloudai_mbridge.training.config.text.serialization import from_dict, from_yaml, resolved_yaml, to_dict, to_yaml
    from cloudai_mbridge.training.config.text.yaml_text import MAX_CHARS, dump_yaml, parse_json, parse_yaml
    from cloudai_mbridge.training.config.train import TrainingConfig
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider


class Color(enum.Enum):
    RED = 1
    GREEN = "green"


@dataclass
class Inner:
    size: int = 1
    label: str | None = None


@dataclass
class OtherInner:
    weight: float


@dataclass(kw_only=True)
class Outer:
    count: int
    rate: float = 0.5
    flag: bool = False
    name: str | None = None
    style: Literal["cosine", "linear"] = "cosine"
    level: Literal[0, 1, 2] = 0
    sizes: list[int] = field(default_factory=list)
    pair: tuple[int, str] | None = None
    blend: tuple[list[str], list[float] | None] | None = None
    patterns: tuple[str, ...] = ()
    table: dict[str, float] = field(default_factory=dict)
    free: Any = None
    path: Path | None = None
    either: str | Path | None = None
    number: int | float = 0
    freq: int | list[int] = 1
    dtype: torch.dtype = torch.float32
    forgotten: torch.dtype = None  # type: ignore[assignment]  # as Megatron-Core annotates it
    activation: Any = None
    color: Color = Color.RED
    stop: signal.Signals = signal.SIGTERM
    inner: Inner = field(default_factory=Inner)
    maybe: Inner | None = None
    choice: Inner | OtherInner | None = None
    _private: int = 3
    computed: int = field(init=False, default=7)


def _refusal(cls: type, data: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        from_dict(cls, data)
    message = str(caught.value)
    assert "\n" not in message
    return message


def _read(cls: type, text: str, tmp_path: Path, name: str = "config.yaml") -> Any:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return from_yaml(cls, path)


ROUND_TRIPS: list[dict[str, Any]] = [
    {},
    {"rate": math.inf},
    {"rate": 1e-5, "number": 3},
    {"number": 3.0},
    {"name": "yes"},
    {"name": "1e-5"},
    {"name": "010"},
    {"name": "0x1F"},
    {"name": ""},
    {"name": "null"},
    {"name": "${oc.env:HOME}"},
    {"name": "a: b #c\n\tü\x00 \ud800 "},
    {"name": "12:30:00"},
    {"sizes": [16, 8, 300], "freq": [1, 0]},
    {"pair": (1, "a"), "blend": (["a", "b"], [0.3, 0.7]), "patterns": ("*.weight", "x")},
    {"blend": (["a"], None)},
    {"table": {"yes": 1.0, "": -0.0}},
    {"free": {"a": [1, None, {"b": "c"}], 3: True}},
    {"free": (1, (2,), [Path("x")])},
    {"free": torch.bfloat16},
    {"path": Path("/a b/c"), "either": Path("x")},
    {"either": "x"},
    {"dtype": torch.bfloat16, "forgotten": torch.float8_e4m3fn},
    {"activation": torch.nn.functional.silu},
    {"activation": torch.nn.functional.gelu},
    {"activation": squared_relu},
    {"color": Color.GREEN, "stop": signal.SIGUSR1},
    {"maybe": Inner(2, "x"), "choice": OtherInner(2.0)},
]


@every("changes", ROUND_TRIPS)
@every("suffix", [".yaml", ".json"])
def test_what_is_written_comes_back(changes: dict[str, Any], suffix: str, tmp_path: Path) -> None:
    before = Outer(count=1, **changes)

    text = to_yaml(before) if suffix == ".yaml" else json.dumps(_text_keys(to_dict(before)))
    after = _read(Outer, text, tmp_path, f"config{suffix}")

    if suffix == ".json" and isinstance(before.free, dict):
        before.free = _text_keys(before.free)  # JSON has no other keys
    assert after == before
    assert type(after.number) is type(before.number)
    assert to_dict(after) == to_dict(before)


def _text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _text_keys(item) for key, item in value.items()}
    return [_text_keys(item) for item in value] if isinstance(value, list) else value


def test_nan_comes_back(tmp_path: Path) -> None:
    assert math.isnan(_read(Outer, to_yaml(Outer(count=1, rate=math.nan)), tmp_path).rate)


def test_names_are_written_as_megatron_bridge_writes_them() -> None:
    data = to_dict(Outer(count=1, dtype=torch.bfloat16, activation=torch.nn.functional.silu, stop=signal.SIGUSR1))

    assert data["_target_"] == f"{__name__}.Outer"
    assert data["dtype"] == {"_target_": "torch.bfloat16", "_call_": False}
    assert data["activation"] == {"_target_": "torch.nn.functional.silu", "_call_": False}
    assert data["stop"] == {
        "_target_": "signal.Signals",
        "_call_": True,
        "_args_": [int(signal.SIGUSR1)],
        "_name_": "SIGUSR1",
    }
    assert "_private" not in data
    assert "computed" not in data
    assert data["maybe"] is None


def test_an_init_method_keeps_its_numbers() -> None:
    method = init_method_normal(0.02)

    written = to_dict(Outer(count=1, activation=method))
    back = from_dict(Outer, written).activation

    assert written["activation"]["_target_"] == "torch.nn.init.normal_"
    assert isinstance(back, functools.partial)
    assert (back.func, back.args, back.keywords) == (method.func, method.args, method.keywords)


@every(
    ("value", "reason"),
    [
        (lambda x: x, "cannot be written"),
        (object(), "cannot be written"),
        (functools.partial(print, 1), "cannot be written"),
        (functools.partial(torch.nn.init.normal_, generator=object()), "cannot be written"),
        ({"_target_": "x"}, "a file would read it as a class"),
        ({1.5: 1}, "neither text nor an int"),
    ],
)
def test_what_could_not_come_back_is_not_written(value: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        to_dict(Outer(count=1, free=value))
    assert str(caught.value).startswith("free")
    assert reason in str(caught.value)


def test_only_config_objects_are_written(sentence: Sentence) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(ConfigError) as caught:
        to_dict(Outer(count=1, free=cycle))
    sentence(caught)
    with pytest.raises(ConfigError) as caught:
        to_dict(3)
    sentence(caught)


DEEP: Any = functools.reduce(lambda deep, _: [deep], range(100), 1)
REFUSED = [
    ({}, "config: "),
    ({"cuont": 1}, "cuont: "),
    ({"count": 1, "zzzz": 1}, "zzzz: "),
    ({"count": 1, 5: 1}, "5: "),
    ({"count": 1, "_private": 1}, "_private: "),
    ({"count": 1, "computed": 7}, "computed: "),
    ({"count": True}, "count: "),
    ({"count": 1.0}, "count: "),
    ({"count": "1"}, "count: "),
    ({"count": None}, "count: "),
    ({"count": 1, "rate": "1e-5"}, "rate: "),
    ({"count": 1, "rate": True}, "rate: "),
    ({"count": 1, "rate": 10**400}, "rate: "),
    ({"count": 1, "flag": 1}, "flag: "),
    ({"count": 1, "flag": "yes"}, "flag: "),
    ({"count": 1, "name": 5}, "name: "),
    ({"count": 1, "style": "cosin"}, "style: "),
    ({"count": 1, "style": 1}, "style: "),
    ({"count": 1, "level": True}, "level: "),
    ({"count": 1, "level": 1.0}, "level: "),
    ({"count": 1, "level": 3}, "level: "),
    ({"count": 1, "sizes": [1, "2"]}, "sizes[1]: "),
    ({"count": 1, "sizes": 3}, "sizes: "),
    ({"count": 1, "freq": [1, None]}, "freq[1]: "),
    ({"count": 1, "pair": [1]}, "pair: "),
    ({"count": 1, "pair": [1, 2]}, "pair[1]: "),
    ({"count": 1, "blend": [["a"], ["b"]]}, "blend[1][0]: "),
    ({"count": 1, "table": {"a": "b"}}, "table.a: "),
    ({"count": 1, "table": {1: 1.0}}, "table.1 (key): "),
    ({"count": 1, "dtype": "torch.bfloat166"}, "dtype: "),
    ({"count": 1, "color": "BLUE"}, "color: "),
    ({"count": 1, "color": 1}, "color: "),
    ({"count": 1, "inner": {"size": "x"}}, "inner.size: "),
    ({"count": 1, "inner": None}, "inner: "),
    ({"count": 1, "maybe": {"sise": 1}}, "maybe.sise: "),
    ({"count": 1, "choice": {"weight": 1.0}}, "choice.weight: "),
    ({"count": 1, "free": {1, 2}}, "free: "),
    ({"count": 1, "free": object()}, "free: "),
    ({"count": 1, "rate": math.nan, "sizes": [math.inf]}, "sizes[0]: "),
    ({"count": 1, "free": DEEP}, "free[0][0]"),
    ([], "Outer: "),
    (None, "Outer: "),
]


@every(("data", "place"), REFUSED)
def test_wrong_data_is_refused_with_its_place(sentence: Sentence, data: Any, place: str) -> None:
    message = _refusal(Outer, data)
    assert message.startswith(place)
    sentence(message)


def test_values_are_read_in_the_form_of_their_field() -> None:
    built = from_dict(Outer, {"count": 1, "rate": 2, "table": {"a": 3}, "choice": {"size": 2}})
    assert type(built.rate) is type(built.table["a"]) is float
    assert built.choice == Inner(2), "a table of a union is read as the first class"
    built = from_dict(Outer, {"count": 1, "dtype": "bfloat16", "forgotten": "torch.half", "stop": "SIGINT"})
    assert (built.dtype, built.forgotten, built.stop) == (torch.bfloat16, torch.float16, signal.SIGINT)


def test_what_a_class_raises_is_a_config_error() -> None:
    message = _refusal(GPTDatasetConfig, {"random_seed": 1})
    assert message == "config: missing key sequence_length of GPTDatasetConfig"

    @dataclass
    class Picky:
        size: int

        def __post_init__(self) -> None:
            raise AssertionError("size\nmust be\n2")

    assert _refusal(Picky, {"size": 1}) == "config: Picky refuses these values: size must be 2"


FORBIDDEN = [
    "os.system",
    "subprocess.Popen",
    "builtins.eval",
    "eval",
    "..os.system",
    "os",
    "",
    None,
    3,
    ["os.system"],
    "torch.load",
    "torch.float32.__class__",
    "torch.nn.functional.silu.__globals__",
    "cloudai_mbridge.training.config.train",
    "cloudai_mbridge.training.config.train.TrainingConfigs",
    "cloudai_mbridge.training.config.text.serialization.from_yaml",
    "megatron.bridge.recipes.llama.llama3_8b_pretrain_config",
    "megatron.core.transformer.spec_utils.ModuleSpec",
    "signal.signal",
]


@every("target", FORBIDDEN)
@every("key", ["free", "inner", "maybe", "activation", "dtype", "color", "table", "path", "sizes"])
def test_no_other_name_is_accepted_anywhere(target: Any, key: str) -> None:
    message = _refusal(Outer, {"count": 1, key: {"_target_": target, "_args_": ["touch /tmp/x"]}})
    assert _refusal(Outer, {"_target_": target, "count": 1}).startswith("_target_: ")
    assert message.startswith(f"{key}._target_: ")
    assert "is not among the classes and functions that a file may name" in message


@every(
    ("key", "value"),
    [
        ("free", {"_target_": "torch.nn.functional.silu", "_call_": True}),
        ("free", {"_target_": "torch.nn.functional.silu", "_args_": [1]}),
        ("free", {"_target_": "torch.nn.functional.silu", "_partial_": True}),
        ("free", {"_target_": "torch.nn.init.normal_", "_partial_": True, "a": [1]}),
        ("free", {"_target_": "torch.nn.init.normal_", "_partial_": True, "_args_": 1}),
        ("free", {"_target_": "pathlib.Path", "_args_": [1]}),
        ("free", {"_target_": "pathlib.Path"}),
        ("free", {"_target_": "pathlib.Path", "_args_": ["a"], "b": 1}),
        ("free", {"_target_": "signal.Signals", "_args_": [9999]}),
        ("free", {"_target_": "signal.Signals", "_name_": "SIGTERN"}),
        ("free", {"_target_": "signal.Signals", "_name_": "SIGTERM", "_args_": [9]}),
        ("free", {"_target_": "signal.Signals"}),
        ("dtype", {"_target_": "torch.nn.functional.silu", "_call_": False}),
        ("color", {"_target_": "signal.Signals", "_name_": "SIGTERM"}),
        ("inner", {"_target_": "TrainingConfig"}),
        ("inner", {"_target_": f"{__name__}.Inner", "_call_": False}),
        ("inner", {"_target_": f"{__name__}.OtherInner", "weight": 1.0}),
    ],
)
def test_a_known_name_in_the_wrong_place_or_shape_is_refused(sentence: Sentence, key: str, value: Any) -> None:
    message = _refusal(Outer, {"count": 1, key: value})
    assert message.startswith(key)
    sentence(message, signals=r"(?<=choices: )SIG.*")


def test_module_specs_are_opaque_because_they_import_what_they_name() -> None:
    spec = {"module": ["os", "system"], "params": {}}
    message = _refusal(GPTModelProvider, {"num_layers": 1, "transformer_layer_spec": spec})

    assert message.startswith("transformer_layer_spec: ")


# YAML


@every(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E3", 1000.0),
        ("1.", 1.0),
        (".5", 0.5),
        ("-0", 0),
        ("0x1f", 31),
        ("010", "010"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("yes", "yes"),
        ("off", "off"),
        ("~", None),
        ("", None),
        ("True", True),
        ("-.inf", -math.inf),
        ("inf", "inf"),
        ("'1'", "1"),
        ("! 1", "1"),
        ("!!str 1", "1"),
        ("<<: 1", {"<<": 1}),
        ("=", "="),
    ],
)
def test_yaml_scalars_follow_the_core_rules(text: str, value: Any) -> None:
    read = parse_yaml(text)

    assert read == value
    assert type(read) is type(value)


BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
)


@every(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is given twice"),
        ("{a: 1, a: 1}", "the key 'a' is given twice"),
        (BOMB, "more than 100000 values"),
        ("&a [*a]", "the alias *a stands before or inside its anchor"),
        ("[*b]", "the alias *b stands before or inside its anchor"),
        ("[" * 2000, "nested deeper than 64 levels"),
        ("- " * 2000, "nested deeper than 64 levels"),
        ("!!python/object/apply:os.system ['true']", "the tag 'tag:yaml.org,2002:python/object/apply:os.system'"),
        ("!!python/name:os.system", "is not read"),
        ("a: !!binary aGk=", "is not read"),
        ("a: 1\n---\nb: 2", "more than one YAML document"),
        ("? [1]\n: 2", "cannot be a key"),
        ("~: 2", "cannot be a key"),
        ("1.5: 2", "cannot be a key"),
        ("a: [1", "expected"),
        ("1e999", "too large for a float"),
        ("9" * 5000, "too many digits"),
        ('"\\UFFFFFFFF"', ""),
        ("a: \x01", "special characters are not allowed"),
        ("a" * (MAX_CHARS + 1), "longer than"),
    ],
)
def test_yaml_traps_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text)

    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_alias_is_a_copy_of_its_own() -> None:
    read = parse_yaml("a: &x [1]\nb: *x")

    assert read == {"a": [1], "b": [1]}
    assert read["a"] is not read["b"]


@pytest.mark.long
def test_as_many_values_as_are_allowed_are_read() -> None:
    assert len(parse_yaml(f"[{', '.join(['1'] * 99_999)}]")) == 99_999
    with pytest.raises(ConfigError, match="more than 100000 values"):
        parse_yaml(f"[{', '.join(['1'] * 100_000)}]")


@every(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
        ("[" * 100_000, "recursion"),
        ("[1e999]", "too large for a float"),
        ("[" + "9" * 5000 + "]", "Exceeds the limit"),
        ("{'a': 1}", "Expecting property name"),
        ("", "Expecting value"),
    ],
)
def test_json_traps_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_json(text)


def test_other_yaml_readers_agree_with_what_is_written() -> None:
    yaml = pytest.importorskip("yaml")
    data = {"yes": ["1e-5", "010", 1e-5, "12:30:00", "2024-01-01", "=", "<<", "~", "a b", "", 5, True, None]}

    assert yaml.safe_load(dump_yaml(data)) == data
    assert parse_yaml(dump_yaml(data)) == data


@every("content", [b"\xff\xfe\x00", b"", b"- 1", b"a: [", b"\x00"])
@every("name", ["c.yaml", "c.json"])
def test_an_unreadable_file_is_named(content: bytes, name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        from_yaml(Outer, path)
    assert str(caught.value).startswith(f"{path}: ")


def test_a_missing_file_and_a_directory_are_config_errors(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none.yaml"):
        with pytest.raises(ConfigError, match=str(path)):
            from_yaml(Outer, path)


# the real classes


def test_a_container_comes_back_whole(tmp_path: Path) -> None:
    before = gpt_container(mixed_precision="bf16_mixed", profiling=None)
    before.model.activation_func = torch.nn.functional.silu
    before.model.params_dtype = torch.bfloat16
    before.model.attention_backend = AttnBackend.flash

    text = to_yaml(before, tmp_path / "run.yaml")
    after = from_yaml(ConfigContainer, tmp_path / "run.yaml")

    assert text == (tmp_path / "run.yaml").read_text(encoding="utf-8")
    for entry in dataclasses.fields(ConfigContainer):
        assert type(getattr(after, entry.name)) is type(getattr(before, entry.name))
    assert to_dict(after) == to_dict(before)
    assert (after.train, after.optimizer, after.checkpoint) == (before.train, before.optimizer, before.checkpoint)


def test_a_finalized_model_comes_back() -> None:
    model = GPTModelProvider(num_layers=4, hidden_size=64, num_attention_heads=4, pipeline_model_parallel_size=2)
    model.pipeline_model_parallel_layout = "Ett|ttL"
    model.pipeline_dtype = torch.float32
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.finalize()
    assert isinstance(model.init_method, functools.partial)

    back = from_dict(GPTModelProvider, to_dict(model))

    assert to_dict(back) == to_dict(model)
    assert back.pipeline_model_parallel_layout == "Ett|ttL"
    assert back.init_method.keywords == model.init_method.keywords


def test_objects_of_the_running_program_are_left_out() -> None:
    container = gpt_container()
    container.model.grad_scale_func = lambda loss: loss
    container.model.timers = object()
    container.dataset.tokenizer = object()

    back = from_dict(ConfigContainer, to_dict(container))

    assert (back.model.grad_scale_func, back.model.timers, back.dataset.tokenizer) == (None, None, None)


def test_the_rank_of_the_writer_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    written = to_dict(DistributedInitConfig(local_rank=3))
    monkeypatch.setenv("LOCAL_RANK", "5")

    assert "local_rank" not in written
    assert from_dict(DistributedInitConfig, written).local_rank == 5


def test_second_names_of_fields() -> None:
    for key in ("seq_length", "sequence_length"):
        assert from_dict(GPTDatasetConfig, {key: 64, "random_seed": 1}).sequence_length == 64
    assert from_dict(DistributedInitConfig, {"lazy_init": True}).lazy_mpu_init is True
    data = {"seq_length": 64, "sequence_length": 64, "random_seed": 1}
    assert from_dict(GPTDatasetConfig, data).seq_length == 64
    message = _refusal(GPTDatasetConfig, {**data, "sequence_length": 65})
    assert message == "sequence_length: 65 contradicts 64, given under its other name"


MEGATRON_BRIDGE_FILE = """
_target_: megatron.bridge.training.config.ConfigContainer
checkpoint: {_target_: megatron.bridge.training.config.CheckpointConfig, save: /ckpt, save_interval: 100}
comm_overlap: null
dataset:
  _target_: megatron.bridge.training.config.FinetuningDatasetConfig
  dataset_root: {_args_: [/data], _call_: true, _target_: pathlib.PosixPath}
  packed_sequence_specs:
    _target_: megatron.bridge.data.datasets.packed_sequence.PackedSequenceSpecs
    packed_sequence_size: 4096
  seq_length: 4096
logger: {_target_: megatron.bridge.training.config.LoggerConfig, log_interval: 1}
mixed_precision:
  _target_: megatron.bridge.training.mixed_precision.MixedPrecisionConfig
  bf16: true
  params_dtype: {_call_: false, _target_: torch.bfloat16}
model:
  _target_: megatron.bridge.models.gpt_provider.GPTModelProvider
  activation_func: {_call_: false, _target_: torch.nn.functional.silu}
  attention_backend:
    _args_: [5]
    _call_: true
    _name_: auto
    _target_: megatron.core.transformer.enums.AttnBackend
  hidden_size: 64
  init_method: {_args_: [], _partial_: true, _target_: torch.nn.init.normal_, mean: 0.0, std: 0.02}
  num_attention_heads: 4
  num_layers: 2
  transformer_layer_spec: {_call_: false, _target_: megatron.bridge.models.gpt_provider.default_layer_spec}
optimizer:
  _target_: megatron.core.optimizer.optimizer_config.OptimizerConfig
  lr: 1.0e-05
scheduler:
  _target_: megatron.bridge.training.config.SchedulerConfig
  lr_decay_steps: 80
  lr_warmup_iters: 2
tokenizer: {_target_: megatron.bridge.training.tokenizers.config.TokenizerConfig, tokenizer_type: NullTokenizer}
train:
  _target_: megatron.bridge.training.config.TrainingConfig
  exit_signal: {_args_: [15], _call_: true, _name_: SIGTERM, _target_: signal.Signals}
  train_iters: 10
"""


def test_a_file_that_megatron_bridge_wrote_loads(tmp_path: Path) -> None:
    config = _read(ConfigContainer, MEGATRON_BRIDGE_FILE, tmp_path)

    assert type(config) is ConfigContainer
    assert type(config.optimizer) is OptimizerConfig
    assert issubclass(OptimizerConfig, MCoreOptimizerConfig)
    assert config.optimizer.lr == 1e-5
    assert config.dataset == FinetuningDatasetConfig(
        dataset_root=Path("/data"),
        seq_length=4096,
        packed_sequence_specs=PackedSequenceSpecs(packed_sequence_size=4096),
    )
    assert config.model.activation_func is torch.nn.functional.silu
    assert config.model.init_method.keywords == {"mean": 0.0, "std": 0.02}
    assert config.train.exit_signal is signal.SIGTERM


def test_computed_fields_are_taken_from_megatron_bridge_only(sentence: Sentence) -> None:
    foreign = {"_target_": "megatron.bridge.training.config.SchedulerConfig", "lr_decay_steps": 80}
    assert from_dict(SchedulerConfig, foreign).lr_decay_steps is None

    message = _refusal(SchedulerConfig, {"lr_decay_steps": 80})
    assert message.startswith("lr_decay_steps: ")
    sentence(message)


def test_a_section_of_another_kind_and_a_base_class_are_refused(sentence: Sentence) -> None:
    data = to_dict(gpt_container())
    message = _refusal(ConfigContainer, {**data, "train": to_dict(OptimizerConfig())})
    assert message.startswith("train: ")
    sentence(message)
    assert _refusal(ConfigContainer, {**data, "dataset": {"_target_": "DatasetProvider"}}).startswith(
        "dataset._target_: "
    )


@every("cls", [TrainingConfig, OptimizerConfig, GPTModelProvider, GPTDatasetConfig])
def test_private_fields_are_no_keys(cls: type) -> None:
    section = describe_class(cls)[0]
    assert section.path == class_path(cls)
    assert not [key for key in section.fields if key.startswith("_")]


def test_a_resolved_configuration_holds_no_secret() -> None:
    config = gpt_container()
    config.logger.comet_api_key = "s3cret-1"
    config.logger.mlflow_tracking_uri = "https://user:s3cret-2@host/path"
    config.tokenizer.hf_tokenizer_kwargs = {"token": "s3cret-3", "use_fast": True}
    text = resolved_yaml(config)
    assert "s3cret" not in text
    assert "https://host/path" in text
    assert "use_fast" in text
    assert config.logger.mlflow_tracking_uri == "https://user:s3cret-2@host/path"
    assert config.tokenizer.hf_tokenizer_kwargs["token"] == "s3cret-3"
