"""A training that is disturbed, beside one that is left alone: what it survived, what that cost. No torch."""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Final

from tutti.launch.signals import raised
from tutti.records.run_folder import WEIGHTS
from tutti.studies.chaos.disturbance import Disturbance, Event, Promise
from tutti.studies.chaos.script import ADD, REMOVE, Moment, moments
from tutti.studies.chaos.training import Leavings, LossSaid, Training, orphans_adopted

RUN: Final = "run"
TWIN: Final = "undisturbed"


@dataclass(frozen=True)
class Question:
    """The question of a study.

    Attributes:
        words: the training, as the words after `tutti`; without `--out`.
        out: its run folder; None: it is thrown away.
        promise: what the training is to survive.
        kinds: of the faults.
        every_s: the mean time between a recovery and the next fault.
        most: how many faults there are at most; None: as many as the training is to survive.
        seed: of the script.
        compare: train once more, undisturbed, in the end.
        repeats: the training ends with the same weights each time, if nothing disturbs it.
        quiet: keep to itself what the training prints.
    """

    words: Sequence[str]
    promise: Promise
    kinds: Collection[str]
    out: Path | None = None
    every_s: float = 2.0
    most: int | None = None
    seed: int = 0
    compare: bool = False
    repeats: bool = False
    quiet: bool = False


@dataclass(frozen=True)
class Twin:
    """The same training, left alone.

    Attributes:
        seconds: from its first step to its end.
        apart: the largest difference between an element of its final weights and of the disturbed one's; 0:
            they are equal, bit for bit; None: one of them has left none, or others.
    """

    seconds: float
    apart: float | None


@dataclass(frozen=True)
class Outcome:
    """The answer.

    Attributes:
        events: the faults.
        alarms: losses that were reported without a fault.
        hung: the training did not go on, and was ended.
        code: its exit code.
        said: its last lines on standard error.
        seconds: from its first step to its end.
        left: the processes and temporary files that it has left behind.
        shared: new files in /dev/shm that nobody uses, of this training or of another program of the user's.
        must_equal: whether its weights are to be those of the twin.
        twin: that, if it was asked for.
    """

    events: Sequence[Event]
    alarms: Sequence[LossSaid]
    hung: bool
    code: int
    said: Sequence[str]
    seconds: float
    left: Sequence[str]
    shared: Sequence[str]
    must_equal: bool = False
    twin: Twin | None = None

    @property
    def survived(self) -> int:
        """The number of events after which the training went on."""
        return sum(event.survived for event in self.events)

    @property
    def recoveries_s(self) -> list[float]:
        """The times from a loss to the next step of all ranks."""
        return [event.next_s for event in self.events if event.said and event.next_s is not None]

    @property
    def broken(self) -> list[str]:
        """The promises that were not kept, a sentence each."""
        found = []
        if self.hung:
            found.append("it did not go on, and was ended")
        elif self.code != 0:
            found.append(f"it ended with exit code {self.code}")
        if self.survived < len(self.events):
            found.append(f"it survived {self.survived} of {len(self.events)} faults")
        if self.left:
            found.append(f"it left behind: {', '.join(self.left)}")
        if self.must_equal and self.twin is not None and self.twin.apart != 0:
            found.append("its final weights are not those of the undisturbed training")
        return found


def disturb(question: Question, tell: Callable[[Event], None]) -> Outcome:
    """Train, and disturb the training.

    Args:
        question: what is to be found out.
        tell: is told of each fault once the training goes on.
    """
    # The training is a process of its own, which would train on.
    ending = raised(signal.SIGTERM, signal.SIGHUP)
    with ending, tempfile.TemporaryDirectory(prefix="tutti-chaos-") as name, orphans_adopted():
        folder = Path(name)
        out = question.out or folder / RUN
        script = moments(question.seed, question.every_s, question.kinds)
        found = _train(question, out, folder / "temporary", script, tell)
        if not question.compare or found.broken:
            return found
        beside = _train(question, folder / TWIN, folder / "of-twin", islice(script, 0), tell)
        apart = None if beside.code else weights_apart(out / WEIGHTS, folder / TWIN / WEIGHTS)
        return Outcome(
            *(found.events, found.alarms, found.hung, found.code, found.said, found.seconds),
            left=[*found.left, *beside.left],
            shared=[*found.shared, *beside.shared],
            must_equal=question.repeats
            and question.promise.replaces
            and not {ADD, REMOVE} & {*question.kinds},
            twin=Twin(beside.seconds, apart),
        )


