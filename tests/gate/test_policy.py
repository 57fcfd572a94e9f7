"""Gate policies: what may be written, what is refused and in which words, and whom a waiver covers."""

from datetime import date
from pathlib import Path

import pytest

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.gate.policy import GatePolicy, Waiver, default_metrics, expired, is_policy, load_policy, waiver_for
from cloudai_mbridge.models.toml_source import read_toml
from tests.golden import Sentence

REPOSITORY = Path(__file__).parents[2]
TODAY = date(2026, 11, 21)
HEAD = 'name = "p"\nbaseline = "b.toml"\n'
TIME, LOSS = (f'{HEAD}[[metrics]]\nname = "{name}"\n' for name in ("step_time_s", "loss_curve"))
WAIVER = """
[[waivers]]
point = "sweep/tp8-*"
metric = "step_time_*"
up_to = 0.08
reason = "driver 570 is slower, ticket 123"
until = {until}
by = "Ada <ada@example.org>"
"""


def _write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def _refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(BadInput) as refused:
        load_policy(_write(tmp_path, text), TODAY)
    return str(refused.value).removeprefix(str(tmp_path) + "/")


def test_a_short_policy_has_defaults(tmp_path: Path) -> None:
    loaded = load_policy(_write(tmp_path, HEAD), TODAY)
    policy = loaded.policy
    assert loaded.baseline_path == tmp_path / "b.toml"
    assert loaded.history_path is None
    assert (policy.false_alarm_rate, policy.confidence, policy.min_runs, policy.max_failed_runs) == (0.01, 0.95, 3, 0)
    assert policy.assumed_noise is None
    assert not policy.fail_on_improvement
    assert policy.metrics == default_metrics()
    assert sum(metric.weight for metric in policy.metrics if metric.follows is None) == pytest.approx(1)


def test_a_history_is_found_beside_the_policy(tmp_path: Path) -> None:
    loaded = load_policy(_write(tmp_path, 'name = "p"\n[history]\nfile = "../h.sqlite"\n'), TODAY)
    assert (loaded.baseline_path, loaded.history_path) == (None, tmp_path / "../h.sqlite")
    assert loaded.policy.history
    assert loaded.policy.history.last == 10


