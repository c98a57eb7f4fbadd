"""A request that a run go on with another number of workers: a file in its folder. Needs no torch.

    tutti resize         writes the file ──── waits ────────────────── reads the answer, removes the file
    process of the run         reads the file ── changes the ranks ── writes the answer into the file

The file is written whole or not at all. It may outlive a `tutti resize` that was killed: then the run acts on
it all the same, and the next request replaces it once it has an answer.
"""

from __future__ import annotations

import secrets
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder, with_remedy
from tutti.records.files import make_file, replace_file
from tutti.records.json_lines import Record, parse_record, to_json

REQUEST: Final = "resize.json"

_READ_S: Final = 2.0
"""The longest time until an answer is read by a `tutti resize` that still waits for it."""


@dataclass(frozen=True)
class ResizeRequest(Record):
    """The content of the file: the number of workers, a token of this request, and the run's answer."""

    workers: int
    token: str
    answer: str | None = None
    agreed: bool = False
    warnings: tuple[str, ...] = ()


def request_workers(folder: Path, workers: int) -> ResizeRequest | None:
    """Write a request into the folder of a run; None: there is one that has no answer yet."""
    path = folder / REQUEST
    request = ResizeRequest(workers, secrets.token_hex(8))
    try:
        if (before := read_request(folder)) is not None:
            if before.answer is None or time.time() - path.stat().st_mtime < _READ_S:
                return None
            path.unlink()
        return request if make_file(path, to_json(request).encode()) else None
    except OSError as error:
        if full := with_remedy(error):
            raise full from error
        raise BadRunFolder(
            f"cannot write {path}, by which a run is asked: {error.strerror}; ask as the user who has "
            "started the run"
        ) from error


def read_request(folder: Path) -> ResizeRequest | None:
    """Return the request in the folder of a run, with its answer; None: there is none."""
    try:
        return parse_record((folder / REQUEST).read_bytes(), ResizeRequest)
    except (OSError, ValueError):
        return None


def answer_request(
    folder: Path, request: ResizeRequest, text: str, *, agreed: bool, warnings: tuple[str, ...] = ()
) -> None:
    """Answer a request, unless it was taken back."""
    if read_request(folder) == request:
        answered = replace(request, answer=text, agreed=agreed, warnings=warnings)
        try:
            replace_file(folder / REQUEST, to_json(answered).encode())
        except OSError:
            remove_request(folder, request)
            raise


def remove_request(folder: Path, request: ResizeRequest) -> None:
    """Remove a request, answered or not."""
    found = read_request(folder)
    if found is not None and found.token == request.token:
        with suppress(OSError):
            (folder / REQUEST).unlink()
