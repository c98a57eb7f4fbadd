"""A rank whose cores other programs use too parks idle threads, so that its own spin less."""

from __future__ import annotations

import itertools
import threading

import pytest

from tutti.launch import busy_cores
from tutti.launch.busy_cores import CoreWatch, ThreadTimes


def test_a_watch_parks_a_team_while_the_cores_are_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = itertools.accumulate([0.0, 0.0, 0.9, 0.9, *[0.0] * 1000])
    ran = itertools.count()
    seen: list[str] = []
    ended = threading.Event()

    class Team:
        def __init__(self, library: object) -> None:
            seen.append("parked")

        def end(self) -> None:
            seen.append("ended")
            ended.set()

    monkeypatch.setattr(busy_cores, "IdleTeam", Team)
    monkeypatch.setattr(busy_cores, "_libgomp", object)
    monkeypatch.setattr(busy_cores, "LOOK_EVERY_S", 0.001)
    monkeypatch.setattr(busy_cores, "thread_times", lambda: ThreadTimes(next(ran), next(waited)))
    watch = CoreWatch(2)
    assert ended.wait(60)
    watch.end()
    assert seen == ["parked", "ended"]


def test_one_thread_is_not_watched() -> None:
    before = threading.active_count()
    CoreWatch(1).end()
    assert threading.active_count() == before
