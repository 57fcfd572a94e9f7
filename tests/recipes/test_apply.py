"""What becomes of every argument: it reaches the training, means something elsewhere, or is reported."""

import contextlib
import json
import re
from typing import Any, get_args

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
from cloudai_mbridge.recipes import Recipe, load_recipe
from cloudai_mbridge.recipes.apply import lacked_by, training_config, unsupported_args, why_unsupported
from cloudai_mbridge.recipes.apply import with_recipe_defaults as with_defaults
from cloudai_mbridge.training.compat.versions import GPU, TRANSFORMER_ENGINE
from cloudai_mbridge.training.config import ConfigContainer
from cloudai_mbridge.training.flops import moe_layer_pattern
from tests.cases import every
from tests.golden import Sentence

DENSE, MOE, DEEPSEEK = "gpt_tiny", "moe_tiny", "deepseek_v3"

_HELD_OUT = [[["/c/c4-validation-91205-samples.en_text_document"], None]] * 2
# Arguments that are a field of the training configuration
RULED = {name: argument.config for name, argument in ARGUMENTS.items() if argument.config}
PASSED = {name: argument.config_extra for name, argument in ARGUMENTS.items() if argument.config_extra}
# Their values, where 3, 0.125, true or a word is none
VALUES: dict[str, Any] = {
    "compute_dtype": "fp32", "cuda_graph_impl": "local", "cuda_graph_scope": ["attn"], "profiling_ranks": [1, 2],
    "moe_flex_dispatcher_backend": "hybridep", "pipeline_model_parallel_layout": "Et|tttL",
    "recompute_modules": ["core_attn"],
}  # fmt: skip
# What else has to be set, and the recipe where it is not the dense one
BESIDE: dict[str, dict[str, Any]] = {
    "cuda_graph_scope": {"cuda_graph_impl": "local"},
    "num_moe_experts": {"model_recipe_name": MOE},
    **{name: {"model_recipe_name": MOE} for name in ARGUMENTS if name.startswith("moe_")},
    **{
        name: {ARGUMENTS[name].needs[0]: "p"}
        for name in ("wandb_entity_name", "wandb_experiment_name", "wandb_save_dir")
    },
    **{name: {"save_dir": "ckpt"} for name in ("save_interval", "most_recent_k")},
    **{name: {"pytorch_profiler": True} for name in ("profiling_start_step", "profiling_stop_step", "profiling_ranks")},
}
# Fields that an argument sets besides its own
ALSO: dict[str, set[str]] = {
    "tp": {"model.sequence_parallel"},
    "moe_flex_dispatcher_backend": {"model.moe_token_dispatcher_type"},
    "seq_length": {"dataset.sequence_length"},
    "pipeline_model_parallel_layout": {"model.virtual_pipeline_model_parallel_size"},
    "vocab_size": {"tokenizer.vocab_size"},
    "recompute_num_layers": {"model.recompute_granularity", "model.recompute_method"},
    "recompute_modules": {"model.recompute_granularity"},
    "cuda_graph_impl": {"rng.te_rng_tracker"},
    "moe_a2a_overlap": {
        *("comm_overlap.delay_wgrad_compute", "comm_overlap.tp_comm_overlap", "model.moe_shared_expert_overlap"),
        "comm_overlap._target_",
    },
    "nccl_ub": {"ddp.average_in_collective"},
    "use_megatron_fsdp": {
        *("ddp.average_in_collective", "ddp.bucket_size", "ddp.data_parallel_sharding_strategy"),
        *("ddp.keep_fp8_transpose_cache", "ddp.use_distributed_optimizer", "model.init_model_with_meta_device"),
        *("optimizer.use_distributed_optimizer", "optimizer.use_precision_aware_optimizer"),
    },
    "activation_offload_layers": {"model.cpu_offloading", "model.cpu_offloading_weights"},
}
# Fields that Megatron-Bridge's launcher does not set in its own configuration, by which the table is checked in
# tests/interop/test_arguments.py
ALONE = {
    "lr": "optimizer.lr",
    "min_lr": "optimizer.min_lr",
    "warmup_iters": "scheduler.lr_warmup_iters",
    "num_distributed_optimizer_instances": "ddp.num_distributed_optimizer_instances",
    "pytorch_profiler": "profiling.use_pytorch_profiler",
    "record_memory_history": "profiling.record_memory_history",
    "profiling_start_step": "profiling.profile_step_start",
    "profiling_stop_step": "profiling.profile_step_end",
    "profiling_ranks": "profiling.profile_ranks",
    "enable_nsys": "profiling.use_nsys_profiler",
    "wandb_save_dir": "logger.wandb_save_dir",
    "save_config_filepath": "logger.save_config_filepath",
    "distributed_timeout_minutes": "dist.distributed_timeout_minutes",
}

