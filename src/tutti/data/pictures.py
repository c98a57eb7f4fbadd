"""Pictures, decoded once, in parallel, into a file that is mapped into memory from then on.

    CACHE/pictures/KEY.npy         (pictures, height, width[, 3]), 8 bits each

KEY depends on the source of the pictures, and on the time of its last change.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tutti.data.rows import Array
from tutti.errors import BadData, BadOption, room_left
from tutti.load_object import optional_package
from tutti.records.files import cache_folder, unfinished_file

T = TypeVar("T")

_BLOCK: Final = 64
"""Pictures that a thread decodes at a time."""

_FORMATS: Final = {
    "PNG": ("png",),
    "JPEG": ("jpg", "jpeg"),
    "JPEG2000": ("jp2",),
    "BMP": ("bmp",),
    "GIF": ("gif",),
    "WEBP": ("webp",),
    "TIFF": ("tif", "tiff"),
    "PPM": ("ppm", "pgm"),
}
"""Pillow's formats that are opened, by content and not by name: EPS, for one, would start Ghostscript."""

_BILINEAR: Final = 2
"""Pillow's `Image.Resampling.BILINEAR`."""

ENDINGS: Final = tuple(ending for endings in _FORMATS.values() for ending in endings)
"""The ends of the names of pictures, without a dot."""


@dataclass(frozen=True)
class Pictures:
    """Pictures as they are stored."""

    source: Path  # their file or folder
    key: Sequence[str]  # texts that identify them
    names: Sequence[str]  # of each, for messages
    content: Callable[[int], bytes]  # returns the bytes of one, by its number; called by several threads

    def opened(self, number: int) -> Any:
        """Open a picture, and read its header."""
        image = optional_package("PIL.Image", "pictures need")
        return image.open(BytesIO(self.content(number)), formats=tuple(_FORMATS))

    def each(self, work: Callable[[int], T]) -> list[T]:
        """Return a function's result for each number, computed in threads: decoding releases the GIL."""
        optional_package("PIL.Image", "pictures need")
        count, bad = len(self.names), dict[int, str]()

        def block(start: int) -> list[T]:
            made = []
            for number in range(start, min(start + _BLOCK, count)):
                try:
                    made.append(work(number))
                except Exception as error:  # a picture may break its decoder in any way
                    bad[number] = f"{self.names[number]}: {str(error).partition(' <_io')[0]}"
            return made

        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            found = [one for made in pool.map(block, range(0, count, _BLOCK)) for one in made]
        if bad:
            shown = "; ".join(bad[number] for number in sorted(bad)[:10])
            raise BadData(
                f"{len(bad):,} of {count:,} pictures of {self.source} cannot be read ({shown}); fix them or "
                f"take them away; the formats are {', '.join(_FORMATS)}"
            )
        return found


def decoded(pictures: Pictures, size: object = None) -> Array:
    """Decode pictures, or map the file of an earlier decoding.

    Args:
        pictures: as they are stored.
        size: the height and width to resize to, or one number for both; None: all have the same size.

    Returns:
        8-bit, of shape (pictures, height, width) or (pictures, 3, height, width).
    """
    wanted = _size(size)
    text = repr((list(pictures.key), wanted))
    place = cache_folder() / "pictures" / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.npy"
    try:
        mapped = np.load(place, mmap_mode="r")
    except (OSError, ValueError, EOFError):
        # It is not there yet, or cut off.
        print(f"decoding {len(pictures.names):,} pictures of {pictures.source}", file=sys.stderr, flush=True)
        _decode(pictures, _shape(pictures, wanted), place)
        mapped = np.load(place, mmap_mode="r")
    array = np.asarray(mapped)
    return array.transpose(0, 3, 1, 2) if array.ndim == 4 else array


def _size(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    both: list[Any] = [*given] if isinstance(given, list | tuple) else [given, given]
    if len(both) != 2 or not all(type(one) is int and 0 < one <= 1 << 13 for one in both):
        raise BadOption(f"--data.size is {given!r}; give the height and the width in pixels, such as 64,64")
    return both[0], both[1]


def _shape(pictures: Pictures, size: tuple[int, int] | None) -> tuple[int, ...]:
    """Return the shape of the array of all pictures, by their headers."""

    def look(number: int) -> tuple[int, int, bool]:
        with pictures.opened(number) as picture:
            if picture.mode[0] in "IF":
                raise ValueError("its pixels have more than 8 bits; give such pictures as NPY files")
            return picture.height, picture.width, picture.mode not in ("1", "L")

    looks = pictures.each(look)
    if not looks:
        raise BadData(f"{pictures.source} has no pictures")
    height, width = size or looks[0][:2]
    for number, one in enumerate(looks):
        if size is None and one[:2] != (height, width):
            raise BadData(
                f"the picture {pictures.names[number]} of {pictures.source} has {one[0]} x {one[1]} pixels, "
                f"{pictures.names[0]} {height} x {width}; bring all to one size by --data.size HEIGHT,WIDTH"
            )
    return (len(looks), height, width, *((3,) if any(colour for *_, colour in looks) else ()))


def _decode(pictures: Pictures, shape: tuple[int, ...], place: Path) -> None:
    mode, size = "RGB" if len(shape) == 4 else "L", (shape[2], shape[1])
    new = unfinished_file(place).with_suffix(f".{os.getpid()}")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        array = np.lib.format.open_memmap(new, "w+", np.uint8, shape)
        with new.open("r+b") as file:
            # Where the disk is full, a write to mapped memory would kill this process.
            os.posix_fallocate(file.fileno(), 0, new.stat().st_size)

        def decode(number: int) -> None:
            with pictures.opened(number) as picture:
                ready = picture.convert(mode)
                array[number] = np.asarray(ready if ready.size == size else ready.resize(size, _BILINEAR))

        pictures.each(decode)
        array.flush()
        new.replace(place)
    except OSError as error:
        raise BadData(
            f"the pictures of {pictures.source} cannot be decoded into {place.parent}, {room_left(place)}: "
            f"{error.strerror or error}; set TUTTI_CACHE to a folder that has room"
        ) from error
    finally:
        new.unlink(missing_ok=True)


def stamp(path: Path) -> str:
    """Return a text that changes when a file does."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
