"""The health of a run: its condition, and the ranks in trouble. Only its records are read.

a rank is      if
----------     ------------------------------------------------------------------------------------------
failed         its heartbeat says so
stopped, gone  the sampler of its host finds its process in that state, or another rank has lost it
silent         its last heartbeat is older than `silent_s`: it was stopped, or has died, or its host has
stuck          it lives, but has made no step for that time, and waits for no other rank; or all ranks wait
behind         it is `BEHIND` steps behind the others, and 3 s worth of their steps
late           it came last in most steps of the last epoch
slow           it computes less than half as many samples per second as the others
"""

from __future__ import annotations

import enum
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tutti.errors import PeerLost
from tutti.records.heartbeat import EVERY_S, FAILED, FINISHED, TRAINING, Heartbeat
from tutti.records.stragglers import straggler
from tutti.records.usage import GONE, STOPPED
from tutti.watching.snapshot import Snapshot

SILENT_S: Final = 10.0
"""The seconds without a heartbeat, or without a step, after which a rank is in trouble."""

BEHIND: Final = 100
"""A rank that is behind lacks at least this many steps ..."""

STEPS_LATE_S: Final = 3.0
"""... and the steps of this many seconds, as heartbeats come once a second."""

FRESH_S: Final = 5.0
"""A sample shows the current state up to this age in seconds."""

SLOW: Final = 0.5
"""A rank is slow below this share of the others' samples per second."""

LONG_STEPS: Final = 10.0
"""A rank may be stuck after this many times its usual step."""

_HAS_LOST: Final = f"{FAILED}: {PeerLost.__name__}: "
"""The beginning of the trouble of a rank that lost another one."""

_NAMES_LOST: Final = rf"{PeerLost.__name__}: lost ranks? (\d+(?:, \d+)*)"


class Condition(enum.Enum):
    """The condition of a run."""

    WAITING = "waiting for records"
    RUNNING = "running"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclass(frozen=True)
class RankTrouble:
    """A trouble of a rank."""

    rank: int
    lost: bool  # the run cannot continue without a change
    what: str
    remedy: str
    state: str = ""  # in place of what its heartbeat says

    def __str__(self) -> str:
        return f"rank {self.rank} {self.what}: {self.remedy}"


@dataclass(frozen=True)
class Health:
    """The condition of a run, and the troubles of its ranks."""

    condition: Condition
    findings: tuple[RankTrouble, ...] = ()

    @property
    def well(self) -> bool:
        """True if the run has not failed, and no rank is lost."""
        return self.condition is not Condition.FAILED and not any(one.lost for one in self.findings)


def examine(run: Snapshot, silent_s: float = SILENT_S) -> Health:
    """Judge a run by its records."""
    condition = _condition(run, silent_s)
    if condition in (Condition.WAITING, Condition.FINISHED):
        return Health(condition)
    missed = _missed(run.beats)
    lost = [found for beat in run.beats if (found := _lost(run, beat, silent_s, missed)) is not None]
    named = {one.rank for one in lost}
    well = [beat for beat in run.beats if beat.rank not in named]
    slow: list[RankTrouble] = []
    if condition is Condition.RUNNING:
        slow = [found for beat in well if (found := _late(beat, well)) is not None]
        slow = slow or _awaited(run, well)
        slow = slow or ([] if lost else _stuck(well, silent_s))
    # Ranks with errors come first, and ranks that lost another one come last.
    lost.sort(key=lambda one: 2 if one.what.startswith(_HAS_LOST) else not one.what.startswith(FAILED))
    return Health(condition, (*lost, *slow))


def _condition(run: Snapshot, silent_s: float) -> Condition:
    if run.summary is not None:
        return Condition.FINISHED
    gone = {beat.rank for beat in run.beats if _state(run, beat.rank) == GONE and beat.state != FINISHED}
    ended = [beat for beat in run.beats if beat.state == FAILED or beat.rank in gone]
    if any(run.now - beat.time > silent_s for beat in ended):
        return Condition.FAILED  # The other ranks were stopped, or wait for it.
    ages = [run.now - beat.time for beat in run.beats if beat.state not in (FINISHED, FAILED)]
    fresh = (host for host in run.usage if run.now - host.time <= FRESH_S)
    sampled = any(one.state != GONE for host in fresh for one in host.ranks)
    if sampled or any(age <= silent_s for age in ages):
        return Condition.RUNNING
    if run.resumable and run.beats and all(beat.state == FINISHED for beat in run.beats):
        return Condition.STOPPED
    if not run.beats and (run.written is None or run.now - run.written <= silent_s):
        return Condition.WAITING
    return Condition.FAILED