# Arguments that do their work outside of the training process, or that only label. A new field must not slip in here
# unnoticed: what is neither listed above nor here has to be reported when it is set.
OUTSIDE = {
    "launcher",
    "model_family_name",
    "model_recipe_name",
    "num_gpus",
    "gpus_per_node",
    "gpu_type",
    "fp8_recipe",  # a part of compute_dtype
    "time_limit",
    "container_image",
    "hf_token",
    "wandb_key",
    "log_dir",
    "detach",
    "max_retries",
    "nemorun_version",
    "custom_mounts",
    # of `plan.launchers` and `launch.script`
    "enable_vboost",
    "lock_gpu_freq",
    "peak_mem_clk",
    "enable_pct_binding",
    "preempt_time",
    "nemo_home",
    "offline",
    "dump_env",
    # which recipe and preset it is
    "task",
    "use_recipes",
    "config_variant",
}
# argument -> (its value, what else has to be set, where it must be found, as what)
DERIVED: dict[str, tuple[Any, dict[str, Any], str, Any]] = {
    "first_k_dense_replace": (2, {"model_recipe_name": MOE}, "model.moe_layer_freq", [0, 0, 1, 1]),
    "optimizer_type": ("muon", {}, "optimizer.optimizer", "dist_muon"),
    "use_megatron_fsdp": (True, {}, "ddp.use_megatron_fsdp", True),
    "activation_offload_layers": (2, {}, "model.cpu_offloading_num_layers", 2),
    "use_tokendrop": (True, {"model_recipe_name": MOE}, "model.moe_pad_expert_input_to_capacity", True),
    "deterministic": (True, {}, "model.deterministic_mode", True),
    "preempt_time": (60, {}, "train.exit_signal_handler", True),
    "data": ("c4", {"c4_root": "/c"}, "dataset.split", None),
    "dataset_paths": (["0.5", "/a"], {"data": "rp2", "index_mapping_dir": "/i"}, "dataset.data_path", ["0.5", "/a"]),
    "index_mapping_dir": ("/i", {"data": "rp2", "dataset_paths": "/a"}, "dataset.path_to_cache", "/i"),
    "dataset_root": ("/s", {"data": "squad"}, "dataset.dataset_root", "/s"),
    "packed_sequence": (
        True,
        {"data": "squad", "dataset_root": "/s"},
        "dataset.dataset_kwargs",
        {"pad_to_max_length": True},
    ),
    "tokenizer_type": ("SentencePieceTokenizer", {"tokenizer_model": "/t"}, "tokenizer.vocab_size", None),
    "tokenizer_model": ("/t", {"tokenizer_type": "HuggingFaceTokenizer"}, "tokenizer.tokenizer_model", "/t"),
    "c4_root": (
        "/c",
        {"data": "c4"},
        "dataset.blend_per_split",
        [[["/c/c4-train.en_6_text_document"], [50.0]], *_HELD_OUT],
    ),
    "c4_train_shards": (
        [1],
        {"data": "c4", "c4_root": "/c"},
        "dataset.blend_per_split",
        [[["/c/c4-train.en_1_text_document"], [50.0]], *_HELD_OUT],
    ),
}
# options of a profiler, which `plan.launchers` reads
OF_NSYS = {"nsys_trace", "nsys_extra_args", "profiling_gpu_metrics", "export_nsys_sqlite"}

