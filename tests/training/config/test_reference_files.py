"""Files that Megatron-Bridge's releases wrote: moved classes, newer keys, null where a value is demanded."""

import dataclasses
import re
import warnings
from collections.abc import Callable
from dataclasses import MISSING
from pathlib import Path
from typing import Any

import pytest
from megatron.core.fusions import fused_bias_geglu

from cloudai_mbridge.training.comm_overlap.user_buffers import PipelineOverlapCfg, TransformerLayerTPOverlapCfg
from cloudai_mbridge.training.compat.versions import RELEASES, installed_release
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.config.text.yaml_text import dump_yaml
from cloudai_mbridge.training.errors import ConfigError
from cloudai_mbridge.training.models.gpt_provider import GPTModelProvider, MLAModelProvider
from cloudai_mbridge.training.schema import check_section_values, load_schema
from cloudai_mbridge.training.schema.known_names import CLASS_PATHS
from tests.cases import every
from tests.golden import Sentence

BRIDGE, LM = "megatron.bridge.training.config", "megatron.training.config"
Make = Callable[..., dict[str, Any]]


def written(tiny: Make) -> dict[str, Any]:
    """Return a file with the traits of those that 0.3.0 to 0.6.0 write."""
    data = tiny()
    data["_target_"] = f"{BRIDGE}.ConfigContainer"
    model = data["model"]
    model["_target_"] = "megatron.bridge.models.gpt_provider.GPTModelProvider"
    model |= {
        "generation_config": None,
        "cuda_graph_scope": None,
        "cuda_graph_modules": ["attn"],
        "params_dtype": "bf16",
    }
    data["logger"] = {"_target_": f"{BRIDGE}.LoggerConfig", "log_interval": 3, "logging_level": None}
    data["rng"] = {"_target_": f"{LM}.common_config.RNGConfig", "seed": 77}
    data["validation"] = {"_target_": f"{LM}.training_config.ValidationConfig", "eval_iters": 5, "start_at_zero": True}
    return data


def _read(path: Path) -> tuple[ConfigContainer, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = ConfigContainer.from_yaml(path)
    return config, [text for each in caught if "dropped" in (text := str(each.message))]


def test_it_loads_and_one_warning_lists_what_was_dropped(tiny: Make, tmp_path: Path) -> None:
    (tmp_path / "run_config.yaml").write_text(dump_yaml(written(tiny)))
    config, told = _read(tmp_path / "run_config.yaml")
    assert (config.rng.seed, config.validation.eval_iters, config.logger.log_interval) == (77, 5, 3)
    assert config.logger.logging_level is not None
    assert not hasattr(config.model, "generation_config")
    (text,) = told
    for part in ("model.generation_config = None", "logger.logging_level = None", "validation.start_at_zero = True"):
        assert part in text


@every("module", ["", ".common_config", ".resilience_config", ".training_config"])
def test_classes_that_moved_to_megatron_lm(module: str, tiny: Make) -> None:
    data = tiny() | {"rng": {"_target_": f"{LM}{module}.RNGConfig", "seed": 5}}
    assert ConfigContainer.from_dict(data).rng.seed == 5


def test_planning_is_as_lenient(tiny: Make) -> None:
    check_section_values(written(tiny))


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("logger", "logging_level", None, "logger.logging_level:"),
        ("validation", "start_at_zero", True, "validation.start_at_zero:"),
    ],
)
def test_our_own_tables_stay_strict(
    sentence: Sentence, section: str, key: str, value: Any, words: str, tiny: Make
) -> None:
    data = tiny()
    data[section] = {**data.get(section, {}), key: value}
    for check in (ConfigContainer.from_dict, check_section_values):
        with pytest.raises(ConfigError, match=words) as caught:
            check(data)
        sentence(caught)


def test_a_wrong_value_in_their_tables_is_still_refused(tiny: Make, sentence: Sentence) -> None:
    data = written(tiny)
    data["rng"]["seed"] = "many"
    with pytest.raises(ConfigError, match=r"rng\.seed:") as caught:
        ConfigContainer.from_dict(data)
    sentence(caught)


