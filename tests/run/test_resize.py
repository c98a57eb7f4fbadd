"""A run goes on with more or fewer ranks when somebody asks, and ends as if it had always had them."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import tutti
from tests.mpi.mpirun import needs_mpirun
from tests.run.test_survival import (
    OPTIONS,
    UPDATES,
    AwaitsReserve,
    Killed,
    ancestor,
    left_alone,
    model,
    waiting_of_reserve,
    weights_of,
)
from tutti.checkpoint.memory_files import StateMemory
from tutti.cli.commands import run as command
from tutti.errors import BadOption, BadRunFolder, PeerLost, RankFailed, RunStopped, TuttiError
from tutti.launch.crew import Orders
from tutti.launch.placement import place_ranks
from tutti.records import checkpoints
from tutti.records.checkpoints import read_manifest
from tutti.records.folder_lock import FolderLock
from tutti.records.heartbeat import TRAINING, Heartbeat
from tutti.records.resize_request import REQUEST, Answerer, Asking, answer, remove_forgotten, requested
from tutti.records.run import Summary, ranks_in_turn
from tutti.records.run_folder import RunFolder
from tutti.run.config import TrainConfig
from tutti.run.lineup import Lineup
from tutti.run.resize import resize
from tutti.run.resize_answers import PREPARE_S, ResizeAnswers
from tutti.run.survival import _Plan
from tutti.run.train_job import TrainJob


class Resizes(tutti.Callback):
    """Asks on rank 0, from steps of the run on, for other numbers of workers, one after the other.

    Until that has come to something, steps take long enough for it.

    Args:
        folder: of the run.
        notes: a folder, where it notes what was asked for, and what came of it.
        workers: their numbers by step.
    """

    asking: ClassVar[list[threading.Thread]] = []

    def __init__(self, folder: Path, notes: Path, workers: Mapping[int, int]) -> None:
        self._folder, self._notes, self._workers = folder, notes, workers
        self._waited = 0

    def step(self, course: tutti.Course) -> None:
        if course.rank != 0:
            return
        if any(thread.is_alive() for thread in self.asking):
            self._waited += 1
            time.sleep(0.25 if self._waited < 8 else 4)  # There are only so many steps.
            return
        self._waited = 0
        for step, workers in self._workers.items():
            note = self._notes / f"asked-{step}"
            if course.step >= step and not note.exists():
                note.touch()
                self.asking.append(threading.Thread(target=self._ask, args=(workers, note), daemon=True))
                self.asking[-1].start()
                return

    def _ask(self, workers: int, note: Path) -> None:
        try:
            if resize(self._folder, workers).startswith("going on with"):
                threading.Event().wait()  # This process is about to end; the next one asks for more.
        except BadOption as error:
            note.write_text(str(error))


def resized_run(tmp_path: Path, sizes: Mapping[int, int], **options: Any) -> tuple[tutti.Result, list[int]]:
    """Train; returns the result, and the ranks of each start of the run."""
    out = tmp_path / "run"
    given = {**OPTIONS, "on_failure": "respawn", "workers": 2, **options}
    callbacks = [Resizes(out, tmp_path, sizes), *given.pop("callbacks", [])]
    result = tutti.train(given.pop("make", model)(), callbacks=callbacks, out=str(out), **given)
    assert not (out / REQUEST).exists() or requested(out) is None
    return result, [start.world.ranks for start in RunFolder(out).starts().records]


def test_more_and_fewer_ranks_make_the_same_updates(tmp_path: Path) -> None:
    sizes = {3: 3, 4: 1, 5: 2}
    found, ranks = resized_run(tmp_path, sizes)
    assert ranks == [2, 3, 1, 2]
    torch.testing.assert_close(weights_of(found), left_alone(), rtol=0, atol=1e-12)
    assert [one.train.samples for one in found.history] == [48] * 6
    assert len(found.history[-1].ranks) == 2
    folder = RunFolder(tmp_path / "run")
    in_turn = folder.read(Summary).ranks_in_turn
    assert in_turn == ranks_in_turn(folder.starts().records)
    assert in_turn[0] == in_turn[-1] == 2
    # Whoever resumes it goes on with as many.
    assert found.config.workers == "2"


class EndsBehind(tutti.Callback):
    """Ends a run once its checkpoint of a step is written, and keeps a copy of its folder as it is then.

    Args:
        out: the folder.
        step: of the checkpoint.
        kept: the copy.
    """

    def __init__(self, out: Path, step: int, kept: Path) -> None:
        self._out, self._step, self._kept = out, step, kept

    def step(self, course: tutti.Course) -> None:
        if course.step != self._step + 1:
            return
        while not self._kept.exists():
            found = [one.name for one in checkpoints.present(self._out / checkpoints.FOLDER)]
            if course.rank == 0 and any(int(name.rpartition("-")[2]) == self._step for name in found):
                unfinished = self._kept.with_suffix(".unfinished")
                # Others are removed meanwhile.
                others = [name for name in found if int(name.rpartition("-")[2]) != self._step]
                shutil.rmtree(unfinished, ignore_errors=True)
                with suppress(FileNotFoundError, shutil.Error):  # Files are replaced meanwhile.
                    shutil.copytree(self._out, unfinished, ignore=shutil.ignore_patterns(".*", *others))
                    unfinished.rename(self._kept)
            time.sleep(0.01)
        raise RuntimeError("that is far enough")


def test_the_weights_are_bit_for_bit_those_of_runs_that_go_on_from_each_other(tmp_path: Path) -> None:
    sizes = {3: 3, 4: 1, 5: 2}
    killed = Killed(tmp_path, [(0, 6 * UPDATES - 1)])
    found, _ = resized_run(tmp_path, sizes, callbacks=[killed])
    starts = [(one.step, one.world.ranks) for one in RunFolder(tmp_path / "run").starts().records]
    assert [ranks for _, ranks in starts] == [2, 3, 1, 2, 2]
    reasons = [one.why for one in RunFolder(tmp_path / "run").starts().records]
    assert reasons[:4] == ["", *(f"somebody asked for {ranks}" for ranks in ("3 ranks", "1 rank", "2 ranks"))]
    assert reasons[4].startswith("lost rank 0: killed by signal 9 (SIGKILL)")
    place: dict[str, str] = {"out": str(tmp_path / "replay")}
    for number, ((begun, ranks), (ended, _)) in enumerate(pairwise(starts)):
        if begun == ended:
            continue
        kept = tmp_path / f"kept-{number}"
        ends = EndsBehind(Path(*place.values()), ended, kept)
        with pytest.raises((RankFailed, RuntimeError)):
            tutti.train(
                model(),
                workers=ranks,
                checkpoint=f"{ended - begun} steps",
                callbacks=ends,
                **place,
                **OPTIONS,
            )
        place = {"resume": str(kept)}
    last = tutti.train(model(), workers=starts[-1][1], callbacks=tutti.Callback(), **place, **OPTIONS)
    assert torch.equal(weights_of(found), weights_of(last))


@pytest.mark.parametrize(
    ("strategy", "servers"),
    [("hogwild", 0), ("downpour", 1), ("easgd", 0), ("gossip", 0), ("local", 0), ("paramserver", 1)],
)
def test_every_kind_of_worker_may_come_and_go(tmp_path: Path, strategy: str, servers: int) -> None:
    options = {"strategy": strategy, "servers": servers}
    found, ranks = resized_run(tmp_path, {3: 3, 4: 1}, **options)
    assert ranks == [2, 3, 1]
    assert [one.epoch for one in found.history] == [1, 2, 3, 4, 5, 6]
    assert [one.train.samples for one in found.history] == [48] * 6
    assert weights_of(found).isfinite().all()


@needs_mpirun
@pytest.mark.mpi
@pytest.mark.parametrize(("standby", "sizes"), [(False, {3: 3, 4: 1}), (True, {3: 1})])
def test_a_run_on_hosts_has_more_and_fewer_ranks_when_somebody_asks(
    tmp_path: Path, standby: bool, sizes: dict[int, int]
) -> None:
    found, ranks = resized_run(tmp_path, sizes, hosts="localhost:3", standby=standby)
    assert ranks == [2, *sizes.values()]
    steps = [start.step for start in RunFolder(tmp_path / "run").starts().records]
    assert all(before < after for before, after in pairwise(steps))
    torch.testing.assert_close(weights_of(found), left_alone(), rtol=0, atol=1e-12)
    assert [one.train.samples for one in found.history] == [48] * 6
    assert found.config.workers == "1"


@needs_mpirun
@pytest.mark.mpi
def test_a_run_on_hosts_goes_on_when_those_who_are_asked_for_cannot_train(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sizes = {3: 4, 4: 2, 5: 3}
    found, ranks = resized_run(tmp_path, sizes, hosts="localhost:3", batch_size=2)
    assert ranks == [2]
    said = {note.name: note.read_text() for note in tmp_path.glob("asked-*")}
    assert "the hosts have places for 3 workers, not for 4" in said["asked-3"]
    assert said["asked-4"] == ""
    assert "batch" in said["asked-5"]
    assert "somebody asked for 3 ranks, in vain: " in capfd.readouterr().err
    assert len(found.history) == 6


def test_ranks_in_reserve_are_replaced_by_those_who_are_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = Killed(tmp_path, [(2, 5 * UPDATES)])
    found, ranks = resized_run(tmp_path, {3: 3}, callbacks=[killed], standby=True)
    assert ranks == [2, 3, 3]
    assert "in reserve have ended" not in capfd.readouterr().err
    torch.testing.assert_close(weights_of(found), left_alone(), rtol=0, atol=1e-12)


def test_the_run_goes_on_when_those_who_are_asked_for_cannot_train(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found, ranks = resized_run(tmp_path, {3: 7, 4: 2, 5: 50_000})
    assert ranks == [2]
    said = {note.name: note.read_text() for note in tmp_path.glob("asked-*")}
    assert "batch" in said["asked-3"]
    assert "somebody asked for 7 ranks, in vain: " in capfd.readouterr().err
    assert said["asked-4"] == ""
    assert "50,000 ranks need more than" in said["asked-5"]
    assert torch.equal(weights_of(found), weights_of(tutti.train(model(), workers=2, **OPTIONS)))


def test_more_ranks_come_back_after_a_loss_that_has_shrunk_the_run(tmp_path: Path) -> None:
    killed = Killed(tmp_path, [(1, 2)])
    found, ranks = resized_run(tmp_path, {6: 2}, callbacks=[killed], on_failure="shrink", on_shrink="scale")
    assert ranks == [2, 1, 2]
    batches = [start.batch_size for start in RunFolder(tmp_path / "run").starts().records]
    assert batches == [6, 3, 6]
    assert [one.train.samples for one in found.history] == [48] * 6


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"strategy": "local", "strategy_options": {"every": 2}}, (2, 4)),
        ({"on_shrink": "scale"}, (1, 2)),
        ({"on_shrink": "scale"}, (2, 1)),
    ],
)
def test_a_schedule_stands_where_it_would_with_the_other_ranks(
    tmp_path: Path, options: dict[str, Any], counts: tuple[int, int]
) -> None:
    before, after = counts
    given = {**options, "schedule": "cosine", "epochs": 8, "optimizer": "sgd"}
    found, ranks = resized_run(tmp_path, {1: after}, workers=before, **given)
    assert ranks == [before, after]
    scale = after / before if "on_shrink" in options else 1
    rest = {**OPTIONS, **given, "lr": 0.01 * scale, "batch_size": round(OPTIONS["batch_size"] * scale)}
    plain = tutti.train(model(), workers=after, **{**rest, "on_shrink": "keep-batch"})
    rates = [one.lr for one in plain.history[3:]]
    assert [one.lr for one in found.history[3:]] == pytest.approx(rates, rel=1e-9)
    steps = [one.step for one in found.history]
    assert steps == sorted(set(steps))


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_with_batches_of_their_own_train_on_as_many_samples_as_were_asked_for(
    tmp_path: Path, workers: int
) -> None:
    found, ranks = resized_run(
        tmp_path, {1: workers}, strategy="local", strategy_options={"every": 2}, steps=32, epochs=None
    )
    assert ranks == [2, workers]
    assert sum(one.train.samples for one in found.history) == 32 * 2 * OPTIONS["batch_size"]


class Own(tutti.Sync):
    """A strategy that no name finds."""


def test_workers_of_a_strategy_of_the_users_that_share_a_batch_make_as_many_steps(tmp_path: Path) -> None:
    killed = Killed(tmp_path, [(1, 20)])
    options = {**OPTIONS, "epochs": None, "steps": 32}
    found = tutti.train(model(), workers=2, strategy=Own(), on_failure="shrink", callbacks=killed, **options)
    assert sum(one.train.samples for one in found.history) == 32 * OPTIONS["batch_size"]
    assert len(found.history[-1].ranks) == 1


def test_the_last_copy_of_a_run_that_has_grown_is_the_newest_checkpoint(tmp_path: Path) -> None:
    killed = Killed(tmp_path, [(3, 20), (3, 24)])
    options = {"strategy": "local", "strategy_options": {"every": 2}, "epochs": 16}
    with pytest.raises(PeerLost, match="it was loss 2 within an hour"):
        resized_run(
            tmp_path, {6: 4}, callbacks=[killed], max_failures=1, checkpoint="1 epoch", keep=20, **options
        )
    present = checkpoints.present(tmp_path / "run" / checkpoints.FOLDER)
    assert read_manifest(present[-1]).ranks == 4
    # Each has the name of a step that no other has made.
    grown = [one for one in present if read_manifest(one).ranks == 4]
    assert max(one.name for one in present if one not in grown) < min(one.name for one in grown)


class _Stays(tutti.Callback):
    def step(self, course: tutti.Course) -> None:
        time.sleep(0.05)


def test_the_command_says_what_has_become_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, codes = tmp_path / "run", list[int]()

    def ask() -> None:
        while not (out / "config.json").exists():
            time.sleep(0.01)
        codes.append(command(["resize", str(out), "-n", "1"]))

    asking = threading.Thread(target=ask)
    asking.start()
    tutti.train(
        model(),
        workers=2,
        callbacks=_Stays(),
        on_failure="respawn",
        out=str(out),
        **{**OPTIONS, "epochs": 10},
    )
    asking.join()
    assert codes == [0]
    text = "going on with 1 rank instead of 2, and batches of 6 samples as before"
    assert f"{out}: {text}" in capsys.readouterr().out
    assert not (out / REQUEST).exists()


def test_a_run_that_has_ended_or_cannot_change_is_not_asked(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match=r"does not exist; .* ask again once it trains"):
        resize(tmp_path / "nowhere", 2)
    with pytest.raises(BadRunFolder, match="if a run is just starting there"):
        resize(tmp_path, 2)
    run = tmp_path / "a run"
    tutti.train(model(), workers=1, checkpoint="1 epoch", out=str(run), **OPTIONS)
    with pytest.raises(BadRunFolder, match=r"finished; to train longer: tutti train --resume '.*' --epochs"):
        resize(run, 2)
    for place in (run / "checkpoints", run / "checkpoints" / "latest"):
        with pytest.raises(BadRunFolder, match=f"give the run's folder, {run}$"):
            resize(place, 2)
    (run / "summary.json").unlink()
    # It has left the heartbeat of one that has stopped.
    with pytest.raises(BadRunFolder, match=r"with 2 ranks it goes on by: tutti train --resume '.*' -n 2"):
        resize(run, 2)
    with FolderLock(run):
        with pytest.raises(BadOption, match=r"keeps no copies .*\. Stop it, by .* -n 2 --on-failure respawn"):
            resize(run, 2)
        RunFolder(run).write_config(TrainConfig("mlp", data="digits", hosts="a:2").as_json())
        with pytest.raises(BadOption, match=r"-n 2 --hosts \.\.\. --on-failure respawn"):
            resize(run, 2)
    assert not (run / REQUEST).exists()
    (tmp_path / "farm.json").touch()
    with pytest.raises(BadRunFolder, match="only a single run"):
        resize(tmp_path, 2)


@pytest.mark.parametrize("workers", [True, "2", None, 1.0])
def test_what_is_no_number_of_workers_is_refused(tmp_path: Path, workers: Any) -> None:
    with pytest.raises(BadOption, match=f"workers has to be a whole number, not {workers!r}"):
        resize(tmp_path, workers)
    with pytest.raises(BadOption, match="cannot go on with 0 ranks"):
        resize(tmp_path, 0)


def test_the_command_names_its_own_option(capsys: pytest.CaptureFixture[str]) -> None:
    for text in ("+1", "1.0", "many"):
        assert command(["resize", "runs/x", "-n", text]) == 2
        assert f"-n has to be a whole number, not '{text}'" in capsys.readouterr().err


def test_a_run_between_two_crews_is_asked(tmp_path: Path) -> None:
    """Of which nobody has the lock for a moment, but which was there a moment ago."""
    RunFolder.take(tmp_path).write_config(TrainConfig("mlp", data="digits", on_failure="respawn").as_json())
    RunFolder(tmp_path).write_heartbeat(Heartbeat(0, "here", 1, time.time(), TRAINING))
    said = list[str]()
    asking = threading.Thread(target=lambda: said.append(resize(tmp_path, 3)))
    asking.start()
    while (request := requested(tmp_path)) is None:
        assert asking.is_alive()
    answer(tmp_path, request, "so be it", agreed=True)
    asking.join()
    assert said == ["so be it"]
    # Its ranks were killed, and nobody has come after them.
    RunFolder(tmp_path).write_heartbeat(Heartbeat(0, "here", 1, time.time() - 31, TRAINING))
    with pytest.raises(BadRunFolder, match="does not train now"):
        resize(tmp_path, 3)


def test_whoever_asks_waits_as_long_as_somebody_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.run.resize._UNHEARD_S", 0.2)
    RunFolder.take(tmp_path).write_config(TrainConfig("mlp", data="digits", on_failure="respawn").as_json())
    RunFolder(tmp_path).write_heartbeat(Heartbeat(0, "here", 1, time.time(), TRAINING))
    with ThreadPoolExecutor(1) as pool:
        with closing(Answerer(tmp_path)):
            asking = pool.submit(resize, tmp_path, 3)
            time.sleep(1.0)
            assert not asking.done()
        with pytest.raises(BadRunFolder, match="does not train now"):
            asking.result(10)


def test_whoever_asks_is_told_at_once_that_the_folder_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    RunFolder.take(run).write_config(TrainConfig("mlp", data="digits", on_failure="respawn").as_json())
    said = list[str]()

    def ask() -> None:
        with pytest.raises(BadRunFolder) as caught:
            resize(run, 3)
        said.append(str(caught.value))

    asking = threading.Thread(target=ask)
    asking.start()
    while requested(run) is None:
        assert asking.is_alive()
    run.rename(tmp_path / "other")
    asking.join()
    assert "was removed" in said[0] or "does not exist" in said[0]
    assert requested(tmp_path / "other") is None


def test_a_request_counts_as_long_as_somebody_waits(tmp_path: Path) -> None:
    with closing(Asking(tmp_path, 3)) as asking:
        request = requested(tmp_path)
        assert request is not None
        assert request.workers == 3
        assert asking.answer() is None
        with pytest.raises(BadRunFolder, match="is being asked for another number of workers already"):
            Asking(tmp_path, 4)
        answer(tmp_path, request, "so be it", agreed=True)
        assert requested(tmp_path) is None
        found = asking.answer()
        assert found is not None
        assert (found.answer, found.agreed) == ("so be it", True)
    assert requested(tmp_path) is None
    assert not (tmp_path / REQUEST).exists()
    # Of somebody who was killed.
    (tmp_path / REQUEST).write_bytes(request.as_bytes())
    assert requested(tmp_path) is None
    remove_forgotten(tmp_path)
    assert not (tmp_path / REQUEST).exists()


def test_an_answer_reaches_only_whoever_has_asked_for_that(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Asking(tmp_path, 3)):
        first = requested(tmp_path)
        assert first is not None
    (tmp_path / REQUEST).write_bytes(first.as_bytes())  # It was killed.
    asking = Asking(tmp_path, 3)
    answer(tmp_path, first, "that was for another one", agreed=True)
    assert asking.answer() is None
    second = requested(tmp_path)
    assert second is not None
    assert second.token != first.token
    # Whoever comes next waits until the answer has been read.
    answer(tmp_path, second, "no", agreed=False)
    with monkeypatch.context() as changed:
        changed.setattr("tutti.records.resize_request.GONE_S", 0.05)
        with pytest.raises(BadRunFolder, match="already"):
            Asking(tmp_path, 4)
    remove_forgotten(tmp_path)
    found = asking.answer()
    assert found is not None
    assert found.answer == "no"
    reads = threading.Timer(0.05, asking.close)
    reads.start()
    with closing(Asking(tmp_path, 4)):
        assert not reads.is_alive()


def test_whoever_asks_removes_no_request_but_its_own(tmp_path: Path) -> None:
    with closing(Asking(tmp_path, 3)) as asking:
        (tmp_path / REQUEST).unlink()
        with pytest.raises(BadRunFolder, match="was removed before there was an answer"):
            asking.answer()
        other = Asking(tmp_path, 4)
    with closing(other):
        later = requested(tmp_path)
        assert later is not None
        assert later.workers == 4


def test_those_who_ask_at_once_take_turns(tmp_path: Path) -> None:
    asked, ends = dict[int, list[str]](), threading.Event()

    def serve() -> None:
        while not ends.is_set():
            request = requested(tmp_path)
            if request is not None:
                answer(tmp_path, request, f"{request.workers} it is", agreed=True)

    def ask(workers: int) -> None:
        said = asked.setdefault(workers, [])
        while len(said) < 50:
            try:
                asking = Asking(tmp_path, workers)
            except BadRunFolder:
                continue
            with closing(asking):
                while (found := asking.answer()) is None:
                    pass
            said.append(found.answer or "")

    threads = [threading.Thread(target=ask, args=(workers,)) for workers in (2, 3, 4)]
    serving = threading.Thread(target=serve)
    for thread in (serving, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    ends.set()
    serving.join()
    assert asked == {workers: [f"{workers} it is"] * 50 for workers in (2, 3, 4)}


@contextmanager
def planned(folder: Path, **options: Any) -> Iterator[_Plan]:
    """The succession of a run of two ranks, which has a copy of its state."""
    with closing(StateMemory()) as memory:
        memory.place.note_folder(folder)
        memory.place.publish(1, {})
        config = TrainConfig(model="mlp", data="digits", on_failure="respawn", **options)
        yield _Plan(Lineup(TrainJob(config, memory=memory.place), place_ranks(2), memory))


def refusal(asking: Asking) -> str:
    """What is said to whoever asks for what there cannot be."""
    found = asking.answer()
    assert found is not None
    assert not found.agreed
    return found.answer or ""


def test_a_run_that_cannot_answer_says_so_once_and_lets_nobody_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with planned(tmp_path) as plan, closing(Asking(tmp_path, 2)) as asking:
        monkeypatch.setattr(os, "pwrite", full)
        assert plan.others.asked_for() is None
        assert plan.others.asked_for() is None
        with pytest.raises(BadRunFolder, match="see what the run has printed"):
            asking.answer()
    assert capfd.readouterr().err.count("cannot be answered: No space left on device") == 1


def test_ranks_that_may_be_why_others_were_lost_are_prepared_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(tmp_path) as plan:
        with closing(Asking(tmp_path, 1)) as asking:
            for _ in range(2):
                assert asking.answer() is None
                assert plan.others.asked_for() is not None
                plan.after(PeerLost([1], "killed"))
                plan.release()
            assert "twice ranks were lost while" in refusal(asking)
            assert plan.others.asked_for() is None
        with closing(Asking(tmp_path, 1)) as asking:
            assert plan.others.asked_for() is not None
            monkeypatch.setattr("tutti.run.resize_answers.out_of_memory_kills", lambda: 1_000_000)
            plan.after(PeerLost([1], "killed"))
            assert "the memory ran out while" in refusal(asking)


def test_ranks_that_are_not_prepared_in_time_are_wanted_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planned(tmp_path) as plan, closing(Asking(tmp_path, 1)) as asking:
        orders, now = plan.others.asked_for(), time.monotonic()
        assert orders is not None
        assert plan.others.asked_for() is orders
        monkeypatch.setattr(time, "monotonic", lambda: now + PREPARE_S - 1)
        assert not plan.others.may_take_over()
        # Those that are prepared wait for a copy of the state as long as that takes.
        monkeypatch.setattr(time, "monotonic", lambda: now + 2 * PREPARE_S - 2)
        assert plan.others.asked_for() is orders
        assert not plan.others.may_take_over()
        monkeypatch.setattr(time, "monotonic", lambda: now + 4 * PREPARE_S)
        assert plan.others.asked_for() is None
        assert "not ready within 10 minutes" in refusal(asking)


def test_a_run_says_what_becomes_of_those_who_are_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with planned(tmp_path) as plan:
        with closing(Asking(tmp_path, 2)) as asking:
            assert plan.others.asked_for() is None
            found = asking.answer()
            assert found is not None
            assert (found.answer, found.agreed) == ("it has 2 ranks already", True)
        with closing(Asking(tmp_path, 1)) as asking:
            assert plan.others.asked_for() is not None
            plan.others.refuse(TuttiError("lost rank 0"))
            text = "the new ranks cannot take over, and the run goes on with 2 ranks as before: lost rank 0"
            assert refusal(asking) == text
            assert f"somebody asked for 1 rank, in vain: {text}" in capfd.readouterr().err
        with closing(Asking(tmp_path, 3)) as asking:
            assert plan.others.asked_for() is not None
            plan.others.take_over()
            found = asking.answer()
            assert found is not None
            assert found.agreed
            assert (found.answer or "").startswith("going on with 3 ranks instead of 2, and batches of 32")
            assert f"{found.answer}, as was asked" in capfd.readouterr().err
            assert found.warnings == place_ranks(3).warnings


def test_a_folder_that_is_renamed_costs_a_run_no_more_than_what_was_asked_for_there(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, elsewhere = tmp_path / "run", tmp_path / "other"
    text = "run goes on with 2 ranks as before: cannot go on in .*: it was removed or renamed"
    for late in (False, True):
        folder.mkdir()
        with planned(folder) as plan, closing(Asking(folder, 3)):
            assert plan.others.asked_for() is not None
            folder.rename(elsewhere)
            if late:
                assert plan.others.take_over() is None
            assert plan.others.asked_for() is None
        shutil.rmtree(elsewhere)
        assert len(re.findall(text, capfd.readouterr().err)) == 1


def test_a_run_of_which_nobody_reads_what_it_says_goes_on_and_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with planned(tmp_path) as plan, open(writing, "w", buffering=1) as unread:
        monkeypatch.setattr(sys, "stderr", unread)
        with closing(Asking(tmp_path, 50_000)) as asking:
            assert plan.others.asked_for() is None
            assert "50,000 ranks need more than" in refusal(asking)
        with closing(Asking(tmp_path, 3)) as asking:
            assert plan.others.asked_for() is not None
            assert plan.others.take_over() is not None
            found = asking.answer()
            assert found is not None
            assert found.agreed
        assert plan.after(PeerLost([1], "killed")).placement.workers == 3
        with suppress(BrokenPipeError):
            unread.flush()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), writing)


def test_others_take_over_once_the_state_is_copied(tmp_path: Path) -> None:
    with planned(tmp_path) as plan, closing(Asking(tmp_path, 1)):
        assert plan.others.asked_for() is not None
        assert not plan.others.may_take_over()
        assert not plan.others.may_take_over()
        plan._memory.place.publish(2, {})
        assert plan.others.may_take_over()


def test_whoever_asks_a_run_that_is_to_stop_or_has_ended_is_told(tmp_path: Path) -> None:
    with planned(tmp_path) as plan:
        with closing(Asking(tmp_path, 1)) as asking:
            assert plan.others.asked_for() is not None
            plan.others.note_stop()
            assert "has been asked to stop; it goes on with others by: tutti train" in refusal(asking)
            assert plan.others.asked_for() is None
        with closing(Asking(tmp_path, 1)) as asking:
            plan.close()
            assert "has ended meanwhile" in refusal(asking)
        Asking(tmp_path, 1).close()
        (tmp_path / REQUEST).write_text("of somebody who was killed")
        plan.close()
        assert not (tmp_path / REQUEST).exists()


class StopsWhileAsked(tutti.Callback):
    """Asks for another rank and has the run stop meanwhile; goes on with it once both have an answer.

    Args:
        folder: of the run.
        program: the process that has started it.
        said: notes the answer.
    """

    def __init__(self, folder: Path, program: int, said: Path) -> None:
        self._folder, self._program, self._said = folder, program, said

    def step(self, course: tutti.Course) -> None:
        if course.rank or course.step != 4:
            return
        with closing(Asking(self._folder, 1)) as asking:
            os.kill(self._program, signal.SIGTERM)
            until = time.monotonic() + 30
            while (found := asking.answer()) is None:
                assert time.monotonic() < until, "there is no answer"
                time.sleep(0.01)
            self._said.write_text(found.answer or "")


def test_a_run_that_is_asked_to_stop_says_so_to_whoever_waits_for_others(tmp_path: Path) -> None:
    out = tmp_path / "run"
    callback = StopsWhileAsked(out, os.getpid(), tmp_path / "said")
    with pytest.raises(RunStopped):
        tutti.train(model(), workers=2, callbacks=callback, on_failure="respawn", out=str(out), **OPTIONS)
    assert "has been asked to stop" in (tmp_path / "said").read_text()
    assert not (out / REQUEST).exists()


class TakesBack(tutti.Callback):
    """Asks for three ranks, takes that back once they are prepared, and waits until they are gone.

    Args:
        folder: of the run.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def step(self, course: tutti.Course) -> None:
        if course.rank or course.step != 9:
            return
        with closing(Asking(self._folder, 3)):
            self._wait(3)
        self._wait(0)

    def _wait(self, count: int) -> None:
        until = time.monotonic() + 60
        while len(waiting_of_reserve()) != count:
            assert time.monotonic() < until, f"there are no {count} ranks in reserve"
            time.sleep(0.01)


