"""Run statements. Where a condition is not known, both ways are taken in doubt: what they set is then unknown."""

import ast
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.interop.presets.static.expressions import binary, bind_target, evaluate, function, items_of, truth
from tests.interop.presets.static.values import UNKNOWN, Class, Import, Module, Raised, Scope, Unsupported, same

if TYPE_CHECKING:
    from tests.interop.presets.static.evaluate import Evaluator


@dataclass
class Frame:
    """A run of a function's body, or of a module's.

    doubt: the evaluator's doubt at its start.
    returned: what it has returned; more than one value where it was in doubt.
    leave: "break", "continue" or "return": statements up to the loop, or to the branch in doubt, are skipped.
    """

    scope: Scope
    module: Module | None = None
    doubt: int = 0
    returned: list[Any] = field(default_factory=list)
    leave: str = ""

    def result(self) -> Any:
        """Return what the function returns."""
        values = self.returned if self.leave == "return" else [*self.returned, None]
        return values[0] if all(same(values[0], value) for value in values) else UNKNOWN


def run(ev: "Evaluator", statements: list[ast.stmt], frame: Frame) -> None:
    """Run statements until the function has returned.

    Raised: the code raises an exception.
    Unsupported: a statement that is not followed; a module's are skipped and their names unknown.
    """
    for statement in statements:
        if frame.leave:
            return
        try:
            _run_one(ev, statement, frame)
        except (Unsupported, Raised):
            if frame.module is None:
                raise
            ev.forget_code(statement, frame.scope)
            _forget_names(statement, frame.scope)


def _run_one(ev: "Evaluator", statement: ast.stmt, frame: Frame) -> None:
    ev.step()
    handler = _HANDLERS.get(type(statement))
    if handler is None:
        raise Unsupported(f"line {statement.lineno}: {type(statement).__name__}")
    handler(ev, statement, frame)


def _forget_names(statement: ast.stmt, scope: Scope) -> None:
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            scope.names[node.id] = UNKNOWN
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            scope.names[node.name] = UNKNOWN


def _delete(ev: "Evaluator", node: Any, frame: Frame) -> None:
    for target in node.targets:
        if isinstance(target, ast.Subscript):
            ev.may_have_changed(evaluate(ev, target.value, frame.scope))
        elif not isinstance(target, ast.Name):
            raise Unsupported("deletes an attribute")


def _assign(ev: "Evaluator", node: Any, frame: Frame) -> None:
    if node.value is not None:  # else it is a mere annotation
        value = evaluate(ev, node.value, frame.scope)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            bind_target(ev, target, value, frame.scope)


def _augmented(ev: "Evaluator", node: Any, frame: Frame) -> None:
    read = ast.parse(ast.unparse(node.target), mode="eval").body  # the target as an expression that reads it
    old = evaluate(ev, read, frame.scope)
    value = evaluate(ev, node.value, frame.scope)
    if not isinstance(old, list | dict | set):
        bind_target(ev, node.target, binary(type(node.op), old, value), frame.scope)
    elif method := _IN_PLACE.get((type(old), type(node.op))):
        ev.call(ev.attribute(old, method), [value], {})
    else:
        raise Unsupported("changes a value in place")


_IN_PLACE = {(list, ast.Add): "extend", (dict, ast.BitOr): "update", (set, ast.BitOr): "update"}


def _return(ev: "Evaluator", node: Any, frame: Frame) -> None:
    frame.returned.append(evaluate(ev, node.value, frame.scope) if node.value else None)
    frame.leave = "return"


def _raise(ev: "Evaluator", node: Any, frame: Frame) -> None:
    if ev.doubt > frame.doubt:  # a configuration that is refused is not asked for
        ev.may_have_raised += 1
        return
    name = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
    raise Raised(name.id if isinstance(name, ast.Name) else "Exception")


def _if(ev: "Evaluator", node: Any, frame: Frame) -> None:
    known = truth(evaluate(ev, node.test, frame.scope))
    if known is not None:
        run(ev, node.body if known else node.orelse, frame)
        return
    returns = [_in_doubt(ev, branch, frame) for branch in (node.body, node.orelse)]
    if all(returns):
        frame.leave = "return"


def _in_doubt(ev: "Evaluator", statements: list[ast.stmt], frame: Frame) -> bool:
    """Run statements that may not run; return whether they return. If they may, all that follows is in doubt, too."""
    doubt = ev.doubt
    ev.doubt += 1
    try:
        run(ev, statements, frame)
    except Raised:  # as `_raise`
        ev.may_have_raised += 1
    finally:
        ev.doubt = max(doubt, frame.doubt + bool(frame.returned))
    leave, frame.leave = frame.leave, ""
    return leave == "return"


