"""Rules M25 to M30 on both sides of each limit, and the answer of Megatron-Core itself about Mamba."""

import importlib
import importlib.util
import inspect
import itertools
import sys
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from cloudai_mbridge.constraints import stack
from cloudai_mbridge.constraints.engine import RULES
from cloudai_mbridge.constraints.rule import NotEvaluated, Point, Violation
from cloudai_mbridge.constraints.upstream import rule_id
from cloudai_mbridge.models.cmd_args import ResolvedCmdArgs
from cloudai_mbridge.models.system import LocalSystem, SlurmSystem, System
from cloudai_mbridge.recipes import Recipe
from cloudai_mbridge.training.compat import versions
from cloudai_mbridge.training.compat.stack import ENGINE, Stack
from tests.cases import every

BY_ID = {rule_id(rule): rule for rule in RULES}
HERE = SlurmSystem(name="c", scheduler="slurm", default_partition="p", partitions=[{"name": "p"}])
SLURM = HERE.model_copy(update={"python_executable": "/nodes/python"})  # whose packages are not known
LOCAL = LocalSystem(name="here", scheduler="local")
HEADS = {"num_attention_heads": 64, "num_query_groups": 8, "hidden_size": 2880}


def _ask(rule: str, model: dict[str, Any] | None = None, system: System | None = SLURM, **args: Any) -> Any:
    """Return "ok", "refused", or the input that the rule lacks."""
    core = args.pop("core", None)
    values = {"launcher": "embedded", "gpu_type": "gb200", **args}
    values = {name: value for name, value in values.items() if value is not None}
    recipe = None if model is None else Recipe("m", "", "", "", {"model": model})
    answer = BY_ID[rule](Point(ResolvedCmdArgs.model_validate(values), system, recipe, core=core))
    if isinstance(answer, NotEvaluated):
        return answer.missing
    return "ok" if answer is None else "refused"


@every(
    ("dtype", "args", "expected"),
    [
        ("bf16", dict(seq_length=4101), "ok"),
        # the same 16 points as in a report of a user: tp = 2 leaves 2048, 2056, 2052 and 2050 tokens
        ("fp8_mx", dict(seq_length=4096, tp=2), "ok"),
        ("fp8_mx", dict(seq_length=4112, tp=2), "refused"),
        ("fp8_mx", dict(seq_length=4128, tp=2), "refused"),
        ("fp8_mx", dict(seq_length=4160, tp=2), "ok"),
        ("fp8_cs", dict(seq_length=4112, tp=2), "ok"),
        ("fp8_cs", dict(seq_length=4104, tp=2), "refused"),
        ("fp8_cs", dict(seq_length=4100, tp=2), "refused"),
        ("fp8_ds", dict(seq_length=4100, tp=2), "refused"),
        ("fp8_sc", dict(seq_length=4112, tp=2), "ok"),
        ("fp8_sc", dict(seq_length=4104, tp=2), "refused"),
        # the weights' gradients multiply all tokens: by 16 on Hopper and in blocks, by 32 in NVFP4
        ("fp8_cs", dict(seq_length=4104, gpu_type="gb200"), "ok"),
        ("fp8_cs", dict(seq_length=4104, gpu_type="h100"), "refused"),
        ("fp8_cs", dict(seq_length=4104, gpu_type=None), "gpu_type"),
        ("fp8_cs", dict(seq_length=4100, gpu_type=None), "refused"),
        ("fp8_sc", dict(seq_length=4104), "refused"),
        ("nvfp4", dict(seq_length=4112), "refused"),
        ("nvfp4", dict(seq_length=4112, tp=2), "refused"),
        ("nvfp4", dict(seq_length=4128), "ok"),
        ("nvfp4", dict(seq_length=4128, tp=2), "ok"),
        # micro-batches, context parallelism
        ("fp8_mx", dict(seq_length=4112, mb=2), "ok"),
        ("fp8_mx", dict(seq_length=4112, mb=4, tp=2), "ok"),
        ("fp8_mx", dict(seq_length=4112, cp=2), "refused"),
        ("fp8_mx", dict(seq_length=4128, cp=2), "refused"),
        ("fp8_mx", dict(seq_length=4160, cp=2), "ok"),
        # others' verdicts, and what is not known
        ("fp8_mx", dict(seq_length=4098, cp=4), "ok"),
        ("fp8_mx", dict(seq_length=4112, task="sft"), "the length that batches of fine-tuning are padded to"),
        ("fp8_mx", dict(seq_length=None), "seq_length and mb"),
    ],
)
def test_tokens_of_a_rank(dtype: str, args: dict[str, Any], expected: str) -> None:
    assert _ask("M25", compute_dtype=dtype, **{"mb": 1, **args}) == expected


