"""The centre on servers, with one level and with two: on virtual ranks and on processes."""

from __future__ import annotations

import sys
from functools import partial

import cloudpickle
import pytest
import torch
from torch import Tensor, nn, optim

from tests.parameter_server import two_types
from tests.parameter_server.two_types import TwoTypes, values, vectors
from tutti.comm.base import ANY, Communicator
from tutti.comm.virtual.world import Fault, VirtualCommunicator, VirtualWorld
from tutti.errors import BadOption, PeerLost
from tutti.parameter_server.base import Rule
from tutti.parameter_server.connect import join_centre, workers_of_centre
from tutti.parameter_server.rules import AddRule, ElasticRule, Hyperparameters, OptimizerRule
from tutti.parameter_server.server import Server
from tutti.replica import Replica
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place

# The ranks cannot import these pages by their names: their functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(two_types)


def add(replica: Replica, workers: int) -> Rule:
    return AddRule()


def elastic(replica: Replica, workers: int) -> Rule:
    return ElasticRule(0.9, workers)


def sgd(replica: Replica, workers: int) -> Rule:
    return OptimizerRule(optim.SGD(replica.module.parameters(), lr=0.5), replica)


def pushing(comm: Communicator, make: object, pushes: int) -> tuple[set[float], int]:
    """Every worker pushes ones, some with an answer and some without; what is in the centre in the end."""
    if comm.servers is not None and comm.servers.serving:
        replica = Replica(TwoTypes(-5.0))
        Server(comm.servers, replica, make(replica, comm.servers.comm.size - len(comm.servers.ranks))).run()
        return set(), 0
    replica = place(TwoTypes(), comm, WeightPlacement.PRIVATE)
    centre = join_centre(comm, replica, make(replica, comm.size))
    weights = [flat.weights for flat in replica.flats]
    for number in range(pushes):
        if number % 2:
            centre.push(vectors(replica, 1.0))
        else:
            centre.exchange(vectors(replica, 1.0), weights)
        comm.compute(1.0 + comm.rank / 10)
    centre.leave()
    centre.read(weights)
    found = values(weights), centre.version
    centre.close()
    return found


@pytest.mark.parametrize("servers", [1, 2, 5])
@pytest.mark.parametrize(("make", "expected"), [(add, 1.0 + 12), (sgd, 1.0 - 6)])
def test_every_message_is_applied(make: object, expected: float, servers: int) -> None:
    found = VirtualWorld(3, (2, 1), servers=servers).run(pushing, make, 4)
    assert found == [({expected}, 12)] * 3


def begin(comm: Communicator) -> set[float]:
    """What is in a centre of workers with other weights each."""
    if comm.servers is not None and comm.servers.serving:
        Server(comm.servers, Replica(TwoTypes()), AddRule()).run()
        return set()
    replica = Replica(TwoTypes(1.0 + comm.rank))
    centre = join_centre(comm, replica, AddRule())
    weights = [flat.weights for flat in replica.flats]
    centre.read(weights)
    centre.close()
    return values(weights)


def test_the_first_workers_weights_are_the_centres() -> None:
    assert VirtualWorld(3, servers=1).run(begin) == [{1.0}] * 3


@pytest.mark.parametrize("server_period", [1, 3, 100])
@pytest.mark.parametrize(("make", "expected"), [(add, 1.0 + 4 * 8), (sgd, 1.0 - 4 * 4)])
def test_two_levels_lose_no_message(make: object, expected: float, server_period: int) -> None:
    world = VirtualWorld(4, (1, 3), servers=1, levels=2, server_period=server_period)
    for found, _ in world.run(pushing, make, 8):
        assert found == {expected}


def two_levels(comm: Communicator, steps: int) -> list[float]:
    """Each worker, whose weights are a number, pulls at the centre of its host, and that at the top."""
    module = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        module.weight.fill_(1.0)
    if comm.servers is not None and comm.servers.serving:
        Server(comm.servers, Replica(module), ElasticRule(0.8, 1)).run()
        return []
    replica = place(module, comm, WeightPlacement.PRIVATE)
    centre = join_centre(comm, replica, ElasticRule(0.8, workers_of_centre(comm)))
    weights = replica.flats[0].weights
    found = []
    for _ in range(steps):
        comm.compute(1.0 + comm.rank / 10)
        weights += comm.rank + 1
        centre.exchange([weights])
        found.append(float(weights[0]))
    centre.leave()
    centre.read([weights])
    centre.close()
    return [*found, float(weights[0])]


@pytest.mark.parametrize("hosts", [(2, 1), (1, 3), (2, 2)], ids=str)
@pytest.mark.parametrize("server_period", [2, 3, 100])
def test_elastic_centres_pull_at_each_other(server_period: int, hosts: tuple[int, int]) -> None:
    """Each centre by the number of those who come to it."""
    of_rank = [host for host, workers in enumerate(hosts) for _ in range(workers)]
    x, host, top, exchanges = [1.0 for _ in of_rank], [1.0, 1.0], 1.0, [0, 0]
    expected: list[list[float]] = [[] for _ in of_rank]
    for _ in range(4):
        for rank, of in enumerate(of_rank):  # They finish in this order, as their speeds hardly differ.
            x[rank] += rank + 1
            d = 0.8 / hosts[of] * (x[rank] - host[of])
            x[rank], host[of] = x[rank] - d, host[of] + d
            expected[rank].append(x[rank])
            exchanges[of] += 1
            if exchanges[of] % server_period == 0:
                d = 0.8 / 2 * (host[of] - top)
                host[of], top = host[of] - d, top + d
    for centre in host:  # Both go up once more before the one above is read.
        top += 0.8 / 2 * (centre - top)
    found = VirtualWorld(sum(hosts), hosts, servers=1, levels=2, server_period=server_period).run(
        two_levels, 4
    )
    for rank in range(len(of_rank)):
        assert found[rank] == pytest.approx([*expected[rank], top], rel=1e-12)


