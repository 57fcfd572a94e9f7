"""The evaluator: modules, names, attributes and calls."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.interop.presets.static import intrinsics
from tests.interop.presets.static.expressions import evaluate
from tests.interop.presets.static.statements import Frame, run
from tests.interop.presets.static.values import (
    UNKNOWN,
    Class,
    External,
    Function,
    Import,
    Instance,
    Intrinsic,
    Module,
    Raised,
    Scope,
    Unsupported,
    parts,
    same,
)

_MAX_DEPTH = 60
_MAX_STEPS = 1_000_000


class Evaluator:
    """Evaluates the code of one repository.

    roots: directories where its packages begin; what is in none of them is `External`.
    given: what is known of things: by dotted name, or by bare name wherever it is imported from, a value.
    defaults: by class name outside of the repository, attributes that its objects have unless set.
    doubt: above 0 while it is not known whether the code at hand is run at all.
    may_have_raised: how often something was done that may have raised an exception.
    """

    def __init__(
        self,
        roots: Sequence[Path],
        given: Mapping[str, Any] | None = None,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.roots = roots
        self.given = {**intrinsics.GIVEN, **(given or {})}
        self.defaults = defaults or {}
        self.doubt = 0
        self.may_have_raised = 0
        self._modules: dict[str, Module | None] = {}
        self._doubtful: dict[int, Any] = {}
        self._depth = 0
        self._steps = 0

    # modules and names

    def module(self, dotted: str) -> Module | External:
        """Return a module with its top level evaluated, or `External` where the repository has none."""
        if dotted not in self._modules:
            self._modules[dotted] = self._load(dotted)
        return self._modules[dotted] or External(dotted)

    def start(self) -> None:
        """Begin a reading: the limits on work count from here."""
        self._steps = self._depth = self.doubt = 0

    def step(self) -> None:
        """Count one step; Unsupported if the code takes more than any configuration does."""
        self._steps += 1
        if self._steps > _MAX_STEPS:
            raise Unsupported("too much work")

    def name(self, name: str, scope: Scope) -> Any:
        """Return the value of a name, `UNKNOWN` where there is none."""
        if name not in (names := scope.holder(name).names):
            return intrinsics.BUILTINS.get(name, UNKNOWN)
        return self.seen(self.imported(names[name]))

    def imported(self, value: Any) -> Any:
        """Return what an import stands for."""
        if not isinstance(value, Import):
            return value
        dotted = f"{value.module}.{value.name}" if value.name else value.module
        for known in (dotted, value.name):
            if known in self.given:
                return self.given[known]
        module = self.module(value.module)
        return self.attribute(module, value.name) if value.name else module

    def seen(self, value: Any) -> Any:
        """Return a value, or `UNKNOWN` for a list or dict that may have been changed."""
        return UNKNOWN if id(value) in self._doubtful else value

    def may_have_changed(self, value: Any) -> None:
        """Remember that a list or dict is not known any more."""
        self._doubtful[id(value)] = value

    def forget(self, value: Any) -> None:
        """Know nothing any more of the objects, lists and dicts in a value."""
        for one in list(parts(value)):
            if isinstance(one, Instance):
                one.attributes.clear()
                one.is_open, one.of = True, None
            elif not isinstance(one, tuple):
                self.may_have_changed(one)

    def forget_code(self, code: ast.AST, scope: Scope) -> None:
        """Know nothing any more of what code that was not followed may have changed.

        scope: where it runs, or a function's outer scope.
        """
        for node in ast.walk(code):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.forget(scope.get(node.id))
            elif isinstance(node, ast.Global | ast.Nonlocal):
                for name in node.names:
                    scope.holder(name).names[name] = UNKNOWN

    # attributes

    def attribute(self, value: Any, name: str) -> Any:
        """Return an attribute; Raised if it is known that there is none."""
        if isinstance(value, Instance):
            return self.seen(self._of_instance(value, name))
        if isinstance(value, Module):
            return self._of_module(value, name)
        if isinstance(value, External):
            dotted = f"{value.dotted}.{name}"
            return self.given.get(dotted, External(dotted))
        if isinstance(value, Class):
            return self._of_class(value, name)
        if isinstance(value, Function):
            return getattr(value.node, "name", "<lambda>") if name == "__name__" else UNKNOWN
        return intrinsics.method(self, value, name)

    def set_attribute(self, value: Any, name: str, new: Any) -> None:
        """Set an attribute, as `assign` does a name."""
        if isinstance(value, Instance):
            self.assign(value.attributes, name, new)

    def assign(self, names: dict[str, Any], name: str, new: Any) -> None:
        """Set a name; in doubt it is then unknown, unless it had that value."""
        names[name] = new if not self.doubt or same(names.get(name, UNKNOWN), new) else UNKNOWN

    def _of_instance(self, value: Instance, name: str) -> Any:
        if name in value.attributes:
            return value.attributes[name]
        for one in value.of.lineage() if value.of else ():
            if isinstance(one, External):
                if name in (known := self.defaults.get(one.name, {})):
                    return known[name]
            elif name in one.scope.names:
                return self._bind(self.imported(one.scope.names[name]), value)
            elif one.fields.get(name) is not None:
                value.attributes[name] = self._field_default(one, name)
                return value.attributes[name]
        if value.is_open:
            return UNKNOWN
        raise Raised("AttributeError")

    def _bind(self, found: Any, value: Instance) -> Any:
        if not isinstance(found, Function) or found.is_decorated("staticmethod"):
            return found
        method = replace(found, bound=value)
        return self.call(method, [], {}) if found.is_decorated("property") else method

    def _field_default(self, one: Class, name: str) -> Any:
        node = one.fields[name]
        assert node is not None
        made = evaluate(self, node, one.scope)
        if isinstance(made, intrinsics.DataclassField):
            return self.call(made.factory, [], {}) if made.factory is not None else made.default
        return made

    def _of_class(self, value: Class, name: str) -> Any:
        for one in value.lineage():
            if isinstance(one, Class):
                if name in one.scope.names:
                    return self.imported(one.scope.names[name])
                if one.fields.get(name) is not None:
                    return self._field_default(one, name)
        return UNKNOWN

    def _of_module(self, value: Module, name: str) -> Any:
        if name in value.scope.names:
            return self.seen(self.imported(value.scope.names[name]))
        if value.is_package:
            submodule = self.module(f"{value.dotted}.{name}")
            if isinstance(submodule, Module):
                return submodule
        if "*" in value.scope.names:
            return UNKNOWN
        raise Raised("AttributeError")

    # calls

    def call(self, callee: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        """Call something; where that cannot be followed, forget what it was given."""
        self.step()
        if isinstance(callee, Intrinsic):
            return callee.call(self, *arguments, **keywords)
        if isinstance(callee, Class):
            return self._construct(callee, arguments, keywords)
        if isinstance(callee, External) and callee.name[:1].isupper() and not arguments:
            return Instance(callee, dict(keywords))
        if isinstance(callee, Function):
            doubt = self.doubt
            try:
                return self._follow(callee, arguments, keywords)
            except Unsupported:
                self.doubt = doubt
                if self._steps > _MAX_STEPS:
                    raise
                self.forget_code(callee.node, callee.scope)
            arguments = [*arguments, callee.bound]
        if not (isinstance(callee, External) and callee.dotted.split(".")[0] in intrinsics.HARMLESS):
            self.may_have_raised += 1
            self.forget((*arguments, *keywords.values()))
        return UNKNOWN

    def _construct(self, of: Class, arguments: list[Any], keywords: dict[str, Any]) -> Instance:
        """Make an object as a dataclass does; with an `__init__` of its own, only what that sets is known."""
        made = Instance(of, {}, of.is_open)
        if isinstance(init := of.method("__init__"), Function):
            made.is_open = True
            self.call(self._bind(init, made), arguments, keywords)
            return made
        names = [name for one in reversed(list(of.lineage())) if isinstance(one, Class) for name in one.fields]
        if arguments and of.is_open:
            made.is_open = True
        else:
            made.attributes.update(zip(dict.fromkeys(names), arguments, strict=False))
        made.attributes.update(keywords)
        self.finish(made)
        return made

    def finish(self, made: Any) -> None:
        """Run the `__post_init__` of a new object of a dataclass, if it has one."""
        if isinstance(made.of, Class) and (finisher := made.of.method("__post_init__")) is not None:
            self.call(self._bind(finisher, made), [], {})

    def _follow(self, function: Function, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if self._depth >= _MAX_DEPTH:
            raise Unsupported("calls too deep")
        scope = Scope({}, function.scope)
        self._bind_arguments(function, scope, arguments, keywords)
        self._depth += 1
        doubt = self.doubt
        try:
            if isinstance(function.node, ast.Lambda):
                return evaluate(self, function.node.body, scope)
            frame = Frame(scope, doubt=doubt)
            run(self, function.node.body, frame)
            return frame.result()
        finally:
            self._depth -= 1
            self.doubt = doubt

    def _bind_arguments(self, function: Function, scope: Scope, arguments: list[Any], keywords: dict[str, Any]) -> None:
        spec = function.node.args
        if function.bound is not None:
            arguments = [function.bound, *arguments]
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        if function.defaults:
            scope.names.update(zip(names[-len(function.defaults) :], function.defaults, strict=True))
        scope.names.update(function.keyword_defaults)
        scope.names.update(zip(names, arguments, strict=False))
        if spec.vararg:
            scope.names[spec.vararg.arg] = tuple(arguments[len(names) :])
        elif len(arguments) > len(names):
            raise Raised("TypeError")
        taken = {*names, *(one.arg for one in spec.kwonlyargs)}
        scope.names.update({name: value for name, value in keywords.items() if name in taken})
        rest = {name: value for name, value in keywords.items() if name not in taken}
        if spec.kwarg:
            scope.names[spec.kwarg.arg] = rest
        elif rest:
            raise Raised("TypeError")

    # loading

    def _load(self, dotted: str) -> Module | None:
        found = next((path for root in self.roots for path in _candidates(root, dotted) if path.exists()), None)
        if found is None:
            return None
        module = Module(dotted, found.is_dir() or found.name == "__init__.py")
        if found.is_file():
            self._modules[dotted] = module
            module.scope.names["__name__"] = dotted
            doubt, self.doubt = self.doubt, 0
            try:
                tree = ast.parse(found.read_text(encoding="utf-8"))
                run(self, tree.body, Frame(module.scope, module))
            except (OSError, SyntaxError, UnicodeDecodeError, RecursionError, ValueError):
                module.scope.names["*"] = UNKNOWN  # no name of it is known
            finally:
                self.doubt = doubt
        return module


def _candidates(root: Path, dotted: str) -> tuple[Path, ...]:
    path = root.joinpath(*dotted.split("."))
    return path / "__init__.py", path.with_name(f"{path.name}.py"), path