def test_ranks_that_nobody_wants_any_more_are_ended(tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = {**OPTIONS, "epochs": 2}
    tutti.train(model(), workers=2, callbacks=TakesBack(out), on_failure="respawn", out=str(out), **options)
    assert [start.world.ranks for start in RunFolder(out).starts().records] == [2]


def test_a_rank_that_is_killed_as_it_takes_over_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    take_over = ResizeAnswers.take_over

    def kill_one_and_take_over(others: ResizeAnswers) -> Orders:
        os.kill(waiting_of(os.getpid())[0], signal.SIGKILL)
        return take_over(others)

    monkeypatch.setattr(ResizeAnswers, "take_over", kill_one_and_take_over)
    _, ranks = resized_run(tmp_path, {3: 3})
    assert ranks == [2, 3]
    assert "a rank that was to take over has ended by now; others are started" in capfd.readouterr().err


def waiting_of(program: int) -> list[int]:
    """The ranks in reserve of a program's run."""
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines() if "->" in line]
    waiting = [int(words[5]) for words in lines if Path(f"/proc/{words[5]}").exists()]
    return [one for one in waiting if ancestor(one, 3) == program]


class AsksItself(tutti.Callback):
    """Asks in every step for three workers from a step on, on all ranks, and for too many before.

    Until that has come to something, steps take long enough for it.

    Args:
        folder: of the run.
        notes: a folder for what was said.
    """

    def __init__(self, folder: Path, notes: Path) -> None:
        self._folder, self._notes = folder, notes

    def step(self, course: tutti.Course) -> None:
        course.resize(7 if course.step < 5 else 3)
        if course.rank == 0 and course.step == 2:
            with pytest.raises(BadOption, match=r"in a callback call course\.resize\(workers\)") as caught:
                tutti.resize(self._folder, 3)
            (self._notes / "said").write_text(str(caught.value))
        if course.ranks == 2:
            time.sleep(0.1)


