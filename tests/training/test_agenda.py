"""The moments at which the ranks of a run meet."""

from __future__ import annotations

from tutti.comm.shm.communicator import HostCommunicator
from tutti.training.agenda import COPY_SHARE, Agenda, Wishes


def test_copies_take_a_share_of_the_time_and_can_be_asked_for() -> None:
    now, wanted, comm = 0.0, False, HostCommunicator.alone()
    agenda = Agenda(comm, Wishes(copies=lambda: wanted, now=lambda: now))
    copied, costs = [], iter([0.4, 0.2, 0.8, 0.2, 0.2])
    pause = round(10 * 0.2 / COPY_SHARE)
    for tick in range(5 * pause):
        now, wanted = tick / 10, tick == 2 * pause + 1
        if agenda.decide(tick, 0).copy:
            copied.append(tick)
            agenda.note_copy(next(costs))
    comm.close()
    assert copied == [0, 2 * pause, 2 * pause + 1, 3 * pause + 1, 4 * pause + 1]
