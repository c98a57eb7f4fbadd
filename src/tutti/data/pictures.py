"""Pictures, decoded once, in parallel, into a file that is mapped into memory from then on.

    CACHE/pictures/KEY.npy         (pictures, height, width[, 3]), 8 bits each
    CACHE/pictures/KEY-good.npy    the numbers of those that could be decoded

KEY depends on where the pictures come from, and when that was changed last.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tutti.data.rows import Array, Indices, Rows, chosen
from tutti.errors import BadData, BadOption, room_left
from tutti.load_object import optional_package
from tutti.records.files import cache_folder
from tutti.records.npz import refuse_larger_than_memory
from tutti.terminal import console_on

MOST_PIXELS: Final = 1 << 26
"""The largest picture: a small file may claim to be far larger."""

_DEEP: Final = ("I", "I;16", "I;16B", "I;16L", "I;16N")
"""Pillow's kinds of grey pictures of 16 bits."""

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
"""Pillow's formats that are opened, whatever a file is called: of the others EPS starts Ghostscript."""

ENDINGS: Final = tuple(ending for endings in _FORMATS.values() for ending in endings)
"""The ends of the names of pictures, without a dot."""


_contents_wanted: ContextVar[bool] = ContextVar("_contents_wanted", default=True)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Leave pictures that have not been decoded before undecoded: those that are opened inside are black."""
    before = _contents_wanted.set(False)
    try:
        yield
    finally:
        _contents_wanted.reset(before)


@dataclass(frozen=True)
class Pictures:
    """Pictures as they are stored.

    Attributes:
        source: the file or folder that has them.
        key: what they depend on: other texts for other pictures.
        names: of each, for messages.
        content: returns the bytes of one, by its number; called by several threads.
    """

    source: Path
    key: Sequence[str]
    names: Sequence[str]
    content: Callable[[int], bytes]


def decoded(pictures: Pictures, size: object = None, skip_bad: bool = False) -> tuple[Array, Indices]:
    """Decode pictures, or map those that were decoded before.

    Args:
        pictures: as they are stored.
        size: height and width, or one number for both, that they are brought to; None: all have the same.
        skip_bad: leave out those that cannot be decoded, and say how many.

    Returns:
        The pictures, 8-bit, of shape (pictures, height, width) or (pictures, 3, height, width); and their
        numbers.

    Raises:
        BadData: one cannot be decoded, or has another size than the first.
        BadOption: `size` is none.
    """
    shape = _size(size)
    text = repr((list(pictures.key), shape, skip_bad))
    place = cache_folder() / "pictures" / hashlib.sha256(text.encode()).hexdigest()[:32]
    files = _Files(*(place.with_name(f"{place.name}{end}.npy") for end in ("", "-good")))
    try:
        mapped, numbers = files.opened()
    except (OSError, ValueError, EOFError):
        # They are not there yet, or cut off.
        looks = _look_at(pictures, shape, skip_bad)
        if _contents_wanted.get():
            _decode(pictures, looks, skip_bad, files)
            mapped, numbers = files.opened()
        else:
            mapped, numbers = np.zeros(looks.shape, np.uint8), np.flatnonzero(~looks.bad)
    if len(numbers) < len(pictures.names):
        print(
            f"{len(pictures.names) - len(numbers):,} of {len(pictures.names):,} pictures of "
            f"{pictures.source} cannot be read and are left out",
            file=sys.stderr,
        )
    found = np.asarray(mapped)[: len(numbers)]
    return (found.transpose(0, 3, 1, 2) if found.ndim == 4 else found), numbers


class _Files(NamedTuple):
    """The files of decoded pictures."""

    values: Path
    good: Path

    def opened(self) -> tuple[Array, Indices]:
        """Map decoded pictures, and read the numbers of those that could be decoded."""
        return np.load(self.values, mmap_mode="r", allow_pickle=False), np.load(self.good, allow_pickle=False)


def decoded_some(
    pictures: Pictures, wanted: Indices | None, size: object = None, skip_bad: bool = False
) -> tuple[Rows, Indices]:
    """Decode pictures, of which some are wanted.

    Args:
        pictures: as they are stored.
        wanted: their numbers, ascending; None: all.
        size: as for `decoded`.
        skip_bad: likewise.

    Returns:
        The pictures that are wanted and could be decoded, and their places among those that are wanted.

    Raises:
        BadData: there is none, or one cannot be decoded.
    """
    found, good = decoded(pictures, size, skip_bad)
    if wanted is None:
        return found, good
    _, at, among = np.intersect1d(good, wanted, return_indices=True)
    if not len(at):
        raise BadData(f"{pictures.source} has no sample with a picture and a target")
    return chosen(found, at), among


def _size(given: object) -> tuple[int, int] | None:
    if given is None:
        return None
    both = given if isinstance(given, list | tuple) else [given, given]
    if len(both) != 2 or not all(type(one) is int and 0 < one <= 1 << 13 for one in both):
        raise BadOption(f"--data.size is {given!r}; give the height and the width in pixels, such as 64,64")
    height, width = both
    assert isinstance(height, int), "it has been looked at"
    assert isinstance(width, int), "it has been looked at"
    return height, width


class _Looks(NamedTuple):
    """The pictures before they are decoded: the shape of all together, and which ones cannot be read."""

    shape: tuple[int, ...]
    bad: NDArray[np.bool_]


def _look_at(pictures: Pictures, size: tuple[int, int] | None, skip_bad: bool) -> _Looks:
    """Look at the beginning of each picture.

    Raises:
        BadData: one cannot be read, or has another size than the first, or memory does not hold all.
    """
    image = optional_package("PIL.Image", "pictures")
    bad = np.zeros(len(pictures.names), dtype=bool)
    shapes = np.zeros((len(bad), 2), np.int64)
    colour = np.zeros(len(bad), dtype=bool)

    def look(number: int) -> None:
        with image.open(BytesIO(pictures.content(number)), formats=tuple(_FORMATS)) as picture:
            if picture.width * picture.height > MOST_PIXELS:
                raise ValueError(f"it claims to have {picture.width:,} x {picture.height:,} pixels")
            shapes[number] = picture.height, picture.width
            if picture.mode == "F":
                raise ValueError(
                    "its pixels are floats, of which 8 bits would be left; give them as NPY files"
                )
            colour[number] = picture.mode not in ("1", "L", *_DEEP)

    _for_each("looking at", pictures, bad, skip_bad, look)
    kept = np.flatnonzero(~bad)
    if not len(kept):
        raise BadData(f"no picture of {pictures.source} can be read")
    height, width = size or tuple(shapes[kept[0]].tolist())
    other = kept[(shapes[kept] != (height, width)).any(axis=1)]
    if size is None and len(other):
        raise BadData(
            f"the picture {pictures.names[other[0]]} of {pictures.source} has {shapes[other[0], 0]} x "
            f"{shapes[other[0], 1]} pixels, {pictures.names[kept[0]]} {height} x {width}; bring all to one "
            "size by --data.size HEIGHT,WIDTH"
        )
    shape = (len(bad), height, width, *((3,) if colour[kept].any() else ()))
    refuse_larger_than_memory(pictures.source, int(np.prod(shape, dtype=object)))
    return _Looks(shape, bad)


def _decode(pictures: Pictures, looks: _Looks, skip_bad: bool, files: _Files) -> None:
    image = optional_package("PIL.Image", "pictures")
    (_, height, width, *colours), bad = looks.shape, looks.bad
    mode = "RGB" if colours else "L"
    try:
        files.values.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=files.values.parent, prefix=f".{files.values.name}.unfinished-") as made:
            folder = Path(made)
            new = _Files(*(folder / file.name for file in files))
            array = np.lib.format.open_memmap(new.values, "w+", np.uint8, looks.shape)
            with new.values.open("r+b") as file:
                # Where the disk is full, a write to mapped memory would kill this process.
                os.posix_fallocate(file.fileno(), 0, new.values.stat().st_size)

            def decode(number: int) -> None:
                if bad[number]:
                    return
                with image.open(BytesIO(pictures.content(number)), formats=tuple(_FORMATS)) as picture:
                    ready = (_reduced(image, picture) if picture.mode in _DEEP else picture).convert(mode)
                    if ready.size != (width, height):
                        ready = ready.resize((width, height), image.Resampling.BILINEAR)
                    array[number] = np.asarray(ready)

            _for_each("decoding", pictures, bad, skip_bad, decode)
            array.flush()
            kept = np.flatnonzero(~bad)
            if len(kept) < len(bad):
                for at, number in enumerate(kept):
                    array[at] = array[number]
                array.flush()
            np.save(new.good, kept)
            for one, place in zip(new, files, strict=True):
                one.replace(place)
    except OSError as error:
        raise BadData(
            f"the pictures of {pictures.source} cannot be decoded into {files.values.parent}, "
            f"{room_left(files.values)}: {error.strerror or error}; set TUTTI_CACHE to a folder that has room"
        ) from error


def _reduced(image: Any, picture: Any) -> Any:
    """Return a grey picture of 16 bits as one of its upper 8: Pillow would make all that is above white."""
    pixels = np.asarray(picture)
    if pixels.min() < 0 or pixels.max() > 0xFFFF:
        raise ValueError("its pixels have more than 16 bits; give them as NPY files")
    return image.fromarray((pixels >> 8).astype(np.uint8))


def _for_each(
    what: str, pictures: Pictures, bad: NDArray[np.bool_], skip_bad: bool, work: Callable[[int], None]
) -> None:
    """Do something with each picture, in threads: decoding does not hold Python's lock."""
    count = len(bad)
    console = console_on(sys.stderr, columns=None)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
    first: dict[int, Exception] = {}
    stop = threading.Event()

    def block(start: int) -> int:
        for number in range(start, min(start + _BLOCK, count)):
            if stop.is_set():
                break
            try:
                work(number)
            except Exception as error:  # a picture may break its decoder in any way
                bad[number] = True
                first[number] = error
                if not skip_bad:
                    stop.set()
        return start

    with progress, ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        task = progress.add_task(f"{what} pictures of {pictures.source.name}", total=count)
        for _ in pool.map(block, range(0, count, _BLOCK)):
            progress.advance(task, _BLOCK)
    if first and not skip_bad:
        number = min(first)
        why: object = first[number]
        if isinstance(why, optional_package("PIL", "pictures").UnidentifiedImageError):
            why = f"it is none of the formats that are read ({', '.join(_FORMATS)})"
        raise BadData(
            f"the picture {pictures.names[number]} of {pictures.source} cannot be read: {why}; "
            "mend it, or leave out such pictures by --data.skip-bad true"
        ) from first[number]


def stamp(path: Path) -> str:
    """Return what changes when a file does."""
    status = path.stat()
    return f"{path.resolve()} {status.st_size} {status.st_mtime_ns}"
