"""The step-time model against the published rows: cross-validation, ranking, speed; with --fit, its calibration.

    python -m tests.benchmarks.time_model [--fit] [--rows FILE] [--seeds 5]

Rows that are left out, by what the tables say of them and never by how well they fit: SFT and LoRA (packed sequences
of unpublished lengths), "tokendrop" (fewer tokens reach the experts than the model says), rows with a note of their own
("gpt-oss-note"), and layouts that cannot be. The tables of 25.09 have no precision column: the main number is FP8 with
current scaling, the one in parentheses MXFP8 on Blackwell and block scaling on Hopper, as their footnote says.
Recomputation, CUDA graphs, the overlap and the dispatcher of experts are not in the tables: they are those of the
preset that the container's release of Megatron-Bridge has for the row, or of the nearest one.

A fit minimises soft-L1 of the error of log(step time), with the priors of calibration.toml. Held out are: rows at
random, whole configurations (the same layout in another container is then not in the fit either), and whole models.
"""

import argparse
import csv
import sys
import time
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares
from scipy.stats import spearmanr

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.estimate.hardware import gpu_named, precision_named
from cloudai_mbridge.estimate.memory.arguments import layout_of
from cloudai_mbridge.estimate.memory.layout import ParallelLayout
from cloudai_mbridge.estimate.published import published_row
from cloudai_mbridge.estimate.time import calibration
from cloudai_mbridge.estimate.time.calibration import (
    Coefficient,
    Setting,
    age,
    load_calibration,
    powers,
    switches_of,
    trained_fraction,
    years,
)
from cloudai_mbridge.estimate.time.model import time_model
from cloudai_mbridge.estimate.time.parts import NUM_PIPELINED, IdealTimes, bubble, device_of, ideal_parts
from cloudai_mbridge.estimate.time.work import work_of
from cloudai_mbridge.recipes import load_recipe
from tests.benchmarks.published_presets import of_preset

ROOT = Path(__file__).parents[2]
DATA = ROOT / "cloudai_mbridge" / "estimate" / "data"
ROWS, CALIBRATION, HELD_OUT = DATA / "published.csv", DATA / "calibration.toml", DATA / "held_out.csv"
FOLDS, MIN_GROUP, CLEARLY = 5, 4, 0.05
SCATTER, SOFT = 0.05, 1.0  # of one row, in log(step time), as found; where the loss turns from squared to linear
LITTLE = 0.85  # rows that leave this much of the prior's standard deviation do not determine a coefficient
_NOTES_LEFT_OUT = ("tokendrop", "gpt-oss-note")


@dataclass(frozen=True)
class Row:
    """A published row as the time model sees it. configuration: equal for rows that differ in the container only.

    task: pretrain, sft, lora, or the row's note.
    """

    setting: Setting
    layout: ParallelLayout
    step_time_s: float
    configuration: str
    task: str

    @property
    def group(self) -> tuple[str, str]:
        return self.setting.model.recipe, self.setting.gpu.name

    @property
    def tokens_per_gpu(self) -> float:
        return (self.layout.gbs or 0) * self.setting.model.seq_length / self.layout.num_gpus


def read_rows(path: Path = ROWS, left_out: bool = False) -> list[Row]:
    """Return the rows of the calibration, or those that are left out of it; never those whose layout cannot be."""
    rows = []
    with path.open(encoding="utf-8", newline="") as text:
        for number, columns in enumerate(csv.DictReader(text), 2):
            if _is_used(columns) == left_out:
                continue
            try:
                rows.append(_row(columns))
            except BadInput as error:
                print(f"line {number} of {path.name} is not a layout: {error}")
    return rows


def _is_used(columns: dict[str, str]) -> bool:
    return columns["section"] == "Pre-Training" and columns["note"] not in _NOTES_LEFT_OUT


def _row(columns: dict[str, str]) -> Row:
    row = published_row(columns)
    model, args = row.architecture, row.args
    precision = precision_named(args.compute_dtype)
    setting = Setting(model, gpu_named(args.gpu_type), precision, row.container, args.task == "lora")
    as_preset = args.model_copy(update=of_preset(args, row.container))
    layout = layout_of(as_preset, load_recipe(row.recipe), mtp_num_layers=model.mtp_num_layers)
    what = (model.recipe, model.mtp_num_layers, setting.gpu.name, setting.precision, _sizes(layout))
    return Row(setting, layout, row.step_time_s, "|".join(map(str, what)), columns["note"] or args.task)


