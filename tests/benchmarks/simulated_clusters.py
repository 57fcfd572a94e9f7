"""The search of `mbridge tune` on made-up clusters, whose every layout's step time is known.

    python tests/benchmarks/simulated_clusters.py [--clusters 20] [--trials 40] [--space llama3_70b:gb200:512 ...]
        [--errors smooth each]

A cluster is the time model with structured errors: every term of a step is off by a factor that is drawn for the
cluster (lognormal, 50 %), every layout by 10 %, the memory by 5 % on all layouts, and a measurement has 1 % of noise.
The 10 % are drawn in two ways: smooth, so that similar layouts are off alike, or of each layout by itself. Nothing can
predict the second kind, and the best of so many layouts is one with a large error of either kind. So beside the search
stands an oracle: the same search, but it knows all of the cluster's factors, which layouts fit, and how the 10 % are
drawn; it learns nothing but these.

Printed for each space and kind, for the search and the oracle: trials until within 3 % of the best of all (median,
90 %), and how far above it the best of 12 and of 20 trials is (median, 90 %). Then, after how many trials the search
stops, and how many searches stop over 2 % above what all trials would have found.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cloudai_mbridge.constraints import check
from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import Precision, gpu_named
from cloudai_mbridge.estimate.headline import headline_estimator
from cloudai_mbridge.estimate.point import groups_of, times_of
from cloudai_mbridge.estimate.time.parts import StepGroups
from cloudai_mbridge.recipes import load_recipe
from cloudai_mbridge.tune.belief import SDS, Belief, LogTimes, Prior
from cloudai_mbridge.tune.measured_search import positions_of
from cloudai_mbridge.tune.ranking import Predictor
from cloudai_mbridge.tune.search import CHANCE, WORTH, Search, Trial
from cloudai_mbridge.tune.space import Options, SearchRequest

Floats = npt.NDArray[np.float64]
Layouts = npt.NDArray[np.intp]
SPACES = ("llama31_405b:gb200:1024", "llama3_70b:gb200:512", "qwen3_235b_a22b:gb200:64", "deepseek_v3:gb200:128")
TERM_SD, LAYOUT_SD, MEMORY_SD, NOISE = 0.5, 0.1, 0.05, 0.01
GOOD, LOOKS = 0.03, (12, 20)
_FEATURES, _RANGE = 512, 1.5  # of the smooth errors: random Fourier features, doublings that they reach


@dataclass(frozen=True)
class Space:
    """Layouts of a model: terms of their steps in seconds, [n, terms]; groups; places; predicted shares of memory.

    legal: how many break no rule; those that need far more memory than there is are no candidates.
    """

    legal: int
    terms: Floats
    groups: list[StepGroups]
    where: Floats
    shares: Floats


def build(name: str) -> Space:
    """Return all layouts that break no rule, in all number formats of the GPU and with all that may be recomputed."""
    recipe_name, gpu, num_gpus = name.split(":")
    recipe, device = load_recipe(recipe_name), gpu_named(gpu)
    formats = tuple(each for each in Precision if device.peak(each) is not None and not each.is_32_bit)
    batch = max(recipe.default("train", "global_batch_size"), 8 * int(num_gpus))
    length = recipe.default("model", "seq_length")
    request = SearchRequest(recipe, device, int(num_gpus), batch, length, formats)
    predictor, headline_of = Predictor(request), headline_estimator()
    legal = 0
    terms, groups, places, shares = [], [], [], []
    for sizes, is_sharded in request.layouts():
        for precision in request.precisions:
            for recompute in request.recomputable:
                options = Options(precision, is_sharded, recompute)
                try:
                    question = predictor.question(sizes, options)
                    model = question.architecture
                    step = times_of(question, model).step_time(question.layout_of(model))
                    found = groups_of(question)
                except BadInput:
                    continue
                if check(question.args, None, recipe).violations:
                    continue
                legal += 1
                headline = headline_of(question)
                share = (headline.peak_memory_gib or 0.0) / (headline.gpu_memory_gib or 1.0)
                if not 0 < share < 1.3:
                    continue
                terms.append(list(step.values()))
                groups.append(found)
                places.append({**sizes._asdict(), "fsdp": is_sharded, "re": recompute, "precision": str(precision)})
                shares.append(share)
    return Space(legal, np.array(terms), groups, positions_of(places), np.array(shares))


@dataclass(frozen=True)
class Cluster:
    """True step times, [n], infinite where the memory does not suffice; and what an oracle knows of them."""

    times: Floats
    known: Floats
    draw: np.random.Generator

    @property
    def best(self) -> float:
        return float(self.times.min())

    def measure(self, index: int) -> float | None:
        seconds = float(self.times[index])
        return seconds * float(np.exp(self.draw.normal(0, NOISE))) if np.isfinite(seconds) else None


def clusters(space: Space, number: int, is_smooth: bool) -> Iterator[Cluster]:
    """Yield clusters: the same ones each time."""
    for seed in range(number):
        draw = np.random.default_rng(seed)
        known = space.terms @ np.exp(draw.normal(0, TERM_SD, space.terms.shape[1]))
        if is_smooth:
            frequencies = draw.normal(0, 1 / _RANGE, (space.where.shape[1], _FEATURES))
            waves = np.cos(space.where @ frequencies + draw.uniform(0, 2 * np.pi, _FEATURES))
            errors = LAYOUT_SD * np.sqrt(2 / _FEATURES) * waves @ draw.normal(0, 1, _FEATURES)
        else:
            errors = draw.normal(0, LAYOUT_SD, len(known))
        fits = space.shares * np.exp(draw.normal(0, MEMORY_SD)) <= 1
        yield Cluster(np.where(fits, known * np.exp(errors), np.inf), np.where(fits, known, np.inf), draw)


@dataclass
class Progress:
    """How far above the best of all the best so far is after each trial; at what trial the search stops, and there."""

    above: list[float]
    stopped: int = 0
    above_at_stop: float = 0.0

    @property
    def to_good(self) -> int:
        return next((number for number, above in enumerate(self.above, 1) if above <= GOOD), len(self.above) + 1)


def play(search: Search, cluster: Cluster, layouts: Layouts, most: int, *, stops: bool) -> Progress:
    """Search among the layouts of a cluster. stops: look whether the search would stop."""
    progress, best, found = Progress([]), np.inf, np.inf
    for number in range(1, most + 1):
        if (index := search.next()) is None:
            break
        layout = int(layouts[index])
        search.learn(Trial(index, cluster.measure(layout)))
        best = min(best, float(cluster.times[layout]))
        progress.above.append(best / cluster.best - 1)
        if stops and not progress.stopped and search.best is not None and search.chance_of_better() < CHANCE:
            progress.stopped, found = number, float(cluster.times[layouts[search.best.index]])
    if progress.stopped:
        progress.above_at_stop = found / best - 1
    progress.stopped = progress.stopped or most
    return progress


def searched(space: Space, cluster: Cluster, most: int) -> Progress:
    """Play the search of `mbridge tune`."""
    prior = Prior(space.where, space.groups, list(space.shares))
    search = Search(prior.beliefs({}), prior.room())
    return play(search, cluster, np.arange(len(space.groups)), most, stops=True)


def known_log_times(times: Floats) -> LogTimes:
    """Return the function of step times whose every factor is known."""
    logs, slopes = np.log(times), np.zeros((len(times), len(SDS)))
    return lambda factors, chosen: (logs[chosen], slopes[chosen])


def oracle(space: Space, cluster: Cluster, most: int, *, is_smooth: bool) -> Progress:
    """Play one who knows all but the errors of layouts, and how these are drawn."""
    fits = np.flatnonzero(np.isfinite(cluster.known))
    shared, own = (LAYOUT_SD, 0.003) if is_smooth else (1e-6, LAYOUT_SD)
    log_times, where = known_log_times(cluster.known[fits]), space.where[fits]
    search = Search([Belief(log_times, where, shared=shared, own=own, noise=NOISE, range_=_RANGE)], None)
    return play(search, cluster, fits, most, stops=False)


def words(of_clusters: list[Progress]) -> str:
    trials = [progress.to_good for progress in of_clusters]
    text = f"within {GOOD:.0%} after {np.median(trials):g}, 90 % {np.quantile(trials, 0.9):g}"
    for look in LOOKS:
        above = [progress.above[:look][-1] for progress in of_clusters]
        text += f"; after {look}: +{np.median(above):.1%}, 90 % +{np.quantile(above, 0.9):.1%}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clusters", type=int, default=20)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--space", dest="spaces", nargs="+", default=SPACES)
    parser.add_argument("--errors", nargs="+", default=["smooth", "each"], choices=["smooth", "each"])
    options = parser.parse_args()
    for name in options.spaces:
        started = time.monotonic()
        space = build(name)
        print(f"{name}: {space.legal} legal layouts, {len(space.groups)} candidates", end=" ")
        print(f"(built in {time.monotonic() - started:.0f} s)", flush=True)
        for kind in options.errors:
            is_smooth = kind == "smooth"
            of_search = [searched(space, one, options.trials) for one in clusters(space, options.clusters, is_smooth)]
            print(f"  errors {kind}: search {words(of_search)};", end=" ")
            late = np.mean([progress.above_at_stop > WORTH for progress in of_search])
            stopped = np.median([progress.stopped for progress in of_search])
            print(f"stops after {stopped:g}, {late:.0%} over {WORTH:.0%} above", flush=True)
            knowing = [
                oracle(space, one, options.trials, is_smooth=is_smooth)
                for one in clusters(space, options.clusters, is_smooth)
            ]
            print(f"  errors {kind}: oracle {words(knowing)}", flush=True)


if __name__ == "__main__":
    main()
