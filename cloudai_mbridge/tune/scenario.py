"""Layouts as a scenario whose search measures them."""

from collections.abc import Mapping, Sequence
from typing import Any

from cloudai_mbridge.models.test_definition import TEMPLATE, TUNE


def search_scenario(
    layouts: Sequence[Mapping[str, Any]], base: Mapping[str, Any], name: str, max_trials: int | None
) -> dict[str, Any]:
    """Return a scenario of one test that searches among layouts.

    layouts: arguments of each, the most promising first. base: a test definition with the remaining settings; a
    layout's own cmd_args take precedence.
    """
    shared, axes, added = _as_space(layouts)
    sweep = {key: value for key, value in (("zip", [list(axes)] if axes else []), ("include", added)) if value}
    test = {
        "id": name,
        "name": name,
        "description": f"the best of {len(layouts)} layouts",
        "test_template_name": TEMPLATE,
        **{key: value for key, value in base.items() if key not in ("name", "description", "cmd_args", "sweep")},
        "agent": TUNE,
        "cmd_args": {**base.get("cmd_args", {}), **shared, **axes},
        **({"agent_steps": max_trials} if max_trials else {}),
        **({"sweep": {**base.get("sweep", {}), **sweep}} if sweep else {}),
    }
    return {"name": name, "Tests": [test]}


def _as_space(
    layouts: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], dict[str, list[Any]], list[dict[str, Any]]]:
    """Return the common arguments, the axes that vary together, and the points outside of the axes.

    A layout with arguments that others lack, such as recomputed modules, is a point outside of the axes.
    """
    names = dict.fromkeys(name for layout in layouts for name in layout)
    everywhere = [name for name in names if all(name in layout for layout in layouts)]
    shared = {name: layouts[0][name] for name in everywhere if len({repr(layout[name]) for layout in layouts}) == 1}
    own = [{name: value for name, value in layout.items() if name not in everywhere} for layout in layouts]
    fewest = min(own, key=len)
    on_axes = [layout for layout, extra in zip(layouts, own, strict=True) if extra == fewest]
    varying = [name for name in everywhere if name not in shared]
    added = [
        {name: layout[name] for name in varying} | extra
        for layout, extra in zip(layouts, own, strict=True)
        if extra != fewest and extra.keys() >= fewest.keys()
    ]
    return shared | fewest, {name: [layout[name] for layout in on_axes] for name in varying}, added
