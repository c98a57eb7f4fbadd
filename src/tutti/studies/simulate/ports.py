"""The ports of a cluster. Each port carries one message at a time."""

from __future__ import annotations

from typing import NamedTuple


class ReplayPort:
    """A port: its last busy period, and the earlier ones that are not over yet.

    Messages are sent in the order of time, but one with a long route arrives late: a message that arrives
    before one that was sent earlier uses the gap.
    """

    __slots__ = ("begin", "earlier", "free")

    def __init__(self) -> None:
        self.begin, self.free = 0.0, 0.0
        self.earlier: list[tuple[float, float]] = []

    def squeeze_in(self, at: float, seconds: float, now: float) -> float:
        """Carry a message in the first gap after `at` that is long enough; return when it begins."""
        periods = [period for period in self.earlier if period[1] > now]
        periods.append((self.begin, self.free))
        for first, last in periods:
            if first >= at + seconds:
                break
            at = max(at, last)
        periods.append((at, at + seconds))
        periods.sort()
        self.begin, self.free = periods.pop()
        self.earlier = periods
        return at


class PortUse(NamedTuple):
    """A part of a message's route."""

    port: ReplayPort
    s_per_byte: float
    latency_s: float


def send(way: tuple[PortUse, ...], nbytes: float, at: float, now: float) -> tuple[float, float]:
    """Send bytes at `at`; return when the sender is done, and when the last byte arrives.

    Later calls send nothing before `now`.
    """
    done, tail, slowest = -1.0, 0.0, 0.0
    for port, s_per_byte, latency_s in way:
        seconds = nbytes * s_per_byte
        if at < port.begin:
            at = port.squeeze_in(at, seconds, now)
            end = at + seconds
        else:
            free = port.free
            if at <= free:
                at = free
            else:
                if free > now:
                    port.earlier.append((port.begin, free))
                port.begin = at
            end = port.free = at + seconds
        if done < 0:
            done = end
        # The last byte leaves a fast port no sooner than it arrives from a slow one.
        if seconds >= slowest:
            tail, slowest = end + latency_s, seconds
        else:
            tail = (tail if tail > end else end) + latency_s
        at += latency_s
    return done, tail
