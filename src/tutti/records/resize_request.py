"""A request to change the number of a run's workers: a file in its folder. Needs no torch.

    tutti resize         writes the file ──── waits ────────────────── reads the answer, removes the file
    process of the run         reads the file ── changes the ranks ── writes the answer into the file

The file is written whole or not at all. It may outlive a `tutti resize` that was killed: the run still acts
on it, and the next request replaces it once it has an answer.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder, with_remedy
from tutti.records.files import make_file, replace_file
from tutti.records.json_lines import Record, parse_record, to_json

REQUEST: Final = "resize.json"


@dataclass(frozen=True)
class ResizeRequest(Record):
    """The content of the file: the number of workers, and the run's answer."""

    workers: int
    answer: str = ""
    agreed: bool = False


def request_workers(folder: Path, workers: int) -> bool:
    """Write a request into the folder of a run; False: one is still unanswered."""
    path, before = folder / REQUEST, read_request(folder)
    if before is not None and before.answer:
        remove_request(folder)
    try:
        return make_file(path, to_json(ResizeRequest(workers)).encode())
    except OSError as error:
        raise with_remedy(error) or BadRunFolder(
            f"cannot write {path}, by which a run is asked: {error.strerror}; ask as the user who has "
            "started the run"
        ) from error


def read_request(folder: Path) -> ResizeRequest | None:
    """Return the request in the folder of a run, with its answer; None: there is none."""
    try:
        return parse_record((folder / REQUEST).read_bytes(), ResizeRequest)
    except (OSError, ValueError):
        return None


def answer_request(folder: Path, request: ResizeRequest, text: str, *, agreed: bool) -> None:
    """Answer a request, unless it was withdrawn."""
    if read_request(folder) == request:
        try:
            answered = replace(request, answer=text, agreed=agreed)
            replace_file(folder / REQUEST, to_json(answered).encode())
        except OSError:
            remove_request(folder)


def remove_request(folder: Path) -> None:
    """Remove a request, answered or not."""
    with suppress(OSError):
        (folder / REQUEST).unlink()
