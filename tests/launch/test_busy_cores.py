from __future__ import annotations

import os
import threading
import time

import torch

import tutti
from tutti.launch import busy_cores
from tutti.launch.busy_cores import CoreWatch, IdleTeam, ThreadTimes, libgomp, waiting_share


def threads_of_this_process() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def test_an_idle_team_has_more_threads_than_the_host_has_cores_until_it_ends():
    torch.ones(8)
    library, before = libgomp(), threads_of_this_process()
    assert library is not None
    team = IdleTeam(library)
    while len(threads_of_this_process() - before) <= (os.cpu_count() or 1):
        time.sleep(0.01)
    started = threads_of_this_process() - before
    team.end()
    while started & threads_of_this_process():
        time.sleep(0.01)


def test_the_share_of_waiting_is_that_of_the_time_since_the_last_look():
    assert waiting_share(ThreadTimes(10, 30), ThreadTimes(11, 33)) == 0.75
    assert waiting_share(ThreadTimes(10, 30), ThreadTimes(10, 30)) == 0.0


def test_a_watch_parks_a_team_on_busy_cores_and_warns_once(monkeypatch, capfd):
    waits = iter([0, 0.6, 0.6, 0.6, 0.01, 0.6])
    times, events, over = ThreadTimes(0, 0), [], threading.Event()

    def thread_times() -> ThreadTimes | None:
        nonlocal times
        waited = next(waits, None)
        if waited is None:
            over.set()
            return None
        times = ThreadTimes(times.ran + 1 - waited, times.waited + waited)
        return times

    class Team:
        def __init__(self, library: object) -> None:
            events.append("parked")

        def end(self) -> None:
            events.append("ended")

    monkeypatch.setattr(busy_cores, "thread_times", thread_times)
    monkeypatch.setattr(busy_cores, "IdleTeam", Team)
    monkeypatch.setattr(busy_cores, "LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(busy_cores, "WARN_AFTER_S", 0.02)
    watch = CoreWatch(threads=2, warns=True)
    over.wait()
    watch.end()
    assert events == ["parked", "ended", "parked", "ended"]
    assert capfd.readouterr().err.count("--threads 1") == 1


class Watched(tutti.Callback):
    def end(self, course: tutti.Course) -> None:
        assert "core watch" in [thread.name for thread in threading.enumerate()]


def test_every_rank_watches_its_cores():
    data = torch.randn(8, 3), torch.arange(8) % 2
    for workers in (1, 2):
        tutti.train("mlp", data, workers=workers, epochs=1, quiet=True, callbacks=Watched())
    assert "core watch" not in [thread.name for thread in threading.enumerate()]
