"""What is filled in before Megatron-Core checks a model: dtypes by name, sequence parallelism, the vocabulary."""

import json
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from tests.cases import every
from tests.golden import Sentence

torch = pytest.importorskip("torch")
pytest.importorskip("megatron.core")

import torch.nn.functional as F  # noqa: E402

from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs  # noqa: E402
from cloudai_mbridge.recipes import load_recipe  # noqa: E402
from cloudai_mbridge.recipes.apply import training_config, with_recipe_defaults  # noqa: E402
from cloudai_mbridge.training.config.container import ConfigContainer  # noqa: E402
from cloudai_mbridge.training.config.rules.validate import runtime_config_update  # noqa: E402
from cloudai_mbridge.training.errors import ConfigError  # noqa: E402
from cloudai_mbridge.training.mixed_precision import MIXED_PRECISION_RECIPES  # noqa: E402
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider, MLAModelProvider  # noqa: E402
from cloudai_mbridge.training.models.layer_specs import has_transformer_engine  # noqa: E402
from cloudai_mbridge.training.models.other_providers import T5ModelProvider  # noqa: E402
from cloudai_mbridge.training.startup.prepare import prepare  # noqa: E402

SMALL: dict[str, Any] = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4}
WITHOUT_TE = pytest.mark.skipif(has_transformer_engine(), reason="Transformer Engine is installed")
Make = Callable[..., dict[str, Any]]


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def container(tiny: Make, **model: Any) -> ConfigContainer:
    config: ConfigContainer = ConfigContainer.from_dict(tiny())
    for name, value in model.items():
        setattr(config.model, name, value)
    return config


@every("provider", [GPTModelProvider, MLAModelProvider, T5ModelProvider])
def test_sequence_parallelism_without_tensor_parallelism_is_switched_off_with_a_warning(provider: Any) -> None:
    model = provider(**SMALL, sequence_parallel=True)
    with warnings.catch_warnings(record=True) as caught:  # Megatron-Core warns of other things
        warnings.simplefilter("always")
        model.finalize()
    text = "model.sequence_parallel = True is switched off: tensor_model_parallel_size is 1"
    assert text in [str(each.message) for each in caught]
    assert model.sequence_parallel is False
    model.tensor_model_parallel_size = 2
    model.finalize()  # what the user asked for comes back
    assert model.sequence_parallel is True


@pytest.mark.filterwarnings("ignore:model.sequence_parallel = True is switched off")
def test_a_second_call_tells_the_same(tiny: Make) -> None:
    config = container(tiny, sequence_parallel=True)
    config.mixed_precision = "bf16_mixed"
    told = prepare(config)
    assert (told["model.sequence_parallel"], told["model.bf16"]) == (False, "True")
    assert prepare(config) == told
    assert "model.sequence_parallel" in told
    config.dist.distributed_backend = "another"
    told.pop("dist.distributed_backend", None)
    assert prepare(config).keys() >= told.keys()


def test_a_sweep_over_tp_keeps_its_points_with_sequence_parallelism_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load_recipe("gpt_tiny")
    for tp in (1, 2):
        monkeypatch.setenv("WORLD_SIZE", str(tp))
        args = with_recipe_defaults(ResolvedCmdArgs(model_recipe_name="gpt_tiny", tp=tp, num_gpus=tp), recipe)
        config = ConfigContainer.from_dict(training_config(recipe, args, {"model.sequence_parallel": "true"}))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            adapted = prepare(config)
        assert config.model.sequence_parallel is (tp > 1)
        assert ("model.sequence_parallel" in adapted) is (tp == 1)


@pytest.mark.parametrize(("params_dtype", "expected"), [(torch.float32, torch.float32), ("bf16", torch.bfloat16)])
def test_pipeline_dtype_follows_the_parameters(params_dtype: Any, expected: Any) -> None:
    model = GPTModelProvider(**SMALL, pipeline_model_parallel_size=2, params_dtype=params_dtype)
    model.finalize()
    assert model.pipeline_dtype is expected
    model.params_dtype = torch.float16
    model.finalize()
    assert model.pipeline_dtype is torch.float16


