"""Crews of one job, one after the other: the next takes over when one has lost a rank. No torch.

    fork server ─┬─ branch ── crew       works ──────── ✝ ended
                 ├─ branch ── reserve         prepares, waits ── is the crew: works ──────
                 └─ branch ── reserve                                   prepares, waits ──

Without a reserve the next crew is forked once a rank is lost, and prepares itself while the others are ended.

Each crew comes from a fork server of its own, so that the ends of one do not touch the other. What the ranks
of the reserve prepare, and what they wait for, is theirs to know. Where no other ranks can be started, the
run ends with the loss and the reason.
"""

from __future__ import annotations

import selectors
import time
from contextlib import ExitStack
from typing import Final, Protocol

from tutti.errors import PeerLost, TuttiError, UserError, no_process
from tutti.launch.crew import Crew, Orders
from tutti.launch.fork_server import GRACE_S
from tutti.launch.fork_server_client import ForkServer, fork_server
from tutti.launch.stop_request import Stopping
from tutti.terminal import warn_on_stderr

RESERVE_S: Final = 0.25
"""The time that a crew works before its reserve is prepared, which takes its cores meanwhile."""

SOON_S: Final = 0.01
"""Time between two looks whether those who are prepared are to take over."""

RESERVES_LOST: Final = 3
"""The reserves of one crew that may be lost before it works without."""

OTHERS_PREPARE: Final = "others prepare themselves"
NO_RESERVE: Final = "from here on new ones are started when one is lost"


class Others(Protocol):
    """Ranks that somebody has asked for, to take over from those that work."""

    def asked_for(self) -> Orders | None:
        """Return their work; None: nobody wants others.

        It is the same object each time, until they have taken over or yet others are wanted.
        """

    def may_take_over(self) -> bool:
        """Tell whether they, who are prepared, are to take over now, or still to wait."""

    def take_over(self) -> Orders | None:
        """Have them take over; returns their work, None if they cannot."""

    def refuse(self, why: TuttiError) -> None:
        """Have them be wanted no more, as they cannot take over."""

    def note_stop(self) -> None:
        """Have nobody be asked for, as the ranks are to stop."""


class Succession(Protocol):
    """The plan for the case that ranks are lost, or others asked for."""

    @property
    def others(self) -> Others:
        """Those whom somebody asks for."""

    def reserve(self) -> Orders | None:
        """Return the work of ranks that prepare themselves and wait; None: nobody is to, or not yet."""

    def after(self, lost: PeerLost) -> Orders:
        """Return the work of those that go on.

        Raises:
            PeerLost: nobody does.
        """

    def release(self) -> None:
        """Let those go on that have prepared themselves, as the others are gone."""