_SAMPLES: dict[str, Any] = {
    "time_limit": "00:10:00",
    "launcher": "embedded",
    "profiling_ranks": 3,
    "cuda_graph_scope": "attn",
    "cuda_graph_impl": "local",
    "packager": "git",
}


def _set(name: str) -> ResolvedCmdArgs:
    """Set one argument to something that asks for an effect."""
    if name in _SAMPLES:
        return ResolvedCmdArgs.model_validate({name: _SAMPLES[name]})
    for value in (True, 7, 0.5, "x"):
        with contextlib.suppress(ValueError):
            return ResolvedCmdArgs.model_validate({name: value}, strict=True)
    raise AssertionError(f"no sample value for {name}")


def _config(recipe: str, extra: dict[str, str] | None = None, **args: Any) -> dict[str, Any]:
    return training_config(load_recipe(recipe), ResolvedCmdArgs(model_recipe_name=recipe, **args), extra or {})


def _value(name: str) -> Any:
    """Return a value of an argument that asks for an effect."""
    annotation = ResolvedCmdArgs.model_fields[name].annotation
    kinds = {get_args(kind)[0] if get_args(kind) else kind for kind in get_args(annotation) or (annotation,)}
    by_kind = True if bool in kinds else 3 if int in kinds else 0.125 if float in kinds else "a-word"
    return VALUES.get(name, by_kind)


def _fields(config: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for section, values in config.items() for name, value in values.items()}


@every("name", sorted((RULED | PASSED).keys() - {"compute_dtype"}))
def test_an_argument_sets_its_field_and_no_other(name: str) -> None:
    value, given = _value(name), {"model_recipe_name": DENSE, **BESIDE.get(name, {})}
    recipe = given.pop("model_recipe_name")
    before, after = _fields(_config(recipe, **given)), _fields(_config(recipe, **given, **{name: value}))
    changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
    place = (RULED | PASSED)[name]
    assert changed - ALSO.get(name, set()) == {place}
    assert after[place] == value


def test_fields_that_upstreams_launcher_does_not_set() -> None:
    assert {name: (RULED | PASSED)[name] for name in ALONE} == ALONE


def test_a_number_format_is_a_recipe_of_precision() -> None:
    assert (_config(DENSE)["mixed_precision"]["bf16"], _config(DENSE, compute_dtype="fp32")["mixed_precision"]) == (
        True,
        None,
    )


@every(
    ("args", "expected"),
    [
        ({"cuda_graph_impl": " Local ", "cuda_graph_scope": "[full_iteration]"}, ("local", ["full_iteration"], True)),
        ({"cuda_graph_impl": "full_iteration"}, ("local", ["full_iteration"], True)),
        ({"cuda_graph_impl": "transformer_engine"}, ("transformer_engine", None, True)),
        ({"cuda_graph_impl": "None", "cuda_graph_scope": "attn"}, (None, None, None)),
    ],
)
def test_what_goes_with_cuda_graphs(args: dict[str, Any], expected: tuple[Any, ...]) -> None:
    data = _config(DENSE, **args)
    model, rng = data["model"], data.get("rng", {})
    found = (model.get("cuda_graph_impl"), model.get("cuda_graph_scope"), rng.get("te_rng_tracker"))
    assert found == expected


@every(("backend", "dispatcher"), [("hybridep", "flex"), ("deepep", "flex"), ("None", "alltoall"), (None, "alltoall")])
def test_a_backend_chooses_the_dispatcher(backend: str | None, dispatcher: str) -> None:
    model = _config("moe_tiny", moe_flex_dispatcher_backend=backend)["model"]
    assert model["moe_token_dispatcher_type"] == dispatcher
    assert model.get("moe_flex_dispatcher_backend") == (backend if dispatcher == "flex" else None)


