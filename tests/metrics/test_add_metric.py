"""A new metric is one field of `Metrics`: every output has it, and reports from before it open."""

import csv
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from cloudai_mbridge import pipeline
from tests.conftest import REPOSITORY
from tests.report.conftest import EMBEDDED, ARun, a_log

pytestmark = pytest.mark.process

BEFORE = "    memory_kind: str | None = None\n    flops_formula"
FIELD = """\
    grad_norm: Statistic | None = field(
        default=None, metadata=measured("gradient norm", "", Direction.SAME, "norm of the gradients", noise_floor=0.01)
    )
"""
POLICY = """\
name = "norms"
baseline = "baseline.toml"
min_runs = 2
[[metrics]]
name = "grad_norm"
margin = 0.02
tolerance = 0.05
"""
RUN_ALL = """\
import json, sys
from cloudai_mbridge import cli
for argv in json.loads(sys.argv[1]):
    sys.argv = ["mbridge", *argv]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, argv
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return the directory of the product with the gradient norm as one more field."""
    source, copy = REPOSITORY / "cloudai_mbridge", tmp_path / "with_metric" / "cloudai_mbridge"
    copy.mkdir(parents=True)
    for file in source.iterdir():
        if file.name not in ("metrics.py", "__pycache__"):
            (copy / file.name).symlink_to(file)
    text = (source / "metrics.py").read_text()
    assert text.count(BEFORE) == 1
    (copy / "metrics.py").write_text(text.replace(BEFORE, FIELD + BEFORE))
    return copy.parent


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """Return a run of three repeats, whose report is from before the metric."""
    arguments = {**EMBEDDED["cmd_args"], "max_steps": 12}
    test = {**EMBEDDED, "cmd_args": arguments, "sweep": {"repeats": 3}}
    run = ARun(tmp_path / "s_2026-11-01_02-00-00", test)
    for number, key in enumerate(run.keys):
        time_s = 0.5 + number / 1000
        run.ended(key, a_log(12, step_time_s=time_s, tflops_per_gpu=0.06 / time_s, grad_norm=2.5 + time_s))
    pipeline.report(run.root)
    assert "grad_norm" not in json.loads((run.root / "report.json").read_text())["points"][0]["metrics"]
    return run.root


def _mbridge(package: Path, *commands: Sequence[str | Path]) -> str:
    """Run commands of the product in a package's directory, and return their output."""
    path = os.pathsep.join([str(package), str(REPOSITORY)])
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, json.dumps([list(map(str, argv)) for argv in commands])],
        env={**os.environ, "PYTHONPATH": path, "COLUMNS": "250"},
        cwd=package,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_new_metric_is_in_every_output(package: Path, older: Path) -> None:
    pytest.importorskip("prometheus_client")
    (package / "policy.toml").write_text(POLICY)
    gating = ("--policy", "policy.toml", "--baseline", "baseline.toml")
    promoting = ("--reason", "first", "--by", "ci", "--yes", "--min-runs", "2")
    printed = _mbridge(
        package,
        ("generate-report", "--result-dir", older),
        ("export", older, "--to", "csv", "-o", "rows.csv"),
        ("export", older, "--to", "csv", "--by", "point", "-o", "points.csv"),
        ("export", older, "--to", "prometheus", "-o", "gauges.prom"),
        ("baseline", "promote", older, *gating, *promoting),
    )
    assert re.search(r"^point .* gradient norm *$", printed, re.MULTILINE)
    report = json.loads((older / "report.json").read_text())
    assert report["points"][0]["metrics"]["grad_norm"]["mean"] == pytest.approx(3.0)
    assert '<property name="grad_norm.capped_mean" value="3.0" />' in (older / "junit.xml").read_text()
    assert "| gradient norm |" in (older / "report.md").read_text()
    assert "Gradient norm: 3 ±0\n" in (older / "t" / "mb1" / "0" / "report.txt").read_text()
    page = (older / "report.html").read_text()
    assert '{"id":"grad_norm","label":"gradient norm","unit":"","title":"gradient norm","better":"same",' in page
    for name in ("rows.csv", "points.csv"):
        rows = list(csv.DictReader((package / name).read_text().splitlines()))
        assert float(rows[0]["grad_norm_mean"]) == pytest.approx(3.0, abs=0.01)
    assert re.search(r'^mbridge_grad_norm\{.*point="mb1".*\} 3\.0', (package / "gauges.prom").read_text(), re.MULTILINE)
    assert 'name = "grad_norm"' in (package / "baseline.toml").read_text()


def test_a_report_from_before_the_metric_opens(package: Path, older: Path) -> None:
    (package / "policy.toml").write_text(POLICY)
    archived = package / "archived.json"
    archived.write_bytes((older / "report.json").read_bytes())
    gating = ("--policy", "policy.toml", "--baseline", "baseline.toml")
    promoting = ("--reason", "first", "--by", "ci", "--yes", "--min-runs", "2")
    _mbridge(
        package,
        ("export", archived, "--to", "csv", "-o", "rows.csv"),
        ("history", "import", archived, "--history", "history.sqlite"),
        ("nodes", "show", archived, "--html", "page.html"),
        ("baseline", "promote", archived, *gating, *promoting),
    )
    rows = list(csv.DictReader((package / "rows.csv").read_text().splitlines()))
    assert (rows[0]["verdict"], rows[0]["grad_norm_mean"]) == ("success", "")
    assert '"id":"grad_norm"' in (package / "page.html").read_text()
