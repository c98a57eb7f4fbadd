"""Answering those who ask a run for another number of workers: on the side of the run. Needs no torch.

    asked ── ranks prepare themselves ── a copy of the state is wanted, and taken ── they take over: agreed
               │ are lost, take too long         │ the run stops or ends
               └──────────────────────── refused ┘

The other side is `tutti.run.resize`.
"""

from __future__ import annotations

import shlex
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder, TuttiError, UserError
from tutti.launch.crew import Orders
from tutti.launch.rank_processes import out_of_memory_kills
from tutti.records.resize_request import Answerer, ResizeRequest, answer, remove_forgotten, requested
from tutti.records.run_folder import RunFolder
from tutti.run.lineup import Lineup, ranks_text
from tutti.run.train_job import TrainJob
from tutti.terminal import say_on_stderr, warn_on_stderr

PREPARE_S: Final = 600.0
"""The longest time in which ranks that were asked for get prepared: one may be stopped, and all wait."""


@dataclass(frozen=True)
class _Asked:
    """Other ranks that somebody has asked for, and that prepare themselves.

    Attributes:
        folder: of the run, where it was asked.
        request: the one for them.
        job: theirs.
        orders: likewise.
        kills_before: the `out_of_memory_kills` before they were started.
        ready: the time when all of them were prepared last; at first, when they were started.
        copies: that had been taken when they were prepared; None: they are not.
    """

    folder: Path
    request: ResizeRequest
    job: TrainJob
    orders: Orders
    kills_before: int
    ready: float
    copies: int | None = None


