"""The layouts of a model on a number of GPUs, ranked by prediction, and a scenario that measures them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cloudai_mbridge import pipeline
from cloudai_mbridge.api.scenarios import Scenario
from cloudai_mbridge.api.tables import Table, Tabular
from cloudai_mbridge.errors import BadInput, counted, shown
from cloudai_mbridge.estimate.hardware import Price, price_of
from cloudai_mbridge.files.toml_text import render_toml
from cloudai_mbridge.models.cmd_args import Launcher
from cloudai_mbridge.models.loading.load import load_system, load_test_definition
from cloudai_mbridge.report.rows import axis_types, axis_values
from cloudai_mbridge.tune.ranking import Candidate, Ranking, rank
from cloudai_mbridge.tune.space import SearchRequest, search_request, search_scenario

_RANK = {"rank": int}
_PREDICTED = {
    **{"step_time_s": float, "step_time_low_s": float, "step_time_high_s": float, "tflops_per_gpu": float},
    **{"peak_memory_gib": float, "gpu_memory_gib": float, "fits": float, "gpu_hours": float, "cost": float},
}


def rank_layouts(
    recipe: str,
    *,
    num_gpus: int,
    gpu: str | None = None,
    system: str | PathLike[str] | None = None,
    precisions: Sequence[str] = ("bf16",),
    gbs: int | None = None,
    seq_length: int | None = None,
    launcher: str = Launcher.MEGATRON_BRIDGE,
    max_steps: int = 10,
    top: int = 10,
) -> "Layouts":
    """Rank the layouts of a recipe's model by their predicted step time; nothing is run.

    gpu: such as "gb200"; default: the system's gpu_type. system: TOML file with gpu_type, [prices] and calibration.
    gbs: sequences per step; default: the preset's, or the recipe's. seq_length: default: the recipe's. max_steps: for
    the cost and the tests. top: how many to return.
    BadInput: an unknown name, or nothing can be predicted for it.
    """
    sizes = {"num_gpus": num_gpus, "gbs": gbs, "seq_length": seq_length, "max_steps": max_steps, "top": top}
    for name, value in sizes.items():
        if value is not None and value < 1:
            raise BadInput(f"{name}: {shown(value)} is below 1")
    if launcher not in list(Launcher):
        raise BadInput(f"launcher: {shown(launcher)} is unknown; use one of {', '.join(Launcher)}")
    loaded = None if system is None else load_system(Path(system))
    request = search_request(
        loaded,
        recipe=recipe,
        gpu=gpu,
        num_gpus=num_gpus,
        precisions=tuple(precisions),
        gbs=gbs,
        seq_length=seq_length,
        launcher=launcher,
        max_steps=max_steps,
    )
    return Layouts(request, rank(request, top), price_of(loaded, request.gpu.name)[0])


@dataclass(frozen=True, repr=False)
class Layouts(Tabular):
    """A ranking. price: of the system; None if it has none. `ranking` counts excluded layouts by reason."""

    request: SearchRequest
    ranking: Ranking
    price: Price | None = None

    @property
    def best(self) -> tuple[Candidate, ...]:
        """The layouts that break no rule and are predicted to fit, the fastest first; there may be none."""
        return tuple(self.ranking.best)

    def scenario(
        self,
        *,
        system: str | PathLike[str],
        max_trials: int | None = None,
        time_limit: str | None = None,
        base: str | PathLike[str] | None = None,
    ) -> Scenario:
        """Return a scenario whose search measures the best of these layouts; nothing is run or written.

        max_trials: layouts to run at most. time_limit: of each job. base: a test TOML with the remaining settings,
        such as containers.
        BadInput: no layouts, or a wrong file or limit.
        """
        if not self.best:
            raise BadInput(f"no layout of {self.request.recipe.name} is left; use more GPUs, or a batch they divide")
        found = {} if base is None else load_test_definition(Path(base)).model_dump(mode="json", exclude_unset=True)
        name = f"tune_{self.request.recipe.name}_{self.request.num_gpus}x{self.request.gpu.name}"
        scenario = search_scenario([each.cmd_args for each in self.best], found, name, max_trials)
        scenario["Tests"][0] |= {"time_limit": time_limit} if time_limit else {}
        with TemporaryDirectory() as directory:
            path = Path(directory, "scenario.toml")
            path.write_text(render_toml(scenario), encoding="utf-8")
            return Scenario(pipeline.load(pipeline.Request(Path(system), path, None, None)))

    @property
    def table(self) -> Table:
        taken = _RANK | _PREDICTED
        arguments = axis_types((each.cmd_args for each in self.best), taken)
        return Table({**_RANK, **_PREDICTED, **arguments}, tuple(self._rows(taken)))

    def _rows(self, taken: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for number, each in enumerate(self.best, 1):
            headline, interval = each.headline, self.ranking.interval_s(each)
            low, high = interval if math.isfinite(interval[1]) else (None, None)
            hours = headline.gpu_hours(self.request.max_steps)
            yield {
                "rank": number,
                **{"step_time_s": each.step_time_s, "step_time_low_s": low, "step_time_high_s": high},
                **{"tflops_per_gpu": headline.tflops_per_gpu, "peak_memory_gib": headline.peak_memory_gib},
                **{"gpu_memory_gib": headline.gpu_memory_gib, "fits": each.fits, "gpu_hours": hours},
                "cost": self.price.per_gpu_hour * hours if self.price and hours is not None else None,
                **axis_values(each.cmd_args, taken),
            }

    def __repr__(self) -> str:
        where = f"{self.request.num_gpus} x {self.request.gpu.name}"
        return f"<Layouts of {self.request.recipe.name!r} on {where}: {counted(len(self.best), 'layout')}>"
