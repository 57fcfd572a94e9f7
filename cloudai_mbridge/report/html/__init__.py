"""The report as one self-contained HTML file: no network, no server, no fonts.

The report travels as JSON in a script element that the browser does not run, and is shown through text nodes only. The
content security policy names the digests of the scripts: no others run, whatever a report contains; nothing is fetched.
"""

import base64
import hashlib
import json
import os
import stat
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from cloudai_mbridge.errors import BadInput
from cloudai_mbridge.plan import POINT_FILES
from cloudai_mbridge.report.html.data import Logs, page_data
from cloudai_mbridge.report.read import read_report

_VENDOR = ("d3.min.js", "plot.umd.min.js")
_LICENCES = ("d3.LICENSE", "plot.LICENSE", "parts.LICENSE")
_STYLES = ("theme", "layout", "charts", "narrow", "print")
# In the order of their use: one scope, so that a module sees the modules before it
_MODULES = (
    *("dom", "format", "model", "statistics", "state", "figure", "columns", "filters", "table", "answer", "headline"),
    *(
        "gate",
        "selection",
        "curves",
        "distribution",
        "sensitivity",
        "parallel",
        "pareto",
        "predicted",
        "searches",
        "nodes",
    ),
    *("node_map", "failures", "rejected", "history", "environment", "live", "main"),
)
# These may be escaped inside a JSON string, and do not occur outside of one
_ESCAPES = str.maketrans({character: f"\\u{ord(character):04x}" for character in "<>&\u2028\u2029"})


def render_html(
    report: Mapping[str, Any],
    history: Sequence[Mapping[str, Any]] = (),
    gate: Mapping[str, Any] | None = None,
    nodes: Mapping[str, Any] | None = None,
    *,
    logs: Logs = MappingProxyType({}),
    reload_s: int | None = None,
) -> str:
    """Render a report as a page of its own.

    report: `Report.to_dict()`. history: rows with run_id, point, comparability_id, ended_at, commit, values, is_change
    and words. gate: a GateResult as a dict; nodes: a NodesResult as a dict. logs: as of `log_links`. reload_s: after
    how many seconds the page loads itself again, None for a page that is final.
    """
    parts_of_page = page_data(report, history, gate, nodes, logs)
    data = script_safe_json({**parts_of_page, "reload_s": reload_s})
    page = _read("assets", "page.html")
    scripts = (*(_read("vendor", name) for name in _VENDOR), page_script())
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    policy = " ".join(f"'sha256-{digest}'" for digest in digests)
    parts = {
        "{{policy}}": f"default-src 'none'; script-src {policy}; style-src 'unsafe-inline'; img-src data:;"
        " base-uri 'none'; form-action 'none'",
        "{{style}}": "\n".join(_read("assets", "css", f"{name}.css") for name in _STYLES),
        "{{licences}}": script_safe_json("\n\n".join(_read("vendor", name) for name in _LICENCES)),
        "{{scripts}}": "\n".join(f"<script>{script}</script>" for script in scripts),
    }
    for mark, text in parts.items():
        page = page.replace(mark, text)
    before, after = page.split("{{data}}")  # last: text inside the data that looks like a mark is not replaced
    return f"{before}{data}{after}"


def log_links(report: Mapping[str, Any], root: Path, page: Path) -> dict[str, list[dict[str, str]]]:
    """Return the logs of every run that are there and not empty: key -> name and link, relative to a page's file."""
    start, links = os.path.relpath(root.resolve(), page.parent.resolve()), {}
    for point in report["points"]:
        log = (point.get("log") or {}).get("file") or ""
        names = dict.fromkeys((PurePosixPath(log).name, POINT_FILES.stderr)) if log else ()
        paths = {name: os.path.normpath(f"{start}/{point['key']}/{name}") for name in names}
        links[point["key"]] = [
            {"name": name, "href": f"./{quote(os.fsencode(path))}"}
            for name, path in paths.items()
            if _is_log(root / point["key"] / name)
        ]
    return links


def _is_log(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_size > 0


def render_report_file(
    path: Path, gate: Mapping[str, Any] | None = None, nodes: Mapping[str, Any] | None = None
) -> str:
    """Render the page of a report.json, or of the run in a directory, with the results of a gate or `mbridge nodes`.

    Raise as `read_report`, and BadInput if the report lacks a part that the page needs.
    """
    report, file = read_report(path)
    try:
        return render_html(report.to_dict(), gate=gate, nodes=nodes)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise BadInput(
            f"{file}: lacks a part that the page shows ({type(error).__name__}: {error}); write it again"
            " with `mbridge generate-report --result-dir DIR`"
        ) from None


def page_script() -> str:
    """Return the page's own JavaScript: its files, joined in one scope."""
    modules = "\n".join(_read("assets", "js", f"{name}.js") for name in _MODULES)
    return f'(() => {{\n"use strict";\n{modules}\n}})();'


def script_safe_json(value: Any) -> str:
    """Return JSON in ASCII that cannot end the script element around it."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


@cache
def _read(*path: str) -> str:
    return resources.files(__package__).joinpath(*path).read_text(encoding="utf-8")
