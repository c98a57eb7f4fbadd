"""Tests of launches and their claims."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread

import pytest

from tutti.records import launches
from tutti.records.files import make_file
from tutti.records.json_lines import to_json
from tutti.records.launches import Beat, Launch, Launches


def test_a_job_is_one_launchs_as_long_as_that_lives(tmp_path: Path) -> None:
    with Launch(tmp_path) as first, Launch(tmp_path) as second:
        assert first.claim("a/b")
        assert first.claim("a/b")
        assert not second.claim("a/b")
        assert second.claim("a/c")
        assert second.shares_cores()
        seen = Launches(tmp_path)
        assert [seen.alive(one.name) for one in (first, second)] == [True, True]
        assert seen.owner("a/b") == first.name
        first.end()
        assert [seen.alive(one.name) for one in (first, second)] == [False, True]
        assert not second.shares_cores()
        assert second.claim("a/b")
        assert seen.owner("a/b") == second.name
        assert seen.owner("a/d") is None


def test_of_many_that_take_over_one_does(tmp_path: Path) -> None:
    with Launch(tmp_path) as dead:
        for number in range(20):
            assert dead.claim(str(number))
    many = [Launch(tmp_path) for _ in range(8)]
    won: list[tuple[int, int]] = []
    together = Barrier(len(many))

    def take(at: int) -> None:
        for number in range(20):
            together.wait()
            if many[at].claim(str(number)):
                won.append((number, at))

    threads = [Thread(target=take, args=(at,)) for at in range(len(many))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in won) == list(range(20))
    for one in many:
        with one:
            pass


@pytest.mark.parametrize("kernel", ["this", "another"])
def test_a_launch_without_a_lock_is_dead_at_once_on_this_host_and_after_its_silence_on_another(
    kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launches, "_kernel", lambda: "this")
    now = 1000.0
    monkeypatch.setattr(launches.time, "monotonic", lambda: now)
    folder = tmp_path / "launches" / "ghost"
    folder.mkdir(parents=True)

    def beat(count: int) -> None:
        (folder / "beat.json").write_text(to_json(Beat(1, "host", kernel, locks=True, count=count)))

    beat(0)
    seen = Launches(tmp_path)
    assert seen.alive("ghost") is (kernel == "another")
    if kernel == "this":
        return
    now += launches.PATIENCE_S - 1
    assert seen.alive("ghost")
    beat(1)
    now += 2
    assert seen.alive("ghost")
    now += launches.PATIENCE_S
    assert not seen.alive("ghost")


def test_a_file_is_made_once(tmp_path: Path) -> None:
    assert make_file(tmp_path / "file", b"first")
    assert not make_file(tmp_path / "file", b"second")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"first")]