def loaded(data: dict[str, Any]) -> ConfigContainer:
    """Load it, and let the warning of dropped keys pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* were dropped: ")
        return ConfigContainer.from_dict(data)


def refusal(data: dict[str, Any], release: str) -> str:
    """Return why planning for a release refuses a file, "" if it does not; loading with the installed one agrees."""
    errors = []
    checks: list[Callable[[], object]] = [lambda: check_section_values(data, release=release)]
    if release == installed_release():
        checks.append(lambda: loaded(data))
    for check in checks:
        try:
            check()
            errors.append("")
        except ConfigError as error:
            errors.append(str(error))
    reasons = {re.sub(r"0\.\d+(\.\d+)?(?= trains)", "RELEASE", error) for error in errors}
    assert len(reasons) == 1, reasons
    return errors[0]


@every("release", RELEASES)
@every(
    ("path", "harmless", "asking"),
    [("model.tensor_parallel_num_weight_shards", 1, 2), ("model.gtp_weight_remat_size", 1, 2)],
)
def test_what_no_release_does_here_is_dropped_by_none(
    path: str, harmless: Any, asking: Any, release: str, tiny: Make
) -> None:
    section, _, key = path.partition(".")
    data = written(tiny)
    data[section] = {"_target_": f"{BRIDGE}.OptimizerConfig", **data[section], key: harmless}
    assert refusal(data, release) == ""
    data[section][key] = asking
    reason = refusal(data, release)
    if key in load_schema(release)["classes"][CLASS_PATHS[data[section]["_target_"]]]["fields"]:
        assert reason == "", "`prepare` refuses it"
    else:
        assert reason.startswith(f"{path}: the training loop does not do {asking}; use ")


@pytest.mark.parametrize(
    ("key", "default", "asking", "having", "without"),
    [
        ("mtp_use_repeated_layer", False, True, "0.17 or newer", ("0.16",)),
        ("dsa_indexer_topk_freq", 1, 2, "0.19 or newer", ("0.16", "0.17", "0.18")),
        ("moe_extended_tp", False, True, "0.16 or older", ("0.17", "0.18", "0.19")),
    ],
)
def test_a_key_of_another_release_is_dropped_only_with_its_default(
    key: str, default: Any, asking: Any, having: str, without: tuple[str, ...], tiny: Make
) -> None:
    data = written(tiny)
    for release in RELEASES:
        data["model"][key] = default
        assert refusal(data, release) == ""
        data["model"][key] = asking
        reason = refusal(data, release)
        assert reason.startswith(f"model.{key}: {asking} needs Megatron-Core {having}") == (release in without), reason
        assert "\n" not in reason


def test_a_typo_in_a_table_of_megatron_core_is_an_error(tiny: Make) -> None:
    data = tiny()
    data["optimizer"] = {**data["optimizer"], "_target_": "megatron.core.optimizer.OptimizerConfig"}
    for release, key, value in (("0.16", "muon_nesterov", False), ("0.19", "muon_use_nesterov", False)):
        assert refusal({**data, "optimizer": {**data["optimizer"], key: value}}, release) == ""
        assert f"optimizer.{key}: True needs" in refusal(
            {**data, "optimizer": {**data["optimizer"], key: True}}, release
        )
    data["optimizer"]["lrr"] = 1
    for release in RELEASES:
        assert refusal(data, release).startswith("optimizer.lrr: unknown key; did you mean 'lr'?")


# Models of single architectures

MODELS = "megatron.bridge.models"


def architecture(tiny: Make, target: str, **fields: Any) -> dict[str, Any]:
    """Return a file with a model of `target`, with every field that it may set."""
    data = written(tiny)
    cls = MLAModelProvider if target.startswith(("deepseek", "kimi")) else GPTModelProvider
    defaults = {each.name: each.default for each in dataclasses.fields(cls) if each.default is not MISSING}
    plain = {name: value for name, value in defaults.items() if isinstance(value, int | float | str | None)}
    given = {"activation_func": "silu", "params_dtype": "bf16", "gradient_accumulation_fusion": False}
    spec = {"transformer_layer_spec": {"_target_": f"{MODELS}.gpt_provider.default_layer_spec", "_call_": False}}
    present = {name: value for name, value in plain.items() if not name.startswith("_")}
    data["model"] = {**present, **given, **spec, **data["model"], "_target_": f"{MODELS}.{target}", **fields}
    return data


@every(
    ("target", "ours"),
    [
        ("llama.llama_provider.Llama3ModelProvider8B", GPTModelProvider),
        ("qwen.qwen_provider.Qwen3MoEModelProvider235B_A22B", GPTModelProvider),
        ("mistral.mistral_provider.MistralModelProvider", GPTModelProvider),
        ("nemotron.nemotron_provider.Nemotron4ModelProvider340B", GPTModelProvider),
        ("deepseek.deepseek_provider.DeepSeekV3Provider", MLAModelProvider),
        ("kimi.kimi_provider.KimiK2Provider", MLAModelProvider),
    ],
)
def test_a_provider_that_only_sets_fields_is_read_as_its_base(target: str, ours: type, tiny: Make) -> None:
    spec = {"_target_": "megatron.core.models.gpt.gpt_layer_specs.get_gpt_decoder_block_spec", "_partial_": True}
    spec |= {"_args_": [], "use_transformer_engine": True}
    data = architecture(tiny, target, transformer_layer_spec=spec, rotary_base=1000000.0, num_layers=4)
    check_section_values(data)
    model: Any = loaded(data).model
    assert (type(model), model.num_layers, model.rotary_base) == (ours, 4, 1000000)
    assert model.transformer_layer_spec.__name__ == "default_layer_spec"


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("default_layer_spec", "default_layer_spec"),
        ("transformer_engine_layer_spec", "default_layer_spec"),
        ("local_layer_spec", "local_layer_spec"),
    ],
)
def test_functions_of_layers_go_by_their_names(name: str, ours: str, tiny: Make) -> None:
    spec = {"_target_": f"{MODELS}.gpt_provider.{name}", "_call_": False}
    data = architecture(tiny, "gpt_provider.GPTModelProvider", transformer_layer_spec=spec)
    check_section_values(data)
    model: Any = loaded(data).model
    assert model.transformer_layer_spec.__name__ == ours


def test_frequencies_of_llama_31(tiny: Make) -> None:
    factors = {"scale_factor": 32, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "old_context_len": 8192}
    data = architecture(tiny, "llama.llama_provider.Llama32ModelProvider1B", **factors)
    check_section_values(data)
    model: Any = loaded(data).model
    assert (model.rope_scaling, model.rope_scaling_factor) == (True, 32.0)
    data["model"]["low_freq_factor"] = 2.0
    assert "model.low_freq_factor: 2.0 is not possible here; use 1" in refusal(data, str(installed_release()))
    del data["model"]["scale_factor"], data["model"]["low_freq_factor"]
    assert "model.low_freq_factor: None" in refusal(data, str(installed_release()))


def test_a_field_that_the_class_would_set_is_demanded(tiny: Make) -> None:
    data = architecture(tiny, "llama.llama_provider.LlamaModelProvider")
    del data["model"]["normalization"]
    words = "LlamaModelProvider is read with all fields that Megatron-Bridge writes; normalization is missing"
    assert words in refusal(data, str(installed_release()))


@every(
    "target",
    [
        "llama.llama_provider.Llama4ModelProvider",
        "qwen.qwen_provider.Qwen3NextModelProvider",
        "gemma.gemma2_provider.Gemma2ModelProvider2B",
        "gpt_oss.gpt_oss_provider.GPTOSSProvider",
        "gpt.gpt_builder.GPTModelConfig",
    ],
)
def test_other_models_are_refused_with_what_is_read(target: str, tiny: Make) -> None:
    reason = refusal(architecture(tiny, target), str(installed_release()))
    assert reason.startswith("model._target_: ")
    assert "docs/training.md" in reason
    assert "GPTModelProvider" in reason.rpartition(";")[2]


def test_no_name_of_an_architecture_hides_one_of_ours() -> None:
    assert CLASS_PATHS["GPTModelProvider"] == f"{GPTModelProvider.__module__}.GPTModelProvider"


def test_both_old_defaults_of_the_dispatchers(tiny: Make) -> None:
    data = written(tiny)
    data["model"] |= {"moe_deepep_num_sms": 20, "moe_hybridep_num_sms": 16, "apply_rope_fusion": False}
    model: Any = loaded(data).model
    model.finalize()  # Megatron-Core 0.19 refuses the two
    assert model.num_layers == data["model"]["num_layers"]


@pytest.mark.parametrize(
    ("section", "key", "value", "read"),
    [
        ("train", "manual_gc_eval", 100, True),
        ("train", "manual_gc_eval", 0, False),
        ("model", "moe_router_dtype", {"_target_": "torch.float32", "_call_": False}, "fp32"),
    ],
)
def test_values_of_another_type_that_recipes_of_megatron_bridge_set(
    sentence: Sentence, section: str, key: str, value: Any, read: Any, tiny: Make
) -> None:
    data = written(tiny)
    data["train"] = {**data["train"], "_target_": f"{BRIDGE}.TrainingConfig"}
    data[section][key] = value
    check_section_values(data)
    assert getattr(getattr(loaded(data), section), key) == read
    ours = tiny()
    ours[section][key] = value
    with pytest.raises(ConfigError, match=rf"{section}\.{key}:") as caught:
        ConfigContainer.from_dict(ours)
    sentence(caught)


def test_the_default_of_megatron_bridges_user_buffers_is_no_buffer_in_fp8(tiny: Make) -> None:
    overlap = "megatron.bridge.training.comm_overlap"
    buffer = {"_target_": f"{overlap}.PipelineOverlapCfg", "num_sm": 1, "cga_size": 2, "num_splits": 4}
    buffer |= {"set_sm_margin": True, "fp8_buf": [False]}
    slots = [each.name for each in dataclasses.fields(TransformerLayerTPOverlapCfg)]
    buffers = {"_target_": f"{overlap}.TransformerLayerTPOverlapCfg", **dict.fromkeys(slots), "fc2_fprop": buffer}
    data = written(tiny)
    data["comm_overlap"] = {"_target_": f"{overlap}.CommOverlapConfig", "tp_comm_overlap": False}
    data["comm_overlap"]["tp_comm_overlap_cfg"] = buffers
    read = loaded(data).comm_overlap
    assert read
    assert read.tp_comm_overlap_cfg
    assert read.tp_comm_overlap_cfg.fc2_fprop == PipelineOverlapCfg(1, 2, 4, True)


def test_the_activation_of_gpt_oss(tiny: Make) -> None:
    data = written(tiny)
    name = "megatron.core.fusions.fused_bias_geglu.quick_gelu"
    data["model"]["activation_func"] = {"_target_": name, "_call_": False}
    read = loaded(data)
    assert read.model.activation_func is fused_bias_geglu.quick_gelu
    assert read.to_dict()["model"]["activation_func"]["_target_"] == name