class ResizeAnswers:
    """The requests to one run, one after the other.

    Args:
        lineup: who trains.
    """

    def __init__(self, lineup: Lineup) -> None:
        self._lineup, self._memory = lineup, lineup.memory
        self._asked: _Asked | None = None
        self._answerer: Answerer | None = None
        self._answered, self._lost_during = "", ""

    def asked_for(self) -> Orders | None:
        """The work of other ranks that are to take over once they are prepared; None: nobody wants that."""
        try:
            self._look()
        except BadRunFolder as gone:
            self.refuse(gone)  # The folder is, and those who train do not need it.
        except OSError:
            pass  # Too many files may be open.
        return None if self._asked is None else self._asked.orders

    def _look(self) -> None:
        """Look at what is asked for.

        Raises:
            BadRunFolder: the folder is gone.
        """
        folder = self._memory.place.folder
        if folder is not None and self._answerer is None:
            self._answerer = Answerer(folder)
        request = None if folder is None else requested(folder)
        if folder is None or request is None or request.token == self._answered:
            self.forget()
        elif self._memory.place.whole and (self._asked is None or self._asked.request != request):
            self.forget()
            self._asked = self._prepared_for(folder, request)
        elif self._asked is not None and time.monotonic() - self._asked.ready > PREPARE_S:
            self.refuse(TuttiError(f"they were not ready within {PREPARE_S / 60:g} minutes"))

    def may_take_over(self) -> bool:
        """Tell whether a copy of the state was taken since they were prepared: no step is to be lost.

        That takes as long as the longest time between two steps, in which the run may validate.
        """
        asked, taken = self._asked, self._memory.place.copies_taken
        assert asked is not None, "they were asked for"
        if asked.copies is None:
            self._memory.want_copy(True)
        before = taken if asked.copies is None else asked.copies
        self._asked = replace(asked, ready=time.monotonic(), copies=before)
        return taken > before

    def take_over(self) -> Orders | None:
        """Have those take over who were asked for; returns their work, None if they cannot."""
        asked, before = self._asked, self._lineup.placement.workers
        assert asked is not None, "they were asked for"
        why = f"somebody asked for {ranks_text(asked.request.workers)}"
        try:
            batch = self._lineup.change_to(asked.job, asked.orders.placement, why)
        except BadRunFolder as gone:
            self.refuse(gone)
            return None
        now = self._lineup.placement
        text = f"going on with {ranks_text(now.workers)} instead of {before}{batch}"
        say_on_stderr(f"{text}, as was asked")
        self._answer(asked.folder, asked.request, text, agreed=True, warnings=now.warnings)
        return asked.orders

    def refuse(self, why: TuttiError) -> None:
        """Say that those who were asked for cannot take over."""
        if self._asked is not None:
            asked, here = self._asked, self._lineup.placement.workers
            goes_on = f"the run goes on with {ranks_text(here)} as before"
            self.forget()
            self._refuse(asked.folder, asked.request, f"the new ranks cannot take over, and {goes_on}: {why}")

    def note_stop(self) -> None:
        """Refuse what anybody asks for, as the run is to stop."""
        self._refuse_all("the run has been asked to stop; it goes on with others by", "-n {workers}")

    def note_loss(self) -> None:
        """Prepare others no more who may be why ranks were lost, as these would be lost again."""
        if self._asked is None:
            return
        if out_of_memory_kills() > self._asked.kills_before:
            self.refuse(TuttiError("the memory ran out while they prepared themselves; ask for fewer"))
        elif self._asked.request.token == self._lost_during:
            self.refuse(TuttiError("twice ranks were lost while they prepared themselves"))
        else:
            self._lost_during = self._asked.request.token

    def forget(self) -> None:
        """Have no others be prepared, until the next look at what is asked for."""
        if self._asked is not None:
            self._asked = None
            self._memory.want_copy(False)

    def close(self) -> None:
        """Refuse what anybody asks for, as the run is over, and leave no request in its folder."""
        with suppress(BadRunFolder, OSError):  # Too many files may be open.
            folder = self._memory.place.folder
            if folder is not None and RunFolder(folder).finished:
                self._refuse_all("the run has finished meanwhile; to train longer", "--epochs ...")
            else:
                self._refuse_all("the run has ended meanwhile; it goes on with others by", "-n {workers}")
            if folder is not None:
                remove_forgotten(folder)
        if self._answerer is not None:
            self._answerer.close()
            self._answerer = None

    def _prepared_for(self, folder: Path, request: ResizeRequest) -> _Asked | None:
        """Prepare for so many workers; None: there cannot be, and that is answered."""
        if request.workers == self._lineup.placement.workers:
            self._answer(folder, request, f"it has {ranks_text(request.workers)} already", agreed=True)
            return None
        try:
            job, placement = self._lineup.of(request.workers)
        except UserError as error:
            self._refuse(folder, request, str(error))
            return None
        for text in placement.warnings:
            warn_on_stderr(text)
        orders = self._lineup.in_reserve(job, placement)
        return _Asked(folder, request, job, orders, out_of_memory_kills(), time.monotonic())

    def _refuse_all(self, why: str, options: str) -> None:
        self.forget()
        with suppress(BadRunFolder, OSError):  # Too many files may be open.
            folder = self._memory.place.folder
            request = None if folder is None else requested(folder)
            if folder is not None and request is not None and request.token != self._answered:
                of = options.format(workers=request.workers)
                way = f"tutti train --resume {shlex.quote(str(folder))} {of}"
                self._refuse(folder, request, f"{why}: {way}")

    def _refuse(self, folder: Path, request: ResizeRequest, text: str) -> None:
        warn_on_stderr(f"somebody asked for {ranks_text(request.workers)}, in vain: {text}")
        self._answer(folder, request, text, agreed=False)

    def _answer(
        self,
        folder: Path,
        request: ResizeRequest,
        text: str,
        *,
        agreed: bool,
        warnings: tuple[str, ...] = (),
    ) -> None:
        """Answer a request, once: where that fails nobody waits any more, and it would fail again."""
        self._answered = request.token
        try:
            answer(folder, request, text, agreed=agreed, warnings=warnings)
        except OSError as error:
            warn_on_stderr(
                f"whoever has asked for {ranks_text(request.workers)} cannot be answered: {error.strerror}"
            )
