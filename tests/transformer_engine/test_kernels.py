"""The shapes that a rehearsal gives for Transformer Engine's functions are those that the emulation computes."""

from collections import Counter
from typing import Any
from unittest import mock

import pytest

from tests.figures import Figure
from tests.transformer_engine.emulated_run import BLACKWELL, HOPPER, torch, train

# isort: split
from cloudai_mbridge.training.dry import kernels
from tests.transformer_engine.emulation import install

# model, number format, compute capability
RUNS = [
    ("dense", None, HOPPER),
    ("dense", "bf16_with_fp8_delayed_scaling_mixed", HOPPER),
    ("dense", "bf16_with_fp8_current_scaling_mixed", BLACKWELL),
    ("dense", "bf16_with_mxfp8_mixed", BLACKWELL),
    ("dense", "bf16_with_nvfp4_mixed", BLACKWELL),
    ("grouped", "bf16_with_fp8_subchannel_scaling_mixed", HOPPER),
    ("grouped", "bf16_with_mxfp8_mixed", BLACKWELL),
    ("mla", None, HOPPER),
]
# Which differ by design: the emulation multiplies without cuDNN
NOT_COMPARED = {"get_fused_attn_backend", "get_cudnn_version", "get_num_cublas_streams", "get_stream_priority_range"}
NOT_COMPARED |= {"device_supports_multicast", "get_cublasLt_version"}


def described(value: Any) -> Any:
    """Return the shapes and types in a result, quantized ones by their parts."""
    if isinstance(value, (list, tuple)):
        return [described(each) for each in value]
    if (names := getattr(type(value), "_INNER_TENSORS", None)) is not None:
        return {name: described(getattr(value, name)) for name, _ in names}
    return (tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else None


def on_meta(value: Any) -> Any:
    if type(value) in (list, tuple):
        return [on_meta(each) for each in value]
    return value.to("meta") if type(value) in (torch.Tensor, torch.nn.Parameter) else value


@pytest.mark.parametrize(("model", "precision", "capability"), RUNS)
def test_shapes(model: str, precision: str | None, capability: tuple[int, int], figure: Figure) -> None:
    own, calls, different = kernels._functions(), Counter[str](), list[str]()

    def compared(name: str, emulation: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Any:
            result = emulation(*args, **kwargs)
            given = own[name](*on_meta(args), **{key: on_meta(each) for key, each in kwargs.items()})
            calls[name] += 1
            if described(given) != described(result) and not _is_written(args, result):
                different.append(f"{name}: {described(given)}, not {described(result)}")
            return result

        return function

    emulations = install.functions()
    assert emulations.keys() <= own.keys() | NOT_COMPARED
    wrapped = {name: each if name in NOT_COMPARED else compared(name, each) for name, each in emulations.items()}
    with mock.patch.object(install, "functions", return_value=wrapped):
        assert len(train(model, precision=precision, capability=capability).losses) == 4
    assert different == []
    assert len(calls) > 4
    figure(f"{model} {precision or 'bf16'}: {sum(calls.values())} calls of {len(calls)} functions")


def _is_written(args: tuple[Any, ...], result: Any) -> bool:
    """Return whether a result is an argument: what is written has the shape that it has."""
    first = result[0] if isinstance(result, list) and result else result
    return first is None or any(first is each for each in args)
