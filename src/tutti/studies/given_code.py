"""Objects and code that a farm was begun with, held against those that it goes on with.

Other weights make another farm, which is refused. Other code may be what repairs a job that has failed, so
that is only said. Imports torch where objects were given, as who gave them has.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np

from tutti.errors import BadRunFolder
from tutti.models import names_file
from tutti.records.farm_folder import CODE, FarmFolder
from tutti.records.untrusted import printable
from tutti.run.config import OBJECT, TrainConfig
from tutti.run.pickled import Pickled
from tutti.run.trust import code_named

_DIGITS = 12


def numbers_given(objects: Mapping[str, Pickled]) -> dict[str, str]:
    """Describe the modules and arrays among objects, as fields of a farm's question, by their numbers.

    Args:
        objects: pickled, by what they are called.
    """
    loaded = _loaded(objects)
    modules = {f"given {name}": _described(one) for name, one in loaded.items() if _is_module(one)}
    arrays = {name: one for name, one in loaded.items() if isinstance(one, np.ndarray)}
    return modules | {
        f"given {name}": f"array {hashlib.sha256(one.tobytes()).hexdigest()[:_DIGITS]}"
        for name, one in arrays.items()
    }


def say_other_code(
    folder: FarmFolder, configs: Iterable[TrainConfig], objects: Mapping[str, Pickled]
) -> None:
    """Warn where a farm goes on with other code than it was begun with.

    Args:
        folder: of the farm; it keeps digests of the code.
        configs: of jobs, with the names of code.
        objects: pickled, by what they are called.

    Raises:
        BadRunFolder: the digests cannot be written or read.
    """
    named = {name for one in configs for name in code_named(one.as_json()).values()}
    digests = {name: _digest_of_file(name) for name in named if not name.startswith(OBJECT)}
    digests |= {f"the given {name}": _digest_of_code(one) for name, one in _loaded(objects).items()}
    known = {name: digest for name, digest in digests.items() if digest}
    before = folder.settle(CODE, known) if known else {}
    for name in sorted(name for name in known if before.get(name, known[name]) != known[name]):
        print(
            f"tutti: warning: the code of {printable(name)} is not what {folder.path} was begun with: jobs "
            "that have finished keep the results of the code before; begin a new farm to compare all by one",
            file=sys.stderr,
            flush=True,
        )


def _loaded(objects: Mapping[str, Pickled]) -> dict[str, object]:
    return {name: pickled.load() for name, pickled in objects.items()}


def _is_module(value: object) -> bool:
    from torch import nn

    return isinstance(value, nn.Module)


def _described(module: Any) -> str:
    import torch
    from torch.nn.parameter import is_lazy

    found = hashlib.sha256()
    for name, part in module.named_modules():
        # What a user's class says of itself may be another text in each process.
        said = part.extra_repr() if _of_torch(type(part)) else ""
        found.update(repr((name, type(part).__qualname__, said)).encode())
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_meta:
            continue
        if tensor.is_quantized or tensor.layout is not torch.strided:
            continue  # It has no plain bytes.
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{type(module).__name__} with weights {found.hexdigest()[:_DIGITS]}"


def _digest_of_file(name: str) -> str:
    """Return the digest of the file with the named code; empty where there is none."""
    where = name.rpartition(":")[0] or name
    place = Path(_place_of_code(where))
    if place.name == "__init__.py":
        inside = place.parent.joinpath(*where.split(".")[1:])
        module = inside.with_suffix(".py")
        place = module if module.is_file() else inside / "__init__.py"
    try:
        return hashlib.sha256(place.read_bytes()).hexdigest()[:_DIGITS]
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise BadRunFolder(f"cannot read {place}: {error.strerror}") from error


def _place_of_code(where: str) -> str:
    """Return the path of a file or a module, found without importing it; empty where there is none."""
    if where.endswith(".py") or names_file(where):
        return str(Path(where).expanduser().resolve())
    with suppress(ImportError, ValueError):
        found = PathFinder.find_spec(where.partition(".")[0], [*sys.path, str(Path.cwd())])
        if found is not None:
            return str(found.origin or [*(found.submodule_search_locations or ())])
    return ""


def _digest_of_code(value: Any) -> str:
    """Return the digest of the functions that an object brings, without those of torch; empty for none."""
    parts = list(value) if isinstance(value, list | tuple) else [value]
    if _is_module(value):
        parts = list(dict.fromkeys(type(one) for one in value.modules()))
    codes = [code for part in parts for code in _codes(part)]
    found = hashlib.sha256()
    for code in codes:
        _add(found, code)
    return found.hexdigest()[:_DIGITS] if codes else ""


def _codes(part: Any) -> Iterator[CodeType]:
    while isinstance(part, partial):
        part = part.func
    if isinstance(part, FunctionType):
        yield part.__code__
        return
    for one in (part if isinstance(part, type) else type(part)).__mro__:
        functions = [] if _of_torch(one) else vars(one).values()
        yield from (function.__code__ for function in functions if isinstance(function, FunctionType))


def _add(found: hashlib._Hash, code: CodeType) -> None:
    """Add what a function does, and not where it stands in a file."""
    found.update(repr((code.co_name, code.co_names, code.co_varnames)).encode())
    found.update(code.co_code)
    for value in code.co_consts:
        if isinstance(value, CodeType):
            _add(found, value)
        elif isinstance(value, frozenset):
            found.update(repr(sorted(map(repr, value))).encode())
        else:
            found.update(repr(value).encode())


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"
