"""The ways to break a module: each changes one place of its syntax tree."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
CALCULATED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
}

UNTOUCHED = {"annotation", "returns", "decorator_list", "type_params", "bases", "keywords"}
"""What is no part of what a function or class does; the keywords of calls are."""

COMMUTATIVE = {
    "add",
    "addcmul",
    "addcmul_",
    "dot",
    "equal",
    "max",
    "maximum",
    "min",
    "minimum",
    "mul",
    "promote_types",
}
"""Functions whose first two arguments may be swapped."""


@dataclass(frozen=True)
class Mutant:
    """One change to a module.

    Attributes:
        source: the module, unchanged.
        line: where.
        lines: a test may notice it if it runs one of them: the first line of its statement, any line of the
            function whose signature it is in, or any line at all.
        function: the qualified name of the outermost function or method around it; "" outside of all.
        change: the code before and after, on one line.
        place: the number of the syntax node.
        way: the number of the change among those of that node.
    """

    source: str
    line: int
    lines: range
    function: str
    change: str
    place: int
    way: int

    def tree(self) -> ast.Module:
        """The syntax tree of the whole module, changed."""
        return _changed(self.source, self.place, self.way)


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module, in the order of its lines."""
    found = []
    for place, (node, function, lines) in enumerate(_places(ast.parse(source))):
        for way, change in enumerate(_changes(node)):
            before = _shown(node)
            after = _shown(change(copy.deepcopy(node)))
            found.append(Mutant(source, node.lineno, lines, function, f"{before}  ->  {after}", place, way))
    return sorted(found, key=lambda one: one.line)


def _changed(source: str, place: int, way: int) -> ast.Module:
    tree = ast.parse(source)
    node = next(one for at, (one, *_) in enumerate(_places(tree)) if at == place)
    after = list(_changes(node))[way](node)
    if after is not node:
        tree = _Replacing(node, ast.copy_location(after, node)).visit(tree)
    return ast.fix_missing_locations(tree)


def _places(tree: ast.Module) -> Iterator[tuple[ast.AST, str, range]]:
    """What may be changed, with its function and lines: no texts, no types, nothing that an error says."""
    everywhere = range(1, len(ast.unparse(tree)) + 1)

    def walk(
        node: ast.AST, path: tuple[str, ...], function: str, lines: range
    ) -> Iterator[tuple[ast.AST, str, range]]:
        if isinstance(node, ast.stmt) and function:
            lines = range(node.lineno, node.lineno + 1)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            path = (*path, node.name)
            if not isinstance(node, ast.ClassDef):
                function = function or ".".join(path)
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        if hasattr(node, "lineno"):
            yield node, function, lines
        for name, value in ast.iter_fields(node):
            if name in UNTOUCHED and not isinstance(node, ast.Call):
                continue
            if isinstance(node, ast.keyword) and node.arg == "strict":
                continue
            if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
                continue
            if isinstance(node, ast.Subscript) and name == "slice" and _is_type(node.value):
                continue
            if isinstance(node, ast.ClassDef) and _is_enum(node):
                value = [one for one in value if not isinstance(one, ast.Assign)]
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from walk(child, path, function, lines)

    yield from walk(tree, (), "", everywhere)


def _is_type(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("list", "dict", "set", "tuple", "Sequence", "Final")


def _is_enum(node: ast.ClassDef) -> bool:
    """Whether it is made of members, the numbers of which are names for them."""
    return any(ast.unparse(base).endswith("Enum") for base in node.bases)


def _changes(node: ast.AST) -> Iterator[Callable[[ast.AST], ast.AST]]:
    """The ways to change a node; each gets its copy in another tree and returns what takes its place."""
    match node:
        case ast.Compare(ops=[operator]):
            for other in COMPARED[type(operator)]:
                yield lambda one, other=other: _set(one, ops=[other()])
        case ast.BinOp(op=operator) if type(operator) in CALCULATED and not _is_text(node):
            yield lambda one: _set(one, op=CALCULATED[type(one.op)]())
        case ast.AugAssign(op=operator):
            if type(operator) in CALCULATED:
                yield lambda one: _set(one, op=CALCULATED[type(one.op)]())
            yield lambda _: ast.Pass()
        case ast.BoolOp(op=operator):
            other = ast.Or if isinstance(operator, ast.And) else ast.And
            yield lambda one: _set(one, op=other())
        case ast.UnaryOp(op=ast.Not() | ast.USub()):
            yield lambda one: one.operand
        case ast.Constant(value=bool() as value):
            yield lambda one: _set(one, value=not value)
        case ast.Constant(value=int() | float() as value):
            other_value = value + 1 if isinstance(value, int) else (2 * value or 1.0)
            yield lambda one: _set(one, value=other_value)
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.Delete():
            yield lambda _: ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield lambda _: ast.Pass()
        case ast.If() | ast.IfExp():
            yield lambda one: _set(one, test=ast.Constant(True))
            yield lambda one: _set(one, test=ast.Constant(False))
        case ast.Dict(keys=keys):
            for at in range(len(keys)):
                yield lambda one, at=at: _set(
                    one, keys=_without(one.keys, at), values=_without(one.values, at)
                )
        case ast.Set(elts=entries) if len(entries) > 1:
            for at in range(len(entries)):
                yield lambda one, at=at: _set(one, elts=_without(one.elts, at))
        case ast.Break():
            yield lambda _: ast.Continue()
        case ast.Continue():
            yield lambda _: ast.Break()
        case ast.Call(args=[first, second, *_]) if not isinstance(first, ast.Starred | ast.Constant) and not (
            isinstance(second, ast.Starred | ast.Constant) or _is_symmetric(node)
        ):
            yield lambda one: _set(one, args=[one.args[1], one.args[0], *one.args[2:]])


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr) or (isinstance(side, ast.Constant) and isinstance(side.value, str))
        for side in (node.left, node.right)
    )


def _is_symmetric(node: ast.Call) -> bool:
    """Whether its first two arguments can be swapped without a change, or never without an error."""
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    checks = {"isinstance", "issubclass", "cast", "getattr"}
    return name in COMMUTATIVE | checks or ast.dump(node.args[0]) == ast.dump(node.args[1])


def _set(node: ast.AST, **fields: object) -> ast.AST:
    for name, value in fields.items():
        setattr(node, name, value)
    return node


def _without(entries: list, at: int) -> list:
    return entries[:at] + entries[at + 1 :]


class _Replacing(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self._new if node is self._old else self.generic_visit(node)


def _shown(node: ast.AST) -> str:
    """A node as code on one line; of a statement with a body, its head."""
    text = ast.unparse(ast.fix_missing_locations(copy.deepcopy(node)))
    return text.splitlines()[0] if text else ""
