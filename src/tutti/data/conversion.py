"""Data sets written anew, in a format that is read faster."""

from __future__ import annotations

import os
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tutti.data.arrays import channels_last
from tutti.data.columns import Stored, columns_of
from tutti.data.contents import Contents, to_keys
from tutti.data.formats import FORMATS, Format
from tutti.data.rows import Array, Rows
from tutti.errors import BadData, BadOption, with_remedy

_NUMBER: Final = re.compile(r"errno[ =]+(\d+)", re.IGNORECASE)
"""Of an error in the texts of HDF5 and Arrow."""


def written_format(path: Path) -> type[Format]:
    """Return the format that a path is to be written in, by its ending.

    Raises:
        BadOption: there is something at the path, or no such format.
    """
    if os.path.lexists(path):
        raise BadOption(f"there is a {path} already; name another, or take it away")
    ending = path.suffix.lower() or "/"
    forms = {form.written: form for form in FORMATS.values() if form.written}
    if ending not in forms:
        endings = ", ".join(sorted(one for one in forms if one != "/"))
        raise BadOption(
            f"{path} is of no kind that can be written: give a name without an ending, for a folder of NPY "
            f"files, or one that ends in {endings}"
        )
    return forms[ending]


def convert(contents: Contents[Stored[Rows], Array], path: Path) -> int:
    """Write a data set to a path, whole or not at all, and return its bytes.

    Args:
        contents: of arrays, or of what reads them piece by piece.
        path: where nothing is.

    Raises:
        BadData: the format cannot hold the data, or there is no room.
        BadOption: there is something at the path, or its ending is of no format that is written.
    """
    form = written_format(path)
    for inputs, _ in contents.parts.values():
        for column in columns_of(inputs):
            _refuse_turned(column.rows)
    try:
        with TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.unfinished-") as made:
            folder = Path(made)
            new = folder / path.name
            form.write(contents, new)
            written_format(path)
            new.rename(path)
    except OSError as error:
        plain = _plain(error, path)
        if known := with_remedy(plain):
            raise BadData(f"{known}; the new data take about {_size(contents):,}") from error
        raise BadData(
            f"{path} cannot be written: {plain.strerror or error}; name a folder that can be written to"
        ) from error
    files = [path] if path.is_file() else list(path.iterdir())
    return sum(file.stat().st_size for file in files)


def _plain(error: OSError, path: Path) -> OSError:
    """Return an error of the system as such: some libraries write its number into a text of their own."""
    found = _NUMBER.search(str(error))
    number = int(found[1]) if found else error.errno
    return OSError(number, os.strerror(number), str(path)) if number else error


def _size(contents: Contents[Stored[Rows], Array]) -> int:
    """The bytes of all samples."""
    return sum(rows.size * rows.dtype.itemsize for rows in to_keys(contents).values())


def _refuse_turned(inputs: Rows) -> None:
    """Refuse inputs that a reader of the file would take for pictures whose channels come last."""
    if channels_last(inputs.shape):
        raise BadData(
            f"inputs of the shape {inputs.shape[1:]} would be taken for pictures whose channels come last; "
            "give them another shape"
        )
