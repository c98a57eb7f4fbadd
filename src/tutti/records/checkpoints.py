"""The files of checkpoints: their names, how they become whole, and how damage is found.

    RUN/checkpoints/
        step-00001234/                 a checkpoint: the state of a run after 1234 steps
            rank-00000.safetensors     the tensors of rank 0
            rank-00000.json            what else it knows, and what its tensors are
            ...
            run.json                   the facts of the run
            manifest.json              the size and the SHA-256 of each of these files, and of itself
        latest                         a link to the one that was written last

    1  the files are written and flushed to the disk in a folder of another name
    2  the manifest is, and the folder
    3  that folder is renamed, and the one around it flushed: from here on there is a new checkpoint
    4  `latest` is moved
    5  checkpoints beyond the kept ones are removed

A process that is killed at any moment, and a power cut, leave what was whole before, or the new one too.
Needs neither torch nor MPI.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadCheckpoint
from tutti.records.json_lines import Json, Record, decode

FOLDER: Final = "checkpoints"
LATEST: Final = "latest"
MANIFEST: Final = "manifest.json"
RUN: Final = "run.json"

FORMAT: Final = 1
"""The version of the files."""

_BEFORE: Final = ".before"
"""The end of the name of a checkpoint whose place a new one of the same step takes."""

_UNFINISHED: Final = ".unfinished"
_NAME: Final = re.compile(rf"step-(\d{{8,}})({re.escape(_BEFORE)})?")
_CHUNK: Final = 1 << 20
REMEDY: Final = "; resume from another one"  # A report of skipped checkpoints leaves it out.


@dataclass(frozen=True)
class FileEntry(Record):
    """The size of a file in bytes, and its SHA-256."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest(Record):
    """Contents of a checkpoint."""

    step: int  # the number of steps done
    ranks: int  # the number of ranks with a state
    files: dict[str, FileEntry]  # by their names; all but the manifest
    score: float | None = None  # of the model, higher is better; None: unknown
    format: int = FORMAT  # the version of the files


