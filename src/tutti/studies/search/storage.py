"""The place of a study: Optuna's journal or SQLite in the folder of the farm, or a database. No torch.

FARM/study.json       where it is, by which name, and whose it is: `StudyPlace`
FARM/study.journal    Optuna's journal
FARM/study.db         SQLite, with --storage sqlite
FARM/study.lock       locked while a launch chooses a trial
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import optuna
from optuna.exceptions import StorageInternalError
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import StudyDirection
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool
from typing_extensions import override

from tutti.errors import BadOption, BadRunFolder, TuttiError
from tutti.records.farm_folder import FarmFolder
from tutti.records.files import locked_file, make_file, refusing
from tutti.records.json_lines import Record, read_record, to_json
from tutti.studies.search.objectives import Aim

JOURNAL: Final = "journal"
SQLITE: Final = "sqlite"

FILES: Final = {JOURNAL: "study.journal", SQLITE: "study.db"}
"""The files of studies in the folder of their farm."""

PLACE: Final = "study.json"
TURN: Final = "study.lock"

NAME: Final = "tutti"
"""The name of a study in the folder of its farm."""

OWNER: Final = "farm"
"""The attribute of a study that says whose it is."""

_PASSWORD: Final = re.compile(r"(://[^/@:]*):[^/@]*@")


@dataclass(frozen=True)
class StudyPlace(Record):
    """The place of a study.

    Attributes:
        storage: "journal", "sqlite", or the URL of a database, without a password.
        name: of the study there.
        farm: tells it from the studies of other farms.
    """

    storage: str
    name: str
    farm: str


class StudyFile(JournalFileBackend):
    """Optuna's journal, locked by the kernel: whoever is killed leaves no lock behind.

    It is not flushed to the disk: if the power goes, the trials that it had not kept are asked for again,
    with the same parameters.
    """

    @override
    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with open(self._file_path, "a+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            _drop_unfinished_line(file)
            file.write(b"".join(json.dumps(log, separators=(",", ":")).encode() + b"\n" for log in logs))


def _drop_unfinished_line(file: BinaryIO) -> None:
    """Remove what a full disk has left of the last line: with another one after it nothing could be read."""
    end = file.seek(0, os.SEEK_END)
    if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
        file.truncate(os.pread(file.fileno(), end, 0).rfind(b"\n") + 1)


def open_study_of(folder: FarmFolder, aims: Sequence[Aim], storage: str | None = None) -> optuna.Study:
    """Open the study of a farm, or make it.

    Args:
        folder: of the farm.
        aims: the objectives.
        storage: "journal", "sqlite", or the URL of a database; None: where it is, at first the journal.

    Raises:
        BadOption: it is elsewhere, cannot be opened, or is that of another farm.
        BadRunFolder: the folder cannot be written.
    """
    place = _place(folder, storage)
    with turn_in(folder):
        if place.storage in FILES:
            file = folder.path / FILES[place.storage]
            found = open_study(file if place.storage == JOURNAL else f"sqlite:///{file}", NAME, aims)
        else:
            # The password is only in what was given.
            found = open_study(storage or place.storage, place.name, aims)
        owner = found.user_attrs.get(OWNER)
        if owner is None and not found.get_trials(deepcopy=False):
            found.set_user_attr(OWNER, place.farm)
        elif owner != place.farm:
            raise BadOption(
                f"the study '{place.name}' in {place.storage} is that of another search; name another folder "
                "with --out, as the study has its name, or delete the study there"
            )
    return found


def turn_in(folder: FarmFolder) -> Any:
    """Return a context that one launch on a farm is in at a time."""
    return locked_file(folder.path / TURN)


def open_study(where: Path | str, name: str, aims: Sequence[Aim]) -> optuna.Study:
    """Open a study, or make it.

    Args:
        where: the file of a journal, or the URL of a database.
        name: of the study.
        aims: its objectives.

    Raises:
        BadOption: the database cannot be opened.
        BadRunFolder: the file is damaged.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    directions = [StudyDirection.MAXIMIZE if aim.higher else StudyDirection.MINIMIZE for aim in aims]
    if isinstance(where, Path):
        try:
            return _made(JournalStorage(StudyFile(str(where))), name, directions)
        except (ValueError, KeyError) as error:
            raise BadRunFolder(
                f"{where} is damaged ({error}): bring back a copy of it, or begin again in another folder "
                "with --out"
            ) from error
    shown = without_password(where)
    try:
        # Others may write for a moment.
        waits = {"timeout": 60} if where.startswith("sqlite") else {}
        # A connection for each access: a trial may take longer than a server keeps silent ones.
        storage = RDBStorage(where, engine_kwargs={"poolclass": NullPool, "connect_args": waits})
        return _made(storage, name, directions)
    except ImportError as error:
        raise BadOption(
            f"--storage {shown} needs a driver: {error}; for PostgreSQL: pip install 'tutti[postgresql]'"
        ) from error
    except (StorageInternalError, SQLAlchemyError, ValueError, OSError) as error:
        raise BadOption(
            f"--storage {shown} cannot be opened: {without_password(_cause(error))}; give journal, sqlite, "
            "or a URL such as postgresql://USER@HOST/DATABASE of a server that runs"
        ) from error


@contextmanager
def database_kept(place: str) -> Iterator[None]:
    """Say what to do when a database does not answer any more.

    Raises:
        TuttiError: it does not.
    """
    try:
        yield
    except (StorageInternalError, SQLAlchemyError) as error:
        raise TuttiError(
            f"the study in {place} cannot be reached: {without_password(_cause(error))}; when it can be "
            "again, go on by the same command with --resume"
        ) from error


def without_password(text: str) -> str:
    """Return a URL, or a text with one, without its password."""
    return _PASSWORD.sub(r"\1@", text)


def place_of(folder: FarmFolder) -> StudyPlace:
    """Return where the study of a farm is.

    Raises:
        BadRunFolder: that cannot be read.
    """
    return read_record(folder.path / PLACE, StudyPlace)


def said_place(folder: FarmFolder) -> str:
    """Return where the study of a farm is, as it is shown."""
    place = place_of(folder)
    if place.storage in FILES:
        return str(folder.path / FILES[place.storage])
    return f"'{place.name}' in {place.storage}"


def _place(folder: FarmFolder, storage: str | None) -> StudyPlace:
    """Note where the study of a new farm is to be, or return where that of an old one is."""
    if storage is not None and storage not in FILES and "://" not in storage:
        raise BadOption(
            f"--storage is '{storage}'; give journal or sqlite, or the URL of a database, such as "
            "postgresql://USER@HOST/DATABASE"
        )
    file, asked = folder.path / PLACE, without_password(storage or JOURNAL)
    name = NAME if asked in FILES else folder.path.absolute().name
    with refusing(file):
        if not file.is_file():
            make_file(file, to_json(StudyPlace(asked, name, secrets.token_hex(8))).encode() + b"\n")
    place = place_of(folder)
    if storage is not None and place.storage != asked:
        raise BadOption(
            f"the study of {folder.path} is in {place.storage}, not in {asked}; leave --storage out, or name "
            "another folder with --out"
        )
    return place


def _made(storage: BaseStorage, name: str, directions: list[StudyDirection]) -> optuna.Study:
    return optuna.create_study(storage=storage, study_name=name, directions=directions, load_if_exists=True)


def _cause(error: BaseException) -> str:
    """Return what a driver has said, which is at the bottom of all."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
