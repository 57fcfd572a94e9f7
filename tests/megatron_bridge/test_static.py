"""The evaluator: what is known, and what must not be taken for known."""

import contextlib
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from cloudai_mbridge.megatron_bridge.static import UNKNOWN, Evaluator, Instance, Unsupported

HEAD = """
class Part:
    def __init__(self):
        self.size = 1

"""


def value_of(tmp_path: Path, text: str) -> Any:
    """Return the value of `f()` in a module with this text."""
    (tmp_path / "module.py").write_text(HEAD + dedent(text), encoding="utf-8")
    ev = Evaluator([tmp_path])
    return ev.call(ev.attribute(ev.module("module"), "f"), [], {})


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("def f(): return [x * 2 for x in range(3) if x]", [2, 4]),
        ("def f(a=1, *, b=2): return {'a': a, **{'b': b}}", {"a": 1, "b": 2}),
        ("def f():\n    x = 0\n    for i in (1, 2, 3):\n        if i == 3: break\n        x += i\n    return x", 3),
        ("def f():\n    try:\n        return {}['x']\n    except KeyError:\n        return 'none'", "none"),
        ("def f(): return f'{1 + 1}gpu'", "2gpu"),
        ("def f():\n    x = [1]\n    x.append(2)\n    return x", [1, 2]),
        ("def g(**k): return k\ndef f(): return g(**dict(a=1))", {"a": 1}),
        ("def f(): return 1 < 2 < 3 and not isinstance('a', int)", True),
        ("T = {}\ndef put(g):\n    T[g.__name__] = g\n    return g\n@put\ndef h(): return 7\nf = lambda: T['h']()", 7),
    ],
)  # fmt: skip
def test_known(tmp_path: Path, text: str, value: Any) -> None:
    assert value_of(tmp_path, text) == value


@pytest.mark.parametrize(
    "text",
    [
        "import torch\ndef f(): return torch.cuda.device_count()",
        "import torch\ndef f():\n    x = 1\n    if torch.flag:\n        x = 2\n    return x",
        "import torch\ndef f():\n    if torch.flag:\n        return 1\n    return 2",
        "import torch\ndef f():\n    x = [1]\n    if torch.flag:\n        x.append(2)\n    return x",
        "import torch\ndef f():\n    p = Part()\n    torch.change(p)\n    return p.size",
        "import torch\ndef f():\n    p = Part()\n    for _ in torch.things:\n        p.size = 2\n    return p.size",
        "def g(p):\n    while True:\n        p.size += 1\ndef f():\n    p = Part()\n    g(p)\n    return p.size",
        "import torch\ndef f():\n    p = Part()\n    torch.flag and setattr(p, 'size', 2)\n    return p.size",
        "import torch\ndef g(p):\n    if torch.on:\n        return\n    p.size = 2\n"
        "def f():\n    p = Part()\n    g(p)\n    return p.size",
        "def f(): return open('/etc/passwd').read()",
    ],
)  # fmt: skip
def test_unknown(tmp_path: Path, text: str) -> None:
    assert value_of(tmp_path, text) is UNKNOWN


def test_both_branches_of_an_open_question_may_agree(tmp_path: Path) -> None:
    assert value_of(tmp_path, "import torch\ndef f():\n    x = 1\n    if torch.flag:\n        x = 1\n    return x") == 1


def test_an_object_from_outside_has_what_was_set(tmp_path: Path) -> None:
    made = value_of(tmp_path, "from torch import Config\ndef f():\n    c = Config(a=1)\n    c.b = 2\n    return c")
    assert isinstance(made, Instance)
    assert made.attributes == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    x = 0\n    for i in range(99999):\n        for j in range(99999): x += 1\n    return x",
        "def f(): return f()",
        "def f(): return 'a' * 10 ** 9",
        "def f(): return [0] * 99999999",
        "def f(): return list(range(10 ** 12))",
    ],
)
def test_work_is_bounded(tmp_path: Path, text: str) -> None:
    with contextlib.suppress(Unsupported):
        assert value_of(tmp_path, text) is UNKNOWN
