"""The tool itself: what it changes, and that whoever knows a function runs the change."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from tests.mutations.operators import mutants
from tests.mutations.patching import HIT, put_in_place, with_hits

NAME = "a_module_to_break"


@dataclass
class Loaded:
    """A module that was made of a text."""

    module: types.ModuleType
    source: str

    def broken(self, change: str) -> None:
        """Put the mutant of that name in place."""
        (mutant,) = [one for one in mutants(self.source) if one.change == change]
        put_in_place(NAME, mutant.tree())


@pytest.fixture
def load() -> Iterator[object]:
    def load(source: str) -> Loaded:
        module = sys.modules[NAME] = types.ModuleType(NAME)
        exec(compile(source, NAME, "exec"), vars(module))
        return Loaded(module, source)

    yield load
    sys.modules.pop(NAME, None)


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("a < b", {"a < b  ->  a <= b", "a < b  ->  a >= b"}),
        ("a + b", {"a + b  ->  a - b"}),
        ("a and b", {"a and b  ->  a or b"}),
        ("not a", {"not a  ->  a"}),
        ("-a", {"-a  ->  a"}),
        ("x = 3", {"3  ->  4"}),
        ("x = 0.0", {"0.0  ->  1.0"}),
        ("x = True", {"True  ->  False"}),
        ("a += b", {"a += b  ->  a -= b", "a += b  ->  pass"}),
        ("a.b = c", {"a.b = c  ->  pass"}),
        ("f(a, b)", {"f(a, b)  ->  pass", "f(a, b)  ->  f(b, a)"}),
        ("f(a, a)", {"f(a, a)  ->  pass"}),
        ("x = min(a, b)", set()),
        ("while a:\n    break", {"break  ->  continue"}),
        ("b if a else c", {"b if a else c  ->  b if True else c", "b if a else c  ->  b if False else c"}),
        ("raise E(a + b)", {"raise E(a + b)  ->  pass"}),
        ("x = {'a': b, 'c': d}", {"{'a': b, 'c': d}  ->  {'c': d}", "{'a': b, 'c': d}  ->  {'a': b}"}),
        ("x = {a, b}", {"{a, b}  ->  {b}", "{a, b}  ->  {a}"}),
        ("def f(a: int | None) -> list[int]:\n    'Text.'", set()),
        ("a + 'text'", set()),
        ("class A(IntEnum):\n    x = 1\n    def f(self):\n        return 2", {"2  ->  3"}),
    ],
)
def test_each_place_is_changed_in_its_ways(source: str, changes: set[str]) -> None:
    assert {one.change for one in mutants(source)} == changes


def test_a_mutant_knows_its_line_and_function() -> None:
    (mutant,) = mutants("class A:\n    def f(self):\n        return self.a + self.b\n")
    assert (mutant.line, mutant.function) == (3, "A.f")


@pytest.mark.parametrize(
    ("change", "lines"),
    [("1  ->  2", {3, 4, 6}), ("2  ->  3", {3, 4, 6}), ("3  ->  4", {4}), ("4  ->  5", {6})],
)
def test_a_mutant_knows_the_lines_that_a_test_must_run_to_notice_it(change: str, lines: set[int]) -> None:
    source = "a = 1\n\ndef f(x=2):\n    y = (\n 3)\n    return 4\n"
    (mutant,) = [one for one in mutants(source) if one.change == change]
    assert lines == {3, 4, 6}.intersection(mutant.lines)


def test_whoever_has_imported_a_function_runs_the_change(load) -> None:
    loaded = load("def f(a, b=1):\n    return a + b\n")
    known = loaded.module.f
    loaded.broken("a + b  ->  a - b")
    assert known(3) == 2
    put_in_place(NAME, next(one.tree() for one in mutants(loaded.source) if one.change == "1  ->  2"))
    assert known(3) == 5


def test_methods_properties_and_fields_of_living_objects_change_too(load) -> None:
    loaded = load(
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n    x: int = 5\n"
        "    @property\n    def twice(self):\n        return 2 * self.x\n"
        "    @staticmethod\n    def no():\n        return False\n"
    )
    living = loaded.module.A(3)
    loaded.broken("2 * self.x  ->  2 / self.x")
    assert living.twice == 2 / 3
    loaded.broken("False  ->  True")
    assert living.no()
    loaded.broken("5  ->  6")
    assert loaded.module.A().x == 6


def test_what_the_fields_of_a_dataclass_say_changes_too(load) -> None:
    loaded = load(
        "from dataclasses import dataclass, field\n@dataclass\nclass A:\n"
        "    x: int = field(default=5, metadata={'help': 'Text.'})\n"
    )
    loaded.broken("{'help': 'Text.'}  ->  {}")
    (found,) = fields(loaded.module.A)
    assert not found.metadata


def test_constants_of_the_module_change(load) -> None:
    loaded = load("LIMIT = 4\ndef f():\n    return LIMIT\n")
    loaded.broken("4  ->  5")
    assert loaded.module.f() == 5


@pytest.mark.parametrize(("text", "seen"), [(f"from {NAME} import LIMIT\n", 5), ("LIMIT = 4\n", 4)])
def test_whoever_has_imported_a_constant_sees_the_change(load, monkeypatch, tmp_path, text, seen) -> None:
    loaded = load("LIMIT = 4\n")
    other = types.ModuleType("tutti.another_module")
    vars(other).update(LIMIT=4, __file__=str(tmp_path / "another_module.py"))
    Path(other.__file__).write_text(text)
    monkeypatch.setitem(sys.modules, other.__name__, other)
    loaded.broken("4  ->  5")
    assert (5, seen) == (loaded.module.LIMIT, other.LIMIT)


def test_tables_of_the_module_change_where_they_are(load) -> None:
    loaded = load(
        "def f():\n    return 1\nclass A:\n    pass\n"
        "TABLE = {'f': f, A: 2, 'g': lambda: (f(), 3)}\nPAIR = (f, A, 4)\n"
    )
    known, shown = loaded.module.TABLE, loaded.module.TABLE["g"]
    loaded.broken("2  ->  3")
    assert known == {"f": loaded.module.f, loaded.module.A: 3, "g": shown}
    loaded.broken("3  ->  4")
    assert shown() == (1, 4)
    loaded.broken("4  ->  5")
    assert (loaded.module.f, loaded.module.A, 5) == loaded.module.PAIR
    (mutant,) = [
        one
        for one in mutants(loaded.source)
        if one.change.endswith("'g': lambda: (f(), 3)}") and "'f'" not in one.change.split("->")[1]
    ]
    put_in_place(NAME, mutant.tree())
    assert known == {loaded.module.A: 2, "g": shown}


def test_members_of_an_enum_stay_and_its_methods_change(load) -> None:
    loaded = load(
        "from enum import IntEnum\nclass A(IntEnum):\n    X = 1\n    def f(self):\n        return 2\n"
    )
    member = loaded.module.A.X
    loaded.broken("2  ->  3")
    assert member is loaded.module.A.X
    assert member.f() == 3


def test_members_of_an_enum_are_found_by_their_values_and_in_tables_as_before(load) -> None:
    loaded = load(
        "from enum import IntEnum\nclass A(IntEnum):\n    X = 1\nTABLE = {A.X: [A.X]}\n"
        "def f():\n    return 2\n"
    )
    member = loaded.module.A.X
    loaded.broken("2  ->  3")
    assert loaded.module.A(1) is member
    assert loaded.module.A["X"] is member
    assert loaded.module.TABLE[member][0] is member


def test_every_line_that_runs_is_told(load) -> None:
    loaded = load("def f(a):\n    if a:\n        a = 2\n    else:\n        a = 3\n    return a\n")
    hits: list[int] = []
    vars(loaded.module)[HIT] = hits.append
    put_in_place(NAME, with_hits(ast.parse(loaded.source)))
    assert loaded.module.f(1) == 2
    assert hits == [2, 3, 6]
