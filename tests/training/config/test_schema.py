"""The schema: complete, up to date, readable without torch, and as strict as the loader."""

import copy
import json
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.cases import every
from tests.golden import GoldenFile, Sentence

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    from megatron.core.transformer import TransformerConfig

    import cloudai_mbridge.training.models.hybrid_provider
    from cloudai_mbridge.training.compat.versions import RELEASES, installed_release
    from cloudai_mbridge.training.config.container import ConfigContainer
    from cloudai_mbridge.training.config.text.serialization import from_dict
    from cloudai_mbridge.training.errors import ConfigError
    from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider
    from cloudai_mbridge.training.schema import SCHEMA_FILE, check_section_values, load_schema
    from cloudai_mbridge.training.schema import __main__ as generator
    from cloudai_mbridge.training.schema.__main__ import generate_schema
    from cloudai_mbridge.training.schema.forms import Form, load_all_releases, parse, render, union
    from cloudai_mbridge.training.schema.known_names import CLASS_PATHS, CONTAINER, ENUMS, FUNCTIONS

REPOSITORY = Path(__file__).parents[3]
GOOD: dict[str, Any] = {
    "train": {"train_iters": 10, "micro_batch_size": 1, "global_batch_size": 8},
    "model": {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4},
    "optimizer": {"lr": 1e-4, "params_dtype": {"_target_": "torch.bfloat16"}},
    "scheduler": {},
    "dataset": {"seq_length": 128, "random_seed": 1},
    "logger": {},
    "tokenizer": {},
    "checkpoint": {"save": "/ckpt"},
}


def test_the_committed_schema_is_what_the_classes_say(golden_file: GoldenFile) -> None:
    fresh = generate_schema()

    golden_file(SCHEMA_FILE, fresh)
    assert json.loads(fresh)["root"] == CONTAINER


def test_the_schema_depends_on_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")

    assert generate_schema() == SCHEMA_FILE.read_text(encoding="utf-8")


