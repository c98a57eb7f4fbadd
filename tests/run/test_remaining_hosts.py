"""A run that loses ranks and hosts goes on, on hosts that are left and on those that stand by."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from tutti.errors import BadOption, HostLost, LauncherLost, PeerLost
from tutti.launch.launcher import Launcher
from tutti.launch.placement import Host, Placement, place_ranks
from tutti.run.config import TrainConfig
from tutti.run.recovery_policy import SLOW_S, after_loss
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
        (PeerLost([2], "ended"), ("b",), {"a": 2, "c": 2}, {"a": 2, "c": 1}),
        # One that stands by is gone, too.
        (B_LOST, ("c",), {"a": 2, "d": 1, "e": 1}, {"a": 2}),
        (LauncherLost("killed"), ("b", "c", "d"), None, {"a": 2, "e": 1}),
    ],
)
def test_ranks_go_on_where_there_are_places(
    lost: PeerLost, dead: Sequence[str], respawned: dict[str, int] | None, shrunk: dict[str, int]
) -> None:
    placement = placed("a:2,b:2,c:2,d:1,e:1", 4)
    if respawned is None:
        with pytest.raises(PeerLost, match=r"only a, e left, with too few places for 4 workers.*--resume"):
            after_loss(placement, lost, all_but(*dead), shrinks=False)
    else:
        assert on(after_loss(placement, lost, all_but(*dead), shrinks=False)) == respawned
    assert on(after_loss(placement, lost, all_but(*dead), shrinks=True)) == shrunk


def test_a_slow_host_is_not_waited_for_where_another_stands_by_and_is_asked_again_at_the_next_loss() -> None:
    busy = Busy(slow=["c"], dead=["b"])
    once = after_loss(placed("a:2,b:2,c:2,d:2", 4), B_LOST, busy.answers, shrinks=False)
    assert (on(once), busy.asked) == ({"a": 2, "d": 2}, [["c", "d"]])
    lost = HostLost(["d"], [2, 3], "it cannot be reached any more")
    assert on(after_loss(once, lost, busy.answers, shrinks=False)) == {"a": 2, "c": 2}


def test_hosts_that_were_lost_come_back_only_where_the_run_would_end() -> None:
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


def test_a_lost_server_is_replaced_whoever_shrinks() -> None:
    placement = placed("a:2,b:2", servers=2)
    # Ranks 2 and 5 are servers.
    assert on(after_loss(placement, PeerLost([2, 5], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 2}
    assert on(after_loss(placement, PeerLost([3], "killed"), all_but(), shrinks=True)) == {"a": 2, "b": 1}


def test_the_first_host_has_to_be_this_machine_and_the_launcher_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    job = TrainJob(TrainConfig(model="mlp", data="digits", on_failure="respawn"), write=False)
    job.check(placed("localhost:1,b:1"))
    with pytest.raises(BadOption, match=r"from the first of them.*--resume auto"):
        job.check(placed("node7:1,localhost:1"))
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(BadOption, match=r"that tutti starts itself.*--resume auto"):
        job.check(Placement(2, 1, launcher=Launcher.MPIRUN))
