"""What `extra_cmd_args` set behind the launcher's back is not judged by what stands elsewhere."""

from pathlib import Path
from typing import Any

import pytest

from cloudai_mbridge.constraints import NotEvaluated, Upstream
from cloudai_mbridge.models.scenario import TestRun
from cloudai_mbridge.models.system import SlurmSystem
from cloudai_mbridge.models.test_definition import TestDefinition
from cloudai_mbridge.sweep.checked import checked_points
from cloudai_mbridge.sweep.expand import SweepSpace
from cloudai_mbridge.sweep.pinned import fill_in_notes, overridden_by, pinned_by
from tests.cases import every

NAMES = {"model_family_name": "qwen", "model_recipe_name": "qwen3_30b_a3b", "gpu_type": "h100", "compute_dtype": "bf16"}
REPO = {"url": "https://github.com/NVIDIA-NeMo/Megatron-Bridge.git", "commit": "v0.3.0"}


def _ids(args: dict[str, Any], extra: dict[str, str]) -> tuple[set[str], set[str], Upstream, SweepSpace]:
    data = {"name": "t", "description": "", "git_repos": [REPO], "extra_cmd_args": extra}
    definition = TestDefinition.model_validate({**data, "cmd_args": {**NAMES, **args}})
    pinned, sweep = pinned_by(definition), SweepSpace(definition, TestRun(id="t", test_name="t"))
    (point,) = checked_points(sweep, None, pinned)
    silent = {answer.rule_id for answer in point.answers if isinstance(answer, NotEvaluated)}
    return {violation.rule_id for violation in point.violations}, silent, pinned, sweep


@every(
    ("args", "extra", "rules"),
    [
        ({"num_gpus": 40, "pp": 5, "ep": 1, "vp": 1, "moe_a2a_overlap": False}, {"model.num_layers": "50"}, {"C02"}),
        ({"num_gpus": 24}, {"model.expert_model_parallel_size": "4"}, {"C07", "M07"}),
        ({"num_gpus": 16, "tp": 64}, {"+model.num_query_groups": "64", "model.num_attention_heads": "64"}, {"M08"}),
        ({"num_gpus": 16, "vp": 1}, {"model.overlap_moe_expert_parallel_comm": "0"}, {"M19"}),
    ],
)
def test_an_operand_that_an_override_sets_is_not_evaluated(
    args: dict[str, Any], extra: dict[str, str], rules: set[str]
) -> None:
    broken, silent, pinned, sweep = _ids(args, {})
    assert rules & broken
    still, now_silent, pinned, sweep = _ids(args, extra)
    assert not rules & still
    assert now_silent > silent
    decided = {"expert_model_parallel_size", "overlap_moe_expert_parallel_comm"} & {k[6:] for k in extra}
    assert any("extra_cmd_args set" in note for note in fill_in_notes(sweep, pinned)) == bool(decided)


@pytest.mark.parametrize("listed", [False, True])
def test_an_embedded_point_without_sequence_parallelism(listed: bool) -> None:
    """Listed: as a point that [sweep] includes."""
    odd = {"model_recipe_name": "gpt_tiny", "compute_dtype": "fp32", "num_gpus": 2, "tp": 2, "seq_length": 4097}
    args = {"launcher": "embedded", **odd} | ({"seq_length": 4096} if listed else {})
    include = {"include": [{"seq_length": 4097}]} if listed else {}
    for extra, is_open in (({}, False), ({"model.sequence_parallel": "false"}, True)):
        data = {"name": "t", "description": "", "extra_cmd_args": extra, "cmd_args": args, "sweep": include}
        definition = TestDefinition.model_validate(data)
        *_, point = checked_points(SweepSpace(definition, TestRun(id="t", test_name="t")), None, pinned_by(definition))
        assert ("M06" in {each.rule_id for each in point.violations}) is not is_open
        silent = {answer.rule_id for answer in point.answers if isinstance(answer, NotEvaluated)}
        assert "M06" not in silent, "the value is known, and judged"


def test_other_keys_change_nothing() -> None:
    args = {"num_gpus": 24}
    assert _ids(args, {"logger.log_interval": "1", "train.manual_gc": "true"})[:2] == _ids(args, {})[:2]


def test_a_launcher_that_is_told_another_gpu_is_named() -> None:
    args = {name: value for name, value in NAMES.items() if name != "gpu_type"}
    data = {"name": "t", "description": "", "git_repos": [REPO], "cmd_args": args}
    definition = TestDefinition.model_validate(data)
    sweep = SweepSpace(definition, TestRun(id="t", test_name="t"))
    system = {"name": "c", "scheduler": "slurm", "default_partition": "p", "partitions": [{"name": "p"}]}
    h100, gb200 = (SlurmSystem.model_validate({**system, "gpu_type": name}) for name in ("h100", "gb200"))
    note = "the launcher is passed gpu_type = 'gb200', CloudAI's default, and the system has h100; set it"
    assert note in fill_in_notes(sweep, pinned_by(definition, h100))
    assert not any("is told" in text for text in fill_in_notes(sweep, pinned_by(definition, gb200)))


SYSTEM = {"name": "c", "scheduler": "slurm", "default_partition": "p", "partitions": [{"name": "p"}]}
ONE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
LLAMA = {"model_family_name": "llama", "model_recipe_name": "llama3_70b", "gpu_type": "h100", "compute_dtype": "bf16"}


