"""The records of a run at one moment."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.heartbeat import Heartbeat
from tutti.records.json_lines import Json, JsonLinesFile
from tutti.records.run import EpochRecord, RunStart, Summary
from tutti.records.run_folder import CONFIG, HISTORY, RANKS, RunFolder, refuse_no_folder
from tutti.records.usage import RankUsage, UsageRecord

MARKS: Final = (CONFIG, HISTORY, RANKS)
"""A folder with one of these is a run folder."""


@dataclass(frozen=True)
class Snapshot:
    """The records of a run at one moment."""

    folder: Path
    now: float  # the time of reading, in seconds since 1970
    written: float | None = None  # the time of the newest file
    config: Json | None = None
    history: tuple[EpochRecord, ...] = ()
    summary: Summary | None = None
    starts: tuple[RunStart, ...] = ()
    resumable: bool = False
    beats: tuple[Heartbeat, ...] = ()
    usage: tuple[UsageRecord, ...] = ()
    damage: tuple[str, ...] = ()

    @property
    def start(self) -> RunStart | None:
        """The last of its starts."""
        return self.starts[-1] if self.starts else None

    @property
    def workers(self) -> int:
        """The known number of ranks that train."""
        given = str((self.config or {}).get("workers", ""))
        count = int(given) if given.isdecimal() else 0
        return max([count, *(beat.rank + 1 for beat in self.beats)])

    def usage_of(self, rank: int) -> tuple[RankUsage, float] | None:
        """Return the newest sample of a rank, and its age in seconds."""
        found = [(one, self.now - host.time) for host in self.usage for one in host.ranks if one.rank == rank]
        return min(found, key=lambda sample: sample[1], default=None)


@dataclass
class Watched:
    """A run folder that is read repeatedly; its history is read only if it has changed."""

    folder: Path
    _history: JsonLinesFile[EpochRecord] = field(default_factory=lambda: JsonLinesFile([], []))
    _size: int = 0

    def check(self) -> None:
        """Refuse a path that is no run folder."""
        folder = self.folder
        refuse_no_folder(folder)
        if any(folder.iterdir()) and not any((folder / name).exists() for name in MARKS):
            raise BadRunFolder(
                f"{folder} is no folder of a run: it has none of {', '.join(MARKS)}; give the folder that "
                "'tutti train' writes, or the folder of a run of a comparison"
            )

    def read(self, now: float) -> Snapshot:
        """Read the records as of the time `now`, in seconds since 1970.

        Raises:
            BadRunFolder: the folder is gone, or a file cannot be read.
        """
        if not self.folder.is_dir():
            raise BadRunFolder(f"run folder {self.folder} is gone: it was removed or renamed")
        self._read_history()
        folder = RunFolder(self.folder)
        beats, config, summary, damage = folder.heartbeats(), None, None, []
        with suppress(BadRunFolder):  # It may not be written yet.
            config = folder.config()
        try:
            summary = folder.find(Summary)
        except BadRunFolder as error:
            damage.append(str(error))
        starts = folder.lines(RunStart)
        return Snapshot(
            folder=self.folder,
            now=now,
            written=_newest(folder),
            config=config,
            history=tuple(self._history.records),
            summary=summary,
            starts=tuple(starts.records),
            resumable=folder.resumable,
            beats=tuple(beats.records),
            usage=tuple(folder.last_usage()),
            damage=(*self._history.damage, *beats.damage, *starts.damage, *damage),
        )

    def _read_history(self) -> None:
        path = self.folder / HISTORY
        size = path.stat().st_size if path.exists() else 0
        if size != self._size:
            self._history, self._size = RunFolder(self.folder).lines(EpochRecord), size


def _newest(folder: RunFolder) -> float | None:
    """Return the time of the newest of the run's files."""
    times = []
    for path in (folder.path / CONFIG, folder.path / HISTORY, *folder.usage_files()):
        with suppress(FileNotFoundError):
            times.append(path.stat().st_mtime)
    return max(times, default=None)
