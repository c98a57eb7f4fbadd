"""The plans made on this machine, in the cache folder. Needs no torch."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from tutti.launch.cores import cpuinfo
from tutti.load_object import names_object
from tutti.records.files import cache_folder, replace_file
from tutti.records.json_lines import Record, parse_record, to_json, to_json_lines
from tutti.records.run import now, versions
from tutti.run.config import OF_LONG_RUNS, TrainConfig
from tutti.studies.autotune.candidates import Candidate, Choices

_OF_CHOICES: Final = ("workers", "threads", "layout")
_OF_SPLITS: Final = ("validation", "test", "split", "seed")
_OF_RUNS: Final = ("epochs", "steps", "validate", "callbacks", "log", "out")
_LEFT_OUT: Final = {*OF_LONG_RUNS, *_OF_CHOICES, *_OF_SPLITS, *_OF_RUNS} - {"weights"}
"""The fields of a configuration that change no step, or that a plan chooses."""


@dataclass(frozen=True)
class RememberedPlan(Record):
    """The pick of a plan."""

    pick: Candidate
    update_s: float  # seconds of an update
    samples: int  # the number of training samples
    allowed_s: float  # the seconds that measuring could take
    date: str = field(default_factory=lambda: now()[:10])


def place_of(config: TrainConfig, choices: Choices, dared: tuple[str, ...], cores: int) -> Path | None:
    """Return the file of a plan; None if its speed depends on code that may change unseen.

    The name is a digest of model, data, batch, optimizer, loss and their options, the choices, the user's
    code, the state of data files, the processor, its usable cores, and the versions.
    """
    fields = {name: value for name, value in config.as_json().items() if name not in _LEFT_OUT}
    words = [word for value in fields.values() if isinstance(value, str) for word in value.split(",")]
    try:
        files = [_state(word) for word in words]
    except OSError:
        return None
    machine = [cpuinfo("model name"), cpuinfo("flags"), cores, versions()]
    key = to_json([fields, files, asdict(choices), dared, machine])
    return cache_folder() / "plans" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"


def find(place: Path | None) -> RememberedPlan | None:
    """Return the remembered plan; None if there is none, or it cannot be read."""
    with suppress(OSError, ValueError):
        return None if place is None else parse_record(place.read_bytes(), RememberedPlan)
    return None


def keep(place: Path | None, remembered: RememberedPlan) -> None:
    """Remember a plan if there is a folder for it."""
    if place is None:
        return
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        replace_file(place, to_json_lines(remembered).encode(), flush=False)


def _state(word: str) -> object:
    """Return what identifies the content of the file that an option names; None: it names no file."""
    if names_object(word):
        file = Path(word if word.endswith(".py") else word.rpartition(":")[0])
        if file.suffix != ".py":
            raise FileNotFoundError(word)
        return str(file.resolve()), hashlib.sha256(file.read_bytes()).hexdigest()
    file = Path(word).expanduser()
    if not file.exists():
        return None
    state = file.stat()
    return str(file.resolve()), state.st_size, state.st_mtime_ns
