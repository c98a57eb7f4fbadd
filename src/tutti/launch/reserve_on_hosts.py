"""Ranks on hosts that prepare themselves while others work: for a loss, or as somebody has asked for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

from tutti.errors import PeerLost, TuttiError, UserError, in_one_line, no_process
from tutti.launch.crew import Orders
from tutti.launch.mpirun import HASTE_S, PROBE_S, answering
from tutti.launch.placement import Placement
from tutti.launch.ranks_on_hosts import RanksOnHosts
from tutti.launch.stop_request import Stopping
from tutti.launch.succession import NO_RESERVE, OTHERS_PREPARE, RESERVES_LOST, Others
from tutti.terminal import warn_on_stderr


class RanksInReserve:
    """Ranks on hosts that have started and imported everything before they are needed.

    Args:
        entry: the function that they will call.
        wanted: the work of those that are ready when a rank is lost; its payload, by which they prepare
            themselves, may be empty. None: there are to be none, or not yet.
        stopping: tells of signals.
        others: those whom somebody has asked for instead.
    """

    def __init__(
        self, entry: str, wanted: Callable[[], Orders | None], stopping: Stopping, others: Others
    ) -> None:
        self._entry, self._wanted, self._stopping, self._others = entry, wanted, stopping, others
        self._ranks: RanksOnHosts | None = None
        self._asked: Orders | None = None
        self._lost = 0

    def look(self, begins: bool = True) -> bool:
        """Start them once they are wanted; say so if they have ended, and start others a few times.

        Args:
            begins: they may be started now: those before them train. While these begin, their cores are
                theirs.

        Returns:
            Whether they take over at once, as somebody has asked for them.
        """
        stops = self._stopping.page.requested
        if stops:
            self._others.note_stop()
        asked = None if stops else self._others.asked_for()
        if asked is not self._asked:
            self.close()
            self._asked = asked
        if self._ranks is not None and not self._ranks.live:
            self._note_end(self._ranks)
        elif begins and self._ranks is None:
            self._begin()
        ready = self._asked is not None and self._ranks is not None and self._ranks.ready
        return ready and self._others.may_take_over() and self._others.take_over() is not None

    def _note_end(self, ranks: RanksOnHosts) -> None:
        """Have others prepare themselves, unless these would end as well."""
        self.close()
        ended = ranks.why_ended()
        if self._asked is not None:
            self._others.refuse(ended or TuttiError("they have ended"))
            return
        # An exception would come again.
        again = ended is None or isinstance(ended, PeerLost)
        self._lost = self._lost + 1 if again else RESERVES_LOST
        what = OTHERS_PREPARE if self._lost < RESERVES_LOST else NO_RESERVE
        why = "" if ended is None else f" ({in_one_line(str(ended))})"
        warn_on_stderr(f"the ranks in reserve have ended{why}; {what}")

    def _begin(self) -> None:
        orders = self._asked
        if orders is None and self._lost < RESERVES_LOST:
            orders = self._wanted()
        if orders is None:
            return
        try:
            self._ranks = RanksOnHosts(
                self._entry, orders.payload, orders.placement, goes_on=True, waits=True
            )
        except (OSError, UserError) as error:
            refusal = no_process(error) if isinstance(error, OSError) else error
            if self._asked is not None:
                self._others.refuse(refusal)
                return
            # Those that train need them only if one of them is lost.
            self._lost = RESERVES_LOST
            warn_on_stderr(f"there are no ranks in reserve ({refusal}); {NO_RESERVE}")

    def answering(
        self, hosts: Sequence[str], patience_s: float = PROBE_S, lost: Collection[str] = ()
    ) -> list[str]:
        """Return those of the hosts that answer: where they live nobody is asked (see `answering`).

        Args:
            hosts: all of them.
            patience_s: how long to wait for an answer.
            lost: those that are asked anyway, as it may be seen a moment later that they live there no more.
        """
        there = set[str]() if self._ranks is None else self._ranks.hosts_there(HASTE_S) - set(lost)
        others = [host for host in hosts if host not in there]
        soon = time.monotonic() + PROBE_S

        def over() -> bool:
            # Whoever has asked the run to stop does not wait for those that may be back.
            return self._stopping.over() or (self._stopping.page.requested and time.monotonic() > soon)

        asked = answering(others, patience_s, over)
        return [host for host in hosts if host in there or host in asked]

    def take(self, payload: bytes, placement: Placement) -> RanksOnHosts | None:
        """Have them begin; None if there are none with this placement, and then none are left."""
        ranks = self._ranks
        # One that was stopped would keep all waiting, and new ones are no slower than those that still begin.
        usable = ranks is not None and ranks.live and ranks.prepared
        if ranks is None or not usable or ranks.placement.hosts != placement.hosts:
            self.close()
            return None
        self._ranks, self._asked, self._lost = None, None, 0
        ranks.need(payload)
        return ranks

    def close(self) -> None:
        """End them."""
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            with ranks:
                return
