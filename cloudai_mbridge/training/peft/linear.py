"""Linear layers with adapters: they take the layers' places, and keep their names in checkpoints."""

from typing import Any

import torch

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.peft.base_layer import weights

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