@pytest.mark.parametrize("key", ["ddp.grad_reduce_in_fp32", "mixed_precision.grad_reduce_in_fp32"])
def test_gradients_are_reduced_in_bf16_unless_set(sentence: Sentence, key: str) -> None:
    for extra, expected in (({}, False), ({key: "true"}, True)):
        data = _config(DENSE, extra)
        assert data["mixed_precision"]["grad_reduce_in_fp32"] is expected
    with pytest.raises(BadInput, match=r"mixed_precision") as caught:
        _config(DENSE, {"mixed_precision.fp8": "hybrid"})
    sentence(caught)


@pytest.mark.parametrize("name", ["fp8_param", "fp8_param_gather"])
def test_weights_of_a_format_are_chosen_by_either_name(name: str) -> None:
    """The class would take the gather of the two where they differ."""
    precision = _config(DENSE, {f"mixed_precision.{name}": "false"}, compute_dtype="fp8_cs")["mixed_precision"]
    assert {key: value for key, value in precision.items() if key.startswith("fp8_param")} == {name: False}


@every(("core", "gathers"), [("0.16", False), ("0.17", True), (None, True)])
def test_weights_in_fp4_are_gathered_by_the_cores_that_can(core: str | None, gathers: bool) -> None:
    args = ResolvedCmdArgs(model_recipe_name=DENSE, compute_dtype="nvfp4")
    precision = training_config(load_recipe(DENSE), args, {}, core)["mixed_precision"]
    assert ("fp4_param_gather" in precision) is gathers


@every("recipe", ["cs", "fp8_cs", "tensorwise"])
def test_cloudais_two_arguments_of_fp8_are_one_format(recipe: str) -> None:
    given = {"compute_dtype": "fp8", "fp8_recipe": recipe}
    args = ResolvedCmdArgs.model_validate({**given, "launcher": "embedded"})
    assert (args.compute_dtype, args.fp8_recipe) == ("fp8_cs", None)
    assert _config(DENSE, **args.model_dump(exclude_unset=True, exclude={"launcher"})) == _config(
        DENSE, compute_dtype="fp8_cs"
    )
    assert ResolvedCmdArgs.model_validate(given).fp8_recipe == recipe, "upstream's launcher takes both"


def test_a_machine_without_transformer_engine_is_told_before_a_job_is(sentence: Sentence) -> None:
    args = ResolvedCmdArgs(model_recipe_name=DENSE, compute_dtype="fp8_mx")
    assert lacked_by(args, {TRANSFORMER_ENGINE}) == {"compute_dtype": TRANSFORMER_ENGINE}
    assert not lacked_by(args, set())
    with pytest.raises(BadInput) as caught:
        training_config(load_recipe(DENSE), args, {}, lacking={TRANSFORMER_ENGINE})
    sentence(caught)


def test_what_decentralized_groups_lack_is_refused_as_by_the_training(sentence: Sentence) -> None:
    given = {"dist.use_decentralized_pg": "true", "dist.use_gloo_process_groups": "false"}
    assert _config(DENSE, given)["dist"] == {"use_decentralized_pg": True, "use_gloo_process_groups": False}
    with pytest.raises(BadInput, match=r"dist.use_sharp") as caught:
        _config(DENSE, {**given, "dist.use_sharp": "true"})
    sentence(caught)
    with pytest.raises(BadInput, match=r"dist.use_gloo_process_groups = True with dist.use_decentralized_pg = True"):
        _config(DENSE, {"dist.use_decentralized_pg": "true"})


