"""mbridge from Python: `import cloudai_mbridge as mb` has these names, too (docs/scripting.md).

Nothing here prints or exits. Errors of one line are `MBridgeError`; `BadInput`, one of them, is what the caller can put
right.
"""

from cloudai_mbridge.api.results import Gate, Report, Run, Table, compare_runs, gate_runs, open_run
from cloudai_mbridge.api.scenarios import Layouts, Plan, Scenario, load, rank_layouts
from cloudai_mbridge.errors import BadInput, MBridgeError
from cloudai_mbridge.rehearsal import Rehearsal

__all__ = [
    "BadInput",
    "Gate",
    "Layouts",
    "MBridgeError",
    "Plan",
    "Rehearsal",
    "Report",
    "Run",
    "Scenario",
    "Table",
    "compare_runs",
    "gate_runs",
    "load",
    "open_run",
    "rank_layouts",
]
