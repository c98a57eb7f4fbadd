"""IDX files: MNIST's format, one array in each, gzip-compressed or not.

Source: the format is described at the end of http://yann.lecun.com/exdb/mnist/.
"""

from __future__ import annotations

import gzip
import math
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from typing_extensions import override

from tutti.data.contents import PARTS, Contents, pair_up
from tutti.data.formats import Format
from tutti.data.rows import Array
from tutti.data.tables import listed
from tutti.errors import BadData
from tutti.records.npz import damaged, open_data_file
from tutti.registry import part

_IDX_NAME = re.compile(
    r"(?P<set>.*?)(?P<part>train|test|t10k|val|valid|validation)[-_.](?P<kind>images|labels)"
    r"([-_.]idx\d)?([-_.]ubyte|\.idx)?(\.gz)?$"
)
"""Such as train-images-idx3-ubyte.gz, t10k-labels.idx1-ubyte, emnist-letters-test-images-idx3-ubyte.gz."""

_IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


@part("folder of IDX files")
class Idx(Format):
    """Folders of IDX files, with names such as train-images-idx3-ubyte and train-labels-idx1-ubyte."""

    @staticmethod
    @override
    def in_folder(folder: Path) -> bool:
        return any(_IDX_NAME.fullmatch(path.name) for path in folder.iterdir() if path.is_file())

    @staticmethod
    @override
    def read(path: Path, options: Mapping[str, Any], labelled: bool = True) -> Contents[object]:
        there = sorted(file.name for file in path.iterdir() if file.is_file())
        files: dict[tuple[str, str], Path] = {}
        sets = set()
        for match in filter(None, map(_IDX_NAME.fullmatch, there)):
            name = "test" if match["part"] == "t10k" else PARTS[match["part"]]
            # Sorted names put an unpacked file before the same one as .gz; the first is kept.
            files.setdefault((name, match["kind"]), path / match.string)
            sets.add(match["set"])
        if len(sets) > 1:
            raise BadData(
                f"{path} holds {len(sets)} data sets ({', '.join(sorted(sets))}); put each into a folder"
            )
        if not labelled:
            alone = {name: (read_idx(file), None) for (name, kind), file in files.items() if kind == "images"}
            return Contents(path.resolve().name, alone)
        explained = (
            f"it has: {listed(there)}; expected train-images-idx3-ubyte and train-labels-idx1-ubyte (also as "
            ".gz, and t10k-... for the test part)"
        )
        pairs = pair_up(files, ("images", "labels"), str(path), explained)
        parts = {name: (read_idx(images), read_idx(labels)) for name, (images, labels) in pairs.items()}
        return Contents(path.resolve().name, parts)


def read_idx(path: Path) -> Array:
    """Read the array in an IDX file, gzip-compressed or not (by its first bytes, not its name)."""
    try:
        with open_data_file(path) as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if packed else raw as file:
                zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
                if zeros or kind not in _IDX_TYPES:
                    raise ValueError(
                        "an IDX file begins with the bytes 00 00 and its type, such as 08 for bytes"
                    )
                shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
                dtype = np.dtype(_IDX_TYPES[kind])
                nbytes = math.prod(shape) * dtype.itemsize
                content = file.read(nbytes + 1)
                if len(content) != nbytes:
                    more = " or more" if len(content) > nbytes else ""
                    raise ValueError(
                        f"its header asks for {nbytes:,} bytes, and it has {len(content):,}{more}"
                    )
    except (EOFError, zlib.error, OSError, ValueError, MemoryError, struct.error) as error:
        raise damaged(path, error) from error
    return np.frombuffer(content, dtype).reshape(shape).astype(dtype.newbyteorder("="), copy=False)
