"""The moments at which the ranks of a run meet."""

from __future__ import annotations

from itertools import pairwise

from tutti.comm.shm.communicator import HostCommunicator
from tutti.training.agenda import COPY_SHARE, SECOND_COPY_S, Agenda, Wishes


def test_copies_take_a_share_of_the_time_but_the_second_one_comes_soon() -> None:
    now, comm = 0.0, HostCommunicator.alone()
    agenda = Agenda(comm, Wishes(copies=True, now=lambda: now))
    copied = []
    for tick in range(1000):
        now = tick / 10
        if agenda.decide(tick, 0).copy:
            copied.append(now)
            # The first copy maps the memory.
            agenda.note_copy(0.9 if len(copied) == 1 else 0.2)
    comm.close()
    assert copied[:2] == [0.0, SECOND_COPY_S]
    pauses = [round(later - one, 1) for one, later in pairwise(copied[1:])]
    assert pauses == [0.2 / COPY_SHARE] * 4