def _train(
    question: Question, out: Path, scratch: Path, script: Iterator[Moment], tell: Callable[[Event], None]
) -> Outcome:
    scratch.mkdir()
    leavings = Leavings(scratch)
    training = Training(question.words, out, scratch, question.quiet)
    try:
        faults = Disturbance(training, question.promise, tell)
        faults.follow(script, question.kinds, question.most)
        code, ended = training.wait(), time.monotonic()
    except BaseException:
        training.end()
        training.wait()
        raise
    seconds = 0.0 if faults.began is None else ended - faults.began
    found = faults.events, faults.alarms, faults.hung, code, training.lines, seconds
    return Outcome(*found, leavings.found(), leavings.shared())


def weights_apart(one: Path, other: Path) -> float | None:
    """The largest difference between two files of weights.

    Returns:
        0 if they are equal, bit for bit; None if one is not there, or they have other parameters.
    """
    if not (one.exists() and other.exists()):
        return None
    import torch
    from safetensors.torch import load_file

    first, second = load_file(one), load_file(other)
    if {name: it.shape for name, it in first.items()} != {name: it.shape for name, it in second.items()}:
        return None
    pairs = [(it.reshape(-1), second[name].reshape(-1)) for name, it in first.items()]
    if all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
        return 0.0
    apart = max(float((a.double() - b.double()).abs().nan_to_num(torch.inf).max()) for a, b in pairs)
    # Zeros of two signs differ in their bits alone.
    return apart or float(torch.finfo(torch.float64).tiny)


def p95(values: Sequence[float]) -> float:
    """The value that 95 of 100 do not exceed, of at least one."""
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def summary(found: Outcome, losses: int) -> list[str]:
    """What is to be said at the end, a line each.

    Args:
        found: the answer.
        losses: how many the training is to survive, as `--max-failures` says.
    """
    events = found.events
    named = sum(event.named for event in events)
    lines = [
        f"survived {found.survived} of {len(events)} faults; rank and cause were named rightly in {named}"
    ]
    if not events and found.code == 0:
        lines.append(
            "nothing was tried: it was over before the first fault came (train longer, or lower --every), or "
            "--max-failures allows fewer losses than each of --events brings"
        )
    if found.alarms:
        lines.append(f"lost without a fault: {'; '.join(alarm.why for alarm in found.alarms)}")
    if times := found.recoveries_s:
        redone = sum(event.redone for event in events)
        lines.append(
            f"from a loss to the next step of all: median {median(times):.2f} s, p95 {p95(times):.2f} s; "
            f"{redone:,} step{'' if redone == 1 else 's'} made again in all"
        )
    if back := [event.back_s for event in events if event.said and event.back_s is not None]:
        lines.append(f"until it was as far as before: median {median(back):.2f} s, p95 {p95(back):.2f} s")
    if found.twin is not None:
        lines += _beside(found, found.twin)
    if sum(len(event.said) for event in events) >= losses:
        lines.append(f"there were no more losses, as it is to survive {losses} (--max-failures)")
    lines.append(f"left behind: {', '.join(found.left) or 'nothing'}")
    if found.shared:
        lines.append(f"new in shared memory, by this or another program: {', '.join(found.shared)}")
    return lines


def _beside(found: Outcome, twin: Twin) -> list[str]:
    """The training beside the one that was left alone."""
    if found.seconds > 0:
        share = twin.seconds / found.seconds
        times = f"{found.seconds:.1f} s beside {twin.seconds:.1f} s undisturbed: {share:.0%} of its speed"
    else:
        times = "it made no step"
    if twin.apart is None:
        weights = "final weights: one of them has none"
    elif twin.apart == 0:
        weights = "final weights: equal to those of the undisturbed training, bit for bit"
    else:
        weights = f"final weights: up to {twin.apart:.2g} apart from those of the undisturbed training"
    return [times, weights]
