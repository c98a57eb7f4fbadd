"""Options of streaming: whether a data set is streamed, and the memory that may take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.data.arrays import stored_dtype
from tutti.data.builtin import BUILT_IN
from tutti.data.contents import slot_of
from tutti.data.formats.npy import files_by_key
from tutti.data.remote import is_remote
from tutti.data.streaming.mapped import Mapped
from tutti.errors import BadOption
from tutti.free_memory import free_bytes
from tutti.load_object import names_object

STREAM: Final = "stream"
BUFFER: Final = "buffer"
AUTO: Final = "auto"

BUFFER_MB: Final = 256
"""The memory for inputs that are streamed: half for the window in use, half for the next."""

MOST: Final = 0.5
"""The share of the free memory that data may take before they are streamed: the model needs some, too."""


@dataclass(frozen=True)
class Streamable:
    """A data set that can be streamed.

    Attributes:
        folder: of NPY files.
        options: of the data, but for those of streaming.
        wanted: whether it is to be streamed.
        buffer_bytes: the memory for its inputs.
    """

    folder: Path
    options: dict[str, object]
    wanted: bool
    buffer_bytes: int


def without_stream(data: object, options: Mapping[str, object], why: str = "") -> dict[str, object]:
    """Return the options but for those of streaming, for data that are to be in memory.

    Args:
        data: as for `open_data`.
        options: of the data.
        why: they have to be; empty: they need not be streamed.

    Raises:
        BadOption: they are to be streamed.
    """
    if not _from_files(data):
        return dict(options)
    if why and _wanted(options) is True:
        raise BadOption(
            f"--data.stream true is not for {why}; leave it out, so that all samples are in memory"
        )
    return {name: value for name, value in options.items() if name not in (STREAM, BUFFER)}


def decided(data: object, streamed: bool) -> dict[str, object]:
    """Return the options by which data are streamed again, or not, whatever memory is free then.

    Which samples are kept for validation depends on it.

    Args:
        data: as for `open_data`.
        streamed: whether they are.
    """
    if streamed:
        return {STREAM: True}
    if not _from_files(data):
        return {}
    folder = Path(str(data)).expanduser()
    return {STREAM: False} if is_remote(data) or any(folder.glob("*.npy")) else {}


def streamable(data: object, options: Mapping[str, object]) -> Streamable | None:
    """Say whether data can be streamed, and whether they are to be.

    Args:
        data: as for `open_data`.
        options: of the data.

    Returns:
        None for data that are read into memory in any case.

    Raises:
        BadOption: they are to be streamed and cannot be, or an option has no such value.
        BadData: a file is missing or broken.
    """
    wanted = _wanted(options) if _from_files(data) or STREAM in options else None
    if not _from_files(data):
        # A function may have an option of this name.
        if wanted is True and not (isinstance(data, str) and names_object(data)):
            raise BadOption("--data.stream true is for files, and these data are in memory already")
        return None
    folder = Path(str(data)).expanduser()
    if wanted is False:
        return None
    files = files_by_key(folder) if folder.is_dir() else {}
    inputs = [found for key, found in files.items() if (slot_of(key) or ("", ""))[1] == "inputs"]
    if not inputs:
        if wanted:
            raise BadOption(
                f"--data.stream true is for folders of NPY files, which {data} is not; write one by: tutti "
                f"data convert {data} NEW, then give --data NEW"
            )
        return None
    several = any("." in key for key in files)
    if several and wanted:
        raise BadOption(
            f"--data.stream true is for one input of one shape, and {folder} has several, or "
            "sequences; leave it out, so that all samples are in memory"
        )
    if several:
        return None
    buffer_bytes = _buffer(options)
    if wanted is None:
        free = free_bytes()
        needed = sum(_stored_bytes(Mapped(one)) for one in inputs)
        wanted = free is not None and needed > MOST * free
    return Streamable(folder, without_stream(data, options), wanted, buffer_bytes)


def _from_files(data: object) -> bool:
    if isinstance(data, Path):
        return True
    return isinstance(data, str) and data not in BUILT_IN and not names_object(data)


def _stored_bytes(rows: Mapped) -> int:
    return rows.size * stored_dtype(rows).itemsize


def _wanted(options: Mapping[str, object]) -> bool | None:
    value = options.get(STREAM, AUTO)
    if value == AUTO:
        return None
    if not isinstance(value, bool):
        raise BadOption(f"--data.stream is {value!r}; give true, false or auto")
    return value


def _buffer(options: Mapping[str, object]) -> int:
    value = options.get(BUFFER, BUFFER_MB)
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise BadOption(f"--data.buffer is {value!r}; give the memory for streamed inputs in MB, above 0")
    return int(value * 1e6)
