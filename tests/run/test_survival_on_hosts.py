"""A run that loses ranks and hosts goes on, on hosts that are left and on those that stand by."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence

import pytest

from tutti.errors import BadOption, HostLost, LauncherLost, PeerLost
from tutti.launch import reserve_on_hosts
from tutti.launch.crew import Orders
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Host, Placement, place_ranks
from tutti.launch.ranks_on_hosts import RanksOnHosts
from tutti.launch.reserve_on_hosts import RanksInReserve
from tutti.run import survival_on_hosts
from tutti.run.config import TrainConfig
from tutti.run.lineup import AHEAD_BYTES
from tutti.run.survival_on_hosts import SLOW_S, after_loss, survive_on_hosts
from tutti.run.train_job import TrainJob


def placed(hosts: str, workers: int | None = None, servers: int = 0) -> Placement:
    return place_ranks("auto" if workers is None else workers, hosts=hosts, servers=servers)


def all_but(*dead: str) -> Callable[[Sequence[str], float], list[str]]:
    return lambda hosts, patience_s: [host for host in hosts if host not in dead]


class Busy:
    """Hosts of which some take longer to answer than one waits at first.

    Args:
        slow: those.
        dead: that never answer.

    Attributes:
        asked: the hosts, each time.
    """

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


def test_fewer_workers_than_places_leave_hosts_that_stand_by() -> None:
    placement = placed("a:2,b:2,c:2", 3)
    assert on(placement) == {"a": 2, "b": 1}
    assert placement.standing_by == (Host("c", 2),)
    assert placement.describe() == "3 ranks on 2 hosts (a: 2, b: 1), c standing by, started by mpirun"
    with pytest.raises(BadOption, match="places for 6 ranks"):
        placed("a:2,b:2,c:2", 7)


@pytest.mark.parametrize(
    ("lost", "dead", "respawned", "shrunk"),
    [
        (PeerLost([3], "killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 1}),
        (PeerLost([0], "killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 1}),
        (LauncherLost("killed"), (), {"a": 2, "b": 2}, {"a": 2, "b": 2}),
        (B_LOST, (), {"a": 2, "c": 2}, {"a": 2}),
        # Only its ranks were seen to end.
        (PeerLost([2], "ended"), ("b",), {"a": 2, "c": 2}, {"a": 2}),
        # One that stands by is gone, too.
        (B_LOST, ("c",), {"a": 2, "d": 1, "e": 1}, {"a": 2}),
        (LauncherLost("killed"), ("b", "c", "d"), None, {"a": 2}),
    ],
)
def test_ranks_go_on_where_there_are_places(
    lost: PeerLost, dead: Sequence[str], respawned: dict[str, int] | None, shrunk: dict[str, int]
) -> None:
    placement = placed("a:2,b:2,c:2,d:1,e:1", 4)
    if respawned is None:
        with pytest.raises(
            PeerLost, match=r"only a, e are left, with too few places for 4 workers.*--resume"
        ):
            after_loss(placement, lost, all_but(*dead), shrinks=False)
    else:
        assert on(after_loss(placement, lost, all_but(*dead), shrinks=False)) == respawned
    assert on(after_loss(placement, lost, all_but(*dead), shrinks=True)) == shrunk


def test_a_slow_host_is_waited_for_where_no_other_can_take_its_place() -> None:
    busy = Busy(slow=["c"])
    placement = after_loss(placed("a:2,b:2,c:2", 4), B_LOST, busy.answers, shrinks=False)
    assert (on(placement), busy.asked) == ({"a": 2, "c": 2}, [["c"], ["b", "c"]])


def test_a_slow_host_is_not_waited_for_where_another_stands_by_and_is_asked_again_at_the_next_loss() -> None:
    busy = Busy(slow=["c"], dead=["b"])
    once = after_loss(placed("a:2,b:2,c:2,d:2", 4), B_LOST, busy.answers, shrinks=False)
    assert (on(once), busy.asked) == ({"a": 2, "d": 2}, [["c"], ["d"]])
    lost = HostLost(["d"], [2, 3], "it cannot be reached any more")
    assert on(after_loss(once, lost, busy.answers, shrinks=False)) == {"a": 2, "c": 2}


def test_a_slow_host_does_not_lose_its_workers_as_the_run_may_shrink() -> None:
    placement, killed = placed("a:2,b:2,c:2"), PeerLost([1], "killed")
    slow = Busy(slow=["b", "c"], dead=["c"])
    assert on(after_loss(placement, killed, slow.answers, shrinks=True)) == {"a": 2, "b": 1}
    assert slow.asked == [["b", "c"], ["b", "c"]]


def test_hosts_that_were_lost_come_back_only_where_the_run_would_end() -> None:
    busy = Busy(slow=["b"])
    assert on(after_loss(placed("a:2,b:2"), B_LOST, busy.answers, shrinks=False)) == {"a": 2, "b": 2}
    assert busy.asked == [["b"]]
    with pytest.raises(HostLost, match="only a is left"):
        after_loss(placed("a:2,b:2"), B_LOST, all_but("b"), shrinks=False)
    assert on(after_loss(placed("a:2,b:2"), B_LOST, busy.answers, shrinks=True)) == {"a": 2}
    once = after_loss(placed("a:2,b:2,c:2", 4), B_LOST, all_but(), shrinks=False)
    twice = after_loss(once, PeerLost([2], "ended"), all_but(), shrinks=False)
    assert on(twice) == {"a": 2, "c": 2}
    assert "standing by" not in twice.describe()


def test_a_lost_server_is_replaced_whoever_shrinks() -> None:
    placement = placed("a:2,b:2", servers=2)
    # Ranks 2 and 5 are servers.
    assert on(after_loss(placement, PeerLost([2, 5], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 2}
    assert on(after_loss(placement, PeerLost([3], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 1}


def test_a_run_of_which_no_worker_is_left_ends() -> None:
    with pytest.raises(PeerLost, match="none is left"):
        after_loss(placed("a:1"), PeerLost([0], "killed"), all_but(), shrinks=True)


def test_the_first_host_has_to_be_this_machine_and_the_launcher_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainJob(TrainConfig(model="mlp", data="digits", on_failure="respawn"), write=False)
    job.check(placed("localhost:1,b:1"))
    with pytest.raises(BadOption, match=r"first of --hosts has to be this machine.*--resume auto"):
        job.check(placed("node7:1,localhost:1"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadOption, match=r"not for ranks that mpirun starts.*--resume auto"):
        job.check(Placement(2, 1, launcher=Launcher.MPIRUN))


@pytest.mark.parametrize("policy", ["respawn", "shrink"])
@pytest.mark.parametrize("nbytes", [AHEAD_BYTES, AHEAD_BYTES + 1, None])
def test_ranks_in_reserve_prepare_themselves_for_the_run_without_a_rank_unless_the_data_are_large(
    monkeypatch: pytest.MonkeyPatch, policy: str, nbytes: int | None
) -> None:
    found: list[Orders | None] = []

    def train(
        entry: str, sent: bytes, placement: Placement, *, reserve: RanksInReserve, **options: object
    ) -> str:
        place = pickle.loads(sent).memory
        found.append(reserve._wanted())
        place.publish(1, {})
        if nbytes is not None:
            place.note_data(nbytes)
        found.append(reserve._wanted())
        return "done"

    monkeypatch.setattr(survival_on_hosts, "start", train)
    config = TrainConfig(model="mlp", data="digits", hosts="localhost:3", on_failure=policy, standby=True)
    placement = placed("localhost:3")
    assert survive_on_hosts(TrainJob(config), placement, None) == "done"
    workers = 3 - (policy == "shrink")
    assert found[0] is None  # There is nothing to go on from.
    assert found[1] is not None
    payload = found[1].payload
    assert found[1].placement.workers == workers
    if nbytes != AHEAD_BYTES:
        assert payload == b""
    else:
        job = pickle.loads(payload)
        assert job.takes_over
        assert job.config.workers == str(workers)


class InReserve(RanksOnHosts):
    """Ranks in reserve on a host of which nobody has noticed yet that they cannot be reached."""

    def __init__(self) -> None:
        return

    def __enter__(self) -> InReserve:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def hosts_there(self, patience_s: float) -> set[str]:
        return {"b"}


def test_a_lost_host_is_asked_though_ranks_in_reserve_were_not_missed_there_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []

    def lose_b(*_: object, reserve: RanksInReserve, **options: object) -> str:
        reserve._ranks = InReserve()
        raise B_LOST

    def silent(hosts: Sequence[str], *_: object) -> list[str]:
        asked.append(list(hosts))
        return []

    monkeypatch.setattr(survival_on_hosts, "start", lose_b)
    monkeypatch.setattr(reserve_on_hosts, "answering", silent)
    config = TrainConfig(model="mlp", data="digits", hosts="localhost:2,b:2", on_failure="respawn")
    with pytest.raises(HostLost, match="only localhost is left"):
        survive_on_hosts(TrainJob(config), placed("localhost:2,b:2"), None)
    assert asked == [["b"]]