def _for(ev: "Evaluator", node: Any, frame: Frame) -> None:
    for item in items_of(evaluate(ev, node.iter, frame.scope)):
        bind_target(ev, node.target, item, frame.scope)
        run(ev, node.body, frame)
        if frame.leave == "return":
            return
        leave, frame.leave = frame.leave, ""
        if leave == "break":
            return
    run(ev, node.orelse, frame)


def _leave(ev: "Evaluator", node: Any, frame: Frame) -> None:
    if ev.doubt > frame.doubt:
        raise Unsupported("leaves a loop, perhaps")
    frame.leave = "break" if isinstance(node, ast.Break) else "continue"


def _try(ev: "Evaluator", node: Any, frame: Frame) -> None:
    before = ev.may_have_raised
    try:
        run(ev, node.body, frame)
        _check_handled(ev, node, before)
    except Raised as raised:
        _check_handled(ev, node, before)
        for handler in node.handlers:
            if _catches(handler, raised):
                run(ev, handler.body, frame)
                break
        else:
            raise
    else:
        run(ev, node.orelse, frame)
    run(ev, node.finalbody, frame)


def _check_handled(ev: "Evaluator", node: Any, before: int) -> None:
    if node.handlers and ev.may_have_raised > before:
        raise Unsupported("handles an exception, perhaps")


def _catches(handler: ast.ExceptHandler, raised: Raised) -> bool:
    if handler.type is None:
        return True
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {kind.id for kind in kinds if isinstance(kind, ast.Name)}
    return bool(names & {str(raised), "Exception"})


def _import(ev: "Evaluator", node: Any, frame: Frame) -> None:
    for alias in node.names:
        bound = alias.asname or alias.name.split(".")[0]
        ev.assign(frame.scope.names, bound, Import(alias.name if alias.asname else bound))


def _import_from(ev: "Evaluator", node: Any, frame: Frame) -> None:
    module = _absolute(node, frame)
    for alias in node.names:
        if alias.name == "*":
            _import_star(ev, module, frame)
        else:
            ev.assign(frame.scope.names, alias.asname or alias.name, Import(module, alias.name))


def _absolute(node: ast.ImportFrom, frame: Frame) -> str:
    if not node.level:
        return node.module or ""
    if frame.module is None:
        raise Unsupported("a relative import in a function")
    parts = frame.module.dotted.split(".")
    parts = parts[: len(parts) - node.level + frame.module.is_package]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _import_star(ev: "Evaluator", dotted: str, frame: Frame) -> None:
    module = ev.module(dotted)
    if not isinstance(module, Module):
        frame.scope.names["*"] = UNKNOWN
        return
    listed = module.scope.names.get("__all__")
    for name in listed if isinstance(listed, list) else list(module.scope.names):
        if isinstance(name, str) and (isinstance(listed, list) or not name.startswith("_")):
            frame.scope.names[name] = module.scope.names.get(name, UNKNOWN)


def _function(ev: "Evaluator", node: Any, frame: Frame) -> None:
    made: Any = function(ev, node, frame.scope)
    for one in reversed(node.decorator_list):
        if ast.unparse(one).split("(")[0] not in _TRANSPARENT:
            made = ev.call(evaluate(ev, one, frame.scope), [made], {})
    ev.assign(frame.scope.names, node.name, made)


# Decorators that do not change what a call returns; those of methods are looked at when a method is bound.
_TRANSPARENT = ("property", "staticmethod", "functools.lru_cache", "lru_cache", "functools.cache", "cache")


def _class(ev: "Evaluator", node: Any, frame: Frame) -> None:
    bases = [evaluate(ev, base, frame.scope) for base in node.bases if not isinstance(base, ast.Subscript)]
    made = Class(node.name, bases, Scope({}, frame.scope), {})
    inner = Frame(made.scope)
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            made.fields[statement.target.id] = statement.value
        elif isinstance(statement, ast.FunctionDef | ast.Assign):
            try:
                _run_one(ev, statement, inner)
            except (Unsupported, Raised):
                _forget_names(statement, made.scope)
    ev.assign(frame.scope.names, node.name, made)


_HANDLERS: dict[type, Callable[["Evaluator", Any, Frame], None]] = {
    ast.Expr: lambda ev, node, frame: evaluate(ev, node.value, frame.scope),
    **dict.fromkeys((ast.Assign, ast.AnnAssign), _assign),
    ast.AugAssign: _augmented,
    ast.Return: _return,
    ast.Raise: _raise,
    ast.If: _if,
    ast.For: _for,
    **dict.fromkeys((ast.Break, ast.Continue), _leave),
    ast.Try: _try,
    ast.Import: _import,
    ast.ImportFrom: _import_from,
    ast.FunctionDef: _function,
    ast.ClassDef: _class,
    **dict.fromkeys((ast.Pass, ast.Assert), lambda ev, node, frame: None),
    ast.Delete: _delete,
}