def test_the_next_lengths_that_fit_do() -> None:
    for dtype, length, mb, cp, tp in itertools.product(
        ("fp8_mx", "fp8_cs", "fp8_sc", "nvfp4"), (4100, 4104, 4112, 4120, 36), (1, 3, 4), (1, 2), (1, 2, 8)
    ):
        args = {"launcher": "embedded", "gpu_type": "h100", "compute_dtype": dtype, "mb": mb, "cp": cp, "tp": tp}
        answer = BY_ID["M25"](Point(ResolvedCmdArgs.model_validate({**args, "seq_length": length}), SLURM))
        if not isinstance(answer, Violation):
            continue
        words = answer.remedy.replace(",", "").split()
        lengths = [int(word) for word in words if word.isdigit()]
        assert lengths
        for other in lengths:
            point = Point(ResolvedCmdArgs.model_validate({**args, "seq_length": other}), SLURM)
            assert [BY_ID[rule](point) for rule in ("M05", "M06", "M25")] == [None] * 3, (args, other)


@every(
    ("dtype", "model", "args", "expected"),
    [
        ("fp8_mx", dict(HEADS, ffn_hidden_size=2880), {}, "ok"),
        ("fp8_cs", dict(HEADS, ffn_hidden_size=2880), dict(tp=4), "ok"),
        ("fp8_mx", dict(HEADS, ffn_hidden_size=2880), dict(tp=4), "refused"),
        ("fp8_cs", dict(HEADS, ffn_hidden_size=2880), dict(tp=8), "refused"),
        ("bf16", dict(HEADS, ffn_hidden_size=2880), dict(tp=8), "ok"),
        ("fp8_cs", dict(HEADS, hidden_size=2888), {}, "refused"),
        ("nvfp4", dict(HEADS, ffn_hidden_size=2896), {}, "refused"),
        ("fp8_cs", dict(HEADS, num_moe_experts=8, moe_ffn_hidden_size=768), dict(et=16), "ok"),
        ("fp8_mx", dict(HEADS, num_moe_experts=8, moe_ffn_hidden_size=768), dict(et=16), "refused"),
        ("fp8_mx", dict(HEADS, ffn_hidden_size=2880), dict(tp=7), "ok"),  # M10's
        ("fp8_mx", None, dict(tp=4), "recipe"),
        ("fp8_mx", dict(HEADS, quant_recipe={}), dict(tp=4), "the format of each layer, which quant_recipe chooses,"),
    ],
)
def test_widths_of_a_rank(dtype: str, model: dict[str, Any] | None, args: dict[str, Any], expected: str) -> None:
    assert _ask("M26", model, compute_dtype=dtype, **args) == expected


@every(
    ("model", "args", "expected"),
    [
        (dict(window_size=[127, 0]), dict(cp=1), "ok"),
        (dict(window_size=[127, 0]), {}, "refused"),
        (dict(window_size=[127, 0], cp_comm_type="a2a+p2p"), {}, "refused"),
        (dict(window_size=[127, 0], cp_comm_type="all_gather"), {}, "ok"),
        (dict(window_size=[127, 0], cp_comm_type=["a2a", "p2p"]), {}, "refused"),
        (dict(window_size=[127, 0], cp_comm_type=["a2a", "all_gather"]), {}, "ok"),
        (dict(window_size=[-1, 0]), {}, "ok"),
        (dict(window_size=[-1, -1]), {}, "ok"),
        (dict(softmax_type="learnable"), {}, "refused"),
        (dict(softmax_type="off-by-one", cp_comm_type="all_gather"), {}, "refused"),
        (dict(softmax_type="learnable", window_size=[127, 0], cp_comm_type="a2a"), {}, "ok"),
        (dict(softmax_type="vanilla"), {}, "ok"),
        (dict(window_size=[127, 0]), dict(gpu_type=None), "gpu_type"),
        (dict(window_size=[127, 0]), dict(launcher="megatron_bridge"), "refused"),
    ],
)
def test_windows_and_sinks_with_context_parallelism(model: dict[str, Any], args: dict[str, Any], expected: str) -> None:
    assert _ask("M27", model, **{"cp": 2, **args}) == expected


def test_layers_without_transformer_engine_have_windows_and_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {"M27": {"window_size": [9, 0]}, "M28": {"num_attention_heads": 6, "cp_comm_type": "a2a"}}
    for lacks, expected in ((True, "ok"), (False, "refused")):
        lacking = frozenset({versions.TRANSFORMER_ENGINE} if lacks else ())
        monkeypatch.setattr(versions, "lacking", lambda lacking=lacking: lacking)
        found = Stack("/nodes/python", "0.16.1", frozenset() if lacks else frozenset({ENGINE}))
        monkeypatch.setattr(stack, "stack_of", lambda python, variables, found=found: found)
        assert {_ask(rule, model, LOCAL, cp=4) for rule, model in models.items()} == {expected}
        assert {_ask(rule, model, HERE, cp=4) for rule, model in models.items()} == {expected}


