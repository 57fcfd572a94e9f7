"""The `[sweep]` table of a test: what CloudAI's grid cannot say."""

from typing import Any, Literal

from pydantic import Field, FiniteFloat

from cloudai_mbridge.models.base import StrictModel, Text

Pattern = dict[Text, Any]


class SweepConfig(StrictModel):
    """How the axes combine, which points are left out or added, in which order, and how many run.

    Axes are named as in the report: an argument by its name, a variable as env.NAME, and num_nodes.
    """

    zip: list[list[Text]] = Field([], description="groups of axes of equal length that vary together")
    exclude: list[Pattern] = Field(
        [], description="points to leave out: {axis = value or list of values}, all must match"
    )
    include: list[Pattern] = Field([], description="points to add: {argument = value}, the rest as in cmd_args")
    repeats: int = Field(1, ge=1, description="runs of every point, on top of the scenario's iterations")
    order: Literal["grid", "random", "informative"] = Field(
        "grid", description="last axis fastest; shuffled by `seed`; or what tells most first (docs/estimate.md)"
    )
    seed: int = Field(0, ge=0, description="of the random order")
    max_points: int | None = Field(None, ge=1, description="accepted points to run; the rest is held back")
    max_gpu_hours: FiniteFloat | None = Field(
        None, gt=0, description="over all runs, as predicted where the GPU is known, else GPUs x time limit"
    )
    memory_share: FiniteFloat | None = Field(
        None,
        gt=0,
        description="hold back points predicted to need more of a GPU; None: only `sweep plan` does, at 0.9",
    )
