"""The ports of a cluster, each of which carries one message at a time."""

from __future__ import annotations

from collections import defaultdict

from tutti.studies.simulate.cluster import PortUse


class Ports:
    """Ports, by number. Messages are sent in the order of time, and one with a long way comes late.

    Of each port the last busy period is known, and the earlier ones that are not over yet: a message that
    comes before one that was sent earlier takes the time in between.
    """

    def __init__(self) -> None:
        self._begin: dict[int, float] = defaultdict(float)
        self._free: dict[int, float] = defaultdict(float)
        self._earlier: dict[int, list[tuple[float, float]]] = defaultdict(list)

    def send(self, way: tuple[PortUse, ...], nbytes: float, at: float, now: float) -> tuple[float, float]:
        """Send bytes at `at`; returns when the sender is done, and when the last byte arrives.

        Nothing is sent before `now` after this.
        """
        begin, free = self._begin, self._free
        done, tail, slowest = -1.0, 0.0, 0.0
        for port, s_per_byte, latency_s in way:
            seconds = nbytes * s_per_byte
            if at < begin[port]:
                at = self._squeeze_in(port, at, seconds, now)
                end = at + seconds
            else:
                if at <= free[port]:
                    at = free[port]
                else:
                    if free[port] > now:
                        self._earlier[port].append((begin[port], free[port]))
                    begin[port] = at
                end = free[port] = at + seconds
            if done < 0:
                done = end
            # The last byte leaves a fast port no sooner than it comes there from a slow one.
            if seconds >= slowest:
                tail, slowest = end + latency_s, seconds
            else:
                tail = max(tail, end) + latency_s
            at += latency_s
        return done, tail

    def _squeeze_in(self, port: int, at: float, seconds: float, now: float) -> float:
        """Carry a message in the first gap from `at` on that is long enough; returns its begin."""
        periods = [period for period in self._earlier[port] if period[1] > now]
        periods.append((self._begin[port], self._free[port]))
        for first, last in periods:
            if first >= at + seconds:
                break
            at = max(at, last)
        periods.append((at, at + seconds))
        periods.sort()
        self._begin[port], self._free[port] = periods.pop()
        self._earlier[port] = periods
        return at
