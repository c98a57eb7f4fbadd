"""Which ranks train next: one table over the ends of ranks, and the steps of a resize."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from tutti.checkpoint.memory_files import StateCopy, StateMemory
from tutti.errors import (
    BadOption,
    BadRunFolder,
    HostLost,
    LauncherLost,
    PeerLost,
    RankFailed,
    RankHung,
    TuttiError,
    UserError,
)
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Placement, place_ranks
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopRequests
from tutti.records.resize_request import (
    ResizeRequest,
    answer_request,
    read_request,
    remove_request,
    request_workers,
)
from tutti.run.config import TrainConfig
from tutti.run.recovery_policy import MOST_LOSSES, SLOW_S, RecoveryPolicy, after_loss
from tutti.run.train_job import TrainJob


@contextmanager
def policy_of(
    folder: Path, on_failure: str = "respawn", workers: int = 3
) -> Iterator[tuple[RecoveryPolicy, StateMemory, StopRequests]]:
    """The policy of a run that has a copy of its state."""
    with closing(StateMemory()) as memory, SignalWatch([]) as signals:
        memory.place.note_folder(folder)
        memory.place.publish(StateCopy(1, 1))
        config = TrainConfig("mlp", data="digits", on_failure=on_failure)
        stopping = StopRequests(signals)
        job = TrainJob(config, memory=memory.place)
        yield RecoveryPolicy(job, place_ranks(workers), memory, stopping), memory, stopping


@pytest.mark.parametrize(
    ("end", "respawn", "shrink"),
    [
        (PeerLost([1], "killed"), 3, 2),
        (PeerLost([0, 2], "killed"), 3, 1),
        (PeerLost([], "what forks them ended"), 3, 3),
        (PeerLost([0, 1, 2], "killed"), 3, None),
        (RankHung([2], "no step"), 3, 2),
        (LauncherLost("mpirun was killed"), 3, 3),
        (RankFailed(0, "an exception"), None, None),
        (UserError("wrong"), None, None),
    ],
)
def test_the_next_ranks_follow_from_the_end_of_the_last(
    tmp_path: Path, end: TuttiError, respawn: int | None, shrink: int | None
) -> None:
    for on_failure, workers in (("respawn", respawn), ("shrink", shrink)):
        with policy_of(tmp_path, on_failure) as (policy, _, _):
            if workers is None:
                with pytest.raises(type(end)):
                    policy.go_on_after(end)
            else:
                policy.go_on_after(end)
                assert policy.placement.workers == workers
                assert policy.job.takeover == str(end)


def test_losses_without_progress_end_the_run(tmp_path: Path) -> None:
    lost = PeerLost([1], "killed by signal 9")
    with policy_of(tmp_path) as (policy, memory, _):
        for _ in range(MOST_LOSSES):
            policy.go_on_after(lost)
        memory.place.publish(StateCopy(2, 2))
        for _ in range(MOST_LOSSES):
            policy.go_on_after(lost)
        with pytest.raises(PeerLost, match=f"killed by signal 9; it was loss {MOST_LOSSES + 1} in a row"):
            policy.go_on_after(lost)


def answer_to(folder: Path) -> tuple[bool, str]:
    """What `tutti resize` gets to read, and takes away."""
    found = read_request(folder)
    assert found is not None
    assert found.answer
    remove_request(folder)
    return found.agreed, found.answer


def begin(policy: RecoveryPolicy, memory: StateMemory, number: int) -> None:
    """Answer the request, up to the start of the new ranks."""
    assert not policy.is_due()
    assert not policy.is_due()
    memory.place.publish(StateCopy(number, 2))
    assert policy.is_due()
    policy.resize()


def test_a_resize_is_agreed_to_when_the_state_was_copied(tmp_path: Path) -> None:
    with policy_of(tmp_path) as (policy, memory, _):
        wanted = memory.place.copy_wish()
        assert request_workers(tmp_path, 1)
        begin(policy, memory, 2)
        assert (policy.placement.workers, policy.job.config.workers, wanted()) == (1, "1", False)
        assert answer_to(tmp_path) == (True, "continuing with 1 rank instead of 3")


def test_a_loss_before_the_copy_delays_a_resize(tmp_path: Path) -> None:
    with policy_of(tmp_path) as (policy, memory, _):
        assert request_workers(tmp_path, 2)
        assert not policy.is_due()
        policy.go_on_after(PeerLost([1], "killed"))
        assert policy.placement.workers == 3
        begin(policy, memory, 2)
        assert policy.placement.workers == 2


@pytest.mark.parametrize(("workers", "agreed"), [(3, True), (33, False)])
def test_no_rank_is_ended_for_the_same_number_or_one_without_room(
    tmp_path: Path, workers: int, agreed: bool
) -> None:
    with policy_of(tmp_path) as (policy, memory, _):
        assert request_workers(tmp_path, workers)
        assert not policy.is_due()
        assert answer_to(tmp_path)[0] == agreed
        memory.place.publish(StateCopy(2, 2))
        assert not policy.is_due()


def test_a_run_that_stops_takes_no_copy_for_others(tmp_path: Path) -> None:
    with policy_of(tmp_path) as (policy, memory, stopping):
        assert request_workers(tmp_path, 1)
        stopping.page.request()
        assert not policy.is_due()
        assert not memory.place.copy_wish()()


def test_a_removed_request_is_cancelled(tmp_path: Path) -> None:
    with policy_of(tmp_path) as (policy, memory, _):
        assert request_workers(tmp_path, 1)
        assert not policy.is_due()
        assert memory.place.copy_wish()()
        remove_request(tmp_path)
        memory.place.publish(StateCopy(2, 2))
        assert not policy.is_due()
        assert not memory.place.copy_wish()()


def test_a_request_stands_alone_until_it_is_answered(tmp_path: Path) -> None:
    assert request_workers(tmp_path, 3)
    assert not request_workers(tmp_path, 4)
    answer_request(tmp_path, ResizeRequest(3), "so be it", agreed=True)
    # Who has asked was killed.
    assert request_workers(tmp_path, 4)
    answer_request(tmp_path, ResizeRequest(3), "for another one", agreed=True)
    assert read_request(tmp_path) == ResizeRequest(4)


def test_a_request_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="cannot write"):
        request_workers(tmp_path / "nowhere", 2)


def placed(hosts: str, workers: int | None = None, servers: int = 0) -> Placement:
    return place_ranks("auto" if workers is None else workers, hosts=hosts, servers=servers)


def all_but(*dead: str) -> Callable[[Sequence[str], float], list[str]]:
    return lambda hosts, patience_s: [host for host in hosts if host not in dead]


class Busy:
    """Hosts that answer late (`slow`) or never (`dead`)."""

    def __init__(self, slow: Sequence[str], dead: Sequence[str] = ()) -> None:
        self._slow, self._dead = slow, dead
        self.asked: list[list[str]] = []

    def answers(self, hosts: Sequence[str], patience_s: float) -> list[str]:
        self.asked.append(list(hosts))
        silent = {*self._dead, *(self._slow if patience_s < SLOW_S else ())}
        return [host for host in hosts if host not in silent]


def on(placement: Placement) -> dict[str, int]:
    return {host.name: host.ranks for host in placement.hosts}


B_LOST = HostLost(["b"], [2, 3], "it cannot be reached any more")


@pytest.mark.parametrize(
    ("lost", "dead", "respawned", "shrunk"),
    [
        (PeerLost([3], "killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 1}),
        (PeerLost([0], "killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 1}),
        (LauncherLost("killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 2}),
        (B_LOST, (), {"a": 2, "c": 2}, {"a": 2}),
        # Only its ranks were seen to end.
        (PeerLost([2], "ended"), ("b",), {"a": 2, "c": 2}, {"a": 2, "c": 1}),
        # One that stands by is gone, too.
        (B_LOST, ("c",), {"a": 2, "d": 1, "e": 1}, {"a": 2}),
        (LauncherLost("killed"), ("b", "c", "d"), None, {"a": 2, "e": 1}),
    ],
)
def test_ranks_are_placed_on_the_remaining_hosts(
    lost: PeerLost, dead: Sequence[str], respawned: dict[str, int] | None, shrunk: dict[str, int]
) -> None:
    placement = placed("a:2,b:2,c:2,d:1,e:1", 4)
    if respawned is None:
        with pytest.raises(PeerLost, match=r"only a, e left, with too few places for 4 workers.*--resume"):
            after_loss(placement, lost, all_but(*dead), shrinks=False)
    else:
        assert on(after_loss(placement, lost, all_but(*dead), shrinks=False)) == respawned
    assert on(after_loss(placement, lost, all_but(*dead), shrinks=True)) == shrunk


def test_a_slow_host_is_passed_over_for_one_that_stands_by_and_probed_at_the_next_loss() -> None:
    busy = Busy(slow=["c"], dead=["b"])
    once = after_loss(placed("a:2,b:2,c:2,d:2", 4), B_LOST, busy.answers, shrinks=False)
    assert (on(once), busy.asked) == ({"a": 2, "d": 2}, [["c", "d"]])
    lost = HostLost(["d"], [2, 3], "it cannot be reached any more")
    assert on(after_loss(once, lost, busy.answers, shrinks=False)) == {"a": 2, "c": 2}


def test_lost_hosts_are_used_again_only_if_the_run_would_end() -> None:
    busy = Busy(slow=["b"])
    assert on(after_loss(placed("a:2,b:2"), B_LOST, busy.answers, shrinks=False)) == {"a": 2, "b": 2}
    assert busy.asked == [[], ["b"]]
    with pytest.raises(HostLost, match="only a left"):
        after_loss(placed("a:2,b:2"), B_LOST, all_but("b"), shrinks=False)
    assert on(after_loss(placed("a:2,b:2"), B_LOST, busy.answers, shrinks=True)) == {"a": 2}
    once = after_loss(placed("a:2,b:2,c:2", 4), B_LOST, all_but(), shrinks=False)
    twice = after_loss(once, PeerLost([2], "ended"), all_but(), shrinks=False)
    assert on(twice) == {"a": 2, "c": 2}
    assert "standing by" not in twice.describe()


def test_a_lost_server_is_replaced_even_if_the_run_shrinks() -> None:
    placement = placed("a:2,b:2", servers=2)
    # Ranks 4 and 5 are servers.
    assert on(after_loss(placement, PeerLost([4, 5], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 2}
    assert on(after_loss(placement, PeerLost([3], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 1}


def test_the_first_host_has_to_be_this_machine_and_the_launcher_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainJob(TrainConfig(model="mlp", data="digits", on_failure="respawn"), write=False)
    job.check(placed("localhost:1,b:1"))
    with pytest.raises(BadOption, match=r"from the first of them.*--resume auto"):
        job.check(placed("node7:1,localhost:1"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadOption, match=r"that tutti starts itself.*--resume auto"):
        job.check(Placement(2, 1, launcher=Launcher.MPIRUN))
