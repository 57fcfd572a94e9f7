"""Linear layers with adapters: they take the layers' places, and keep their names in checkpoints."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.peft.adapter import Adapter
from cloudai_mbridge.training.peft.config import AdapterConfig
from cloudai_mbridge.training.peft.layers import BaseLayer, weights

# Attributes of a layer that other modules read or call
_OF_THE_LAYER = ("weight", "bias", "layer_norm_weight", "layer_norm_bias", "weight0", "num_gemms", "backward_dw")


class AdaptedLinear(torch.nn.Module):
    """A layer whose output is that of the wrapped one and of its adapter.

    In a state dict the wrapped layer has the names that it has without, and the adapter's begin with `adapter.`.
    """

    def __init__(self, to_wrap: Any, adapter: torch.nn.Module) -> None:
        super().__init__()
        self.to_wrap, self.adapter = to_wrap, adapter
        self.config = to_wrap.config
        if hasattr(to_wrap, "return_layernorm_output"):  # the norm is a part of Transformer Engine's layer
            to_wrap.return_layernorm_output = True
        self._register_state_dict_hook(_without_wrapper)  # type: ignore[no-untyped-call]
        self._register_load_state_dict_pre_hook(_with_wrapper)  # type: ignore[no-untyped-call]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped layer that other modules read."""
        return getattr(self.to_wrap, name) if name in _OF_THE_LAYER else super().__getattr__(name)

    def forward(self, x: torch.Tensor, *args: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, bias) as the wrapped layer does. args: of that layer; for grouped experts, their splits."""
        output, bias, seen = self.run_wrapped(x, *args, **keywords)
        return output + self.added(seen, args[0] if args else None).reshape(output.shape), bias

    def added(self, x: torch.Tensor, splits: Any) -> torch.Tensor:
        """Return the adapter's output for the weight's input."""
        y: torch.Tensor = self.adapter(x, splits)
        return y

    def run_wrapped(self, x: torch.Tensor, *args: Any, **keywords: Any) -> tuple[Any, Any, torch.Tensor]:
        """Return the wrapped layer's output, its bias, and the input of its weight: x, or the norm's output.

        A layer with a norm returns ((output, normed), bias) or (output, bias, normed).
        """
        output, *rest = self.to_wrap(x, *args, **keywords)
        if isinstance(output, tuple):
            return output[0], rest[0], output[1]
        return output, rest[0], rest[1] if len(rest) > 1 else x

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state of the layer and its adapter."""
        found: dict[str, Any] = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        adapter: Any = self.adapter
        found.update(adapter.sharded_state_dict(f"{prefix}adapter.", sharded_offsets, metadata))
        return found

    def merged(self) -> list[torch.Tensor]:
        """Return this rank's matrices with the adapter, in fp32. A collective of the ranks that share them."""
        adapter: Any = self.adapter
        matrices = zip(weights(self.to_wrap), adapter.products(), strict=True)
        return [quantized.values(weight).float() + product.float() for weight, product in matrices]


_WRAPPER = "to_wrap."