def step_folder(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return folder / f"step-{step:08d}"


def unfinished_folder(folder: Path, step: int, attempt: str) -> Path:
    """Return the path of a checkpoint while it is being written."""
    return folder / f".step-{step:08d}.{attempt}{_UNFINISHED}"


def tensors_file(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:05d}.safetensors"


def head_file(rank: int) -> str:
    """Return the name of the file with the rest of a rank's state."""
    return f"rank-{rank:05d}.json"


def present(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, good or not, in the order of their steps."""
    if not folder.is_dir():
        return []
    named = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    checkpoints = sorted((int(match[1]), match[2] is None, path) for match, path in named if match)
    return [path for _, _, path in checkpoints]


def verify(path: Path) -> Manifest:
    """Compare all files of a checkpoint with its manifest, and return that."""
    manifest = read_manifest(path)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda item: _compare(path / item[0], item[1]), manifest.files.items()))
    return manifest


def read_manifest(path: Path) -> Manifest:
    """Read the manifest of a checkpoint, and compare it with its own SHA-256."""
    try:
        text = (path / MANIFEST).read_bytes()
    except FileNotFoundError as error:
        raise _bad(path, "it has no manifest.json" if path.is_dir() else "there is no such folder") from error
    except OSError as error:
        raise _bad(path, f"manifest.json cannot be read ({error.strerror})") from error
    try:
        values = json.loads(text)
        values.pop("sha256")
        if _sealed(values) != text:
            raise _bad(path, "manifest.json is damaged")
        if values["format"] > FORMAT:
            raise _bad(path, f"it has format {values['format']}, and this version reads up to {FORMAT}")
        manifest = decode(Manifest, values)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise _bad(path, "manifest.json is damaged") from error
    match = _NAME.fullmatch(path.resolve().name)
    if match and int(match[1]) != manifest.step:
        raise _bad(path, f"manifest.json belongs to step {manifest.step}")
    names = [name(rank) for rank in range(len(manifest.files) // 2) for name in (tensors_file, head_file)]
    if {RUN, *names} != set(manifest.files) or len(names) != 2 * manifest.ranks:
        raise _bad(path, "manifest.json lists other files than a checkpoint has")
    return manifest


def write_file(path: Path, memory: int, offset: int, size: int) -> FileEntry:
    """Write a stretch of another file to a new file, and flush it to the disk."""
    digest, buffer = hashlib.sha256(), memoryview(bytearray(min(size, _CHUNK)))
    with open(path, "wb", buffering=0) as file:
        for at in range(0, size, _CHUNK):
            chunk = buffer[: min(_CHUNK, size - at)]
            if os.preadv(memory, [chunk], offset + at) != len(chunk):
                raise OSError(errno.EIO, "the snapshot is too short", str(path))
            digest.update(chunk)
            while chunk:
                chunk = chunk[os.write(file.fileno(), chunk) :]
        os.fsync(file.fileno())
    return FileEntry(size, digest.hexdigest())


def commit(unfinished: Path, manifest: Manifest) -> None:
    """Make a checkpoint of a folder that has all of its files; see above for the steps."""
    folder, final = unfinished.parent, step_folder(unfinished.parent, manifest.step)
    with open(unfinished / MANIFEST, "wb") as file:  # [2]
        file.write(_sealed(asdict(manifest)))
        file.flush()
        os.fsync(file.fileno())
    flush_folder(unfinished)
    if final.exists() or final.is_symlink():  # [3]
        # It counts until the new one is there.
        before = final.with_name(final.name + _BEFORE)
        remove(before)
        final.rename(before)
    unfinished.rename(final)
    flush_folder(folder)


def tidy(folder: Path, step: int, keep: int) -> None:
    """Move `latest` to the checkpoint of a step; remove all but the last `keep` and the best one.

    Those of later steps are of a course that was given up: the run has gone on from an earlier one.
    """
    latest, link = folder / LATEST, folder / f".{LATEST}{_UNFINISHED}"
    link.unlink(missing_ok=True)  # [4]
    link.symlink_to(step_folder(folder, step).name)
    if latest.is_dir() and not latest.is_symlink():  # Programs that copy folders make one of it.
        remove(latest)
    link.rename(latest)
    flush_folder(folder)
    failure: OSError | None = None
    for path in _not_kept(present(folder), step, keep):  # [5]
        try:
            remove(path)
        except OSError as error:
            failure = failure or error
    if failure is not None:
        raise failure


def remove(path: Path) -> None:
    """Remove a checkpoint, which is none any more as soon as that begins."""
    gone = path.with_name(f".{path.name.lstrip('.')}.removed{_UNFINISHED}")
    _delete(gone)
    with suppress(FileNotFoundError):
        _delete(path.rename(gone))


def remove_unfinished(folder: Path) -> None:
    """Remove what writers have left that were killed; what cannot be removed stays until the next time."""
    for path in folder.glob(f".*{_UNFINISHED}"):
        with suppress(OSError):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a folder, or a link in its place."""
    with suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _not_kept(checkpoints: list[Path], step: int, keep: int) -> list[Path]:
    """Return the checkpoints to remove after one of a step was written."""
    whole = [
        path
        for path in checkpoints
        if (match := _NAME.fullmatch(path.name)) and not match[2] and int(match[1]) <= step
    ]
    scores = {path: _score(path) for path in whole}
    top = max(whole, key=lambda path: scores[path], default=None)
    kept = {*whole[-keep:], *([top] if top is not None and scores[top] > -math.inf else [])}
    return [path for path in checkpoints if path not in kept]


def _score(path: Path) -> float:
    with suppress(BadCheckpoint):
        score = read_manifest(path).score
        if score is not None and not math.isnan(score):
            return score
    return -math.inf


def _compare(path: Path, entry: FileEntry) -> None:
    """Compare a file with what the manifest says of it."""
    name = path.name
    try:
        with open(path, "rb") as file:
            found = FileEntry(
                os.fstat(file.fileno()).st_size, hashlib.file_digest(file, "sha256").hexdigest()
            )
    except FileNotFoundError as error:
        raise _bad(path.parent, f"{name} is missing") from error
    except OSError as error:
        raise _bad(path.parent, f"{name} cannot be read ({error.strerror})") from error
    if found.size != entry.size:
        raise _bad(path.parent, f"{name} has {found.size:,} bytes instead of {entry.size:,}")
    if found != entry:
        raise _bad(path.parent, f"{name} has other contents than were written (SHA-256)")


def _sealed(values: Json) -> bytes:
    """Return a manifest as it is written, with the SHA-256 of all else in it."""
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()
    return json.dumps({"sha256": digest, **values}, indent=1).encode() + b"\n"


def _bad(path: Path, why: str) -> BadCheckpoint:
    return BadCheckpoint(f"checkpoint {path} cannot be used: {why}{REMEDY}")


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, so that a renamed file survives a power cut."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
