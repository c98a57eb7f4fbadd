"""Puts changed code in the place of what has been imported.

Functions keep their identity and get other code, tables keep theirs and get other entries: so everybody who
has imported them sees the change.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any

HIT = "__hit__"
PLAIN = (bool, int, float, complex, str, bytes, tuple, frozenset, type(None))
TABLES = (dict, list, set)


def put_in_place(name: str, tree: ast.Module) -> None:
    """Let an imported module do what the tree says.

    Args:
        name: the module's.
        tree: its syntax tree, changed in bodies, constants, tables or defaults.

    Raises:
        Exception: what the module raises when it is run as the tree says.
    """
    module = sys.modules[name]
    # Other classes of the same names register themselves where the module's own are.
    changed = types.ModuleType(name)
    changed.__dict__.update(
        {key: value for key, value in vars(module).items() if key.startswith("__") or key == HIT}
    )
    sys.modules[name] = changed
    try:
        exec(compile(tree, getattr(module, "__file__", name), "exec", dont_inherit=True), vars(changed))
    finally:
        sys.modules[name] = module
    _take_over(vars(module), vars(changed), module, lambda key, value: _assign(module, key, value))


def _assign(module: types.ModuleType, key: str, value: object) -> None:
    """Let everybody who has imported a constant of the module have another."""
    before = getattr(module, key)
    setattr(module, key, value)
    for name, other in list(sys.modules.items()):
        if (
            name.startswith(("tutti.", "tests."))
            and vars(other).get(key) is before
            # Another module may have the same number by the same name.
            and f"from {module.__name__} import" in Path(str(other.__file__)).read_text()
        ):
            setattr(other, key, value)


def with_hits(tree: ast.Module) -> ast.Module:
    """The tree with a call of `__hit__(line)` before every statement of its functions."""

    class Marking(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            self.generic_visit(node)
            node.body = list(_marked(node.body, node))
            return node

        def generic_visit(self, node: ast.AST) -> ast.AST:
            super().generic_visit(node)
            if isinstance(
                node, ast.If | ast.For | ast.While | ast.With | ast.Try | ast.ExceptHandler | ast.match_case
            ):
                node.body = list(_marked(node.body, node))
                for part in ("orelse", "finalbody"):
                    if getattr(node, part, None):
                        setattr(node, part, list(_marked(getattr(node, part), node)))
            return node

    return ast.fix_missing_locations(Marking().visit(tree))


def _marked(body: list[ast.stmt], owner: ast.AST) -> Iterator[ast.stmt]:
    for number, statement in enumerate(body):
        described = (
            number == 0 and isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        )
        if not described and not isinstance(statement, ast.Global | ast.Nonlocal):
            line = ast.Constant(statement.lineno)
            name = ast.Name(HIT, ast.Load())
            call = ast.Expr(ast.Call(name, [line], []))
            yield ast.copy_location(call, statement)
        yield statement


def _take_over(old: Any, new: Any, module: types.ModuleType, assign: Callable[[str, object], None]) -> None:
    for key, value in new.items():
        if key == "__dataclass_fields__":
            for name, declared in value.items():
                old[key][name].metadata = declared.metadata
        if key not in old or (key.startswith("__") and not inspect.isfunction(value)):
            continue
        before = old[key]
        if isinstance(before, Enum):
            continue
        if isinstance(value, type) and value.__module__ == module.__name__ and isinstance(before, type):
            _take_over(vars(before), vars(value), module, _assigning(before))
        elif isinstance(value, PLAIN) and not isinstance(before, types.FunctionType):
            value = _own(value, before, module)
            if type(value) is not type(before) or value != before:
                assign(key, value)
        elif isinstance(value, TABLES) and type(value) is type(before):
            entries = _own(value, before, module)
            before.clear()
            before.extend(entries) if isinstance(before, list) else before.update(entries)
        else:
            for ours, theirs in zip(_functions(before), _functions(value), strict=False):
                if theirs.__module__ == module.__name__:
                    _replace(ours, theirs)


def _own(new: Any, old: Any, module: types.ModuleType) -> Any:
    """What a constant or table holds, with the module's own functions and classes, not their doubles."""
    if isinstance(new, Enum) and type(new).__module__ == module.__name__:
        members: Any = getattr(module, type(new).__name__, None)
        return new if members is None else members[new.name]
    if type(new) is not type(old):
        old = None
    if isinstance(new, dict):
        known = old or {}
        return {_own(key, None, module): _own(value, known.get(key), module) for key, value in new.items()}
    if type(new) in (list, tuple):
        before = old if old is not None and len(old) == len(new) else [None] * len(new)
        return type(new)(_own(one, was, module) for one, was in zip(new, before, strict=True))
    if type(new) in (set, frozenset):
        return type(new)(_own(one, None, module) for one in new)
    if getattr(new, "__module__", None) != module.__name__:
        return new
    if isinstance(new, type | types.FunctionType):
        found: Any = module
        for name in new.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is not None:
            return found
    if isinstance(new, types.FunctionType):
        if old is not None:
            _replace(old, new)
            return old
        return types.FunctionType(new.__code__, vars(module), new.__name__, new.__defaults__, new.__closure__)
    return new if old is None else old


def _assigning(owner: type) -> Callable[[str, object], None]:
    return lambda key, value: setattr(owner, key, value)


def _functions(value: object) -> list[types.FunctionType]:
    """The functions behind a function, method, property or cached function."""
    if isinstance(value, property):
        return [one for one in (value.fget, value.fset, value.fdel) if isinstance(one, types.FunctionType)]
    inner = inspect.unwrap(getattr(value, "__func__", getattr(value, "func", value)))  # type: ignore[arg-type]
    return [inner] if isinstance(inner, types.FunctionType) else []


def _replace(ours: types.FunctionType, theirs: types.FunctionType) -> None:
    ours.__code__ = theirs.__code__
    ours.__defaults__, ours.__kwdefaults__ = theirs.__defaults__, theirs.__kwdefaults__
    for mine, other in zip(ours.__closure__ or (), theirs.__closure__ or (), strict=False):
        try:
            if isinstance(other.cell_contents, PLAIN):
                mine.cell_contents = other.cell_contents
        except ValueError:
            continue
