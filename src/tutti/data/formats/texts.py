"""Text files, packed or not."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Final, TextIO, cast

from tutti.data.formats import read_start
from tutti.errors import BadData
from tutti.records.npz import damaged, open_data_file

PACKED: Final = ("", ".gz", ".zst")
"""The endings of text files after those of their formats."""

_GZIP: Final = b"\x1f\x8b"
_ZSTD: Final = b"\x28\xb5\x2f\xfd"


@contextmanager
def open_text(path: Path) -> Iterator[TextIO]:
    """Open a text in UTF-8, packed by gzip or zstd or not, as its first bytes tell; ends of lines are kept.

    Raises:
        BadData: it is missing, empty, truncated or no text.
    """
    start = read_start(path)
    try:
        with ExitStack() as stack:
            raw = cast("IO[bytes]", stack.enter_context(open_data_file(path)))
            if start.startswith(_GZIP):
                raw = cast("IO[bytes]", stack.enter_context(gzip.GzipFile(fileobj=raw)))
            elif start.startswith(_ZSTD):
                import pyarrow

                raw = stack.enter_context(pyarrow.CompressedInputStream(raw, "zstd"))
            yield stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8-sig", newline=""))
    except UnicodeDecodeError as error:
        raise BadData(f"{path} is no text in UTF-8: {error.reason}; save it as UTF-8") from error
    except (EOFError, OSError, zlib.error) as error:
        raise damaged(path, error) from error


def stem_of(path: Path) -> str:
    """Return the name of a file without its endings: those of its format and of packing."""
    return path.name.removesuffix(".gz").removesuffix(".zst").rpartition(".")[0]