def _state(run: Snapshot, rank: int) -> str | None:
    """Return the state of the rank's process, if a fresh sample has it."""
    sample = run.usage_of(rank)
    return sample[0].state if sample is not None and sample[1] <= FRESH_S else None


def _missed(beats: Sequence[Heartbeat]) -> dict[int, float]:
    """Return the ranks that others have lost, with the time."""
    found = [(beat.time, re.match(_NAMES_LOST, beat.error or "")) for beat in beats]
    return {int(rank): time for time, match in found if match for rank in match[1].split(", ")}


def _lost(run: Snapshot, beat: Heartbeat, silent_s: float, missed: Mapping[int, float]) -> RankTrouble | None:
    """Return the trouble that keeps the rank from training, if there is one."""
    place, step = f"process {beat.process} on {beat.host}", f"step {beat.step:,}"
    age, state = run.now - beat.time, _state(run, beat.rank)
    if beat.state == FINISHED:
        return None
    word = ""
    if beat.state == FAILED:
        what, remedy = f"{FAILED}: {beat.error}", "its traceback ends the output of the run"
        if what.startswith(_HAS_LOST):
            remedy = "the end of the output says why"
    elif state in STOPPED:
        word, what = "stopped", f"is stopped in {step}"
        remedy = f"{place} got a stop signal; 'kill -CONT {beat.process}' there lets it go on"
    elif state == GONE or beat.time < missed.get(beat.rank, 0.0):
        word, what, remedy = "gone", f"is gone since {step}", f"{place} has ended; see its output"
    elif age > silent_s:
        word, what = "silent", f"has been silent for {age:.0f} s, since {step}"
        remedy = f"is {place} stopped or dead, is the host up, and can it write this folder?"
    else:
        return None
    return RankTrouble(beat.rank, True, what, remedy, word)


def _late(beat: Heartbeat, well: Sequence[Heartbeat]) -> RankTrouble | None:
    """Return how far the rank is behind the others, or how slow it is, if it is."""
    others = [other for other in well if other.rank != beat.rank and other.updates]
    if not others or beat.state != TRAINING:
        return None
    lag = statistics.median(_step_at(beat.time, other) for other in others) - beat.step
    rate = statistics.median(other.steps_per_s for other in others)
    if lag > max(BEHIND, STEPS_LATE_S * rate):
        return RankTrouble(beat.rank, False, f"is {lag:,.0f} steps behind the others", _ask_about(beat))
    usual = statistics.median(other.samples_per_s for other in others)
    if 0 < beat.samples_per_s < SLOW * usual:
        what = f"computes {beat.samples_per_s:,.0f} samples/s, the others {usual:,.0f}"
        return RankTrouble(beat.rank, False, what, _ask_about(beat))
    return None


def _awaited(run: Snapshot, well: Sequence[Heartbeat]) -> list[RankTrouble]:
    """Return the rank that the others waited for in the last epoch, as all make the same steps."""
    late = straggler([[rank] for rank in run.history[-1].ranks]) if run.history else None
    if late is None:
        return []
    what = f"{str(late).removeprefix(f'rank {late.rank} ')}, in epoch {run.history[-1].epoch}"
    return [RankTrouble(late.rank, False, what, _ask_about(beat)) for beat in well if beat.rank == late.rank]


def _ask_about(beat: Heartbeat) -> str:
    return f"what else runs on {beat.host}, and does each rank have a core there? See also --balance"


def _step_at(time: float, beat: Heartbeat) -> float:
    """Estimate the step of a rank at a time near its last heartbeat."""
    return beat.step + (beat.steps_per_s * (time - beat.time) if beat.state == TRAINING else 0.0)


def _stuck(well: Sequence[Heartbeat], silent_s: float) -> list[RankTrouble]:
    """Return the live ranks that make no step and wait for no other rank, or all of them if all wait."""
    stuck = []
    for beat in well:
        usual = 1 / beat.steps_per_s if beat.steps_per_s else EVERY_S
        if beat.state == TRAINING and beat.time - beat.moved > max(silent_s, LONG_STEPS * usual):
            stuck.append(beat)
    found = []
    for beat in [beat for beat in stuck if not beat.waits] or stuck:
        where = f", in {beat.waits}" if beat.waits else ""
        what = f"has made no step for {beat.time - beat.moved:.0f} s{where}"
        remedy = f"'py-spy dump --pid {beat.process}' on {beat.host} shows its stack"
        # The first step of a large model may take long.
        found.append(RankTrouble(beat.rank, beat.steps_per_s > 0, what, remedy))
    return found