def test_adam_is_precision_aware_with_bf16_weights_alone() -> None:
    assert _config("llama3_8b")["optimizer"]["use_precision_aware_optimizer"] is True
    assert "use_precision_aware_optimizer" not in _config(DENSE)["optimizer"], "without the distributed optimizer"
    whole = {f"{section}.use_distributed_optimizer": "false" for section in ("ddp", "optimizer")}
    muon = _config("llama3_8b", {"optimizer.optimizer": '"muon"', **whole})["optimizer"]
    assert "use_precision_aware_optimizer" not in muon
    for dtype in ("fp32", "fp8_ds"):  # whose weights its kernel does not take
        optimizer = _config("deepseek_v3", compute_dtype=dtype)["optimizer"]
        assert not {"exp_avg_dtype", "use_precision_aware_optimizer"} & optimizer.keys()
    for dtype in ("fp8_cs", "fp8_mx", "fp8_sc", "nvfp4"):  # upstream's launcher leaves it to the recipe
        assert "use_precision_aware_optimizer" not in _config("llama3_8b", compute_dtype=dtype)["optimizer"]
        assert _config("deepseek_v3", compute_dtype=dtype)["optimizer"]["use_precision_aware_optimizer"] is True
    weights_in_bf16 = {"mixed_precision.fp8_param": "false"}
    assert (
        "use_precision_aware_optimizer" in _config("deepseek_v3", weights_in_bf16, compute_dtype="fp8_ds")["optimizer"]
    )


@every(
    ("args", "extra", "expected"),
    [
        ({"num_gpus": 32, "pp": 4, "vp": 2}, {}, (2**27, True, True)),
        ({"num_gpus": 32, "pp": 4, "vp": 1}, {}, (2**27, None, None)),
        ({"num_gpus": 4, "pp": 4, "vp": 2}, {}, (None, None, None)),
        ({"num_gpus": 32, "pp": 4, "vp": 2, "compute_dtype": "fp32"}, {}, (2**27, True, None)),
        ({"num_gpus": 32, "pp": 4, "vp": 2, "compute_dtype": "fp8_cs"}, {}, (2**27, True, True)),
        ({"num_gpus": 32, "pp": 4, "vp": 2, "compute_dtype": "fp8_mx"}, {}, (2**27, True, None)),
        ({"num_gpus": 32, "pp": 4, "vp": 2, "compute_dtype": "nvfp4"}, {}, (2**27, True, None)),
        ({"num_gpus": 32, "pp": 4, "vp": 2}, {"ddp.num_buckets": "3"}, (None, True, True)),
        ({"num_gpus": 32, "pp": 4, "vp": 2}, {"ddp.overlap_param_gather": "false"}, (2**27, None, None)),
        ({"num_gpus": 32, "pp": 4, "vp": 2}, {"optimizer.optimizer": "sgd"}, (2**27, True, None)),
    ],
)
def test_parameters_are_gathered_as_in_upstreams_performance_recipes(
    args: dict[str, Any], extra: dict[str, str], expected: tuple[Any, ...]
) -> None:
    data = _config("llama3_8b", extra, **args)
    ddp, optimizer = data["ddp"], data["optimizer"]
    names = ("bucket_size", "align_param_gather")
    found = (*(ddp.get(name) for name in names), optimizer.get("overlap_param_gather_with_optimizer_step"))
    assert found == expected
    assert optimizer["overlap_param_gather"] == ddp["overlap_param_gather"]


@every("name", sorted(PASSED))
def test_an_argument_is_passed_on(sentence: Sentence, name: str) -> None:
    value, place, others = _value(name), PASSED[name], BESIDE.get(name, {})
    assert unsupported_args(ResolvedCmdArgs.model_validate({name: value, **others})) == {}
    assert (name in unsupported_args(ResolvedCmdArgs.model_validate({name: value}))) is bool(others)
    if others:
        sentence(why_unsupported(name))
    override = {place: json.dumps(value)}
    assert _at(_config(DENSE, override), place) == value  # extra_cmd_args may set it instead
    with pytest.raises(BadInput) as caught:
        _config(DENSE, override, **{name: value})
    sentence(caught)


@every("name", DERIVED)
def test_an_argument_decides_several_fields(name: str) -> None:
    value, others, place, expected = DERIVED[name]
    given = {"model_recipe_name": DENSE, **others, name: value}
    assert unsupported_args(ResolvedCmdArgs.model_validate(given)) == {}
    recipe = given.pop("model_recipe_name")
    config = _config(recipe, **given)
    assert _at(config, place) == expected
    others.pop("model_recipe_name", None)
    with contextlib.suppress(KeyError, TypeError):  # what it needs alone is refused by rule E07
        assert _config(recipe, **others) != config
    ConfigContainer.from_dict(config)