def test_validate_alone_fills_the_pipeline_dtype_in(tiny: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    config = container(tiny, pipeline_model_parallel_size=2)
    config.mixed_precision = None
    config.model.transformer_impl, config.model.apply_rope_fusion = "local", False
    runtime_config_update(config)
    assert config.model.pipeline_dtype is config.model.params_dtype


@every(
    ("name", "dtype"),
    [("bf16", "bfloat16"), ("torch.float16", "float16"), ("float32", "float32"), ("16-mixed", "float16")],
)
def test_dtypes_and_activations_by_name(name: str, dtype: str, tiny: Make) -> None:
    model = GPTModelProvider(**SMALL, params_dtype=name, activation_func="silu")
    model.finalize()
    assert (model.params_dtype, model.activation_func) == (getattr(torch, dtype), F.silu)
    data = tiny()
    data["model"] |= {"params_dtype": name, "activation_func": "relu"}
    read = ConfigContainer.from_dict(data).model
    assert (read.params_dtype, read.activation_func) == (getattr(torch, dtype), F.relu)


@pytest.mark.parametrize(
    ("field", "name"), [("params_dtype", "bf61"), ("pipeline_dtype", ""), ("activation_func", "swish")]
)
def test_names_of_nothing_are_refused(sentence: Sentence, field: str, name: str, tiny: Make) -> None:
    with pytest.raises(ConfigError, match=f"model.{field}") as caught:
        prepare(container(tiny, **{field: name}))
    sentence(caught, dtypes=r"(?<=valid: )torch\..*")


@WITHOUT_TE
@every("moe", [{}, {"num_moe_experts": 4}])
@every("recipe", sorted(name for name in MIXED_PRECISION_RECIPES if "fp8" in name and "-" not in name))
def test_fp8_without_transformer_engine_is_refused_in_words(recipe: str, moe: dict[str, Any], tiny: Make) -> None:
    config = container(tiny, **moe)
    config.mixed_precision = recipe
    with pytest.raises(ConfigError, match=r"model\.fp8 = '(e4m3|hybrid)'"):
        prepare(config)


@WITHOUT_TE
def test_what_else_megatron_compares_with_transformer_engine_names_it(sentence: Sentence) -> None:
    model = GPTModelProvider(**SMALL, symmetric_ar_type="one_shot")
    with pytest.raises(ValueError) as caught:
        model.finalize()
    sentence(caught)


def test_a_table_that_tensor_parallelism_cannot_split_is_refused(
    tiny: Make, monkeypatch: pytest.MonkeyPatch, sentence: Sentence
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"model\.vocab_size") as caught:
        prepare(container(tiny, vocab_size=257, should_pad_vocab=False, tensor_model_parallel_size=2))
    sentence(caught)
    prepare(container(tiny, vocab_size=257, should_pad_vocab=True, tensor_model_parallel_size=2))


TOKENIZERS = {
    "null": {"tokenizer_type": "NullTokenizer", "vocab_size": 257},
    "bytes": {"metadata_path": {"library": "byte-level"}, "vocab_size": 257, "tokenizer_type": None},
}


@pytest.mark.kept_ranks
@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize(("tp", "rows"), [(1, 300), (2, 200)])
def test_a_vocabulary_of_the_tokenizer_is_padded(tokenizer: str, tp: int, rows: int, train: Any, ranks: Any) -> None:
    """257 ids: neither 2 ranks nor `make_vocab_size_divisible_by` divide them."""
    overrides = [
        *("model.vocab_size=null", "model.should_pad_vocab=false", "model.make_vocab_size_divisible_by=100"),
        *(f"model.tensor_model_parallel_size={tp}", "train.train_iters=2"),
    ]
    padded = train(tp, {"tokenizer": TOKENIZERS[tokenizer]}, *overrides)
    assert len(padded.losses) == 2
    whole = train(tp, None, f"model.tensor_model_parallel_size={tp}", "train.train_iters=1")
    hidden, tables = 64, 2
    assert _parameters(whole) - _parameters(padded) == tables * hidden * (512 // tp - rows)


@pytest.mark.kept_ranks
def test_a_model_takes_the_tokenizer_s_vocabulary_in_the_place_of_its_own(train: Any) -> None:
    """`use_tokenizer_vocab_size` of Megatron-Bridge 0.6: 512 rows in the model, 100 ids."""
    section = {"tokenizer": {"tokenizer_type": "NullTokenizer", "vocab_size": 100, "use_tokenizer_vocab_size": True}}
    taken = train(1, section, "model.make_vocab_size_divisible_by=1", "train.train_iters=1")
    own = train(1, None, "train.train_iters=1")
    hidden, tables = 64, 2
    assert _parameters(own) - _parameters(taken) == tables * hidden * (512 - 100)


def _parameters(done: Any) -> int:
    run = next(line for line in done.stdout.splitlines() if line.startswith("MBRIDGE_RUN"))
    return int(json.loads(run.partition(" ")[2])["parameters_on_rank_0"])
