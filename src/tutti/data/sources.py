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
from dataclasses import replace
from pathlib import Path

from tutti.data.arrays import Array, part_arrays, stored_dtype
from tutti.data.builtin import BUILT_IN
from tutti.data.contents import Contents, contents_of
from tutti.data.formats import FORMATS, Format, nearest, read_start
from tutti.data.formats.idx import read_folder
from tutti.data.targets import with_checked_targets
from tutti.errors import BadData, BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object, takes_option
from tutti.records.untrusted import printable


def read_source(data: object, options: Mapping[str, object]) -> Contents[Array]:
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
    parts = {part: part_arrays(part, x, y) for part, (x, y) in contents.parts.items()}
    first, _ = parts["train"]
    for part, (inputs, _) in parts.items():
        if inputs.shape[1:] != first.shape[1:] or stored_dtype(inputs) != stored_dtype(first):
            raise BadData(
                f"the {part} inputs have the shape {inputs.shape} and type {inputs.dtype}, the "
                f"train inputs {first.shape} and {first.dtype}; all parts need one input shape and one type"
            )
    arrays = Contents(printable(contents.name), parts, contents.classes, contents.labels)
    found = with_checked_targets(arrays, given)
    _, first = found.parts["train"]
    for part, (_, targets) in found.parts.items():
        if targets.shape[1:] != first.shape[1:]:
            raise BadData(
                f"the {part} targets have the shape {targets.shape}, the train targets {first.shape}; "
                "all parts need one shape for each target"
            )
    return replace(found, labels=tuple(map(printable, found.labels)))


def _contents(data: object, options: dict[str, object]) -> tuple[Contents[object], int | None]:
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
    if not isinstance(data, str | Path):
        name = "arrays" if isinstance(data, tuple | list | dict) else type(data).__name__
        return contents_of(data, name, "the data"), classes
    path = Path(data).expanduser()
    if isinstance(data, str):
        form = check_named(data)
        if data in BUILT_IN:
            return BUILT_IN[data](), classes
    else:
        form = format_of(path)
    return read_folder(path) if form is None else form.read(path), classes


def check_named(data: str) -> Format | None:
    """Refuse a name that is neither a built-in data set nor a file of a known kind nor a folder.

    Returns:
        The format of a file; None for what is none.

    Raises:
        UnknownName: a word without a dot or a slash, of which there is no such data set.
        BadData: the file is missing, empty or of another kind.
    """
    path = Path(data).expanduser()
    if not (data and path.exists()) and path.name == data and not path.suffix:
        BUILT_IN.check(data)
    return None if data in BUILT_IN else format_of(path)


def format_of(path: Path) -> Format | None:
    """Return the format of a file by its first bytes; None: it is a folder.

    Raises:
        BadData: it is missing, empty or of another kind.
    """
    if not path.exists():
        raise BadData(f"there is no {path}; {nearest(path)}")
    if path.is_dir():
        return None
    start = read_start(path, max(4, *(len(form.start) for form in FORMATS.values())))
    # Of two formats of which one begins like the other, the one that says more.
    for form in sorted(FORMATS.values(), key=lambda form: len(form.start), reverse=True):
        if start.startswith(form.start):
            return form
    known = ", ".join(f"{name} ({form.start.hex(' ')} ...)" for name, form in FORMATS.items())
    raise BadData(
        f"{path} is of no known kind: it begins with the bytes {start.hex(' ')}; give a file of one of these "
        f"formats: {known}; numpy.savez('data.npz', x=inputs, y=targets) makes an NPZ file of arrays"
    )


def _classes(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadOption(f"--data.classes is {value!r}; give a whole number of at least 1")
    return value