def _sizes(layout: ParallelLayout) -> tuple[object, ...]:
    """Return what makes a configuration: the columns of the tables, without the settings of presets."""
    own = ("num_gpus", "tp", "pp", "cp", "vp", "ep", "mbs", "gbs", "pipeline_layout", "use_megatron_fsdp")
    return tuple(getattr(layout, name) for name in own)


class Problem:
    """The rows as arrays: a step is sum(ideal * exp(exponents @ theta)) * exp(ages @ theta)."""

    def __init__(self, rows: Sequence[Row], coefficients: Iterable[Coefficient], newest: str) -> None:
        self.coefficients = list(coefficients)
        self.rows = list(rows)
        index = {coefficient.name: i for i, coefficient in enumerate(self.coefficients)}
        shape = len(self.rows), len(IdealTimes._fields), len(index)
        self.ideal, self.exponents = np.zeros(shape[:2]), np.zeros(shape)
        self.ages = np.zeros((shape[0], shape[2]))
        self.measured = np.log([row.step_time_s for row in self.rows])
        for i, row in enumerate(self.rows):
            self.ideal[i] = _ideal(row)
            for j, part in enumerate(IdealTimes._fields):
                for name, exponent in powers(part, row.setting, switches_of(row.layout)):
                    self.exponents[i, j, index[name]] += exponent
            for name, exponent in age(row.setting, newest):
                self.ages[i, index[name]] += exponent
        self.prior = np.array([_theta(c, c.prior) for c in self.coefficients])
        self.prior_sd = np.array([1e-4 if c.is_fixed else c.prior_sd for c in self.coefficients])
        self.lower = np.array([-np.inf if c.lower is None else _theta(c, c.lower) - 1e-9 for c in self.coefficients])

    def predict(self, theta: np.ndarray, of: np.ndarray) -> np.ndarray:
        return np.log((self.ideal[of] * np.exp(self.exponents[of] @ theta)).sum(1)) + self.ages[of] @ theta

    def fit(self, of: np.ndarray) -> np.ndarray:
        def error(theta: np.ndarray) -> np.ndarray:
            rows = (self.predict(theta, of) - self.measured[of]) / SCATTER
            return np.concatenate([rows, (theta - self.prior) / self.prior_sd])

        def slope(theta: np.ndarray) -> np.ndarray:
            seconds = self.ideal[of] * np.exp(self.exponents[of] @ theta)
            shares = seconds / seconds.sum(1, keepdims=True)
            rows = (np.einsum("ij,ijk->ik", shares, self.exponents[of]) + self.ages[of]) / SCATTER
            return np.vstack([rows, np.diag(1 / self.prior_sd)])

        bounds = (self.lower, np.full(len(self.lower), np.inf))
        return least_squares(error, self.prior, slope, bounds=bounds, loss="soft_l1", f_scale=SOFT).x

    def held_out(self, labels: Sequence[str], folds: int, seed: int) -> np.ndarray:
        """Predict every row from a fit without the rows of its fold; rows with one label are in one fold."""
        names = sorted(set(labels))
        order = np.random.default_rng(seed).permutation(len(names))
        fold_of = {names[name]: fold % folds for fold, name in enumerate(order)}
        fold = np.array([fold_of[label] for label in labels])
        predicted = np.zeros(len(self.rows))
        for number in range(folds):
            out = np.flatnonzero(fold == number)
            predicted[out] = self.predict(self.fit(np.flatnonzero(fold != number)), out)
        return predicted


def _theta(coefficient: Coefficient, value: float) -> float:
    return value if coefficient.is_rate else float(np.log(value))


def _ideal(row: Row) -> np.ndarray:
    setting, layout = row.setting, row.layout
    device = device_of(setting.gpu, setting.precision)
    assert device is not None
    work = work_of(setting.model, layout.tp, layout.ep, layout.expert_tp)
    parts = np.array(ideal_parts(setting.model, work, layout, device, layout.num_microbatches))
    parts *= [trained_fraction(part, setting) for part in IdealTimes._fields]
    parts[:NUM_PIPELINED] *= 1 + bubble(layout.pp, layout.vp, layout.num_microbatches)
    return parts


def median_error(predicted: np.ndarray, measured: np.ndarray) -> float:
    return float(np.median(np.abs(np.expm1(predicted - measured))))


def by(rows: Sequence[Row], key: Callable[[Row], object]) -> dict[object, list[int]]:
    groups = defaultdict(list)
    for i, row in enumerate(rows):
        groups[key(row)].append(i)
    return dict(sorted(groups.items(), key=str))