def test_a_callback_asks_for_other_ranks_and_trains_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    callback = AsksItself(out, tmp_path)
    tutti.train(model(), workers=2, callbacks=callback, on_failure="respawn", out=str(out), **OPTIONS)
    assert [start.world.ranks for start in RunFolder(out).starts().records] == [2, 3]
    assert (tmp_path / "said").exists()
    said = capfd.readouterr().err
    assert said.count("somebody asked for 7 ranks, in vain: ") == 1
    assert not (out / REQUEST).exists()


def test_a_callback_of_a_run_that_cannot_change_is_warned_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = {**OPTIONS, "epochs": 1}
    tutti.train(model(), workers=1, callbacks=AsksInVain(), out=str(tmp_path / "run"), **options)
    assert capfd.readouterr().err.count("was started without --on-failure") == 1


class AsksInVain(tutti.Callback):
    def __init__(self) -> None:
        self.course: tutti.Course | None = None

    def step(self, course: tutti.Course) -> None:
        self.course = course  # It is pickled with the callback.
        course.resize(2)


class NotesScores(AwaitsReserve):
    """Notes how soon the kernel is to end ranks: those of the reserve, and this one once it has taken over.

    Args:
        folder: of the notes.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def step(self, course: tutti.Course) -> None:
        super().step(course)
        note = self._folder / "waiting"
        if course.rank == 0 and course.step == 2 and not note.exists():
            note.write_text(" ".join({score_of(one) for one in waiting_of_reserve()}))

    def end(self, course: tutti.Course) -> None:
        (self._folder / "at the end").write_text(score_of(os.getpid()))


def score_of(process: int) -> str:
    return Path(f"/proc/{process}/oom_score_adj").read_text().strip()


def test_ranks_in_reserve_are_the_first_that_the_kernel_ends_for_memory(tmp_path: Path) -> None:
    callbacks = [NotesScores(tmp_path), Killed(tmp_path, [(1, 3)])]
    options = {**OPTIONS, "epochs": 1}
    tutti.train(model(), workers=2, callbacks=callbacks, on_failure="respawn", standby=True, **options)
    assert (tmp_path / "1-3").exists()
    assert (tmp_path / "waiting").read_text() == "1000"
    assert (tmp_path / "at the end").read_text() == score_of(os.getpid())


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
def test_what_is_in_the_place_of_a_request_is_to_be_removed(tmp_path: Path, kind: str) -> None:
    path = tmp_path / REQUEST
    make = {"link": lambda: path.symlink_to("x"), "folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}
    make[kind]()
    with pytest.raises(BadRunFolder, match="remove it and ask again"):
        Asking(tmp_path, 2)
    assert requested(tmp_path) is None
    remove_forgotten(tmp_path)
    assert path.is_symlink() or path.exists()


@pytest.mark.parametrize("text", ["", "{", '{"workers": "many"}', "[]"])
def test_what_is_no_request_is_none(tmp_path: Path, text: str) -> None:
    with open(tmp_path / REQUEST, "w") as file:
        file.write(text)
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        assert requested(tmp_path) is None
