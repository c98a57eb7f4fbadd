"""Interchangeable parts by name: each is one file of its package, and found there without a list.

    src/tutti/models/lenet.py                      MODELS = Registry("tutti.models", "model")
        @part("lenet")                             list(MODELS)            names, nothing is imported
        def lenet(shape, outputs): ...             MODELS.summary("lenet") the first line of its docstring
                                                   MODELS.options("lenet") its parameters with a default
                                                   MODELS["lenet"]         imports that file alone

A new part is a new file: names, help texts and error messages follow.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

from typing_extensions import override

from tutti.errors import UnknownName
from tutti.load_object import load_object, names_object

T = TypeVar("T")


def part(name: str) -> Callable[[T], T]:
    """Name a class or function, by a literal; a registry reads the decorator in the file's text."""

    def named(value: T) -> T:
        if isinstance(value, type):
            cast("Any", value).name = name
        return value

    return named


_DEFINITION: Final = re.compile(r'^@part\("([^"]+)"\)$.*?^(?:class|def) (\w+)', re.MULTILINE | re.DOTALL)
"""A part's name for users and in Python. A file is parsed for its docstrings alone: that takes longer."""


@dataclass(frozen=True)
class PartFile:
    """The place of a part: the file and the module that define it, and its name there."""

    file: Path
    module: str
    attribute: str

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the file."""
        return ast.parse(self.file.read_text(encoding="utf-8"))

    @property
    def definition(self) -> ast.ClassDef | ast.FunctionDef:
        """The class or function of the part in that tree."""
        kinds = ast.ClassDef | ast.FunctionDef
        return next(
            node for node in self.tree.body if isinstance(node, kinds) and node.name == self.attribute
        )


class Registry(Mapping[str, T], Generic[T]):
    """The parts of a package, by name, in the order of its files.

    The package itself is not imported for the names. `kind` is the word for a part in error messages, such as
    "model"; `hint`, or the text that it returns, follows the message about an unknown name.
    """

    def __init__(self, package: str, kind: str, hint: str | Callable[[], str] = "") -> None:
        self._package, self._kind, self._hint = package, kind, hint

    @cached_property
    def _places(self) -> dict[str, PartFile]:
        # The folder below the outermost package: looking up the package itself would import its parents.
        outermost, *below = self._package.split(".")
        spec = importlib.util.find_spec(outermost)
        assert spec is not None, f"no package {outermost}"
        folder = Path(next(iter(spec.submodule_search_locations or ())), *below)
        places: dict[str, PartFile] = {}
        for file in sorted(folder.glob("*.py")):
            for name, attribute in _DEFINITION.findall(file.read_text(encoding="utf-8")):
                assert name not in places, f"two parts are called {name}: in {file} and {places[name].file}"
                places[name] = PartFile(file, f"{self._package}.{file.stem}", attribute)
        return places

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    @override
    def __len__(self) -> int:
        return len(self._places)

    @override
    def __contains__(self, name: object) -> bool:
        return name in self._places

    @override
    def __getitem__(self, name: str) -> T:
        place = self._places[name]
        return cast("T", getattr(importlib.import_module(place.module), place.attribute))

    def named(self, name: str) -> T:
        """Import and return the part called `name`, or raise UnknownName."""
        self.check(name)
        return self[name]

    def load(self, spec: str) -> object:
        """Import the part called `spec`, or the user's `package.module:object` or `file.py:object`."""
        return load_object(spec, self._kind) if names_object(spec) else self.named(spec)

    def check(self, name: str) -> None:
        """Refuse an unknown name, without importing a part."""
        if name not in self:
            hint = self._hint() if callable(self._hint) else self._hint
            raise UnknownName(self._kind, name, self, hint)

    def check_options(self, name: str, given: Iterable[str], known: Collection[str] | None = None) -> None:
        """Refuse options that a part does not have; `known` are its own, by default `options(name)`."""
        known = self.options(name) if known is None else known
        for option in given:
            if option not in known:
                raise UnknownName("option", option, known, of=f"the {self._kind} '{name}'")

    def summary(self, name: str) -> str:
        """Return the first line of the part's docstring, or else of its file's."""
        place = self._places[name]
        text = ast.get_docstring(place.definition) or ast.get_docstring(place.tree) or ""
        return text.partition("\n")[0]

    def literal(self, name: str, variable: str) -> Any:
        """Return the literal that a part, or its file, assigns to a variable; None if there is none."""
        place = self._places[name]
        for node in (*place.tree.body, *place.definition.body):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == variable:
                return ast.literal_eval(node.value)
        return None

    def options(self, name: str) -> tuple[str, ...]:
        """Return the parameters of a function, or fields of a class and its bases, that have a default."""
        place = self._places[name]
        node = place.definition
        if isinstance(node, ast.ClassDef):
            return tuple(self._fields(place))
        positional = [*node.args.posonlyargs, *node.args.args]
        optional = positional[len(positional) - len(node.args.defaults) :]
        named = [a for a, value in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True) if value]
        return tuple(argument.arg for argument in (*optional, *named))

    def _fields(self, place: PartFile) -> Iterator[str]:
        """Yield the fields of a class that have a default, then those of its bases."""
        node = place.definition
        assert isinstance(node, ast.ClassDef), "it has fields"
        given = [one for one in node.body if isinstance(one, ast.AnnAssign) and one.value is not None]
        own = [one.target for one in given if "ClassVar" not in ast.unparse(one.annotation)]
        yield from (target.id for target in own if isinstance(target, ast.Name))
        bases = {ast.unparse(base) for base in node.bases}
        for one in place.tree.body:
            module = (one.module or "") if isinstance(one, ast.ImportFrom) else ""
            if isinstance(one, ast.ImportFrom) and module.rpartition(".")[0] == self._package:
                file = place.file.with_name(f"{module.rpartition('.')[2]}.py")
                for imported in bases.intersection(alias.name for alias in one.names):
                    yield from self._fields(PartFile(file, module, imported))