class Line:
    """The crews of a job.

    Args:
        entry: the function of the ranks.
        stop: the file of their `StopPage`.
        succession: the plan.
        hang_timeout_s: the time in which each rank that trains has to make a step; None: any.
    """

    def __init__(self, entry: str, stop: int, succession: Succession, hang_timeout_s: float | None) -> None:
        self._entry, self._stop, self._hang_timeout_s = entry, stop, hang_timeout_s
        self._succession = succession
        self._servers = ExitStack()
        self._server: ForkServer | None = None
        self._selector = selectors.DefaultSelector()
        self._crew: Crew | None = None
        self._reserve: Crew | None = None
        self._reserve_for: Orders | None = None
        self._without_reserve, self._reserves_lost = False, 0
        self._prepared = False

    def follow(self, orders: Orders, stopping: Stopping) -> tuple[Crew, TuttiError | None]:
        """Have the crews work until one is done, none goes on, or a signal ends all.

        Args:
            orders: of the first.
            stopping: tells of signals.

        Returns:
            The last crew, and what has ended it.
        """
        self._selector.register(stopping, selectors.EVENT_READ, lambda: None)
        crew, since = self._begin(orders), time.monotonic()
        self._crew, lost = crew, None
        while not stopping.over():
            look_s = SOON_S if self._prepared else RESERVE_S
            limits = [look_s, stopping.patience_s(), crew.patience_s()]
            for key, _ in self._selector.select(min(limit for limit in limits if limit is not None)):
                key.data()
            outcome = crew.outcome()
            if outcome is None:
                late = time.monotonic() - since > RESERVE_S
                if not late or not self._look_after_reserve(stopping):
                    continue
                others = self._succession.others.take_over()
                if others is None:
                    continue
                orders = others
            elif not outcome.begun and lost is not None:
                return crew, lost.adding(str(outcome.error))
            elif isinstance(outcome.error, PeerLost):
                try:
                    orders = self._succession.after(outcome.error)
                except PeerLost as last:
                    return crew, last
                except OSError as error:  # Too many files may be open; the loss is still to be named.
                    return crew, outcome.error.adding(str(no_process(error)))
                lost = outcome.error
            else:
                return crew, outcome.error
            try:
                crew, since = self._replace(orders), time.monotonic()
            except (OSError, UserError) as error:
                why = no_process(error) if isinstance(error, OSError) else error
                return crew, why if lost is None else lost.adding(str(why))
        return crew, None

    def close(self) -> None:
        """End all ranks."""
        for crew, grace_s in ((self._reserve, 0.0), (self._crew, GRACE_S)):
            if crew is not None:
                crew.unregister(self._selector)
                crew.end(grace_s)
        self._servers.close()
        self._selector.close()

    def _begin(self, orders: Orders) -> Crew:
        if self._server is None or not self._server.runs:
            placement = orders.placement
            server = fork_server(placement.threads or 1, crowded=bool(placement.warnings))
            self._server = self._servers.enter_context(server)
        with ExitStack() as unless_begun:
            branch = self._server.branch(self._entry)
            unless_begun.callback(branch.close)
            crew = Crew(branch, self._entry, orders, self._stop, None, self._hang_timeout_s)
            unless_begun.pop_all()
        crew.register(self._selector)
        return crew

    def _replace(self, orders: Orders) -> Crew:
        """End the crew; returns the next one, which prepares itself meanwhile if it can.

        Raises:
            OSError, UserError: none can be started, or the others cannot be ended.
        """
        reserve, late = self._reserve, None
        if reserve is not None and not (reserve.is_prepared and reserve.orders.placement == orders.placement):
            # Ranks that still prepare themselves may take long, or fail: new ones are no slower.
            self._reserve, late = None, reserve
            if late.orders is orders:
                warn_on_stderr("a rank that was to take over has ended by now; others are started instead")
            late.kill()
        if self._reserve is None and orders.waits:
            self._reserve = self._begin(orders)
        if late is not None:
            self._end(late)  # Before any gate is opened.
        self._end_crew()
        after, self._reserve, self._reserves_lost = self._reserve, None, 0
        self._prepared = False
        self._crew = after or self._begin(orders)
        self._succession.release()
        return self._crew

    def _end_crew(self) -> None:
        if self._crew is not None:
            crew, self._crew = self._crew, None
            self._end(crew)

    def _look_after_reserve(self, stopping: Stopping) -> bool:
        """Have ranks prepare themselves; returns whether they are to take over at once."""
        if stopping.page.requested:
            self._succession.others.note_stop()
        asked = None if stopping.page.requested else self._succession.others.asked_for()
        if self._reserve is not None and self._reserve_for is not asked:
            self._end_reserve()
        if self._reserve is None:
            self._begin_reserve(asked)
        elif (outcome := self._reserve.outcome(watched=False)) is not None:
            reserve = self._end_reserve()
            if stopping.page.requested:
                self._without_reserve = True  # The signal may have reached them, who have nothing to save.
            elif asked is not None:
                self._succession.others.refuse(outcome.error or TuttiError("they have ended"))
            elif not outcome.begun:
                self._do_without(f"there are no ranks in reserve ({outcome.error})")
            else:
                self._note_reserve_ended(reserve, outcome.error)
        self._prepared = asked is not None and self._reserve is not None and self._reserve.is_prepared
        return self._prepared and self._succession.others.may_take_over()

    def _begin_reserve(self, asked: Orders | None) -> None:
        self._reserve_for = asked
        try:
            orders = self._succession.reserve() if asked is None and not self._without_reserve else asked
            self._reserve = None if orders is None else self._begin(orders)
        except (OSError, UserError) as error:
            # Those that train need them only if one of them is lost.
            why = no_process(error) if isinstance(error, OSError) else error
            if asked is not None:
                self._succession.others.refuse(why)
            else:
                self._do_without(f"there are no ranks in reserve ({why})")

    def _end_reserve(self) -> Crew:
        assert self._reserve is not None, "it has begun"
        reserve, self._reserve = self._reserve, None
        self._end(reserve)
        return reserve

    def _note_reserve_ended(self, reserve: Crew, error: TuttiError | None) -> None:
        """Have others prepare themselves, unless these would end as well."""
        self._reserves_lost += 1
        again = isinstance(error, PeerLost) and self._reserves_lost < RESERVES_LOST and not reserve.starved
        if again:
            warn_on_stderr(f"the ranks in reserve have ended ({error}); {OTHERS_PREPARE}")
        else:
            self._do_without(f"the ranks in reserve have ended ({error})")

    def _do_without(self, why: str) -> None:
        self._without_reserve = True
        warn_on_stderr(f"{why}; {NO_RESERVE}")

    def _end(self, crew: Crew) -> None:
        crew.unregister(self._selector)
        crew.end(0.0)
        if not crew.answers:
            raise UserError("the process that forks the ranks does not answer; it may have been stopped")
