"""The folder of a run: the names of its files, their writing and their reading.

    config.json           the resolved configuration: enough to repeat the run
    data.json             the data as the model saw them: `TrainedOn`
    starts.jsonl          one `RunStart` a line: the start, and each resume
    history.jsonl         one `EpochRecord` a line, appended after each epoch
    history.csv           its figures in columns: train/loss, stages/wait, ...
    summary.json          the finished run: `Summary`
    weights.safetensors   the trained model
    checkpoints/          the states from which the run can go on
    ranks/0.json, ...     the newest `Heartbeat` of each rank, replaced about once a second
    usage.jsonl           one `UsageRecord` a line: what the host of rank 0 does, every half second
    usage-HOST.jsonl      the same of another host that sees the run folder
    learning-rate.svg     the loss against the learning rate, with --lr auto
    trace.json            the time-line of all ranks, with --trace; trace-2.json after a resume
    predictions.npz       outputs for the validation part, with --predictions: `Predictions`
    pipeline.json         the work of the ranks of a pipeline in one step: `PipelineRecord`
    tensorboard/          event files, with --log tensorboard
    mlflow.txt            the number of the run in MLflow, with --log mlflow
    resize.json           a request of tutti resize, until it is answered
    log.txt               what a run of a cross-validation or a search has printed
    error.txt             why it has failed
    .lock                 locked while a job writes the folder
    .claim                locked while a cross-validation or a search works on the run

Files that are not appended to are written under another name and renamed: they are whole or not there. Needs
neither torch nor MPI.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, Final, TypeVar

from tutti.errors import BadRunFolder
from tutti.records.checkpoints import FOLDER as CHECKPOINTS
from tutti.records.checkpoints import present
from tutti.records.files import refusing, replace_file
from tutti.records.folder_lock import LOCK, is_locked, refuse_locked
from tutti.records.heartbeat import Heartbeat
from tutti.records.json_lines import (
    Json,
    JsonLinesFile,
    Record,
    append_line,
    last_record,
    read_all,
    read_lines,
    read_record,
    to_json,
    to_json_lines,
)
from tutti.records.pipeline import PipelineRecord
from tutti.records.preparation import Preparation, TableInputs
from tutti.records.run import EpochRecord, RunStart, Summary
from tutti.records.texts import Shape
from tutti.records.trace import Lane, chrome_trace
from tutti.records.usage import UsageRecord

CONFIG: Final = "config.json"
HISTORY: Final = "history.jsonl"
CSV: Final = "history.csv"
TENSORBOARD: Final = "tensorboard"
WEIGHTS: Final = "weights.safetensors"
PREDICTIONS: Final = "predictions.npz"
RATES: Final = "learning-rate.svg"
RANKS: Final = "ranks"
TRACE: Final = "trace.json"
STARTS: Final = "starts.jsonl"
MLFLOW: Final = "mlflow.txt"

RUNS: Final = Path("runs")
"""The folder of run folders without a given path."""


@dataclass(frozen=True)
class SeenInput(Record):
    """One of the inputs of a data set, as a model saw it; for the scale see `tutti.data.Scale`.

    Without a name the model takes it by position. The first size of a sequence is the longest length.
    """

    name: str
    shape: tuple[int, ...]
    sequence: bool = False
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fill: tuple[float, ...] = ()


@dataclass(frozen=True)
class TrainedOn(Record):
    """A model's training data, as it saw them: enough to apply it to other data."""

    name: str  # of the data set
    classes: int | None  # the number of classes of the model; None: none
    labels: tuple[Any, ...]  # their names: texts, whole numbers or booleans; empty if unknown
    shape: tuple[int, ...]  # of one input
    mean: tuple[float, ...]  # of the inputs' scale, see `tutti.data.Scale`
    std: tuple[float, ...]  # likewise
    outputs: int = 1  # the number of outputs that a model needs
    fill: tuple[float, ...] = ()  # the replacement of missing inputs; empty: none are
    dtype: str = ""  # of the stored inputs, such as "uint8"; empty: unknown
    columns: tuple[str, ...] = ()  # the names of the inputs, if each is a column of a table
    # each of them, if there are several, or sequences; shape and scale are empty then
    inputs: tuple[SeenInput, ...] = ()
    # the weights of classes in the loss, or of labels of 0 and of 1, balanced by the counts of these data, a
    # line for each; empty: there were none
    class_weights: tuple[tuple[float, ...], ...] = ()
    # of the columns of a table as inputs, whose number is `shape`; None: there is no table
    preparation: Preparation | None = None

    @property
    def of_inputs(self) -> Shape:
        """The shape of one input, or of each."""
        if not self.inputs:
            return self.shape
        if self.inputs[0].name:
            return {one.name: one.shape for one in self.inputs}
        shapes = tuple(one.shape for one in self.inputs)
        return shapes if len(shapes) > 1 else shapes[0]

    @property
    def table(self) -> TableInputs | None:
        """The inputs of a prepared table; None: there is none."""
        return None if self.preparation is None else self.preparation.inputs


