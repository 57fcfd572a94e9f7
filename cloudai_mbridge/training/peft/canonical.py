"""An adapter each for the parts of a fused layer: queries, keys and values; gate and up projection."""

from dataclasses import replace
from typing import Any

import torch

from cloudai_mbridge.training.compat import quantized
from cloudai_mbridge.training.peft.adapter import Adapter, AdapterShape
from cloudai_mbridge.training.peft.base_layer import BaseLayer
from cloudai_mbridge.training.peft.linear import AdaptedLinear


class _Parts(torch.nn.ModuleDict):
    """Adapters by name."""

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        """Return the sharded state of all adapters."""
        found: dict[str, Any] = {}
        adapters: Any = self.items()
        for name, adapter in adapters:
            found |= adapter.sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return found


class SplitLinear(AdaptedLinear):
    """A fused layer with adapters for some of its parts.

    groups: into how many equal blocks of rows the layer is divided, each with a block of every part. rows: of a part in
    all blocks of this rank, in the layer's order.
    """

    def __init__(self, to_wrap: Any, parts: dict[str, Adapter], rows: dict[str, int], groups: int) -> None:
        super().__init__(to_wrap, _Parts({f"adapter_{name}": adapter for name, adapter in parts.items()}))
        self.rows, self.groups = rows, groups

    def added(self, x: torch.Tensor, splits: Any) -> torch.Tensor:
        """Return the adapters' output, in the order of the layer's."""
        return self._joined({name: adapter(x, splits) for name, adapter in self._parts()})

    def merged(self) -> list[torch.Tensor]:
        """Return this rank's matrix with the adapters, in fp32. A collective of the ranks that share it."""
        weight = self.to_wrap.weight
        products = {name: adapter.products()[0].T for name, adapter in self._parts()}
        return [quantized.values(weight).float() + self._joined(products).T.float()]

    def _parts(self) -> Any:
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


def split_linear(module: Any, name: str, base: BaseLayer, shape: AdapterShape, parts: frozenset[str]) -> AdaptedLinear:
    """Return a fused layer with adapters for these parts of it. Raises ValueError: it has other parts."""
    config, is_qkv = module.config, name.endswith("linear_qkv")
    if is_qkv:
        groups = (config.num_query_groups or config.num_attention_heads) // base.ranks
        heads = config.num_attention_heads // base.ranks
        rows = {"q": heads * config.kv_channels, **dict.fromkeys("kv", groups * config.kv_channels)}
    else:
        groups, rows = 1, dict.fromkeys(("gate", "up"), base.out_size // 2)
    if sum(rows.values()) != base.out_size or not groups:
        raise ValueError(f"peft = CanonicalLoRA: {name} has more than queries, keys and values, or parts of them")
    chosen = {part.rpartition("_")[2] for part in parts}
    adapters = {
        part: Adapter(base, replace(shape, name=f"{shape.name}.{part}"), size)
        for part, size in rows.items()
        if part in chosen
    }
    return SplitLinear(module, adapters, rows, groups)