def test_what_is_shipped_is_what_the_code_has_by_default() -> None:
    shipped = load_policy(REPOSITORY / "conf/gates/default.toml").policy
    defaults = GatePolicy(name=shipped.name, description=shipped.description, baseline=shipped.baseline)
    assert shipped == defaults
    text = (REPOSITORY / "conf/gates/default.toml").read_text()
    keys = {*GatePolicy.model_fields, *type(shipped.metrics[0]).model_fields, *Waiver.model_fields}
    assert {key for key in keys if key not in text} == set()
    assert load_policy(REPOSITORY / "conf/gates/nightly.toml").policy.metrics == defaults.metrics


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "p"\n', "policy.toml: names no reference; set baseline to a file, or write a [history]"),
        (HEAD + '[history]\nfile = "h"\n', "policy.toml:3: history: baseline is set as well"),
        *(
            (
                f'name = "p"\n[history]\nfile = "h"\n{key}\n',
                f"policy.toml:4: history.{key.split()[0]}: the keys nights and since are not supported any more; remove"
                " them, find drifts over many nights with `mbridge history trend`",
            )
            for key in ("nights = 60", "since = 2026-01-20", "nights = 'x'\nsince = 1")
        ),
        (HEAD + "min_run = 3\n", "policy.toml:3: min_run: unknown key; did you mean 'min_runs'"),
        (HEAD + "min_runs = 0\n", "policy.toml:3: min_runs: 0 must be greater than or equal to 1"),
        (HEAD + 'min_runs = "3"\n', "policy.toml:3: min_runs: '3' must be a valid integer"),
        (HEAD + "false_alarm_rate = 0\n", "policy.toml:3: false_alarm_rate: 0 must be greater than 0"),
        (HEAD + "false_alarm_rate = 0.21\n", "policy.toml:3: false_alarm_rate: 0.21 must be less than or equal to 0.2"),
        (HEAD + "false_alarm_rate = nan\n", "policy.toml:3: false_alarm_rate: nan must be a finite number"),
        (HEAD + "confidence = 1.0\n", "policy.toml:3: confidence: 1.0 must be less than 1"),
        (HEAD + "assumed_noise = -0.1\n", "policy.toml:3: assumed_noise: -0.1 must be greater than 0"),
        (HEAD + "metrics = []\n", "policy.toml:3: metrics: [] is empty"),
        (
            HEAD + '[[metrics]]\nname = "step_time"\n',
            "metrics[0].name: 'step_time' is not a metric; did you mean 'step_time_",
        ),
        (TIME + "margins = 1\n", "metrics[0].margins: unknown key; did you mean 'margin'"),
        (TIME + "margin = 0.05\n", "policy.toml:3: metrics[0]: is the tolerance, and not above the margin of 0.05"),
        (
            TIME + "margin = 0.03\ntolerance = 0.03\n",
            "policy.toml:6: metrics[0].tolerance: 0.03 is the tolerance, and not above the margin of 0.03",
        ),
        (TIME + "weight = 0.0\n", "metrics[0].weight: 0.0 must be greater than 0"),
        (TIME + '[[metrics]]\nname = "step_time_s"\n', "policy.toml:6: metrics[1].name: 'step_time_s' appears twice"),
        (
            LOSS + '[[metrics]]\nname = "tflops_per_gpu"\nfollows = "step_time_s"\n',
            "policy.toml:7: metrics[1].follows: 'step_time_s' is not among the metrics",
        ),
        (
            LOSS + 'follows = "step_time_s"\n',
            "metrics[0].follows: 'step_time_s' does not measure the same as loss_curve",
        ),
        (LOSS + "required = false\n", "metrics: none is required and decides for itself"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    assert words in _refused(tmp_path, text)


def test_a_waiver_covers_its_points_and_metrics_until_its_last_day(tmp_path: Path) -> None:
    policy = load_policy(_write(tmp_path, HEAD + WAIVER.format(until="2026-11-21")), TODAY).policy
    waiver = waiver_for(policy, "sweep/tp8-pp1", "step_time_s", TODAY)
    assert waiver
    assert (waiver.by, waiver.until, waiver.up_to) == ("Ada <ada@example.org>", TODAY, 0.08)
    assert waiver_for(policy, "sweep/tp8-pp1", "loss_curve", TODAY) is None
    assert waiver_for(policy, "sweep/tp4-pp1", "step_time_s", TODAY) is None
    assert waiver_for(policy, "sweep/TP8-pp1", "step_time_s", TODAY) is None
    assert expired(policy, TODAY) == ()
    tomorrow = date(2026, 11, 22)
    assert waiver_for(policy, "sweep/tp8-pp1", "step_time_s", tomorrow) is None
    assert expired(policy, tomorrow) == (waiver,)
    assert load_policy(_write(tmp_path, HEAD + WAIVER.format(until="2027-11-21")), TODAY), "of a year"
    brackets = GatePolicy(name="p", waivers=[_waiver(TODAY, point="a/[1]*")])
    assert waiver_for(brackets, "a/[1]*", "step_time_s", TODAY), "a name is itself, too"
    assert waiver_for(brackets, "a/1x", "step_time_s", TODAY)


def _waiver(until: date, point: str = "a/*", metric: str = "*", up_to: float = 0.1) -> Waiver:
    return Waiver(point=point, metric=metric, up_to=up_to, reason="known since spring", until=until, by="Ada")


def test_of_several_waivers_the_widest_counts_then_the_longest() -> None:
    ends = (date(2026, 12, 1), date(2027, 1, 1), date(2026, 11, 1))
    waivers = [_waiver(until) for until in ends]
    found = waiver_for(GatePolicy(name="p", waivers=waivers), "a/b", "loss_curve", TODAY)
    assert found is waivers[1]
    waivers.append(_waiver(TODAY, up_to=0.2))
    waivers.append(_waiver(date(2026, 11, 20), up_to=0.3))  # expired
    found = waiver_for(GatePolicy(name="p", waivers=waivers), "a/b", "loss_curve", TODAY)
    assert found is waivers[3]


@pytest.mark.parametrize("point", ["*", "**", "?*"])
@pytest.mark.parametrize("metric", ['metric = "*"', 'metric = "**"', ""])
def test_a_waiver_of_everything_is_refused(tmp_path: Path, sentence: Sentence, point: str, metric: str) -> None:
    text = HEAD + WAIVER.format(until="2026-12-01").replace("sweep/tp8-*", point)
    sentence(_refused(tmp_path, text.replace('metric = "step_time_*"', metric)))
    assert load_policy(_write(tmp_path, text), TODAY)  # one metric of all points
    text = text.replace(f'point = "{point}"', 'point = "sweep/*"').replace('metric = "step_time_*"', metric)
    assert load_policy(_write(tmp_path, text), TODAY)  # all metrics of some points


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('reason = "driver 570 is slower, ticket 123"\n', "", "waivers[0].reason: is missing; add it"),
        ("until = 2026-12-01\n", "", "waivers[0].until: is missing; add it"),
        ('by = "Ada <ada@example.org>"\n', "", "waivers[0].by: is missing; add it"),
        ("driver 570 is slower, ticket 123", "  slow    ", "too short a reason; use at least 10 characters"),
        ("2026-12-01", "2027-11-23", "policy.toml:9: waivers[0].until: 2027-11-23 is more than a year ahead"),
        ("2026-12-01", '"2026-12-01"', "is not a date; write it without quotes, such as 2026-12-31"),
        ("2026-12-01", "2026-12-01T00:00:00", "is not a date"),
        ("step_time_*", "steptime*", "waivers[0].metric: 'steptime*' matches no metric; did you mean 'step_time_"),
        ('point = "sweep/tp8-*"', 'point = " "', "waivers[0].point: ' ' must not be blank"),
        ("up_to = 0.08\n", "", "waivers[0].up_to: is missing; add it"),
        ("up_to = 0.08", "up_to = 0", "policy.toml:7: waivers[0].up_to: 0 must be greater than 0"),
        ("up_to = 0.08", "up_to = 1.1", "waivers[0].up_to: 1.1 must be less than or equal to 1"),
        ("up_to = 0.08", "up_to = nan", "waivers[0].up_to: nan must be a finite number"),
        ("by =", "untill = 1\nby =", "waivers[0].untill: unknown key; did you mean 'until'?"),
    ],
)
def test_a_waiver_says_why_and_until_when(tmp_path: Path, old: str, new: str, words: str) -> None:
    text = HEAD + WAIVER.format(until="2026-12-01")
    assert old in text
    assert words in _refused(tmp_path, text.replace(old, new))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (HEAD, True),
        ('name = "p"\nmin_runs = 3\n', True),
        ('[[metrics]]\nname = "step_time_s"\n', True),
        ('name = "t"\ndescription = "d"\n[metrics]\nwarmup_steps = 3\n', False),
        ('name = "t"\nbaseline = "x"\n[cmd_args]\n', False),
        ("", False),
    ],
)
def test_a_policy_is_told_from_other_files(tmp_path: Path, text: str, answer: bool) -> None:
    assert is_policy(read_toml(_write(tmp_path, text))) is answer
