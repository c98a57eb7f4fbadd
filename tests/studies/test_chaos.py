"""A training that is disturbed: what befalls it, what it says of that, and what it is held to."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import psutil
import pytest
import torch
from safetensors.torch import save_file

import tutti
from tests.run.test_survival import OPTIONS, model, weights_of
from tutti.cli.chaos import _verdict, repeats
from tutti.cli.commands import COMMANDS
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.layout import BEAT, PID, ControlLayout, control_bytes
from tutti.errors import BadOption, UnknownName
from tutti.run.config import TrainConfig
from tutti.studies.chaos import disturbance
from tutti.studies.chaos.disturbance import Disturbance, Event, Promise, is_named
from tutti.studies.chaos.running_ranks import RankSeen, RunningRanks
from tutti.studies.chaos.script import USUAL, Moment, moments
from tutti.studies.chaos.study import Outcome, Twin, p95, summary, weights_apart
from tutti.studies.chaos.training import LossSaid, Training

KILLED = "killed by signal 9 (SIGKILL); if nobody sent it"
STOPPED = "it was stopped by a signal (SIGSTOP), and nobody let it go on"


def test_a_seed_decides_what_happens_when_and_to_whom() -> None:
    def script(seed: int) -> list[Moment]:
        return list(itertools.islice(moments(seed, 2.0, USUAL), 200))

    assert script(1) == script(1) != script(2)
    assert {one.kind for one in script(1)} == set(USUAL)
    assert all(1.0 <= one.pause_s <= 3.0 and 0 <= one.draw < 1 for one in script(1))


def test_a_script_without_faults_has_no_lines() -> None:
    assert list(moments(1, 2.0, ())) == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"tutti: lost rank 1: {KILLED}; going on with 2 new ranks", LossSaid(5.0, (1,), KILLED, True)),
        (f"tutti: error: lost ranks 0, 3: {KILLED}", LossSaid(5.0, (0, 3), KILLED, False)),
        ("tutti: warning: 3 ranks share 2 cores", None),
    ],
)
def test_losses_are_read_from_what_a_training_says(line: str, said: LossSaid | None) -> None:
    assert LossSaid.in_line(line, 5.0) == said


def said(*losses: tuple[tuple[int, ...], str]) -> list[LossSaid]:
    return [LossSaid(0.0, ranks, why, True) for ranks, why in losses]


@pytest.mark.parametrize(
    ("kind", "ranks", "losses", "rightly"),
    [
        ("kill", (1,), [((1,), KILLED)], True),
        ("kill", (1,), [((0,), KILLED)], False),
        ("kill", (1,), [((1,), STOPPED)], False),
        ("kill", (1,), [], False),
        ("kill-two", (0, 1), [((0, 1), KILLED)], True),
        ("kill-two", (0, 1), [((0,), KILLED)], False),
        ("kill-again", (1, 0), [((1,), KILLED), ((0,), KILLED)], True),
        ("stop", (1,), [((1,), STOPPED)], True),
        ("slow", (1,), [], True),
        ("slow", (1,), [((1,), STOPPED)], False),
    ],
)
def test_a_loss_is_named_rightly_by_its_ranks_and_its_cause(
    kind: str, ranks: tuple[int, ...], losses: Sequence[Any], rightly: bool
) -> None:
    assert is_named(kind, ranks, said(*losses)) == rightly


class InThisProcess(Training):
    """A training in a thread, by ranks that this process has forked."""

    def __init__(self, **options: Any) -> None:
        self.losses, self.lines, self.result = [], [], None
        self.process = cast("Any", SimpleNamespace(pid=os.getpid()))
        self._options = options
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        self.result = tutti.train(model(), workers=2, **{**OPTIONS, **self._options})

    def hear(self, text: str) -> None:
        if (loss := LossSaid.in_line(text, time.monotonic())) is not None:
            self.losses.append(loss)

    @property
    def over(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> int:
        self._thread.join()
        return 0 if self.result is not None else 1


class Paced(tutti.Callback):
    """Gives a short training time to be disturbed."""

    def step(self, course: tutti.Course) -> None:
        time.sleep(0.01)


def test_a_training_is_disturbed_and_ends_with_the_weights_of_one_that_was_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alone = tutti.train(model(), workers=2, **OPTIONS | {"epochs": 30})
    monkeypatch.setattr(disturbance, "SLOW_S", 0.1)
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    training = InThisProcess(epochs=30, callbacks=Paced(), on_failure="respawn")
    monkeypatch.setattr(heard, "write", training.hear, raising=False)
    script = [Moment(0.1, kind, 0.9) for kind in ("kill", "slow", "kill-two", "kill-first")]
    told: list[Event] = []
    faults = Disturbance(training, Promise(True, 10, None), told.append)
    faults.follow(iter(script), USUAL, most=None)
    assert [(one.kind, one.ranks, one.named, one.survived) for one in told] == [
        ("kill", (1,), True, True),
        ("slow", (1,), True, True),
        ("kill-two", (0, 1), True, True),
        ("kill-first", (0,), True, True),
    ]
    assert all(one.next_s is not None and one.next_s > 0 for one in told)
    assert faults.alarms == []
    assert not faults.hung
    assert training.result is not None
    assert torch.equal(weights_of(training.result), weights_of(alone))


def test_ranks_come_and_go_while_others_are_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    alone = tutti.train(model(), workers=2, **OPTIONS | {"epochs": 60})
    heard = io.StringIO()
    monkeypatch.setattr(sys, "stderr", heard)
    training = InThisProcess(epochs=60, callbacks=Paced(), on_failure="respawn", out=str(tmp_path / "run"))
    training.folder = tmp_path / "run"
    monkeypatch.setattr(heard, "write", training.hear, raising=False)
    told: list[Event] = []
    faults = Disturbance(training, Promise(True, 10, None), told.append)
    kinds = ("remove", "remove", "add", "add", "add", "add", "kill")
    faults.follow((Moment(0.1, kind, 0.9) for kind in kinds), kinds, most=None)
    assert [(one.kind, one.ranks, one.named, one.survived) for one in told] == [
        ("remove", (1,), True, True),  # Of one rank none is removed.
        ("add", (1,), True, True),
        ("add", (2,), True, True),
        ("add", (3,), True, True),  # Two more than at first are the most.
        ("kill", (3,), True, True),
    ]
    assert all(one.next_s is not None and one.next_s > 0 for one in told)
    assert not faults.hung
    assert training.result is not None
    assert len(training.result.history[-1].ranks) == 4
    torch.testing.assert_close(weights_of(training.result), weights_of(alone), rtol=0, atol=1e-12)


def test_ranks_that_were_replaced_are_not_counted_while_they_end(monkeypatch: pytest.MonkeyPatch) -> None:
    workers, before, until = 2, 2, 0.0

    def look(self: RunningRanks) -> dict[int, RankSeen]:
        steps = int(time.monotonic() * 100)
        count = before if time.monotonic() < until else workers
        return {rank: RankSeen(1000 * count + rank, steps) for rank in range(count)}

    def resized(run: object, count: int) -> str:
        nonlocal workers, before, until
        before, workers, until = workers, count, time.monotonic() + 0.3
        return ""

    monkeypatch.setattr(RunningRanks, "look", look)
    monkeypatch.setattr(disturbance, "resize", resized)
    told: list[Event] = []
    training = cast(
        "Any", SimpleNamespace(process=SimpleNamespace(pid=os.getpid()), losses=[], over=False, folder=None)
    )

    def tell(event: Event) -> None:
        told.append(event)
        training.over = len(told) == 3

    faults = Disturbance(training, Promise(True, 10, None), tell)
    kinds = ("remove", "add", "add")
    faults.follow((Moment(0.0, kind, 0.9) for kind in kinds), kinds, most=None)
    assert [(one.kind, one.ranks) for one in told] == [("remove", (1,)), ("add", (1,)), ("add", (2,))]
    assert all(one.next_s is not None and one.next_s > 0.29 for one in told)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_chaos_that_is_ended_leaves_no_training_behind(tmp_path: Path, signum: signal.Signals) -> None:
    words = ["chaos", "--every", "60", "train", "mlp", "--epochs", "100000", "-n", "2"]
    command = [sys.executable, "-m", "tutti", *words, "--on-failure", "respawn"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    # torch makes a folder for itself, which stays.
    folders = {"TMPDIR": str(temporary), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "of torch")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **folders},
    ) as chaos:
        assert chaos.stdout is not None
        said = []
        for line in chaos.stdout:
            said.append(line)
            if re.match(r"\s*epoch +2/", line):
                break
        left = psutil.Process(chaos.pid).children(recursive=True)
        chaos.send_signal(signum)
        try:
            # The other end of the pipe is closed once nobody trains any more.
            said.append(chaos.communicate(timeout=60)[0])
        finally:
            _, left = psutil.wait_procs(left, timeout=20)
            for one in left:
                one.kill()
    assert left == []
    if signum == signal.SIGKILL:
        assert chaos.returncode == -signum
        return  # Nobody is there to remove its folder.
    assert chaos.returncode == 128 + signum, "".join(said)
    assert list(temporary.iterdir()) == []


def test_of_two_groups_of_ranks_the_one_that_trains_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunningRanks, "_is_rank", lambda self, process: True)
    arenas = [Arena.create() for _ in range(2)]
    line = ControlLayout(1).line(0)
    words = [arena.words(arena.allocate(control_bytes(1)), line + 8) for arena in arenas]
    for group, process in zip(words, (1001, 1002), strict=True):
        group[line + PID] = process
    ranks = RunningRanks(os.getpid())
    for trains in (0, 1):
        words[trains][line + BEAT], words[1 - trains][line + BEAT] = 8, 0
        assert ranks.look() == {0: RankSeen(1001 + trains, 7)}
        # Between two epochs nobody does.
        words[trains][line + BEAT] = 0
        assert ranks.look() == {0: RankSeen(1001 + trains, None)}
    # Others took over from it, and it is about to end.
    words[0][line + BEAT] = 9
    assert ranks.look() == {0: RankSeen(1002, None)}
    for arena in arenas:
        arena.close()


def test_what_is_left_of_a_group_that_has_lost_a_rank_does_not_train(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    alive = {1001, 1002, 1003, 1004}
    monkeypatch.setattr(RunningRanks, "_is_rank", lambda self, process: process in alive)
    layout = ControlLayout(2)
    arenas = [Arena.create() for _ in range(2)]
    words = [arena.words(arena.allocate(control_bytes(2)), layout.words) for arena in arenas]
    for group, first in zip(words, (1001, 1003), strict=True):
        for rank in range(2):
            group[layout.line(rank) + PID] = first + rank
    for group in words:
        ranks = RunningRanks(os.getpid())
        other = words[1] if group is words[0] else words[0]
        for one in (other, group):
            for rank in range(2):
                one[layout.line(rank) + BEAT] = 8 if one is group else 0
        first = group[layout.line(0) + PID]
        assert ranks.look()[0].process == first
        # It has made steps, and is about to end; the other one has begun.
        alive.discard(first + 1)
        other[layout.line(0) + BEAT] = 8
        assert ranks.look()[0].process == other[layout.line(0) + PID]
        alive.add(first + 1)
    for arena in arenas:
        arena.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lenet", "--on-failure", "respawn"], "tutti chaos train lenet"),
        (["train", "lenet"], "add --on-failure respawn or shrink"),
        (["train", "--hosts", "a,b", "--on-failure", "respawn"], "leave --hosts out"),
        (["train", "--resume", "runs/a", "--on-failure", "respawn"], "leave --resume out"),
        (["--most", "0", "train", "--on-failure", "respawn"], "--most is 0; give at least 1"),
        (["--every", "nan", "train", "--on-failure", "respawn"], "--every is nan; give seconds from 0 on"),
        (["--events", ",", "train", "--on-failure", "respawn"], "--events names no fault"),
        (
            ["--events", "stop", "train", "--on-failure", "respawn", "--hang-timeout", "off"],
            "nothing finds a rank that is stopped",
        ),
    ],
)
def test_a_training_that_has_nothing_to_survive_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        COMMANDS["chaos"]()(words)


def test_an_unknown_fault_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="did you mean 'kill-two'"):
        COMMANDS["chaos"]()(["--events", "kill-tow", "train", "--on-failure", "respawn"])


@pytest.mark.parametrize(
    ("options", "equal"),
    [
        ({}, True),
        ({"strategy": "local"}, True),
        ({"strategy": "easgd"}, False),
        ({"balance": "speed"}, False),
        ({"strategy": "paramserver"}, True),
        ({"strategy": "paramserver", "strategy_options": {"quorum": 1}}, True),
        ({"strategy": "paramserver", "strategy_options": {"quorum": 0.5}}, False),
    ],
)
def test_equal_weights_are_asked_of_trainings_that_do_not_depend_on_speed(
    options: dict[str, Any], equal: bool
) -> None:
    assert repeats(TrainConfig(**options)) == equal


def test_weights_are_equal_only_bit_for_bit(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a", "b", "c", "d")]
    values = [torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]), torch.tensor([0.0, 1.5])]
    for file, value in zip(files, values, strict=False):
        save_file({"weight": value}, file)
    save_file({"bias": values[0]}, files[3])
    assert weights_apart(files[0], files[0]) == 0
    assert 0 < cast("float", weights_apart(files[0], files[1])) < 1e-300
    assert weights_apart(files[0], files[2]) == 0.5
    assert weights_apart(files[0], files[3]) is None
    assert weights_apart(files[0], tmp_path / "none") is None


def outcome(**changes: Any) -> Outcome:
    loss = LossSaid(3.0, (1,), KILLED, True)
    events = [
        Event(2.0, "kill", (1,), (loss,), True, True, 0.25, 12, 0.5),
        Event(9.0, "slow", (0,), (), True, True, 0.01, 0, None),
    ]
    return Outcome(**{"events": events, **FINE, **changes})


FINE: dict[str, Any] = {
    "alarms": [],
    "hung": False,
    "code": 0,
    "said": [],
    "seconds": 20.0,
    "left": [],
    "shared": [],
    "must_equal": True,
    "twin": Twin(16.0, 0.0),
}


def test_what_a_training_survived_is_told_in_a_few_lines() -> None:
    assert summary(outcome(), losses=10) == [
        "survived 2 of 2 faults; rank and cause were named rightly in 2",
        "from a loss to the next step of all: median 0.25 s, p95 0.25 s; 12 steps made again in all",
        "until it was as far as before: median 0.50 s, p95 0.50 s",
        "20.0 s beside 16.0 s undisturbed: 80% of its speed",
        "final weights: equal to those of the undisturbed training, bit for bit",
        "left behind: nothing",
    ]
    assert outcome().broken == []


def test_a_training_that_no_fault_befell_is_not_told_as_one_that_survived() -> None:
    found = outcome(events=[], twin=None)
    assert summary(found, losses=10)[1].startswith("nothing was tried: it was over")
    assert (_verdict(found), _verdict(outcome())) == (1, 0)


def test_a_training_that_fails_by_itself_is_told_as_that(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["train", "mlp", "--data", "digits", "-n", "2", "--batch-size", "1", "--on-failure", "respawn"]
    assert COMMANDS["chaos"]()(words) == 2
    said = capfd.readouterr().err
    assert "batch" in said
    assert said.endswith("tutti: error: the training failed before the first fault, as it says above\n")
    assert "promises" not in said


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": 1}, "exit code 1"),
        ({"hung": True}, "did not go on"),
        ({"left": ["process 7 (python)"]}, r"process 7 \(python\)"),
        ({"twin": Twin(16.0, 1e-9)}, "final weights are not those"),
        ({"events": [Event(2.0, "kill", (1,))]}, "survived 0 of 1"),
    ],
)
def test_a_promise_that_is_not_kept_is_named(change: dict[str, Any], reason: str) -> None:
    (found,) = outcome(**change).broken
    assert re.search(reason, found)


def test_of_a_hundred_values_95_are_not_above_the_p95() -> None:
    assert p95([float(value) for value in range(1, 101)]) == 96
    assert p95([3.0]) == 3.0