def test_requests_are_served_in_the_order_in_which_they_come() -> None:
    def train(comm: Communicator) -> tuple[float, int | None]:
        if comm.servers is not None and comm.servers.serving:
            Server(comm.servers, Replica(TwoTypes()), AddRule()).run()
            return 0.0, 0
        replica = place(TwoTypes(), comm, WeightPlacement.PRIVATE)
        centre = join_centre(comm, replica, AddRule())
        comm.compute(1.0 - comm.rank / 10)
        receipt = centre.exchange(vectors(replica, 1.0))
        centre.close()
        return comm.clock(), receipt.staleness

    found = VirtualWorld(3, servers=1).run(train)
    assert [staleness for _, staleness in found] == [2, 1, 0]
    assert [clock for clock, _ in found] == sorted((clock for clock, _ in found), reverse=True)


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("dead", [0, 1, 3])
@pytest.mark.parametrize("operation", [9, 14, 19, 24, 31])
def test_no_rank_hangs_when_a_worker_or_a_server_dies(dead: int, operation: int, levels: int) -> None:
    def train(comm: Communicator) -> str:
        try:
            pushing(comm, elastic, 20)
        except PeerLost:
            return "lost"
        return "done"

    world = VirtualWorld(
        3, (2, 1), servers=1, levels=levels, server_period=2, faults=[Fault(dead, operation=operation)]
    )
    found = world.run(train)
    assert world.lost == [dead]
    assert [outcome for rank, outcome in enumerate(found) if rank != dead] == ["lost"] * (
        3 if dead == 3 else 2
    )


def test_several_hosts_without_a_server_are_refused() -> None:
    def train(comm: Communicator) -> None:
        replica = place(TwoTypes(), comm, WeightPlacement.PRIVATE)
        join_centre(comm, replica, AddRule())

    with pytest.raises(BadOption, match=r"the workers are on 2 hosts.*'--servers 1'"):
        VirtualWorld(3, (2, 1)).run(train)


def test_the_senders_options_travel_with_the_gradient() -> None:
    there, here = [
        optim.Adam([{"params": [nn.Parameter(torch.ones(1))], "betas": betas}], lr=lr, amsgrad=amsgrad)
        for betas, lr, amsgrad in (((0.9, 0.99), 0.1, True), ((0.5, 0.6), 0.2, False))
    ]
    here.param_groups[0]["initial_lr"] = 7.0  # a scheduler's; there is none on the other side
    Hyperparameters(there).write(Hyperparameters(here).read())
    group = there.param_groups[0]
    assert (group["lr"], group["betas"], group["amsgrad"]) == (0.2, (0.5, 0.6), False)
    assert type(group["amsgrad"]) is bool
    assert "initial_lr" not in group


def test_a_learning_rate_that_is_a_tensor_travels_too() -> None:
    make = partial(optim.Adam, [nn.Parameter(torch.ones(1))])
    there, rate = make(lr=torch.tensor(0.1)), torch.tensor(0.2)
    kept = there.param_groups[0]["lr"]
    Hyperparameters(there).write(Hyperparameters(make(lr=rate)).read())
    assert there.param_groups[0]["lr"] is kept
    assert float(kept) == pytest.approx(0.2)


def test_servers_and_workers_do_not_wait_in_a_circle(monkeypatch: pytest.MonkeyPatch) -> None:
    # As over MPI: a message inside a host is buffered, one between hosts waits for its receiver.
    send, recv, taken = VirtualCommunicator.send, VirtualCommunicator.recv, 9999

    def is_far(comm: VirtualCommunicator, other: int) -> bool:
        members, host_of = comm._group.members, comm._cluster.host_of
        return host_of[members[other]] != host_of[members[comm.rank]]

    def send_and_wait(self: VirtualCommunicator, vector: Tensor, to: int, tag: int = 0) -> None:
        send(self, vector, to, tag)
        if is_far(self, to):
            recv(self, torch.zeros(1), to, taken)

    def recv_and_confirm(self: VirtualCommunicator, vector: Tensor, source: int = ANY, tag: int = 0) -> int:
        source = recv(self, vector, source, tag)
        if is_far(self, source):
            send(self, torch.zeros(1), source, taken)
        return source

    monkeypatch.setattr(VirtualCommunicator, "send", send_and_wait)
    monkeypatch.setattr(VirtualCommunicator, "recv", recv_and_confirm)
    found = VirtualWorld(8, 2, servers=4).run(pushing, add, 6)
    assert all(values == {1.0 + 8 * 6} for values, _ in found)