def test_muon_shards_its_own_state() -> None:
    data = _config("llama3_8b", optimizer_type="muon")
    assert data["ddp"].items() >= {"use_distributed_optimizer": False, "grad_reduce_in_fp32": True}.items()
    assert data["mixed_precision"]["grad_reduce_in_fp32"] is True
    assert not {"use_precision_aware_optimizer", "exp_avg_dtype"} & data["optimizer"].keys()
    assert _config("llama3_8b", optimizer_type="adam")["optimizer"]["use_precision_aware_optimizer"] is True


def test_what_goes_with_sharding_and_offloading() -> None:
    data = _config("llama3_8b", use_megatron_fsdp=True, nccl_ub=True, save_dir="ckpt")
    assert (
        data["ddp"].items()
        >= {
            "use_distributed_optimizer": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "keep_fp8_transpose_cache": False,
            "average_in_collective": False,
            "fsdp_manual_registration": True,
        }.items()
    )
    assert (data["model"]["init_model_with_meta_device"], data["checkpoint"]["ckpt_format"]) == (True, "fsdp_dtensor")
    assert "ckpt_format" not in _config("llama3_8b", use_megatron_fsdp=True)["checkpoint"]
    assert _config("llama3_8b", use_megatron_fsdp=False) == _config("llama3_8b")
    model = _config("llama3_8b", activation_offload_layers=4)["model"]
    assert (model["cpu_offloading"], model["cpu_offloading_weights"]) == (True, False)
    assert _config("llama3_8b", activation_offload_layers=0) == _config("llama3_8b")


@every(("text", "ranks"), [(3, [3]), ("0,3", [0, 3]), ("[0, 3]", [0, 3]), ([0, 3], [0, 3])])
def test_ranks_to_profile(sentence: Sentence, text: Any, ranks: list[int]) -> None:
    assert _config(DENSE, profiling_ranks=text)["profiling"]["profile_ranks"] == ranks
    with pytest.raises(BadInput) as caught:
        _config(DENSE, profiling_ranks="all")
    sentence(caught)


def test_overlapped_exchange_of_experts_as_upstreams_launcher_sets_it() -> None:
    data = _config(MOE, moe_a2a_overlap=True, ep=2)
    assert data["comm_overlap"].items() >= {"delay_wgrad_compute": True, "tp_comm_overlap": False}.items()
    assert (data["model"]["moe_shared_expert_overlap"], data["model"]["num_moe_experts"]) == (False, 4)
    assert "comm_overlap" not in _config(MOE, moe_a2a_overlap=False)


def test_user_buffers_of_nccl_as_upstreams_launcher_sets_them(sentence: Sentence) -> None:
    """NCCL has no average in the kernels that use them."""
    assert _config(DENSE, nccl_ub=True)["ddp"].items() >= {"nccl_ub": True, "average_in_collective": False}.items()
    assert _config(DENSE, nccl_ub=False)["ddp"].items() >= {"nccl_ub": False, "average_in_collective": True}.items()
    with pytest.raises(BadInput, match=r"ddp\.nccl_ub") as caught:
        training_config(load_recipe(DENSE), ResolvedCmdArgs(nccl_ub=True), {}, lacking={GPU})
    sentence(caught)


@pytest.mark.parametrize(("wanted", "factor"), [(True, 1.0), (False, None)])
def test_experts_of_a_fixed_size_as_upstreams_launcher_sets_them(wanted: bool, factor: float | None) -> None:
    model = _config(MOE, use_tokendrop=wanted)["model"]
    assert model["moe_expert_capacity_factor"] == factor
    assert model["moe_pad_expert_input_to_capacity"] is wanted
    assert model["moe_router_force_load_balancing"] is not wanted
    forced = _config(MOE, {"model.moe_router_force_load_balancing": "true"}, use_tokendrop=wanted)["model"]
    assert forced["moe_router_force_load_balancing"] is True
    assert _config(DENSE, use_tokendrop=wanted)["model"] == _config(DENSE)["model"]


