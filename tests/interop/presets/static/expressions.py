"""Evaluate an expression."""

import ast
import operator
from collections.abc import Callable, ItemsView, Iterator, KeysView, ValuesView
from typing import TYPE_CHECKING, Any

from tests.interop.presets.static.values import (
    NATIVE,
    UNKNOWN,
    External,
    Function,
    Raised,
    Scope,
    Unsupported,
    has_unknown,
    is_plain,
    native,
    same,
)

if TYPE_CHECKING:
    from tests.interop.presets.static.evaluate import Evaluator

_MAX_ITEMS = 10_000
_BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_,
}
_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda item, container: item in container,
    ast.NotIn: lambda item, container: item not in container,
}


def evaluate(ev: "Evaluator", node: ast.expr, scope: Scope) -> Any:
    """Return the value of an expression; Raised if the code raises here, Unsupported for other kinds of expressions."""
    ev.step()
    handler = _HANDLERS.get(type(node))
    if handler is None:
        raise Unsupported(f"line {node.lineno}: {type(node).__name__}")
    return handler(ev, node, scope)


def truth(value: Any) -> bool | None:
    """Return whether a value counts as true, or None where that is not known."""
    if value is UNKNOWN or isinstance(value, External):
        return None
    return bool(value) if value is None or isinstance(value, NATIVE) else True


def items_of(value: Any) -> list[Any]:
    """Return the items of what is iterated; Unsupported if they are not known."""
    if not is_iterable(value) or len(value) > _MAX_ITEMS:
        raise Unsupported("items that are not known")
    return list(value)


def is_iterable(value: Any) -> bool:
    """Return whether the items of a value are known."""
    return isinstance(value, list | tuple | set | dict | range | KeysView | ValuesView | ItemsView)


def binary(kind: type, left: Any, right: Any) -> Any:
    """Apply an operator to two values."""
    if kind not in _BINARY or not (isinstance(left, NATIVE) and isinstance(right, NATIVE)):
        return UNKNOWN
    if kind is ast.Mult:
        _check_repetition(left, right)
    return native(_BINARY[kind], left, right)


def _check_repetition(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, int) and not isinstance(other, int | float) and one * len(other) > _MAX_ITEMS:
            raise Unsupported("too long")
        if isinstance(one, int) and one.bit_length() > 256:
            raise Unsupported("too large")


def _call(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    of = evaluate(ev, node.func.value, scope) if isinstance(node.func, ast.Attribute) else None
    callee = ev.attribute(of, node.func.attr) if of is not None else evaluate(ev, node.func, scope)
    arguments = _sequence(ev, node.args, scope)
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        value = evaluate(ev, keyword.value, scope)
        if keyword.arg is not None:
            keywords[keyword.arg] = value
        elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
            keywords.update(value)
        else:
            raise Unsupported("keyword arguments that are not known")
    if callee is UNKNOWN:
        ev.forget(of)
    return ev.call(callee, arguments, keywords)


def _sequence(ev: "Evaluator", nodes: list[ast.expr], scope: Scope) -> list[Any]:
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, ast.Starred):
            values += items_of(evaluate(ev, node.value, scope))
        else:
            values.append(evaluate(ev, node, scope))
    return values


def _hashed(values: list[Any]) -> Any:
    return UNKNOWN if has_unknown(values) else native(set, values)