def rank(a: np.ndarray, b: np.ndarray) -> float:
    """Return Spearman's rank correlation; nan where one side does not vary."""
    return float("nan") if np.ptp(a) == 0 or np.ptp(b) == 0 else float(spearmanr(a, b)[0])


def mean_of_configurations(problem: Problem, values: np.ndarray) -> np.ndarray:
    mean = np.empty_like(values)
    for of in by(problem.rows, lambda row: row.configuration).values():
        mean[of] = values[of].mean()
    return mean


def in_right_order(problem: Problem, predicted: np.ndarray) -> tuple[int, int]:
    """Count the pairs within a model and system that differ clearly, and those of them that are predicted in order."""
    pairs = right = 0
    for of in by(problem.rows, lambda row: row.group).values():
        for a, b in combinations(of, 2):
            difference = problem.measured[a] - problem.measured[b]
            if abs(difference) > CLEARLY:
                pairs += 1
                right += difference * (predicted[a] - predicted[b]) > 0
    return pairs, right


SCHEMES: dict[str, Callable[[Row], str]] = {
    "rows": lambda row: "",
    "configurations": lambda row: row.configuration,
    "models": lambda row: row.setting.model.recipe,
}


def cross_validate(problem: Problem, scheme: str, seeds: int) -> list[np.ndarray]:
    """Return the held-out predictions of every seed; whole models are left out one by one, which has no seed."""
    labels = [SCHEMES[scheme](row) for row in problem.rows]
    if scheme == "rows":
        labels = [f"{i:04d}" for i in range(len(labels))]
    if scheme == "models":
        return [problem.held_out(labels, len(set(labels)), 0)]
    return [problem.held_out(labels, FOLDS, seed) for seed in range(seeds)]


def print_tables(problem: Problem, seeds: int) -> None:
    results = {scheme: cross_validate(problem, scheme, seeds) for scheme in SCHEMES}
    print(f"{len(problem.rows)} rows, {len(_configurations(problem, range(len(problem.rows))))} configurations")
    print("\nheld out           seeds  median |error|  90 % below  in order (pairs > 5 % apart)")
    for scheme, runs in results.items():
        medians = [median_error(p, problem.measured) for p in runs]
        ninety = np.median([np.quantile(np.abs(np.expm1(p - problem.measured)), 0.9) for p in runs])
        pairs, right = np.median([in_right_order(problem, p) for p in runs], axis=0).astype(int)
        spread = f"{np.median(medians):.1%} ({min(medians):.1%} - {max(medians):.1%})"
        print(f"{scheme:18} {len(runs):4}   {spread:24} {ninety:6.1%}   {right} of {pairs} = {right / pairs:.1%}")
    _print_models(problem, results)
    _print_groups(problem, results)
    _print_left_out_in_turn(problem)


def _print_left_out_in_turn(problem: Problem) -> None:
    print("\nleft out in turn       median |error|  90 % below   bias")
    found = {**held_out_errors(problem), "without_release": errors_without(problem, lambda row: row.setting.container)}
    for scheme, errors in found.items():
        sizes, bias = np.abs(np.expm1(errors)), np.median(np.expm1(errors))
        print(f"{scheme:20} {np.median(sizes):10.1%} {np.quantile(sizes, 0.9):13.1%} {bias:+10.1%}")
    for name, of in by(problem.rows, lambda row: f"{row.setting.gpu.name} {row.setting.precision}").items():
        errors = np.expm1(held_out_errors(problem)[calibration.FORMAT][of])
        print(f"  all of {name!s:14} {len(of):4} rows {np.median(np.abs(errors)):7.1%} bias {np.median(errors):+7.1%}")


def errors_without(problem: Problem, label: Callable[[Row], str | None]) -> np.ndarray:
    """Return log(predicted / measured) of every row by a fit without the rows of its label."""
    labels = [str(label(row)) for row in problem.rows]
    return problem.held_out(labels, len(set(labels)), 0) - problem.measured