def test_what_is_said_to_be_reached_by_an_override_is() -> None:
    """Every section.field that a reason of the table names is a field of the training configuration."""
    named = {name for argument in ARGUMENTS.values() for name in re.findall(r"\b[a-z]+\.[a-z_]+\b", argument.refused)}
    for name in named:
        try:
            _config(DENSE, {name: "true"})
        except BadInput as error:  # of another type, at most
            assert "unknown" not in str(error), error  # noqa: PT017


def _at(data: dict[str, Any], place: str) -> Any:
    section, _, field = place.partition(".")
    return data.get(section, {}).get(field) if field else data[section]


@every("name", sorted(ResolvedCmdArgs.model_fields))
def test_every_argument_is_accounted_for(name: str) -> None:
    accounted = name in OUTSIDE
    accounted |= name in {*RULED, *PASSED, *DERIVED} and not ARGUMENTS[name].needs
    assert (name in unsupported_args(_set(name))) is not accounted


def test_every_argument_maps_or_is_listed_with_the_reason_why_not() -> None:
    assert list(ARGUMENTS) == list(ResolvedCmdArgs.model_fields)
    for name, argument in ARGUMENTS.items():
        places = (argument.config, argument.config_extra, argument.means, argument.refused)
        assert sum(map(bool, places)) == 1, name
        assert argument.refused or argument.config_extra or argument.needs or not argument.harmless, name
        assert not argument.means or argument.refused or name in {*OUTSIDE, *DERIVED, *OF_NSYS}, name


@every(("name", "values"), [(name, argument.harmless) for name, argument in ARGUMENTS.items() if argument.harmless])
def test_a_harmless_value_asks_for_nothing(name: str, values: tuple[Any, ...]) -> None:
    for value in values:
        assert unsupported_args(ResolvedCmdArgs.model_validate({name: value})) == {}


@every(("name", "value"), [("domain", "vlm"), ("dryrun", True), ("dataset_root", "/s"), ("nsys_trace", "cuda")])
def test_what_the_loop_does_not_do_is_reported(name: str, value: Any) -> None:
    """A run that dropped one of these would measure, or do, something else than it says."""
    assert unsupported_args(ResolvedCmdArgs.model_validate({name: value})) == {name: value}


def test_defaults_ask_for_nothing() -> None:
    assert unsupported_args(ResolvedCmdArgs()) == unsupported_args(ResolvedCmdArgs(dataset_name=None)) == {}


def test_the_recipe_fills_in_what_the_user_left_open() -> None:
    recipe = load_recipe("llama3_8b")
    args = with_defaults(ResolvedCmdArgs(model_recipe_name="llama3_8b", mb=4, lr=1.0), recipe)
    assert (args.mb, args.gb, args.seq_length, args.lr, args.min_lr) == (4, 128, 8192, 1.0, 3e-5)
    assert args.num_layers == 32
    assert args.tp is None
    assert {"gb", "seq_length"} <= args.model_fields_set


def test_a_recipe_is_not_changed_by_its_use() -> None:
    recipe = load_recipe(DENSE)
    before = repr(recipe.sections)
    _config(DENSE, {"model.qk_layernorm": "true"}, tp=2, num_layers=2)
    assert repr(recipe.sections) == before


@pytest.mark.parametrize("vp", [None, 1])
def test_one_virtual_stage_is_none(vp: int | None) -> None:
    """Megatron-Core takes 1 for interleaving and refuses it."""
    assert _config(DENSE, pp=2, vp=vp)["model"].get("virtual_pipeline_model_parallel_size") is None


@every(("tp", "expected"), [(None, False), (0, False), (1, False), (2, True)])
def test_sequence_parallelism_follows_tensor_parallelism(tp: int | None, expected: bool) -> None:
    model = _config(DENSE, tp=tp)["model"]
    assert model["sequence_parallel"] is expected
    assert model["tensor_model_parallel_size"] == (tp or 1)


