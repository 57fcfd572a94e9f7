"""Which ranks of a layout differ in what they build: pipeline stages, and the ends of the other dimensions."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Layout:
    """Sizes of a layout, and the order in which Megatron-Core numbers its ranks: the first dimension is the fastest."""

    tp: int
    cp: int
    pp: int
    dp: int
    ep: int
    etp: int
    order: tuple[str, ...]

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    def rank_of(self, **place: int) -> int:
        """Return the rank at a place of the dense layout: its tp, cp, pp and dp."""
        rank, step = 0, 1
        for name in self.order:
            rank += place.get(name, 0) * step
            step *= getattr(self, name)
        return rank

    def place_of(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in the dense layout."""
        place = {}
        for name in self.order:
            rank, place[name] = divmod(rank, getattr(self, name))
        return place


def layout_of(config: Any, world_size: int) -> Layout:
    """Return the layout of a prepared configuration.

    ValueError: the world is not divisible by it.
    """
    model = config.model
    tp, cp, pp = model.tensor_model_parallel_size, model.context_parallel_size, model.pipeline_model_parallel_size
    if world_size % (tp * cp * pp):
        raise ValueError(f"{world_size} ranks are not divisible by tp {tp} x cp {cp} x pp {pp}")
    order = ("tp", "cp", "pp", "dp") if config.dist.use_tp_pp_dp_mapping else ("tp", "cp", "dp", "pp")
    ep, etp = model.expert_model_parallel_size or 1, model.expert_tensor_parallel_size or tp
    return Layout(tp, cp, pp, world_size // (tp * cp * pp), ep, etp, order)


def distinct_ranks(layout: Layout) -> list[int]:
    """Return the ranks to build: of every pipeline stage the first, a middle and the last of all other dimensions.

    Expert parallelism lies across tp, cp and dp of one stage, so their ends are its ends.
    """
    ranks = set()
    for stage in range(layout.pp):
        for share in (0, 1, 2):
            place = {name: share * (getattr(layout, name) - 1) // 2 for name in ("tp", "cp", "dp")}
            ranks.add(layout.rank_of(pp=stage, **place))
    return sorted(ranks)


def saving_ranks(layout: Layout) -> list[int]:
    """Return the ranks that save the model's shards: of every stage the first tensor- and expert-parallel ranks."""
    within = {"tp": layout.tp, "cp": layout.cp, "dp": layout.dp}
    ranks = []
    for stage in range(layout.pp):
        for index in range(max(layout.tp, layout.ep * layout.etp)):
            place, rest = {}, index
            for name in (each for each in layout.order if each != "pp"):
                rest, place[name] = divmod(rest, within[name])
            ranks.append(layout.rank_of(pp=stage, **place))
    return sorted(ranks)
