"""A user's `data`, read into arrays: a built-in name, a path, a factory, or an object.

"digits", "mnist", "fashion-mnist"            built in
"set.npz", "train-images-idx3-ubyte.gz", "folder/"     files
"package.module:factory", "file.py:factory"   called with the options; gives one of the objects below
(x, y) or ((x, y), (x_test, y_test))          arrays, tensors, nested lists
dataset or (dataset, test_dataset)            map-style torch data sets
{"x_train": ..., "y_train": ..., ...}         the keys of an NPZ file
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tutti.data.arrays import Arrays, part_arrays, stored_dtype
from tutti.data.builtin import BUILT_IN
from tutti.data.contents import Contents, contents_of
from tutti.data.formats import read_path
from tutti.data.targets import read_targets
from tutti.errors import BadData, BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object, takes_option
from tutti.records.untrusted import printable


@dataclass(frozen=True)
class Source:
    """A data set as it was read and checked, on one process.

    Attributes:
        name: for people to read.
        parts: "train", and perhaps "validation" and "test".
        classes: the number of classes; None when the targets are floats.
        labels: the classes' names; empty when unknown.
    """

    name: str
    parts: dict[str, Arrays]
    classes: int | None
    labels: tuple[str, ...]


def read_source(data: object, options: Mapping[str, object]) -> Source:
    """Read and check a data set.

    Args:
        data: what the module's docstring lists.
        options: the arguments of a factory; `classes` (how many there are) goes with every kind of data.

    Raises:
        BadData: the data are missing, broken, or do not fit together.
        NotFinite: NaN or inf in them.
        BadOption: an option that cannot be used.
        UnknownName: no such built-in data set, file, factory or option.
    """
    contents, given = _contents(data, dict(options))
    arrays = {part: part_arrays(part, x, y) for part, (x, y) in contents.parts.items()}
    first = arrays["train"].inputs
    for part, other in arrays.items():
        if other.inputs.shape[1:] != first.shape[1:] or stored_dtype(other.inputs) != stored_dtype(first):
            raise BadData(
                f"the {part} inputs have the shape {other.inputs.shape} and type {other.inputs.dtype}, the "
                f"train inputs {first.shape} and {first.dtype}; all parts need one input shape and one type"
            )
    found = read_targets(
        {part: a.targets for part, a in arrays.items()},
        given if given is not None else contents.classes,
        contents.labels,
    )
    for part, targets in found.parts.items():
        if targets.shape[1:] != found.parts["train"].shape[1:]:
            raise BadData(
                f"the {part} targets have the shape {targets.shape}, the train targets "
                f"{found.parts['train'].shape}; all parts need one shape for each target"
            )
    parts = {part: Arrays(a.inputs, found.parts[part]) for part, a in arrays.items()}
    return Source(printable(contents.name), parts, found.classes, tuple(map(printable, found.labels)))


def _contents(data: object, options: dict[str, object]) -> tuple[Contents, int | None]:
    """Return the contents of `data`, and the number of classes that the options give."""
    factory = load_object(data, "data set") if isinstance(data, str) and names_object(data) else None
    classes = None if takes_option(factory, "classes") else _classes(options.pop("classes", None))
    if factory is not None:
        spec = str(data)
        made = call_with_options(factory, options, "data set", spec)
        return contents_of(made, spec.rpartition(":")[2], f"what '{spec}' returned"), classes
    if options:
        raise UnknownName(
            "option", next(iter(options)), ["classes"], "Only factories take others.", of="the data"
        )
    if isinstance(data, str | Path):
        return _word(data), classes
    return contents_of(data, _name(data), "the data"), classes


def check_word(data: str) -> None:
    """Refuse a word without a dot or a slash that is neither a file nor a built-in data set.

    Raises:
        UnknownName: there is no such data set.
    """
    path = Path(data).expanduser()
    if not (data and path.exists()) and path.name == data and not path.suffix:
        BUILT_IN.check(data)


def _word(data: str | Path) -> Contents:
    if isinstance(data, str) and data in BUILT_IN:
        return BUILT_IN[data]()
    if isinstance(data, str):
        check_word(data)
    return read_path(Path(data).expanduser())


def _classes(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadOption(f"--data.classes is {value!r}; give a whole number of at least 1")
    return value


def _name(data: object) -> str:
    return "arrays" if isinstance(data, tuple | list | dict) else type(data).__name__