RECORDS: Final[dict[type[Record], str]] = {
    TrainedOn: "data.json",
    Summary: "summary.json",
    PipelineRecord: "pipeline.json",
}
"""The files that hold one record each."""

LINES: Final[dict[type[Record], str]] = {EpochRecord: HISTORY, RunStart: STARTS}
"""The files that hold one record a line."""

LOG: Final = "log.txt"
ERROR: Final = "error.txt"

BEFORE: Final = (LOCK, LOG, ERROR)
"""The files that may be in a folder before a run begins there."""

R = TypeVar("R", bound=Record)


@dataclass(frozen=True)
class RunFolder:
    """A run folder. Made by `create` and `open`.

    Every method raises `BadRunFolder` for a file that cannot be read or written.
    """

    path: Path

    @classmethod
    def create(cls, path: str | Path | None, model: str, data: str) -> RunFolder:
        """Make the folder of a new run, or use an empty one; by default `runs/DATE-MODEL-DATA`."""
        check_writable(path)
        chosen = Path(path) if path is not None else RUNS / folder_name(model, data)
        with refusing(chosen):
            if path is None:
                chosen = _make_unused(chosen)
        return cls.take(chosen)

    @classmethod
    def take(cls, path: str | Path) -> RunFolder:
        """Begin a new run in a folder that is known to be free."""
        folder = cls(Path(path))
        with refusing(folder.path):
            (folder.path / RANKS).mkdir(parents=True, exist_ok=True)
        return folder

    @classmethod
    def open(cls, path: str | Path) -> RunFolder:
        """Open the folder of a run."""
        folder = cls(Path(path))
        refuse_no_folder(folder.path)
        if not folder.has(CONFIG):
            raise BadRunFolder(
                f"{folder.path} has no {CONFIG}, so it is no folder of a run; give one that 'tutti train' "
                "wrote"
            )
        return folder

    def begin_again(self) -> None:
        """Remove the files that a run resumed from a checkpoint writes again; its history is cut later."""
        with refusing(self.path):
            for name in (CSV, PREDICTIONS, RECORDS[Summary]):
                (self.path / name).unlink(missing_ok=True)
            shutil.rmtree(self.path / TENSORBOARD, ignore_errors=True)
            (self.path / RANKS).mkdir(exist_ok=True)
            for beat in (self.path / RANKS).iterdir():
                beat.unlink()

    def write_config(self, config: Json) -> None:
        """Write the resolved configuration."""
        self._write_json(CONFIG, config)

    def config(self) -> Json:
        """Read the resolved configuration, as JSON values."""
        return read_record(self.path / CONFIG, Json)

    def write(self, record: Record) -> None:
        """Write the run's record of a kind in `RECORDS`."""
        self._write_json(RECORDS[type(record)], record)

    def read(self, kind: type[R]) -> R:
        """Read the run's record of a kind in `RECORDS`."""
        return read_record(self.path / RECORDS[kind], kind)

    def find(self, kind: type[R]) -> R | None:
        """Read the run's record of a kind in `RECORDS`; None if it has left none."""
        return self.read(kind) if self.has(RECORDS[kind]) else None

    def append(self, record: Record, flush: bool = True) -> None:
        """Append a record of a kind in `LINES`; it survives a power cut only if flushed."""
        path = self.path / LINES[type(record)]
        with refusing(path):
            append_line(path, record, flush=flush)

    def lines(self, kind: type[R]) -> JsonLinesFile[R]:
        """Read the records of a kind in `LINES`; none if there are none yet."""
        return read_lines(self.path / LINES[kind], kind)

    def keep(self, kind: type[R], records: Sequence[R]) -> None:
        """Replace the records of a kind in `LINES` by those from which the run continues."""
        lines = "".join(f"{to_json(one)}\n" for one in records)
        self.write_file(LINES[kind], lines.encode(errors="backslashreplace"))

    def write_heartbeat(self, beat: Heartbeat) -> None:
        """Replace the rank's last heartbeat: readers see either of them, whole."""
        # It need not survive a power cut, so it is not flushed to the disk: that would make the rank wait.
        replace_file(self.path / RANKS / f"{beat.rank}.json", to_json(beat).encode() + b"\n", flush=False)

    def heartbeats(self) -> JsonLinesFile[Heartbeat]:
        """Read the newest heartbeat of each rank that has left one, sorted by rank."""
        found = read_all((self.path / RANKS).glob("[0-9]*.json"), Heartbeat)
        found.records.sort(key=lambda beat: beat.rank)
        return found

    def usage_file(self, host: str | None = None) -> Path:
        """Return the file with the samples of a host; by default of rank 0's."""
        return self.path / ("usage.jsonl" if host is None else f"usage-{host}.jsonl")

    def usage_files(self) -> list[Path]:
        """Return the files of samples, rank 0's host first."""
        others = sorted(self.path.glob("usage-*.jsonl"))
        return [path for path in (self.usage_file(), *others) if path.is_file()]

    def usage(self) -> JsonLinesFile[UsageRecord]:
        """Read the samples of all hosts, in the order of time; none if a run has left none."""
        return read_all(self.usage_files(), UsageRecord)

    def last_usage(self) -> list[UsageRecord]:
        """Read the newest readable sample of each host."""
        found = []
        for path in self.usage_files():
            with suppress(OSError):
                found.append(last_record(path, UsageRecord))
        return [record for record in found if record is not None]

    def write_trace(self, lanes: Sequence[Lane]) -> Path:
        """Write the time-line beside those of earlier starts; return the file."""
        names = chain([TRACE], (f"trace-{number}.json" for number in count(2)))
        name = next(name for name in names if not self.has(name))
        return self.write_file(name, json.dumps(chrome_trace(lanes), separators=(",", ":")).encode())

    def write_file(self, name: str, content: bytes) -> Path:
        """Write a file, such as `WEIGHTS`."""
        path = self.path / name
        with refusing(path):
            replace_file(path, content)
        return path

    def error(self) -> str | None:
        """Return why the run has failed, such as its traceback; None: it has not, or is no job."""
        path = self.path / ERROR
        try:
            return path.read_bytes().decode(errors="replace")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadRunFolder(f"cannot read {path}: {error.strerror}") from error

    def write_error(self, text: str) -> None:
        """Write why the run has failed."""
        with refusing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            content = text.rstrip("\n").encode(errors="replace") + b"\n"
            replace_file(self.path / ERROR, content, flush=False)

    @property
    def weights(self) -> Path:
        """The file of the trained weights."""
        return self.path / WEIGHTS

    def has(self, name: str) -> bool:
        """Return whether the run has left a file, such as `CONFIG`."""
        return (self.path / name).exists()

    @property
    def resumable(self) -> bool:
        """True if the run has a checkpoint, good or not."""
        return bool(present(self.path / CHECKPOINTS))

    @property
    def finished(self) -> bool:
        """True if the run has ended."""
        return self.has(RECORDS[Summary])

    @property
    def unfinished(self) -> str:
        """A clause about the progress of an unfinished run."""
        epochs = len(self.lines(EpochRecord).records)
        doing = "is being trained" if is_locked(self.path) else "was interrupted"
        kept = "a" if self.resumable else "no"
        return f"the run {self.path} {doing}, with {epochs} complete epochs and {kept} checkpoint"

    @property
    def next_step(self) -> str:
        """The advice for an unfinished run."""
        if is_locked(self.path):
            return f"wait until it is finished ('tutti watch {self.path}' shows how it is)"
        if self.resumable:
            return f"finish it: tutti train --resume {self.path}"
        return f"train it again, with --checkpoint 1m or the like: tutti train --config {self.path} --out ..."

    def _write_json(self, name: str, values: object) -> None:
        self.write_file(name, to_json_lines(values).encode())


