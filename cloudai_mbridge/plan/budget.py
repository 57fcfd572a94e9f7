"""`[sweep] max_gpu_hours`: what a run is taken to cost, and which rule said so."""

from collections import Counter

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.headline import START_UP_S, Headline

PREDICTED = f"predicted, with {START_UP_S:g} s of start-up a run"
BY_LIMIT = "GPUs x time limit"


class Budget:
    """The GPU-hours of a test's sweep. where: the test, for messages. max_gpu_hours: None allows everything."""

    def __init__(self, where: str, max_gpu_hours: float | None) -> None:
        self._where, self._most = where, max_gpu_hours
        self.gpu_hours = 0.0
        self._rules: Counter[str] = Counter()

    def price(
        self, headline: Headline | None, num_gpus: int, num_steps: int | None, time_limit_s: float | None, num_runs: int
    ) -> tuple[float, str]:
        """Return the GPU-hours of a point's runs and the rule: predicted where that is known, else by the time limit.

        A run ends at its time limit, whatever was predicted.

        Raises:
            BadInput: there is a budget, and neither a prediction nor a time limit.
        """
        limit = None if time_limit_s is None else num_gpus * time_limit_s / 3600
        predicted = headline.gpu_hours(num_steps, START_UP_S) if headline else None
        if predicted is not None:
            return num_runs * (predicted if limit is None else min(predicted, limit)), PREDICTED
        if limit is None:
            if self._most is not None:
                raise BadInput(f"{self._where}: sweep.max_gpu_hours needs a time_limit; set one")
            return 0.0, BY_LIMIT
        return num_runs * limit, BY_LIMIT

    def allows(self, gpu_hours: float) -> bool:
        """Return whether as much may be spent on top of what was."""
        return self._most is None or self.gpu_hours + gpu_hours <= self._most

    def spend(self, gpu_hours: float, rule: str) -> None:
        """Count a point in."""
        self.gpu_hours += gpu_hours
        self._rules[rule] += 1

    def note(self) -> str | None:
        """Return how the points that were counted in were priced; None without a budget or a prediction."""
        if self._most is None or not self._rules[PREDICTED]:
            return None
        counts = "; ".join(f"{count} points: {rule}" for rule, count in sorted(self._rules.items()))
        return f"{self._where}: max_gpu_hours counts {self.gpu_hours:.4g} GPU-hours ({counts})"