def undetermined(problem: Problem, theta: np.ndarray) -> dict[str, float]:
    """Return the fitted coefficients of which the rows tell little: standard deviation after over before the fit.

    The posterior is taken as normal, with the rows' weights of the loss.
    """
    seconds = problem.ideal * np.exp(problem.exponents @ theta)
    slopes = np.einsum("ij,ijk->ik", seconds / seconds.sum(1, keepdims=True), problem.exponents) + problem.ages
    every = np.arange(len(problem.rows))
    scaled = (problem.predict(theta, every) - problem.measured) / SCATTER / SOFT
    weights = 1 / np.sqrt(1 + scaled**2) / SCATTER**2
    precision = slopes.T @ (slopes * weights[:, None]) + np.diag(problem.prior_sd**-2.0)
    ratio = np.sqrt(np.diag(np.linalg.inv(precision))) / problem.prior_sd
    each = zip(problem.coefficients, ratio, strict=True)
    return {one.name: float(left) for one, left in each if left > LITTLE and not one.is_fixed}


def _print_models(problem: Problem, results: dict[str, list[np.ndarray]]) -> None:
    print("\nmedian |error| and Spearman of step time, by model, held out by")
    print("model                rows   " + "".join(f"{scheme:>22}" for scheme in SCHEMES) + "   bias, models")
    for name, of in by(problem.rows, lambda row: row.setting.model.recipe).items():
        cells = ""
        for runs in results.values():
            error = np.median([median_error(p[of], problem.measured[of]) for p in runs])
            cells += f"{error:14.1%}{np.median([rank(p[of], problem.measured[of]) for p in runs]):8.2f}"
        bias = np.median(np.expm1(results["models"][0][of] - problem.measured[of]))
        print(f"{name!s:20} {len(of):4}   {cells}   {bias:+.1%}")


def _print_groups(problem: Problem, results: dict[str, list[np.ndarray]]) -> None:
    print(
        f"\nSpearman within a model and system (>= {MIN_GROUP} rows): of step time and tokens/s/GPU, held out by rows;"
    )
    print("of step time, held out by configurations, over rows and over configurations (mean over containers, >= 3);")
    print("and what knowing every configuration's own mean would reach, the container being unknown")
    print("model, system                  rows  conf   step  tok/s   step   conf   ceiling")
    table = []
    for name, of in by(problem.rows, lambda row: row.group).items():
        if len(of) < MIN_GROUP:
            continue
        columns = _ranks(problem, results, of)
        table.append(columns)
        number = len(_configurations(problem, of))
        print(f"{' '.join(name):30} {len(of):4} {number:5}" + "".join(f"{value:7.2f}" for value in columns))
    print(f"{'median':40}" + "".join(f"{value:7.2f}" for value in np.nanmedian(table, axis=0)))


def _ranks(problem: Problem, results: dict[str, list[np.ndarray]], of: list[int]) -> list[float]:
    """Return the columns of a model and system: medians over the seeds."""
    measured, own_mean = problem.measured, mean_of_configurations(problem, problem.measured)
    speed = np.log([row.tokens_per_gpu for row in problem.rows])
    first = [i for n, i in enumerate(of) if problem.rows[i].configuration not in _configurations(problem, of[:n])]
    means = [mean_of_configurations(problem, p)[first] for p in results["configurations"]]
    return [
        float(np.median([rank(p[of], measured[of]) for p in results["rows"]])),
        float(np.median([rank((speed - p)[of], (speed - measured)[of]) for p in results["rows"]])),
        float(np.median([rank(p[of], measured[of]) for p in results["configurations"]])),
        float(np.median([rank(mean, own_mean[first]) for mean in means])) if len(first) >= 3 else float("nan"),
        rank(own_mean[of], measured[of]),
    ]


def _configurations(problem: Problem, of: Iterable[int]) -> set[str]:
    return {problem.rows[i].configuration for i in of}


def print_left_out(problem: Problem, theta: np.ndarray, path: Path) -> None:
    print("\nleft out of the fit and of the tables above")
    others = Problem(read_rows(path, left_out=True), problem.coefficients, newest_container(problem.rows))
    predicted = others.predict(theta, np.arange(len(others.rows)))
    for row, error in zip(others.rows, np.expm1(predicted - others.measured), strict=True):
        print(f"{' '.join(row.group):24} {row.setting.container} {row.task:9} {error:+.0%}")


def print_speed(problem: Problem) -> None:
    """Print microseconds a point, the layout being there."""
    calls = 0
    start = time.process_time()
    while time.process_time() - start < 1:
        for row in problem.rows[:20]:
            model = time_model(*row.setting)
            for _ in range(50):
                model.step_time_s(row.layout)
        calls += 1000
    print(f"\n{(time.process_time() - start) / calls * 1e6:.1f} microseconds of processor time a point")