def run_of(place: Path) -> tuple[Path, bool]:
    """Return the folder of the run that a place belongs to, and whether it is one of its checkpoints."""
    inside = place.absolute().parent.name == CHECKPOINTS and not (place / CONFIG).is_file()
    return (place.absolute().parent.parent, True) if inside else (place, False)


def refuse_no_folder(path: Path) -> None:
    """Raise BadRunFolder if there is no folder `path`."""
    if not path.is_dir():
        what = "is a file, not a folder" if path.exists() else "does not exist"
        raise BadRunFolder(f"run folder {path} {what}; give the folder that 'tutti train' writes")


def refuse_used(folder: Path, before: Collection[str] = ()) -> None:
    """Refuse to begin in a folder with other files than those that may precede a run."""
    with refusing(folder):
        if folder.is_dir() and any(place.name not in before for place in folder.iterdir()):
            raise BadRunFolder(
                f"the folder {folder} is not empty; name another one with --out, go on with what is in it by "
                "--resume, or delete it"
            )


def check_writable(path: str | Path | None) -> None:
    """Refuse a run folder that cannot be written, before the run. Nothing is left behind."""
    folder = Path(path) if path is not None else RUNS
    with refusing(folder):
        if path is not None and folder.is_dir():
            refuse_locked(folder)
            refuse_used(folder, BEFORE)
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
        # Permission bits say nothing to root or on a read-only disk; only writing shows it.
        with tempfile.TemporaryFile(dir=existing) as probe:
            probe.write(b"\0")
            probe.flush()


def folder_name(model: str, data: str) -> str:
    """Return DATE-MODEL-DATA, in characters that every file system accepts."""
    date = datetime.now().strftime("%Y-%m-%d-%H%M%S")
    return "-".join([date, *(_word(name) for name in (model, data))])


def _word(name: str) -> str:
    """Return the last part of a path or of `file.py:factory`, in plain characters."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", re.split(r"[/:\\]", name.rstrip("/"))[-1]).strip("-.") or "unnamed"


def _make_unused(path: Path) -> Path:
    """Make the folder `path`, numbered if it exists: never one that another job has just made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1_000_000):
        candidate = path if number == 1 else path.with_name(f"{path.name}-{number}")
        with suppress(FileExistsError):
            candidate.mkdir()
            return candidate
    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
