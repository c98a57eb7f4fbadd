"""The losses that a run survives."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from tutti.checkpoint.memory_files import StateMemory
from tutti.errors import PeerLost, RankHung
from tutti.records.heartbeat import Heartbeat
from tutti.records.run_folder import RANKS, RunFolder
from tutti.run.losses import HOUR_S, Losses

LOST = PeerLost([1], "killed by signal 9")


def test_one_too_many_within_an_hour_is_the_end() -> None:
    now = 0.0
    with closing(StateMemory()) as memory:
        losses = Losses(2, memory, lambda: now)
        losses.note(LOST)
        now = HOUR_S
        losses.note(LOST)
        losses.note(LOST)
        with pytest.raises(PeerLost, match="killed by signal 9; it was loss 3 within an hour"):
            losses.note(LOST)


def test_why_ranks_come_after_others_may_have_names_that_are_no_text() -> None:
    with closing(StateMemory()) as memory:
        assert memory.place.takeover is None
        memory.place.note_takeover("lost rank 1: no file a\udcff.npz")
        assert memory.place.takeover == "lost rank 1: no file a\\udcff.npz"


def test_who_hangs_again_and_again_and_comes_no_further_is_not_replaced(tmp_path: Path) -> None:
    hung = RankHung([0, 1], "it made no step for 60 s")
    folder = RunFolder(tmp_path)
    with closing(StateMemory()) as memory:
        losses = Losses(100, memory)
        for step in (1, 2, 3, 4):
            memory.place.publish(1, {"step": step})
            losses.note(hung)
        losses.note(hung)
        losses.note(LOST)
        losses.note(hung)
        losses.note(hung)
        with pytest.raises(RankHung, match="3 times in a row it hung and came no further than step 4:"):
            losses.note(hung)
        memory.place.note_folder(tmp_path)
        (tmp_path / RANKS).mkdir()
        folder.write_heartbeat(Heartbeat(0, "here", 7, 1.0, step=300))
        for step in (5, 6):  # New ranks copy the state of their first step, which is not that of the hang.
            memory.place.publish(1, {"step": step})
            losses.note(hung)
        with pytest.raises(RankHung, match="no further than step 300:"):
            losses.note(hung)