def write_calibration(problem: Problem, theta: np.ndarray, newest: str) -> None:
    lines = [_HEAD.format(newest=newest, rows=len(problem.rows))]
    for coefficient, value in zip(problem.coefficients, theta, strict=True):
        value = value if coefficient.is_rate else np.exp(value)
        lines += [f"[coefficients.{coefficient.name}]", f"value = {float(f'{value:.4g}')}"]
        lines += [f'meaning = "{coefficient.meaning}"', f"prior = {coefficient.prior}"]
        lines += [f"prior_sd = {coefficient.prior_sd}"]
        lines += [] if coefficient.lower is None else [f"lower = {coefficient.lower}"]
        lines += [*["is_rate = true"] * coefficient.is_rate, *["is_fixed = true"] * coefficient.is_fixed, ""]
    CALIBRATION.write_text("\n".join(lines).rstrip("\n") + "\n", encoding="utf-8")


_HEAD = """\
# Written by `python -m tests.benchmarks.time_model --fit`: values; the rest of a coefficient is its input.
# A value is a factor on a part's ideal time (is_rate: an exponent, or a rate a year). prior_sd: of its logarithm.

newest_container = "{newest}"
source = "{rows} rows of Megatron-Bridge's published performance tables; soft-L1 fit of log(step time) with priors"
"""


def left_out_by(scheme: str) -> Callable[[int, Row], str]:
    """Return the label of what is left out of the fit that predicts a row, the number of the row given."""
    gpu, form = (lambda row: row.setting.gpu.name), (lambda row: str(row.setting.precision))
    label: dict[str, Callable[[int, Row], str]] = {
        calibration.ROW: lambda number, row: str(number),
        calibration.CONFIGURATION: lambda number, row: row.configuration,
        calibration.CELL: lambda number, row: f"{row.setting.model.recipe} {gpu(row)} {form(row)}",
        calibration.RECIPE: lambda number, row: row.setting.model.recipe,
        calibration.FORMAT: lambda number, row: f"{gpu(row)} {form(row)}",
        calibration.GPU: lambda number, row: gpu(row),
    }
    return label[scheme]


@cache
def held_out_errors(problem: Problem) -> dict[str, np.ndarray]:
    """Return log(predicted / measured) of every row, by what was left out of the fit; each is left out in turn."""
    found = {}
    for scheme in calibration.SCHEMES:
        labels = [left_out_by(scheme)(number, row) for number, row in enumerate(problem.rows)]
        found[scheme] = problem.held_out(labels, len(set(labels)), 0) - problem.measured
    return found


def render_held_out(problem: Problem) -> str:
    """Return the text of held_out.csv."""
    errors, layouts = held_out_errors(problem), list(dict.fromkeys(row.configuration for row in problem.rows))
    lines = [_HELD_OUT_HEAD + ",".join(("recipe", "gpu", "precision", "layout", *errors))]
    for i, row in enumerate(problem.rows):
        setting = row.setting
        names = setting.model.recipe, setting.gpu.name, setting.precision, layouts.index(row.configuration)
        lines.append(",".join([*map(str, names), *(f"{found[i]:.4f}" for found in errors.values())]))
    return "\n".join(lines) + "\n"


_HELD_OUT_HEAD = """\
# Written by `python -m tests.benchmarks.time_model --fit`: log(predicted / measured) of every row of the fit, by fits
# without this row; without all rows of its configuration; of its recipe, GPU and number format (cell); of its recipe;
# of its GPU and number format; of its GPU. layout: rows with one number are one configuration in several containers.
"""


def load_problem(path: Path = ROWS) -> Problem:
    rows = read_rows(path)
    return Problem(rows, load_calibration().coefficients.values(), newest_container(rows))


def newest_container(rows: Sequence[Row]) -> str:
    return max((row.setting.container or "" for row in rows), key=years)


def main(fit: bool, path: Path, seeds: int) -> None:
    problem = load_problem(path)
    print_tables(problem, seeds)
    everything = np.arange(len(problem.rows))
    theta = problem.fit(everything)
    print(f"\nin the fit: median |error| {median_error(problem.predict(theta, everything), problem.measured):.1%}")
    print(f"hardly determined by the rows: {undetermined(problem, theta) or 'none that is fitted'}")
    print_left_out(problem, theta, path)
    if fit:
        write_calibration(problem, theta, newest_container(problem.rows))
        HELD_OUT.write_text(render_held_out(problem), encoding="utf-8")
        tomllib.loads(CALIBRATION.read_text(encoding="utf-8"))
    print_speed(problem)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="write the calibration")
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(sys.argv[1:])
    main(options.fit, options.rows, options.seeds)
