"""Facts about data without torch: their existence, and the columns of CSV files."""

from __future__ import annotations

import csv
import difflib
import io
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import dropwhile, islice
from pathlib import Path
from typing import Any, Final

from tutti.data.remote import check_address, is_remote
from tutti.data.tables import TABLE_OPTIONS, TARGET_WORDS, check_options, choose, listed
from tutti.errors import BadData, BadOption
from tutti.parts import DATA_SETS
from tutti.records.run_folder import RUNS
from tutti.records.texts import printable
from tutti.terminal import wait_shown

_PACKED: Final = ("", ".gz", ".zst")
CSV: Final = tuple(f".{form}{packed}" for form in ("csv", "tsv") for packed in _PACKED)
JSON: Final = tuple(f".{form}{packed}" for form in ("jsonl", "ndjson", "json") for packed in _PACKED)
"""The endings of text files."""

LOGGED_AFTER_S: Final = 2.0
"""The seconds after which a log has a line that a file is being read."""

_SEPARATORS: Final = ",;\t"

_LOOKED_AT: Final = 1000
"""Lines of a CSV file that are looked at before it is read."""


def check_data(data: str, options: Mapping[str, Any], reads: bool = True) -> None:
    """Refuse data that do not exist, and columns that a CSV file does not have.

    `data` is a built-in name, a path or an address; `reads` is whether these options alone choose the
    columns.
    """
    path = check_there(data)
    if path is None or not reads:
        return
    if options.get("stream") is True and not any(path.glob("*.npy")):
        raise not_streamed(path)
    for part in sorted(path.glob("train*"))[:1] if path.is_dir() else [path]:
        if part.is_file() and part.name.lower().endswith(CSV):
            check_options(options, (*TABLE_OPTIONS, "stream", "buffer"), f"the table '{part}'")
            choose(csv_start(part, options).names, options, str(part))


def not_streamed(path: Path) -> BadOption:
    """Return the error about data that cannot be streamed."""
    return BadOption(
        "--data.stream true is for folders of NPY files with one input, and no sequences or missing "
        f"values, which {path} is not; leave it out, or write one by: tutti data convert {path} NEW"
    )


def check_there(data: str) -> Path | None:
    """Return the path of data; None: they are built in, at an address, or named by a pattern."""
    if is_remote(data):
        check_address(data)
        return None
    if data in DATA_SETS:
        return None
    path = Path(data).expanduser()
    if data and path.exists():
        return path
    if path.name == data and not path.suffix:
        DATA_SETS.check(data)
    if not any(letter in data for letter in "*?["):
        raise BadData(f"there is no {path}; {nearest(path)}")
    return None


def reading_shown(data: object, shows: bool = True) -> AbstractContextManager[None]:
    """Show that a file is read in a block, if that takes long."""
    path = Path(data).expanduser() if isinstance(data, str | Path) else None
    if not shows or path is None or not path.exists():
        return nullcontext()
    size = f", {path.stat().st_size / 1e6:,.0f} MB" if path.is_file() else ""
    return wait_shown(f"reading {printable(path.name)}{size}", logged_after_s=LOGGED_AFTER_S)


def _opened(path: Path) -> Any:
    """Open a file for reading, unpacked by its ending."""
    if path.suffix.lower() not in _PACKED[1:]:
        return open(path, "rb")
    import pyarrow

    return pyarrow.input_stream(str(path))


@dataclass(frozen=True)
class CsvStart:
    """The first rows of a CSV file, and the facts in them."""

    rows: list[list[str]]
    names: list[str]  # of the columns
    named: bool  # whether the first row has these names
    separator: str


def csv_start(path: Path, options: Mapping[str, Any], labelled: bool = True) -> CsvStart:
    """Read the first rows of a CSV file."""
    rows, separator = _first_rows(path)
    cells, target = rows[0], options.get("target")
    named = _are_names(cells, target if isinstance(target, list | tuple) else [target])
    if not named and target is None and labelled:
        raise BadData(
            f"{path} has no line with the names of its {len(cells)} columns: say which column is to be "
            "predicted by its number, --data.target 0 for the first, -1 for the last"
        )
    names = [name.strip() for name in cells] if named else [str(at) for at in range(len(cells))]
    return CsvStart(rows, names, named, separator)


def _first_rows(path: Path) -> tuple[list[list[str]], str]:
    """Return the cells of a file's first rows, and their separator."""
    try:
        with io.TextIOWrapper(_opened(path), encoding="utf-8-sig", newline="") as file:
            lines = list(islice(dropwhile(lambda line: not line.strip(), file), _LOOKED_AT))
            separator = max(_SEPARATORS, key=lines[0].count) if lines else ""
            rows = [row for row in csv.reader(lines, delimiter=separator or ",") if row]
    except UnicodeDecodeError as error:
        raise BadData(not_in_utf8(path)) from error
    except csv.Error as error:
        raise BadData(f"{path} is broken: {error}; save it as a table in UTF-8") from error
    except OSError as error:
        from tutti.records.npz import damaged  # It imports NumPy.

        raise damaged(path, error) from error
    if not rows:
        raise BadData(f"{path} has no rows; give a table with a row for each sample")
    return rows, separator


def not_in_utf8(path: Path) -> str:
    """Return the message about a text file in another encoding."""
    with _opened(path) as file:
        wide = file.read(2) in (b"\xff\xfe", b"\xfe\xff")
    name, form = ("UTF-16", "utf-16") if wide else ("Latin-1", "latin1")
    return (
        f"{path} is not in UTF-8; write it so, as from {name} by: iconv -f {form} -t utf-8 {path.name} > "
        "NEW.csv"
    )


def _are_names(cells: list[str], targets: list[Any] | tuple[Any, ...]) -> bool:
    """Return whether the first row has the names of the columns.

    It has if none of its cells is a number, if one is the target's name, or if they count from 0, like
    pandas' columns.
    """
    words = [cell.strip() for cell in cells]
    counted = len(words) > 2 and words == [str(at) for at in range(len(words))]
    targeted = any(
        word.lower() in TARGET_WORDS or (word in targets and not _is_float(word)) for word in words
    )
    return counted or targeted or not any(map(_is_float, words))


def _is_float(text: str) -> bool:
    with suppress(ValueError):
        float(text)
        return True
    return False


def nearest(path: Path) -> str:
    """Suggest the file that a missing one may be, or list the existing ones."""
    folder = path.parent
    while not os.path.isdir(folder):
        path, folder = folder, folder.parent
    names = sorted(p.name for p in folder.iterdir() if not p.name.startswith(".") and p.name != RUNS.name)
    names = [name for name in names if name.endswith(path.suffix.lower())] or names
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    if near:
        return f"did you mean {folder / near[0]}?"
    return f"{folder.resolve()} has: {listed(names) or 'nothing'}"
