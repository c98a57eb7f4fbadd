"""The folder of a farm: the names of its files, their writing and their reading.

    farm.json             what the farm was asked, and its jobs: `FarmPlan`
    splits.npz            the rows of each fold
    data.npz              the data, where they were given as arrays
    block                 the ranks of each job, in all launches: results depend on it
    threads               how many each rank has, in all launches: results depend on it in their last bits
    launches/*/           what each launch does: events.jsonl, usage.jsonl
    jobs/NAME/            the run folder of a job: `tutti.records.run_folder`

The state of a job is the state of its run folder. Needs neither torch nor MPI.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Final

from tutti.errors import BadOption, BadRunFolder
from tutti.records.files import make_file, refusing, unfinished_file
from tutti.records.folder_lock import is_locked
from tutti.records.json_lines import (
    Json,
    JsonLinesFile,
    Record,
    parse_record,
    read_all,
    read_record,
    to_json,
)
from tutti.records.launches import EVENTS, JOBS, USAGE, Launch, all_launches
from tutti.records.run_folder import ERROR, RunFolder, refuse_used

FARM: Final = "farm.json"
SPLITS: Final = "splits.npz"
DATA: Final = "data.npz"
BLOCK: Final = "block"
THREADS: Final = "threads"

_NAME: Final = re.compile(r"[A-Za-z0-9_=+,@-][A-Za-z0-9_=+,@.-]*")


class JobState(Enum):
    """The state of a job."""

    WAITING = "waiting"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


@dataclass(frozen=True)
class FarmPlan(Record):
    """The kind of study, such as "cv", and its question; a resumed farm must have the same.

    `jobs` has the configuration of each job that is known from the beginning.
    """

    kind: str
    question: Json
    jobs: dict[str, Json] = field(default_factory=dict)


@dataclass(frozen=True)
class FarmEvent(Record):
    """The beginning or the end of a job on a block of a launch; each launch numbers its own blocks."""

    time: float  # in seconds since 1970
    event: str  # "began" or "ended"
    job: str
    block: int
    state: str = ""  # of a job that has ended, a `JobState`
    seconds: float = 0.0  # of the block's work on it
    why: str = ""  # it has stopped or failed
    launch: str = ""


@dataclass(frozen=True)
class FarmFolder:
    """The folder of a farm. Made by `begin` and `open`.

    Every method raises `BadRunFolder` for a file that cannot be read or written.
    """

    path: Path

    @classmethod
    def begin(
        cls,
        path: str | Path,
        kind: str,
        question: Json,
        jobs: Mapping[str, Json] | None = None,
        *,
        resume: bool = False,
    ) -> FarmFolder:
        """Make the folder of a new farm, or open the folder of an earlier one.

        Raises:
            BadOption: the existing farm has another plan.
            BadRunFolder: something else is there, or the folder cannot be written.
        """
        plan, folder = FarmPlan(kind, question, dict(jobs or {})), cls(Path(path))
        if not (resume and (folder.path / FARM).is_file()):
            # Another launch may be about to make the same one.
            begun = folder.path.glob(f"{unfinished_file(Path(FARM)).name}*")
            refuse_used(folder.path, [one.name for one in begun])
            with refusing(folder.path):
                folder.path.mkdir(parents=True, exist_ok=True)
                # Last: without it there is no farm.
                if make_file(folder.path / FARM, to_json(plan, indent=2).encode() + b"\n"):
                    return folder
            if not resume:
                refuse_used(folder.path)
        folder._refuse_other(plan)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> FarmFolder:
        """Open the folder of a farm."""
        folder = cls(Path(path))
        if not (folder.path / FARM).is_file():
            what = f"has no {FARM}" if folder.path.is_dir() else "does not exist"
            raise BadRunFolder(
                f"{folder.path} {what}, so it is no folder of a farm; give one that 'tutti cv' or "
                "'tutti tune' wrote"
            )
        return folder

    @cached_property
    def plan(self) -> FarmPlan:
        """The plan of the farm."""
        return read_record(self.path / FARM, FarmPlan)

    @property
    def splits(self) -> Path:
        """The file with the rows of each fold."""
        return self.path / SPLITS

    def settle(self, what: str, wanted: int) -> int:
        """Return the first launch's decision on `THREADS` or `BLOCK`: `wanted`, if this is the first."""
        with refusing(self.path):
            mine = make_file(self.path / what, f"{wanted}\n".encode())
        return wanted if mine else self.settled(what) or wanted

    def settled(self, what: str) -> int | None:
        """Return the first launch's number; None: there is none yet."""
        path = self.path / what
        try:
            return int(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise BadRunFolder(f"cannot read {path}: {error}; delete it") from error

    @property
    def usage(self) -> list[Path]:
        """The files with the samples of cores, one for each launch."""
        return [file for file in self._of_launches(USAGE) if file.is_file()]

    def launch(self) -> Launch:
        """Begin to work on the farm, together with other launches."""
        return Launch(self.path)

    @property
    def worked_on(self) -> bool:
        """True if a launch works on the farm."""
        return any(map(is_locked, all_launches(self.path)))

    def job(self, name: str) -> Path:
        """Return the run folder of a job."""
        if not all(_NAME.fullmatch(part) for part in name.split("/")):
            raise BadOption(
                f"a job cannot have the name '{name}'; use letters, digits and any of _=+,@.- with / between "
                "the parts, none of which begins with a dot"
            )
        return self.path / JOBS / name

    def state(self, name: str) -> JobState:
        """Return the state of a job, by its run folder and the lock on it."""
        folder = RunFolder(self.job(name))
        if folder.finished:
            return JobState.FINISHED
        if is_locked(folder.path):
            return JobState.RUNNING
        if folder.has(ERROR):
            return JobState.FAILED
        return JobState.STOPPED if folder.resumable else JobState.WAITING

    def clear_error(self, name: str) -> None:
        """Remove the error of a job that is retried."""
        with refusing(self.job(name)), suppress(FileNotFoundError, NotADirectoryError):
            (self.job(name) / ERROR).unlink()

    def events(self) -> JsonLinesFile[FarmEvent]:
        """Read the events of all launches, in the order of time, with blocks numbered over all of them."""
        found, numbers = read_all(self._of_launches(EVENTS), FarmEvent), dict[tuple[str, int], int]()
        for at, event in enumerate(found.records):
            number = numbers.setdefault((event.launch, event.block), len(numbers))
            found.records[at] = replace(event, block=number)
        return found

    def _of_launches(self, file: str) -> list[Path]:
        return [folder / file for folder in all_launches(self.path)]

    def _refuse_other(self, plan: FarmPlan) -> None:
        differ = differences(FarmFolder.open(self.path).plan, plan)
        if differ:
            raise BadOption(
                f"{self.path} is the folder of another farm: {'; '.join(differ)}; give what it was begun "
                "with, or name another folder with --out"
            )


def differences(before: FarmPlan, now: FarmPlan) -> list[str]:
    """Name the fields in which two plans differ, each as "NAME is X (was Y)"; a missing option is none."""
    if before.kind != now.kind:
        return [f"it is of '{before.kind}', not '{now.kind}'"]
    # As it would be read again: a tuple is a list then.
    now = parse_record(to_json(now), FarmPlan)
    asked, known = now.question, before.question
    options = sorted(key for key in {*known, *asked} if known.get(key) != asked.get(key))
    if options:
        return [
            f"{key.replace('_', '-')} is {_shown(asked, key)} (was {_shown(known, key)})" for key in options
        ]
    for job in sorted({*before.jobs, *now.jobs}):
        was, is_now = before.jobs.get(job, {}), now.jobs.get(job, {})
        if other := sorted(key for key in {*was, *is_now} if was.get(key) != is_now.get(key)):
            return [f"its job '{job}' is another, by {', '.join(one.replace('_', '-') for one in other)}"]
    return []


def _shown(options: Json, key: str) -> str:
    value = options.get(key)
    return "none" if value is None else str(value)
