"""Each argument is the real launcher's option of its meaning, and sets the field there that it sets in our loop."""

from typing import Any, get_args

from cloudai_mbridge.megatron_bridge.launcher_options import find_launcher
from cloudai_mbridge.megatron_bridge.release import Release
from cloudai_mbridge.models.cmd_args import ARGUMENTS, ResolvedCmdArgs
from cloudai_mbridge.plan.launcher_command import FLAGS, _argument
from tests.interop.test_presets import _real, release

__all__ = ["release"]
BASE = ["-m", "llama", "-mr", "llama3_8b", "-g", "h100", "-c", "bf16", "-ng", "8", "--task", "pretrain"]
# Values that an option takes, where 3, 0.125, true or a word is none
SAMPLES: dict[str, Any] = {
    "gpu_type": "b200", "num_gpus": 16, "task": "sft", "compute_dtype": "fp8_cs", "domain": "vlm", "data": "rp2",
    "cuda_graph_impl": "transformer_engine", "cuda_graph_scope": "attn", "recompute_modules": "mlp", "vp": 2,
    "profiling_ranks": 3, "config_variant": "v1", "optimizer_type": "adam", "dataset_paths": ["a", "b"],
    "moe_flex_dispatcher_backend": "None", "tokenizer_type": "HuggingFaceTokenizer", "packager": "none",
    "c4_train_shards": [1, 2], "model_family_name": "qwen", "model_recipe_name": "qwen3_8b", "nsys_trace": "cuda",
    "pipeline_model_parallel_layout": "Et|tL", "record_memory_history": False, "max_retries": 3,
    "enable_pct_binding": False,
}  # fmt: skip
# What the parser calls an argument that it calls neither as we do, nor as the field that it sets
NAMES = {"gpu_type": "gpu"}
# An argument that sets its field with others only -> those; of a model with experts, beside MIXTURE
BESIDE: dict[str, list[str]] = {
    **{f"wandb_{each}_name": ["-wdk", "k"] for each in ("project", "entity", "experiment")},
    "cuda_graph_impl": ["--cuda_graph_scope", "attn"],
    "num_layers": ["--first_k_dense_replace", "1"],
    "cuda_graph_scope": ["--cuda_graph_impl", "transformer_engine"],
    "vocab_size": ["--tokenizer_type", "NullTokenizer"],
}
MIXTURE = ["-m", "deepseek", "-mr", "deepseek_v3", "-g", "gb200", "-ng", "256"]
OF_EXPERTS = {"num_layers", "num_moe_experts", "moe_flex_dispatcher_backend"}
# Fields of the real container that are ours by another name, or in part
PLACES = {"compute_dtype": "mixed_precision.fp8", "vocab_size": "tokenizer.vocab_size"}
OLDER = {"seq_length": "dataset.sequence_length"}  # 0.3
# Arguments that the launcher hands to others than the configuration: overrides of the job's command line, NeMo-Run's
# plugins, its own directory
NOT_THERE = {
    *("enable_nsys", "pytorch_profiler", "profiling_start_step", "profiling_stop_step", "profiling_ranks"),
    *("record_memory_history", "save_config_filepath", "wandb_save_dir"),
    *("lr", "min_lr", "warmup_iters", "distributed_timeout_minutes"),
}


def _value(name: str) -> Any:
    if name in SAMPLES:
        return SAMPLES[name]
    annotation = ResolvedCmdArgs.model_fields[name].annotation
    kinds = [get_args(each)[0] if get_args(each) else each for each in get_args(annotation) or (annotation,)]
    return True if bool in kinds else 3 if int in kinds else 0.125 if float in kinds else "a-word"


def _changed(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return [key for key in after if before.get(key) != after[key]]


def test_an_option_is_parsed_as_its_argument(release: Release) -> None:
    """One name of the parsed options changes: the argument's, or that of the field that it sets."""
    commands = [["--parsed", *BASE], *(["--parsed", *BASE, *_argument(name, _value(name))] for name in FLAGS)]
    base, *answers = _real(release, *commands)
    taken = {name: answer for name, answer in zip(FLAGS, answers, strict=True) if "refused" not in answer}
    wrong = {}
    for name, answer in taken.items():
        place = ARGUMENTS[name].config or ARGUMENTS[name].config_extra or ""
        changed = _changed(base, answer)
        if len(changed) != 1 or changed[0] not in (name, place.rpartition(".")[2], NAMES.get(name)):
            wrong[name] = changed
    assert wrong == {}
    assert len(taken) == (70 if release.version < "0.6" else len(FLAGS))


def test_an_argument_sets_its_field_of_the_real_configuration(release: Release) -> None:
    """Of the arguments that are a field of our configuration, each of the fields is changed by the launcher, too."""
    ours = {name: ARGUMENTS[name].config or ARGUMENTS[name].config_extra for name in FLAGS}
    older = OLDER if release.version < "0.6" else {}
    places = {name: place for name, place in {**ours, **PLACES, **older}.items() if place}
    commands, bases = [], []
    for name in places:
        bases.append(["--whole", *BASE, *(MIXTURE if name in OF_EXPERTS else ()), *BESIDE.get(name, ())])
        commands.append([*bases[-1], *_argument(name, _value(name))])
    answers = _real(release, *bases, *commands)
    wrong = {}
    for name, before, after in zip(places, answers[: len(places)], answers[len(places) :], strict=True):
        changed = _changed(before, after)
        if places[name] not in changed and not _is_unknown(release, name):
            wrong[name] = after.get("refused") or changed
    assert wrong.keys() == {name for name in NOT_THERE if not _is_unknown(release, name)}, _lines(wrong)


def _lines(found: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in found.items())


def _is_unknown(release: Release, name: str) -> bool:
    launcher = find_launcher(release)
    assert launcher
    return launcher.option(FLAGS[name]) is None