def _without_wrapper(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    for key in [key for key in state if key.startswith(prefix + _WRAPPER)]:
        state[prefix + key.removeprefix(prefix + _WRAPPER)] = state.pop(key)


def _with_wrapper(state: dict[str, Any], prefix: str, *_: Any) -> None:
    for key in [key for key in state if key.startswith(prefix)]:
        own = key.removeprefix(prefix)
        if not own.startswith(("adapter.", _WRAPPER)):
            state[f"{prefix}{_WRAPPER}{own}"] = state.pop(key)


class SplitLinear(AdaptedLinear):
    """A fused layer with adapters for some of its parts.

    groups: into how many equal blocks of rows the layer is divided, each with a block of every part. rows: of a part in
    all blocks of this rank, in the layer's order.
    """

    def __init__(self, to_wrap: Any, parts: dict[str, Adapter], rows: dict[str, int], groups: int) -> None:
        adapters: dict[str, torch.nn.Module] = {f"adapter_{name}": adapter for name, adapter in parts.items()}
        super().__init__(to_wrap, torch.nn.ModuleDict(adapters))
        self.rows, self.groups = rows, groups

    def added(self, x: torch.Tensor, splits: Any) -> torch.Tensor:
        """Return the adapters' output, in the order of the layer's."""
        return self._joined({name: adapter(x, splits) for name, adapter in self._adapters()})

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state of the layer and its adapters."""
        found: dict[str, Any] = self.to_wrap.sharded_state_dict(prefix, sharded_offsets, metadata)
        for name, adapter in self._adapters():
            found |= adapter.sharded_state_dict(f"{prefix}adapter.adapter_{name}.", sharded_offsets, metadata)
        return found

    def merged(self) -> list[torch.Tensor]:
        """Return this rank's matrix with the adapters, in fp32. A collective of the ranks that share it."""
        weight = self.to_wrap.weight
        products = {name: adapter.products()[0].T for name, adapter in self._adapters()}
        return [quantized.values(weight).float() + self._joined(products).T.float()]

    def _adapters(self) -> Any:
        adapters: Any = self.adapter
        return [(name.removeprefix("adapter_"), adapter) for name, adapter in adapters.items()]

    def _joined(self, outputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Put the blocks of the parts [..., rows] by turns; a part without an adapter adds nothing."""
        some = next(iter(outputs.values()))
        leading = some.shape[:-1]
        blocks = [
            outputs.get(name, some.new_zeros(*leading, rows)).reshape(*leading, self.groups, rows // self.groups)
            for name, rows in self.rows.items()
        ]
        return torch.cat(blocks, -1).reshape(*leading, sum(self.rows.values()))


def split_linear(
    module: Any, base: BaseLayer, peft: AdapterConfig, dim: int, seed: int, parts: frozenset[str]
) -> AdaptedLinear:
    """Return a fused layer with adapters for these parts of it. Raises ValueError: it has other parts."""
    config = base.config
    if base.name.endswith("linear_qkv"):
        groups = (config.num_query_groups or config.num_attention_heads) // base.ranks
        heads = config.num_attention_heads // base.ranks
        rows = {"q": heads * config.kv_channels, **dict.fromkeys("kv", groups * config.kv_channels)}
    else:
        groups, rows = 1, dict.fromkeys(("gate", "up"), base.out_size // 2)
    if sum(rows.values()) != base.out_size or not groups:
        raise ValueError(f"peft = CanonicalLoRA: {base.name} has more than queries, keys and values, or parts of them")
    chosen = {part.rpartition("_")[2] for part in parts}
    adapters = {
        part: Adapter(replace(base, name=f"{base.name}.{part}", out_size=size, is_gated=False), peft, dim, seed)
        for part, size in rows.items()
        if part in chosen
    }
    return SplitLinear(module, adapters, rows, groups)


class DecomposedLinear(AdaptedLinear):
    """Weight-decomposed adaptation: W' = m (W + B A) / |W + B A|, row by row (DoRA, https://arxiv.org/abs/2402.09353).

    The magnitudes begin as the norms of the rows. The norm counts as a constant in the backward pass, as the paper
    proposes. Of weights that are split along the input it is that of the whole rows.
    """

    def __init__(self, to_wrap: Any, adapter: Adapter) -> None:
        super().__init__(to_wrap, adapter)
        with torch.no_grad():
            adapter.weight_magnitude.copy_(self._norms(super().merged()[0]))

    def forward(self, x: torch.Tensor, *args: Any, **keywords: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, bias) as the wrapped layer does."""
        output, bias, seen = self.run_wrapped(x, *args, **keywords)
        added = self.added(seen, None).reshape(output.shape)
        magnitude: Any = self.adapter.weight_magnitude
        with torch.no_grad():
            norms = self._norms(super().merged()[0])
        ratio = magnitude / norms.to(magnitude.dtype)
        inside = self.to_wrap.bias if bias is None else None  # the wrapped layer has added it
        if inside is None or not inside.numel():
            return ratio * (output + added), bias
        return ratio * (output - inside + added) + inside, bias

    def merged(self) -> list[torch.Tensor]:
        """Return this rank's matrix with the adapter, in fp32. A collective of the ranks that share it."""
        (matrix,) = super().merged()
        magnitude: Any = self.adapter.weight_magnitude
        return [matrix * (magnitude / self._norms(matrix))[:, None]]

    def _norms(self, matrix: torch.Tensor) -> torch.Tensor:
        """Return the norms of the whole rows. A collective of the ranks that have parts of them."""
        base: Any = self.adapter.base
        squares = matrix.square().sum(1)
        if base.kind == "row" and base.ranks > 1:
            dist.all_reduce(squares, group=base.group)
        return squares.sqrt()
