"""The evaluator: what is known, and what must not be taken for known."""

import contextlib
from pathlib import Path
from textwrap import dedent
from typing import Any

from tests.cases import every
from tests.interop.presets.static import UNKNOWN, Evaluator, Instance, Unsupported

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


@every(
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
        ("import o\ndef f():\n    if o.a: return 1\n    return 1", 1),
        ("def f(x=1):\n    y = 2\n    del y\n    return x", 1),
        ("def f():\n    p = Part()\n    p.m = ['a']\n    m = p.m\n    m += ['b']\n    return p.m", ["a", "b"]),
        ("def f():\n    x = {'a': 1}\n    y = x\n    y |= {'a': 2}\n    return x", {"a": 2}),
        ("from copy import deepcopy\ndef f():\n    x = {'a': [{'b': 1}]}\n    y = deepcopy(x)\n"
         "    y['a'][0]['b'] = 2\n    return x", {"a": [{"b": 1}]}),
        ("from copy import deepcopy\ndef f():\n    p = Part()\n    p.me = p\n    q = deepcopy(p)\n    q.me.size = 2\n"
         "    return [p.size, q.size]", [1, 2]),
        ("from copy import copy\ndef f():\n    p = Part()\n    p.sub = Part()\n    copy(p).sub.size = 2\n"
         "    return p.sub.size", 2),
        ("import logging\nlog = logging.getLogger('x')\ndef f():\n    try:\n        log.info('hello')\n"
         "        return 1\n    except KeyError:\n        return 2", 1),
        ("T = {}\ndef put(g):\n    T[g.__name__] = g\n    return g\n@put\ndef h(): return 7\nf = lambda: T['h']()", 7),
    ],
)  # fmt: skip
def test_known(tmp_path: Path, text: str, value: Any) -> None:
    assert value_of(tmp_path, text) == value


@every(
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
        "import o\ndef f():\n    if o.a:\n        if o.b: return 1\n        else: return 1\n    return 2",
        "import o\ndef g(p):\n    if o.a:\n        if o.b: return\n        p.size = 1\n    p.size = 2\n"
        "def f():\n    p = Part()\n    g(p)\n    return p.size",
        "def f():\n    d = {'tp': 8}\n    del d['tp']\n    return d.get('tp', 1)",
        "def g(p):\n    del p.size\ndef f():\n    p = Part()\n    g(p)\n    return p.size",
        "X = 1\ndef g():\n    global X\n    X = 5\ndef f():\n    g()\n    return X",
        "def f():\n    x = 1\n    def g():\n        nonlocal x\n        x = 5\n    g()\n    return x",
        "import o\ndef f(): return 'attn' in (o.Scope.attn, o.Scope.moe)",
        "import o\ndef f(): return any([o.x])",
        "import o\ndef f(): return isinstance(o.x, str)",
        "import o\ndef f(): return hasattr(o, 'x')",
        "import o\ndef f():\n    x = [1]\n    x += o.more\n    return len(x)",
        "def f():\n    v = 1\n    try:\n        unknown()\n        v = 2\n"
        "    except Exception:\n        v = 3\n    return v",
        "def f():\n    v = 1\n    try:\n        unknown()\n        v = 2\n"
        "    except Exception:\n        pass\n    return v",
        "import o\ndef f():\n    try:\n        x = {}['a'] if o.x else 1\n"
        "    except KeyError:\n        return 2\n    return 1",
        "import o\ndef f():\n    try:\n        if o.x: {}['a']\n    except KeyError:\n        return 2\n    return 1",
        "try:\n    unknown()\n    V = 1\nexcept Exception:\n    V = 2\ndef f(): return V",
        "import o\ndef f():\n    x = [1]\n    o.change(x)\n    return x",
        "import o\ndef f():\n    x, y, z = 1, 1, 1\n    for _ in o.things:\n        z, y, x = y, x, 2\n    return z",
        "import o\nP = Part()\nfor i in o.things:\n    P.size = i\ndef f(): return P.size",
        "P = Part()\ndef g():\n    while True:\n        P.size += 1\ndef f():\n    g()\n    return P.size",
        "from copy import deepcopy\nimport o\ndef f():\n    p = Part()\n    p.m = [1]\n    if o.x: p.m.append(2)\n"
        "    return deepcopy(p).m",
        "def f():\n    x = {1, 2}\n    y = x\n    y -= {1}\n    return len(x)",
    ],
)  # fmt: skip
def test_unknown(tmp_path: Path, text: str) -> None:
    assert value_of(tmp_path, text) is UNKNOWN


DATACLASS = """
from dataclasses import dataclass, replace
@dataclass
class Sizes:
    tp: int = 1
    dp: int = 0
    def __post_init__(self):
        self.dp = 8 // self.tp
class More(Sizes):
    pass
"""


@every(("text", "value"), [("Sizes()", 8), ("Sizes(2)", 4), ("More(tp=2)", 4), ("replace(Sizes(), tp=8)", 1)])
def test_a_dataclass_finishes_its_objects(tmp_path: Path, text: str, value: int) -> None:
    assert value_of(tmp_path, f"{DATACLASS}def f(): return {text}.dp") == value


def test_a_dataclass_that_finishes_in_an_unknown_way(tmp_path: Path) -> None:
    text = DATACLASS.replace("self.dp = 8 // self.tp", "unknown(self)")
    assert value_of(tmp_path, f"{text}def f(): return Sizes(tp=2).tp") is UNKNOWN


def test_both_branches_of_an_open_question_may_agree(tmp_path: Path) -> None:
    assert value_of(tmp_path, "import torch\ndef f():\n    x = 1\n    if torch.flag:\n        x = 1\n    return x") == 1


def test_an_object_from_outside_has_what_was_set(tmp_path: Path) -> None:
    made = value_of(tmp_path, "from torch import Config\ndef f():\n    c = Config(a=1)\n    c.b = 2\n    return c")
    assert isinstance(made, Instance)
    assert made.attributes == {"a": 1, "b": 2}


@every(
    "text",
    [
        "def f():\n    x = 0\n    for i in range(99999):\n        for j in range(99999): x += 1\n    return x",
        *("def f(): return f()", "def f(): return 'a' * 10 ** 9", "def f(): return [0] * 99999999"),
        "def f(): return list(range(10 ** 12))",
    ],
)
def test_work_is_bounded(tmp_path: Path, text: str) -> None:
    with contextlib.suppress(Unsupported):
        assert value_of(tmp_path, text) is UNKNOWN