def test_a_new_field_of_our_own_is_one_of_every_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one release is installed where the schema is written."""
    before = copy.deepcopy(load_all_releases())
    for entry in before["classes"].values():
        entry["fields"].pop("hf_model_revision", None)
    monkeypatch.setattr(generator, "load_all_releases", lambda: before)

    assert generate_schema() == SCHEMA_FILE.read_text(encoding="utf-8")


def test_every_known_class_is_in_the_schema() -> None:
    assert set(load_schema()["classes"]) == set(CLASS_PATHS.values())


def test_fields_of_base_classes_are_in_the_schema() -> None:
    fields = load_schema()["classes"][CLASS_PATHS["GPTModelProvider"]]["fields"]

    assert set(TransformerConfig.__dataclass_fields__) - set(fields) == {
        name for name in TransformerConfig.__dataclass_fields__ if name.startswith("_")
    }
    assert fields["vocab_size"] == {"type": "int | None", "required": False, "default": None}


def test_an_entry_says_type_default_and_choices() -> None:
    classes = load_schema()["classes"]
    scheduler = classes[CLASS_PATHS["SchedulerConfig"]]["fields"]

    assert scheduler["lr_decay_style"] == {
        "type": "Literal['constant', 'linear', 'cosine', 'inverse-square-root', 'WSD']",
        "required": False,
        "default": "linear",
        "choices": ["constant", "linear", "cosine", "inverse-square-root", "WSD"],
    }
    assert scheduler["lr_decay_steps"]["computed"] is True
    assert classes[CONTAINER]["fields"]["train"]["required"] is True
    assert classes[CLASS_PATHS["DatasetProvider"]]["abstract"] is True
    assert "default" not in classes[CLASS_PATHS["DistributedInitConfig"]]["fields"]["local_rank"]


@pytest.mark.process
def test_the_reading_side_needs_neither_torch_nor_yaml() -> None:
    program = (
        "import sys\n"
        "from cloudai_mbridge.training.schema import check_section_values, load_schema\n"
        "load_schema(); check_section_values({'train': {'train_iters': 1}}, partial=True)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'megatron', 'yaml', 'numpy'}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=600
    )

    assert done.stdout == "[]\n"


def test_a_good_config_passes_here_and_there() -> None:
    check_section_values(GOOD)
    assert type(from_dict(ConfigContainer, GOOD).model) is GPTModelProvider


# section, key, value; None as the section: the value replaces the whole config
WRONG: list[tuple[str, str, Any]] = [
    ("train", "train_iter", 1),
    ("train", "train_iters", "10"),
    ("train", "train_iters", True),
    ("train", "train_iters", 1.5),
    ("train", "exit_signal", "SIGTERN"),
    ("train", "rampup_batch_size", [1, "2"]),
    ("train", "empty_unused_memory_level", 3),
    ("model", "bf16", 1),
    ("model", "num_layer", 1),
    ("model", "activation_func", "os.system"),
    ("model", "attention_backend", "flesh"),
    ("model", "_target_", "os.system"),
    ("model", "_target_", "TrainingConfig"),
    ("model", "transformer_layer_spec", {"module": ["os", "system"]}),
    ("optimizer", "lr", "1e-4"),
    ("optimizer", "params_dtype", "torch.bfloat"),
    ("scheduler", "lr_decay_steps", 1),
    ("dataset", "sequence_length", 64),
    ("dataset", "blend", [["a"], ["b"]]),
    ("dataset", "tokenizer", "x"),
    ("logger", "mlflow_tags", {"a": 1}),
    ("tokenizer", "hf_tokenizer_kwargs", {"_target_": "os.system"}),
    ("checkpoint", "save", 1),
    ("optimizer_config_override_provider", "x", 1),
    ("profiling", "profile_ranks", "0"),
    ("ft", "simulated_fault_type", "rank_hang"),
    ("comm_overlap", "bucket_size", 1),
    ("peft", "dimension", 8),
    ("trian", "train_iters", 1),
]


@every(("section", "key", "value"), WRONG)
def test_the_schema_and_the_loader_refuse_with_the_same_words(section: str, key: str, value: Any) -> None:
    data = copy.deepcopy(GOOD)
    data.setdefault(section, {})[key] = value

    with pytest.raises(ConfigError) as by_schema:
        check_section_values(data)
    with pytest.raises(ConfigError) as by_loader:
        from_dict(ConfigContainer, data)
    assert str(by_schema.value) == str(by_loader.value)
    assert str(by_schema.value).startswith(section)


@every("section", sorted(GOOD))
def test_a_missing_section_is_refused_unless_the_config_is_partial(sentence: Sentence, section: str) -> None:
    data = {name: values for name, values in GOOD.items() if name != section}

    check_section_values(data, partial=True)
    with pytest.raises(ConfigError, match=section) as caught:
        check_section_values(data)
    sentence(caught)


def test_a_partial_config_is_typed_all_the_same(sentence: Sentence) -> None:
    check_section_values({"dataset": {"seq_length": 8}, "comm_overlap": {"bucket_size": 1}}, partial=True)
    with pytest.raises(ConfigError, match=r"dataset\.seq_length:") as caught:
        check_section_values({"dataset": {"seq_length": "8"}}, partial=True)
    sentence(caught)


@every("data", [None, [], "train", 3])
def test_a_config_is_a_table(sentence: Sentence, data: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_section_values(data)
    sentence(caught)


@every(
    "form",
    [
        Form("any"),
        union((Form("int"), Form("none"))),
        Form("literal", ("a", 1, -1, None, True)),
        Form("list", (union((Form("int"), Form("float"))),)),
        Form("tuple", (Form("str"),), True),
        Form("tuple", (Form("list", (Form("str"),)), union((Form("list", (Form("float"),)), Form("none"))))),
        Form("tuple", ()),
        Form("dict", (Form("str"), Form("any"))),
        Form("config", ("a.b.C",)),
        Form("enum", ("signal.Signals",)),
        Form("opaque", ("x<locals>.Y",)),
    ],
)
def test_type_texts_come_back(form: Form) -> None:
    assert parse(render(form)) == form


@every("text", ["", "x", "int |", "list[", "__import__('os')", "set[int]", "1", "int.real"])
def test_other_texts_are_no_types(text: str) -> None:
    with pytest.raises(ValueError, match="is not the text of a type"):
        parse(text)


def test_everything_that_a_file_may_name_exists() -> None:
    import importlib

    enums = [ENUMS[path] for path in load_schema(installed_release())["enums"] if path in ENUMS]
    assert enums
    for module, name in [*FUNCTIONS.values(), *enums]:
        assert callable(getattr(importlib.import_module(module), name))
    assert cloudai_mbridge.training.models.hybrid_provider.MambaModelProvider


@every("backend", ["auto", "flashinfer", "torch"])
def test_where_the_release_is_not_known_the_values_of_every_release_pass(backend: str) -> None:
    """0.17 has auto, torch and te; 0.18 flashinfer, torch and vllm."""
    data = {"model": {"_target_": "GPTModelProvider", "inference_grouped_gemm_backend": backend}}
    check_section_values(data, partial=True)
    releases = {"auto": {"0.17"}, "flashinfer": {"0.18", "0.19"}, "torch": {"0.17", "0.18", "0.19"}}[backend]
    for release in RELEASES:
        with nullcontext() if release in releases else pytest.raises(ConfigError, match="grouped_gemm_backend"):
            check_section_values(data, partial=True, release=release)


def test_members_of_an_enum_are_those_of_every_release() -> None:
    anywhere = load_schema()["enums"]
    for release in RELEASES:
        for name, members in load_schema(release)["enums"].items():
            assert members.keys() <= anywhere[name].keys()
