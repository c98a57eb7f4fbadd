"""The moments at which the ranks of a run meet."""

from __future__ import annotations

from itertools import pairwise

from tutti.comm.shm.communicator import HostCommunicator
from tutti.training.agenda import Agenda, Wishes
from tutti.training.copy_times import MAPPED_S, SHARE, CopyTimes


def test_copies_are_due_when_their_times_have_come() -> None:
    now, comm = 0.0, HostCommunicator.alone()
    agenda = Agenda(comm, Wishes(copies=CopyTimes(None), now=lambda: now))
    copied = []
    for tick in range(2000):
        now = tick / 10
        if agenda.decide(tick, 0).copy:
            copied.append(now)
            agenda.note_copy(0.2)
    comm.close()
    assert copied[:3] == [0.0, MAPPED_S, 2 * MAPPED_S]
    pauses = [round(later - one, 1) for one, later in pairwise(copied[2:])]
    assert pauses == [0.2 / SHARE] * 4