def test_recomputing_layers_means_full_recompute_of_a_block() -> None:
    model = _config(DENSE, recompute_num_layers=2)["model"]
    assert (model["recompute_granularity"], model["recompute_method"]) == ("full", "block")
    assert _config(DENSE, recompute_num_layers=0)["model"].get("recompute_granularity") is None


@every("text", ["core_attn,mlp", "[core_attn, mlp]", "['core_attn', \"mlp\"]", " core_attn ,, mlp "])
def test_recomputing_modules_is_selective(text: str) -> None:
    model = _config(DENSE, recompute_modules=text)["model"]
    assert model["recompute_modules"] == ["core_attn", "mlp"]
    assert model["recompute_granularity"] == "selective"


@every(("modules", "lacked"), [("moe,layernorm", True), (["moe_act"], True), ("moe", False)])
def test_modules_that_transformer_engine_recomputes(modules: Any, lacked: bool) -> None:
    args = ResolvedCmdArgs(recompute_modules=modules)
    assert lacked_by(args, {TRANSFORMER_ENGINE}) == ({"recompute_modules": TRANSFORMER_ENGINE} if lacked else {})
    assert lacked_by(args, {GPU}) == {}


def test_backends_of_a_gpu_are_not_replaced_without_one() -> None:
    args = ResolvedCmdArgs(moe_flex_dispatcher_backend="hybridep")
    assert lacked_by(args, {GPU}) == {"moe_flex_dispatcher_backend": GPU}
    assert lacked_by(args, {TRANSFORMER_ENGINE}) == lacked_by(ResolvedCmdArgs(), {GPU}) == {}
    assert lacked_by(ResolvedCmdArgs(moe_flex_dispatcher_backend="None"), {GPU}) == {}


@every(("layers", "expected"), [(2, [0, 0]), (4, [0, 0, 0, 1]), (61, [0] * 3 + [1] * 58), (64, [0] * 3 + [1] * 61)])
def test_fewer_or_more_layers_keep_the_expert_pattern(layers: int, expected: list[int]) -> None:
    assert _config(DEEPSEEK, num_layers=layers)["model"]["moe_layer_freq"] == expected


@every(
    ("key", "text", "expected"),
    [
        ("optimizer.weight_decay", "0.5", 0.5),
        ("optimizer.adam_eps", "1e-4", 1e-4),
        ("optimizer.clip_grad", "2", 2),
        ("model.qk_layernorm", "true", True),
        ("optimizer.optimizer", "sgd", "sgd"),
        ("optimizer.optimizer", '"sgd"', "sgd"),
        ("model.moe_layer_freq", "[0, 1, 0, 1]", [0, 1, 0, 1]),
        ("ddp.overlap_grad_reduce", "true", True),
        ("rng.seed", "7", 7),
    ],
)
def test_an_extra_argument_is_typed(key: str, text: str, expected: Any) -> None:
    section, field = key.split(".")
    value = _config(DENSE, {key: text})[section][field]
    assert value == expected
    assert type(value) is type(expected)


@every(
    ("key", "text"),
    [
        ("lr", "1"),
        ("optimzer.lr", "1"),
        ("optimizer.learning", "1"),
        ("optimizer.clip_grad", "fast"),
        ("model.rotary_base", "4.0"),
        ("model.qk_layernorm", "True"),
        ("scheduler.lr_decay_style", "quick"),
        ("model.activation_func.x", "1"),
        ("optimizer.clip_grad", "0.5\nadam_eps = 0.1"),
    ],
)
def test_an_extra_argument_that_is_wrong(sentence: Sentence, key: str, text: str) -> None:
    with pytest.raises(BadInput) as caught:
        _config(DENSE, {key: text})
    sentence(caught)


def test_the_expert_pattern_of_the_config_fits_its_layers() -> None:
    recipe: Recipe = load_recipe(DEEPSEEK)
    args = ResolvedCmdArgs(model_recipe_name=DEEPSEEK, num_layers=5)
    assert moe_layer_pattern(ConfigContainer.from_dict(training_config(recipe, args, {})).model) == [0, 0, 0, 1, 1]
