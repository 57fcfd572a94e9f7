"""Every field of the configuration is read by the loop or by Megatron-Core, is refused, or is listed as without effect.

By its name: an attribute that code reads, or a text that code looks fields up by, which refusals do as well.
"""

import ast
import dataclasses
import importlib
import re
import warnings
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core warns while it is imported
    import megatron.core

    from cloudai_mbridge.training import config
    from cloudai_mbridge.training.schema import load_schema

_ROOT = Path(config.__file__).parents[1]
_LISTED = Path(__file__).parents[3] / "docs" / "tables" / "fields-without-effect.csv"
_WORD = re.compile(r"[A-Za-z_]\w*")
# Classes whose fields are handed on as a whole, to a library or as a table
_WHOLE = {
    *("BulkOverlapCfg", "PipelineOverlapCfg", "RingExchangeOverlapCfg", "TransformerLayerTPOverlapCfg"),
    "InProcessRestartConfig",
}
_NOT_TRAINED = {"T5ModelProvider", "MIMOProvider"}  # which the loop refuses by name


def words_of(text: str) -> set[str]:
    """Return the names that code reads, and the words of its texts; documentation is none."""
    with warnings.catch_warnings():  # Megatron-Core's docstrings have escapes that Python 3.12 warns of
        warnings.simplefilter("ignore", SyntaxWarning)
        tree, found = ast.parse(text), set[str]()
    bodies = [node.body for node in ast.walk(tree) if isinstance(getattr(node, "body", None), list)]
    firsts = [body[0].value for body in bodies if body and isinstance(body[0], ast.Expr)]
    documentation = {id(value) for value in firsts if isinstance(value, ast.Constant)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            found.update(_WORD.findall(node.value))
    return found


@cache
def read_below(root: Path) -> set[str]:
    files = [path.read_text(encoding="utf-8") for path in root.rglob("*.py")]
    return set().union(*map(words_of, files))


def fields_of(path: str) -> list[str]:
    """Return the fields that a user can set, and that the class itself or another of ours declares."""
    module, _, name = path.rpartition(".")
    cls = getattr(importlib.import_module(module), name)
    ours = [base for base in cls.__mro__ if base.__module__.startswith("cloudai_mbridge.")]
    declared = set().union(*(vars(base).get("__annotations__", {}) for base in ours))
    return [each.name for each in dataclasses.fields(cls) if each.init and each.name in declared]


def test_every_field_is_read_refused_or_listed() -> None:
    known = read_below(_ROOT) | read_below(Path(megatron.core.__path__[0])) | set(_WORD.findall(_LISTED.read_text()))
    classes = [path for path in load_schema()["classes"] if path.rpartition(".")[2] not in _WHOLE | _NOT_TRAINED]
    assert len(classes) > 30
    unread = {
        f"{path.rpartition('.')[2]}.{name}"
        for path in classes
        if path.startswith("cloudai_mbridge.")
        for name in fields_of(path)
        if name not in known and not name.startswith("_")
    }
    assert not unread, "read or refuse them, or list them in docs/tables/fields-without-effect.csv"


def test_a_declaration_is_not_a_reader() -> None:
    text = '"""Says lone."""\n@dataclass\nclass A:\n    """Holds lone."""\n    lone: int = 0\n    b.lone = 1\n'
    assert "lone" not in words_of(text)
    for reader in ("x.lone", 'getattr(x, "lone")', '{"section.lone": 1}'):
        assert "lone" in words_of(f"{text}\nprint({reader})")
