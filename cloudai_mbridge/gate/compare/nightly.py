"""A gate that looks every night: a false-alarm rate for all nights together, and a slow drift that no night shows."""

from dataclasses import dataclass

from cloudai_mbridge.errors import counted
from cloudai_mbridge.gate.compare.policy import GatePolicy
from cloudai_mbridge.gate.compare.shared import MARGIN_OF_ALL
from cloudai_mbridge.gate.compare.verdict import GateVerdict, MetricVerdict, PointVerdict
from cloudai_mbridge.gate.compare.words import percent
from cloudai_mbridge.gate.results.values import METRICS, PRIMARY
from cloudai_mbridge.gate.statistics.always_valid import Drift, find_drift
from cloudai_mbridge.gate.statistics.nights import NightLevels

_OF_DRIFTS = 0.5  # share of the rate; the nights have the rest in equal parts
_NIGHTS_A_WEEK = 7


@dataclass(frozen=True)
class Nightly:
    """horizon: the nights over which the rate is kept. nights: the levels of those that have been."""

    horizon: int
    nights: NightLevels

    @property
    def share_of_a_night(self) -> float:
        return (1 - _OF_DRIFTS) / self.horizon

    def note(self, rate: float, of_a_night: float) -> str:
        """Say how the rate is kept."""
        count = len(self.nights.levels)
        return (
            f"night {count} of {self.horizon}: the false-alarm rate of {rate:.2%} is kept over all of them, tonight's"
            f" share is {of_a_night:.4%}"
        )

    def settle(self, policy: GatePolicy) -> tuple[PointVerdict, ...]:
        """Say whether the step time drifts; nothing of a policy without it, or in the first nights."""
        metric = next((each for each in policy.metrics if each.name == PRIMARY), None)
        drift = find_drift(self.nights.levels, self.horizon)
        if metric is None or drift is None:
            return ()
        rate = policy.false_alarm_rate * _OF_DRIFTS
        is_drift = drift.evidence * rate >= 1 and drift.change > metric.margin * MARGIN_OF_ALL
        verdict = GateVerdict.REGRESSION if is_drift else GateVerdict.PASS
        found = MetricVerdict(
            metric=PRIMARY,
            verdict=verdict,
            words=self._words(drift) if is_drift else f"no drift in {counted(len(self.nights.levels), 'night')}",
            unit=METRICS[PRIMARY].unit,
            decides=is_drift,
            change=drift.change if is_drift else None,
            p_value=min(1.0, 1 / drift.evidence) if drift.evidence > 0 else 1.0,
        )
        name = f"{counted(self.nights.points, 'point')} over {counted(len(self.nights.levels), 'night')}"
        return (PointVerdict(name, verdict, (), (found,)),)

    def _words(self, drift: Drift) -> str:
        began = self.nights.began[min(drift.since, len(self.nights.began) - 1)][:10]
        week = (1 + drift.slope) ** _NIGHTS_A_WEEK - 1
        return (
            f"drifts by {percent(week)} a week since about {began}, {percent(drift.change)} so far;"
            f" p = {min(1.0, 1 / drift.evidence):.2g}, however often it is looked at"
        )