def _on(
    env: dict[str, Any], args: dict[str, Any], test_env: dict[str, Any]
) -> tuple[list[set[str]], tuple[str, ...], Upstream]:
    """Return the rules that each point breaks on a system with these variables, and the notes."""
    data = {"name": "t", "description": "", "git_repos": [{**REPO, "commit": "v0.6.0"}], "extra_env_vars": test_env}
    definition = TestDefinition.model_validate({**data, "cmd_args": args})
    system = SlurmSystem.model_validate({**SYSTEM, "global_env_vars": env})
    pinned, sweep = pinned_by(definition, system), SweepSpace(definition, TestRun(id="t", test_name="t"))
    points = checked_points(sweep, system, pinned)
    return [{each.rule_id for each in point.violations} for point in points], fill_in_notes(sweep, pinned), pinned


def test_fsdp_on_a_system_with_one_connection_is_refused() -> None:
    fsdp = {**LLAMA, "num_gpus": 64, "use_megatron_fsdp": [False, True], "tp": 1, "pp": 1, "cp": 1, "vp": 1}
    assert ["M24" in rules for rules in _on(ONE, fsdp, {})[0]] == [False, True]
    assert ["M24" in rules for rules in _on({"CUDA_DEVICE_MAX_CONNECTIONS": 1}, fsdp, {})[0]] == [False, True]
    assert ["M24" in rules for rules in _on({}, fsdp, ONE)[0]] == [False, True]
    for env, test_env in (({}, {}), (ONE, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})):
        assert ["M24" in rules for rules in _on(env, fsdp, test_env)[0]] == [False, False]
    swept = {"CUDA_DEVICE_MAX_CONNECTIONS": ["1", "8"]}
    assert ["M24" in rules for rules in _on({}, fsdp, swept)[0]] == [False, False, True, False]


def test_fsdp_of_a_preset_is_refused_with_one_connection() -> None:
    shipped = {**LLAMA, "model_recipe_name": "llama3_70b", "gpu_type": "gb300", "num_gpus": 64}
    assert [sorted(rules) for rules in _on(ONE, shipped, {})[0]] == [["M24"]]
    assert [sorted(rules) for rules in _on({}, shipped, {})[0]] == [[]]


@pytest.mark.parametrize("launcher", ["megatron_bridge", "embedded"])
def test_a_variable_of_the_system_that_replaces_the_recipes_is_named(launcher: str) -> None:
    args = {**NAMES, "gpu_type": "gb200", "num_gpus": 8, "launcher": launcher}
    note = "global_env_vars.CUDA_DEVICE_MAX_CONNECTIONS = '1' of the system replaces 32, which the recipe sets"
    assert any(text.startswith(note) for text in _on(ONE, args, {})[1])
    silent = ((ONE, ONE), ({"CUDA_DEVICE_MAX_CONNECTIONS": "32"}, {}), ({"NCCL_DEBUG": "WARN"}, {}))
    for env, test_env in silent:
        assert not any("global_env_vars" in text for text in _on(env, args, test_env)[1])


def test_the_notes_of_the_embedded_loop() -> None:
    """Which presets fill in, if they do."""
    args = {"launcher": "embedded", "model_recipe_name": "llama3_8b", "compute_dtype": "bf16", "num_gpus": 8}
    open_, all_set = {**args, "gpu_type": ["h100", "gb200"]}, {"tp": 1, "pp": 1, "cp": 2, "mb": 1, "gb": 128}
    source = "defaults of Megatron-Bridge 0.6.0 (the newest known release): "
    names = "llama3_8b pretrain h100 bf16, llama3_8b pretrain gb200 bf16"
    assert _on({}, open_, {})[1] == (source + names,)
    written = {**open_, **all_set, "seq_length": 8192}
    assert _on({}, written, {})[1] == (source + names.rpartition(", ")[2],)  # which has graphs
    assert _on({}, {**written, "cuda_graph_impl": "none", "cuda_graph_scope": ""}, {})[1] == ()
    assert _on({}, {**args, "gpu_type": "h100", **all_set, "seq_length": [4096, 8192]}, {})[1] == ()
    assert _on({}, {**open_, "model_recipe_name": "gpt_tiny"}, {})[1] == ()


def test_options_and_switches_count_as_overrides() -> None:
    extra = {"--expert_model_parallel_size": "32", "model.cpu_offloading": "0", "model.recompute_granularity": "null"}
    assert overridden_by(extra) >= {"ep", "activation_offload_layers", "recompute_modules", "recompute_num_layers"}
    assert overridden_by({"-tp": "8", "++train.micro_batch_size": "2", "-sl=4096": ""}) == {"tp", "mb", "seq_length"}
    assert {"cuda_graph_impl", "cuda_graph_scope"} <= overridden_by({"model.cuda_graph_impl": "local"})


def test_what_cmd_args_say_is_known_whatever_the_overrides() -> None:
    """The launcher applies its own options after the overrides."""
    broken, *_ = _ids({"num_gpus": 24, "ep": 7}, {"model.expert_model_parallel_size": "4"})
    assert "C07" in broken


def test_an_install_path_in_the_home_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    commit = "8a346226" + 32 * "0"
    package = tmp_path / f"install/Megatron-Bridge__{commit}/src/megatron/bridge/package_info.py"
    package.parent.mkdir(parents=True)
    package.write_text("MAJOR = 0\nMINOR = 5\nPATCH = 1\n")
    definition = TestDefinition.model_validate(
        {"name": "t", "description": "", "git_repos": [{**REPO, "commit": commit}], "cmd_args": NAMES}
    )
    system = {"name": "c", "scheduler": "slurm", "default_partition": "p", "partitions": [{"name": "p"}]}
    pinned = pinned_by(definition, SlurmSystem.model_validate({**system, "install_path": "~/install"}))
    assert pinned.release is not None
    assert pinned.release.version == "0.5.1"