@every(
    ("model", "args", "expected"),
    [
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=8), "ok"),
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=16), "refused"),
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=4, tp=2), "ok"),
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=8, tp=2), "refused"),
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=2, tp=16), "refused"),
        (dict(HEADS), dict(cp=16), "ok"),
        (dict(HEADS, cp_comm_type="all_gather"), dict(cp=16), "ok"),
        (dict(HEADS, num_query_groups=None, cp_comm_type="a2a"), dict(cp=16), "ok"),
        (dict(HEADS, cp_comm_type="a2a"), dict(cp=16, gpu_type=None), "gpu_type"),
    ],
)
def test_all_to_all_splits_heads(model: dict[str, Any], args: dict[str, Any], expected: str) -> None:
    assert _ask("M28", model, **args) == expected


@every(
    ("args", "expected"),
    [
        (dict(tp=4, core="0.16"), "ok"),
        (dict(tp=32, core="0.16"), "refused"),
        (dict(cp=2, core="0.17"), "refused"),
        (dict(cp=2, core="0.18"), "ok"),
        (dict(tp=4, cp=8, core="0.19"), "refused"),
        (dict(tp=4, cp=8), "refused"),
        (dict(cp=2), "the release of Megatron-Core"),
    ],
)
def test_heads_of_gated_delta_net(args: dict[str, Any], expected: str) -> None:
    for own in ({"experimental_attention_variant": "gated_delta_net"}, {"hybrid_layer_pattern": "G*G*/G"}):
        assert _ask("M30", dict(HEADS, **own), **args) == expected
    assert _ask("M30", dict(HEADS, hybrid_layer_pattern="M*/G"), **args) == "ok"


_KERNELS = "megatron.core.inference.contexts.attention_context.triton.tensor_ops"


class _Built(Exception):
    """The mixer asked for its first weights: its sizes have passed."""


class _Group:
    def __init__(self, size: int) -> None:
        self._size = size

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return 0


def test_mamba_as_megatron_core_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask the mixer about heads, groups and tp, and the context parallelism of it about cp."""
    pytest.importorskip("torch")
    if importlib.util.find_spec("triton") is None:  # of kernels, which nothing here runs
        monkeypatch.setitem(sys.modules, _KERNELS, MagicMock())
    for name in [each for each in sys.modules if each.startswith("megatron.core.ssm")]:
        monkeypatch.delitem(sys.modules, name)
    mixer = importlib.import_module("megatron.core.ssm.mamba_mixer")
    contexts = importlib.import_module("megatron.core.ssm.mamba_context_parallel")
    from megatron.core.transformer import TransformerConfig

    def build(*args: Any, **kwargs: Any) -> None:
        raise _Built

    monkeypatch.setattr(mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mixer, "build_module", build)
    seen = set()
    for heads, groups, tp, cp in itertools.product(
        (None, 6, 8, 64, 96), (1, 3, 4, 8, 12), (1, 2, 3, 4, 8, 16), (1, 2, 3, 4, 6, 8)
    ):
        for hidden in (64, 96) if heads is None else (64,):
            config = TransformerConfig(
                num_layers=2, hidden_size=hidden, num_attention_heads=4, mamba_num_heads=heads, mamba_num_groups=groups
            )
            own = SimpleNamespace(tp=_Group(tp), cp=_Group(cp))
            submodules = SimpleNamespace(in_proj=None)
            try:
                with pytest.raises(_Built):
                    mixer.MambaMixer(config, submodules, hidden, pg_collection=own)
                count = heads or 2 * hidden // 64
                sizes = _Group(cp), 64 * count // tp, count // tp, groups // tp, 128
                # weights, which its checks do not read; later releases take two more
                weights = len(inspect.signature(contexts.MambaContextParallel).parameters) - len(sizes)
                contexts.MambaContextParallel(*sizes, *(None,) * weights)
                expected = "ok"
            except AssertionError:
                expected = "refused"
            model = {"hidden_size": hidden, "mamba_num_groups": groups, "hybrid_layer_pattern": "M*"}
            model |= {} if heads is None else {"mamba_num_heads": heads}
            assert _ask("M29", model, tp=tp, cp=cp) == expected, (heads, groups, tp, cp, hidden)
            seen.add(expected)
    assert seen == {"ok", "refused"}
    assert _ask("M29", {"hidden_size": 64, "hybrid_layer_pattern": "*-"}, tp=16) == "ok"


@every(
    ("name", "args", "expected"),
    [
        ("nemotron_3_nano", dict(tp=8), "ok"),
        ("nemotron_3_nano", dict(tp=16), "refused"),
        ("nemotron_3_nano", dict(cp=3), "refused"),
        ("nemotron_3_nano", dict(cp=16), "ok"),
        ("nemotron_3_super", dict(tp=16), "refused"),
        ("nemotron_3_ultra", dict(tp=8, cp=64), "refused"),
        ("nemotron_3_ultra", dict(tp=8, cp=32), "ok"),
    ],
)
def test_mamba_of_the_recipes(name: str, args: dict[str, Any], expected: str) -> None:
    from cloudai_mbridge.recipes import load_recipe

    assert _ask("M29", dict(load_recipe(name).sections["model"]), **args) == expected
