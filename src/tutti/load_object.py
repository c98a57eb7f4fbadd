"""Python objects named by text: `package.module:object` or `file.py:object`."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Final

from tutti.errors import BadOption, UnknownName

_FILE: Final = "tutti_file_"
"""Prefix of the names of modules imported by the paths of their files."""


def names_object(spec: str) -> bool:
    """Return whether `spec` is `package.module:object`, `file.py:object` or a .py file, and no address."""
    return spec.endswith(".py") or (":" in spec and "://" not in spec)


def load_object(spec: str, kind: str) -> object:
    """Import the object that `package.module:object` or `file.py:object` names.

    Modules are looked up in the working directory too. A file is imported once per process, under a module
    name that depends only on its path, in `sys.modules`; it can import the files of its folder. If it imports
    Keras, that uses torch, unless the environment names another backend.
    """
    where, _, path = spec.rpartition(":")
    if not where or not path:
        raise BadOption(f"the {kind} '{spec}' names no object; write 'package.module:NAME' or 'file.py:NAME'")
    # For modules that import Keras, whose own default is TensorFlow.
    os.environ.setdefault("KERAS_BACKEND", "torch")
    module = _from_file(where, spec, kind) if where.endswith(".py") else _from_name(where, spec, kind)
    found: object = module
    for name in path.split("."):
        if not hasattr(found, name):
            raise UnknownName(
                "object", name, _names_in(found), f"It is needed for the {kind} '{spec}'.", where
            )
        found = getattr(found, name)
    return found


def call_with_options(
    factory: object,
    options: Mapping[str, object],
    kind: str,
    spec: str,
    own: Mapping[str, object] = MappingProxyType({}),
    known: Iterable[str] = (),
) -> object:
    """Call `factory(**options, **own)`, once the options are known to fit its signature."""
    if not callable(factory):
        found = type(factory).__name__
        raise BadOption(f"the {kind} '{spec}' is no function or class but {found}; name something to call")
    parameters = _parameters(factory)
    if parameters is None:
        return factory(**options, **own)
    named = {n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    named -= own.keys()
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for name in options:
        if name not in named and not open_ended:
            raise UnknownName("option", name, {*named, *known}, of=f"the {kind} '{spec}'")
    for name in sorted(named - options.keys()):
        if parameters[name].default is inspect.Parameter.empty:
            raise BadOption(f"the {kind} '{spec}' needs the option '{name}', which is not given")
    return factory(**options, **own)


def require_packages(what: str, packages: Iterable[str], extra: str) -> None:
    """Refuse work if packages of an extra are missing; `what` begins the sentence ("pictures need")."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise BadOption(f"{what} {', '.join(missing)}, not installed here: pip install 'tutti[{extra}]'")


def optional_package(name: str, what: str, extra: str = "data") -> ModuleType:
    """Import a package that only some users need, as `require_packages` does."""
    require_packages(what, [name.partition(".")[0]], extra)
    return importlib.import_module(name)


def takes_option(factory: object, name: str) -> bool:
    """Return whether `factory` can be called with the keyword `name` (bare **kwargs do not count)."""
    parameters = _parameters(factory) if callable(factory) else None
    return parameters is not None and name in parameters


def _names_in(owner: object) -> list[str]:
    """List the public names of a module or class, without imported modules."""
    public = [name for name in dir(owner) if not name.startswith("_")]
    return [name for name in public if not isinstance(getattr(owner, name, None), ModuleType)]


def _parameters(factory: Callable[..., object]) -> Mapping[str, inspect.Parameter] | None:
    """Return the parameters of `factory`; None for the few built-in callables that hide theirs."""
    try:
        return inspect.signature(factory).parameters
    except ValueError:
        return None


def imported_files() -> list[str]:
    """Return the Python files that this process has imported by their paths."""
    return [str(module.__file__) for name, module in sys.modules.items() if name.startswith(_FILE)]


def import_files(paths: Iterable[str]) -> None:
    """Import Python files by their paths, with the same module names as in other processes."""
    for path in paths:
        _from_file(path, path, "file")


def find_file(where: str, spec: str, kind: str) -> Path:
    """Return the file `where` that the `spec` of an object names, or raise BadOption."""
    file = Path(where).expanduser().resolve()
    if not file.is_file():
        raise BadOption(f"the {kind} '{spec}' is in no file: there is no {file}; check the path")
    return file


def _from_file(where: str, spec: str, kind: str) -> ModuleType:
    file = find_file(where, spec, kind)
    name = f"{_FILE}{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    _let_import_from(file.parent)
    layout = importlib.util.spec_from_file_location(name, file)
    assert layout is not None, "the name ends with .py"
    assert layout.loader is not None
    module = importlib.util.module_from_spec(layout)
    sys.modules[name] = module
    try:
        layout.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise _import_failed(spec, kind, error) from error
    return module


def _from_name(where: str, spec: str, kind: str) -> ModuleType:
    _let_import_from(Path.cwd())
    try:
        return importlib.import_module(where)
    except Exception as error:
        raise _import_failed(spec, kind, error) from error


def _let_import_from(folder: Path) -> None:
    # At the end, so that a user's random.py cannot replace the standard library's.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _import_failed(spec: str, kind: str, error: Exception) -> BadOption:
    last = traceback.extract_tb(error.__traceback__)[-1]
    at = "" if isinstance(error, SyntaxError) else f" (at {last.filename}, line {last.lineno})"
    return BadOption(f"importing the {kind} '{spec}' failed: {type(error).__name__}: {error}{at}")