def _dict(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    made: dict[Any, Any] = {}
    for key, value_node in zip(node.keys, node.values, strict=True):
        value = evaluate(ev, value_node, scope)
        if key is None:
            if not isinstance(value, dict):
                raise Unsupported("a mapping that is not known")
            made.update(value)
        else:
            made[_key(evaluate(ev, key, scope))] = value
    return made


def _key(value: Any) -> Any:
    if has_unknown(value):
        raise Unsupported("a key that is not known")
    native(hash, value)
    return value


def _subscript(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    value = evaluate(ev, node.value, scope)
    if not isinstance(value, list | tuple | dict | str):
        return UNKNOWN
    index = evaluate(ev, node.slice, scope)
    return UNKNOWN if has_unknown(index) else ev.seen(native(operator.getitem, value, index))


def _slice(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    parts = [evaluate(ev, part, scope) if part else None for part in (node.lower, node.upper, node.step)]
    return UNKNOWN if has_unknown(parts) else slice(*parts)


def _unary(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    value = evaluate(ev, node.operand, scope)
    if isinstance(node.op, ast.Not):
        known = truth(value)
        return UNKNOWN if known is None else not known
    if isinstance(node.op, ast.USub) and isinstance(value, int | float):
        return -value
    return UNKNOWN


def _bool(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    """`and` and `or`: one operand can decide, whatever the unknown ones are."""
    decides = isinstance(node.op, ast.Or)
    in_doubt = False
    value: Any = UNKNOWN
    doubt = ev.doubt
    try:
        for operand in node.values:
            value = evaluate(ev, operand, scope)
            known = truth(value)
            if known is decides:
                return decides if in_doubt else value
            if known is None:
                in_doubt = True
                ev.doubt = doubt + 1
    except Raised as raised:
        raise _perhaps(raised, in_doubt) from None
    finally:
        ev.doubt = doubt
    return UNKNOWN if in_doubt else value


def _perhaps(raised: Raised, in_doubt: bool) -> Exception:
    return Unsupported(f"raises {raised}, perhaps") if in_doubt else raised


def _compare(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    left = evaluate(ev, node.left, scope)
    result: Any = True
    for op, right_node in zip(node.ops, node.comparators, strict=True):
        right = evaluate(ev, right_node, scope)
        one = _compared(type(op), left, right)
        if one is False:
            return False
        result = one if result is True else UNKNOWN
        left = right
    return result


def _compared(kind: type, left: Any, right: Any) -> Any:
    if has_unknown(left) or has_unknown(right):
        return UNKNOWN
    is_known = kind in (ast.Is, ast.IsNot) or (is_plain(left) and is_plain(right))
    return native(_COMPARE[kind], left, right) if is_known else UNKNOWN


def _if(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    known = truth(evaluate(ev, node.test, scope))
    if known is not None:
        return evaluate(ev, node.body if known else node.orelse, scope)
    ev.doubt += 1
    try:
        one, other = evaluate(ev, node.body, scope), evaluate(ev, node.orelse, scope)
    except Raised as raised:
        raise _perhaps(raised, True) from None
    finally:
        ev.doubt -= 1
    return one if same(one, other) else UNKNOWN


def _joined(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    parts = []
    for part in node.values:
        value = part.value if isinstance(part, ast.Constant) else evaluate(ev, part.value, scope)
        plain = isinstance(part, ast.Constant) or (part.format_spec is None and part.conversion == -1)
        if not plain or not isinstance(value, str | int | float | bool | type(None)):
            return UNKNOWN
        parts.append(str(value))
    return "".join(parts)


def function(ev: "Evaluator", node: ast.FunctionDef | ast.Lambda, scope: Scope) -> Function:
    """Return the function that a definition makes."""
    defaults = [evaluate(ev, default, scope) for default in node.args.defaults]
    pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return Function(node, scope, defaults, {one.arg: evaluate(ev, value, scope) for one, value in pairs if value})


def _comprehension(ev: "Evaluator", node: Any, scope: Scope) -> Any:
    """Return a list, set or dict; a generator counts as a list. One of unknown items is unknown."""
    try:
        scopes = list(_scopes(ev, node.generators, scope))
    except _UnknownItems:
        return UNKNOWN
    if isinstance(node, ast.DictComp):
        return {_key(evaluate(ev, node.key, one)): evaluate(ev, node.value, one) for one in scopes}
    values = [evaluate(ev, node.elt, one) for one in scopes]
    return _hashed(values) if isinstance(node, ast.SetComp) else values


class _UnknownItems(Exception):
    """The items of a comprehension are not known."""


def _scopes(ev: "Evaluator", generators: list[ast.comprehension], scope: Scope) -> Iterator[Scope]:
    """Yield the scope of each round of a comprehension."""
    if not generators:
        yield scope
        return
    first, *rest = generators
    items = evaluate(ev, first.iter, scope)
    if not is_iterable(items):
        raise _UnknownItems
    for item in items_of(items):
        inner = Scope({}, scope)
        bind_target(ev, first.target, item, inner)
        known = [truth(evaluate(ev, test, inner)) for test in first.ifs]
        if None in known:
            raise _UnknownItems
        if all(known):
            yield from _scopes(ev, rest, inner)


def bind_target(ev: "Evaluator", target: ast.expr, value: Any, scope: Scope) -> None:
    """Assign a value to a target: a name, an attribute, an item, or several of them."""
    if isinstance(target, ast.Name):
        ev.assign(scope.names, target.id, value)
    elif isinstance(target, ast.Attribute):
        ev.set_attribute(evaluate(ev, target.value, scope), target.attr, value)
    elif isinstance(target, ast.Subscript):
        _set_item(ev, evaluate(ev, target.value, scope), evaluate(ev, target.slice, scope), value)
    elif isinstance(target, ast.Tuple | ast.List):
        known = isinstance(value, list | tuple) and len(value) == len(target.elts)
        values = list(value) if known else [UNKNOWN] * len(target.elts)
        for one, item in zip(target.elts, values, strict=True):
            bind_target(ev, one, item, scope)
    else:
        raise Unsupported(type(target).__name__)


def _set_item(ev: "Evaluator", container: Any, key: Any, value: Any) -> None:
    if isinstance(container, list | dict):
        if ev.doubt or has_unknown(key):
            ev.may_have_changed(container)
        else:
            native(operator.setitem, container, key, value)


_HANDLERS: dict[type, Callable[["Evaluator", Any, Scope], Any]] = {
    ast.Constant: lambda ev, node, scope: node.value,
    ast.Name: lambda ev, node, scope: ev.name(node.id, scope),
    ast.Attribute: lambda ev, node, scope: ev.attribute(evaluate(ev, node.value, scope), node.attr),
    ast.Call: _call,
    ast.List: lambda ev, node, scope: _sequence(ev, node.elts, scope),
    ast.Tuple: lambda ev, node, scope: tuple(_sequence(ev, node.elts, scope)),
    ast.Set: lambda ev, node, scope: _hashed(_sequence(ev, node.elts, scope)),
    ast.Dict: _dict,
    ast.Subscript: _subscript,
    ast.Slice: _slice,
    ast.BinOp: lambda ev, node, scope: binary(
        type(node.op), evaluate(ev, node.left, scope), evaluate(ev, node.right, scope)
    ),
    ast.UnaryOp: _unary,
    ast.BoolOp: _bool,
    ast.Compare: _compare,
    ast.IfExp: _if,
    ast.JoinedStr: _joined,
    ast.Lambda: function,
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp), _comprehension),
}
