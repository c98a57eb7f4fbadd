"""Data sets in files that the user names: an NPZ file, a pair of IDX files, or a folder with IDX files."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from tutti.data.contents import PARTS, Contents, from_keys
from tutti.data.formats import GZIP_MAGIC, ZIP_MAGIC, read_idx, read_npz, read_start
from tutti.errors import BadData

_IDX_NAME = re.compile(
    r"(?P<set>.*?)(?P<part>train|test|t10k|val|valid|validation)[-_.](?P<kind>images|labels)"
    r"([-_.]idx\d)?([-_.]ubyte|\.idx)?(\.gz)?$"
)
"""Such as train-images-idx3-ubyte.gz, t10k-labels.idx1-ubyte, emnist-letters-test-images-idx3-ubyte.gz."""

_WORDS = (("images", "labels"), ("inputs", "targets"), ("idx3", "idx1"))


def read_path(path: Path) -> Contents:
    """Read the data set in a file or folder; a file's first bytes tell its format, not its name.

    Raises:
        BadData: it is missing, empty, broken or of another kind, or files that belong to it are missing.
    """
    if not path.exists():
        raise BadData(f"there is no {path}; {_nearest(path)}")
    if path.is_dir():
        return _folder(path)
    start = read_start(path)
    if start.startswith(ZIP_MAGIC):
        return from_keys(read_npz(path), path.stem, str(path))
    if start.startswith((GZIP_MAGIC, b"\0\0")):
        inputs = read_idx(path)
        return Contents(_stem(path), {"train": (inputs, read_idx(_labels_beside(path)))})
    raise BadData(
        f"{path} is of no known kind: it begins with the bytes {start.hex(' ')}; give an IDX file "
        f"(00 00 ...), an IDX.gz file (1f 8b ...) or an NPZ file (50 4b ...)"
    )


def _folder(folder: Path) -> Contents:
    there = sorted(p.name for p in folder.iterdir() if p.is_file())
    found: dict[tuple[str, str, str], Path] = {}
    for name in there:
        match = _IDX_NAME.fullmatch(name)
        if match:
            part = "test" if match["part"] == "t10k" else PARTS[match["part"]]
            # Sorted names put an unpacked file before the same one as .gz; the first is kept.
            found.setdefault((match["set"], part, match["kind"]), folder / name)
    sets = sorted({key[0] for key in found})
    if len(sets) > 1:
        raise BadData(
            f"{folder} holds {len(sets)} data sets ({', '.join(sets)}); name one file with images instead"
        )
    listed = ", ".join(there[:10]) + (", ..." if len(there) > 10 else "") or "no file"
    parts: dict[str, tuple[object, object]] = {}
    for part in ("train", "validation", "test"):
        images, labels = (found.get((s, part, kind)) for kind in ("images", "labels") for s in (sets or [""]))
        if images and labels:
            parts[part] = read_idx(images), read_idx(labels)
        elif images or labels or part == "train":
            lacks = "labels" if images else "images" if labels else "images and labels"
            raise BadData(
                f"{folder} lacks the {part} {lacks}; it has: {listed}; expected train-images-idx3-ubyte "
                f"and train-labels-idx1-ubyte (also as .gz, and t10k-... for the test part)"
            )
    return Contents(folder.resolve().name, parts)


def _labels_beside(inputs: Path) -> Path:
    """Return the file with the labels of an IDX file, found in its folder by its name."""
    name = inputs.name
    for word, other in _WORDS:
        name = name.replace(word, other)
    if name == inputs.name:
        raise BadData(
            f"{inputs} has no labels: its name does not say how they are called; name the pair like "
            f"'train-images-idx3-ubyte' and 'train-labels-idx1-ubyte'"
        )
    for option in (name, name.removesuffix(".gz"), name.removesuffix(".gz") + ".gz"):
        if (inputs.parent / option).is_file():
            return inputs.parent / option
    missing = inputs.parent / name
    raise BadData(f"the labels of {inputs} are missing: there is no {missing}; {_nearest(missing)}")


def _nearest(path: Path) -> str:
    folder = path.parent
    while not folder.is_dir():
        path, folder = folder, folder.parent
    names = sorted(p.name for p in folder.iterdir())
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    if near:
        return f"did you mean {folder / near[0]}?"
    listed = ", ".join(names[:10]) + (", ..." if len(names) > 10 else "") or "nothing"
    return f"{folder.resolve()} has: {listed}"


def _stem(path: Path) -> str:
    return path.name.removesuffix(".gz").removesuffix(".idx")
