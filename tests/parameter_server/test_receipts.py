"""What a visit at a centre tells of itself: how stale and old it was, how long it waited, what it sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn, optim

from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import VirtualWorld
from tutti.parameter_server.base import Centre, Outcome, Push, Receipt
from tutti.parameter_server.connect import join_centre
from tutti.parameter_server.rules import AddRule, OptimizerRule, Rounds
from tutti.parameter_server.server import Server
from tutti.parameter_server.shared_memory import CLOSED_TAG, SharedCentre
from tutti.replica import Flat, Replica
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place

LENGTH = 48
NBYTES = 8 * LENGTH
HEADER = 16
"""Bytes of a request to a server, for a rule without settings."""


def module() -> nn.Module:
    made = nn.ParameterList([nn.Parameter(torch.zeros(16, dtype=torch.float64)) for _ in range(3)])
    assert isinstance(made, nn.Module)
    return made


def private_flats(comm: Communicator) -> list[Flat]:
    return list(place(module(), comm, WeightPlacement.PRIVATE).flats)


class Slow(AddRule):
    """Takes two seconds for each message."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        self._comm = comm

    def apply(self, push: Push) -> Outcome:
        self._comm.compute(2.0)
        return super().apply(push)


@dataclass
class Visitor:
    """A worker and its view of a centre."""

    comm: Communicator
    centre: Centre

    def push(self) -> Receipt:
        return self.centre.push([torch.ones(LENGTH, dtype=torch.float64)])

    def exchange(self) -> Receipt:
        return self.centre.exchange([torch.ones(LENGTH, dtype=torch.float64)])

    def pull(self) -> Receipt:
        return self.centre.pull([torch.zeros(LENGTH, dtype=torch.float64)])


def visit(comm: Communicator, program: Callable[[Visitor], object]) -> object:
    """One rank of a centre that adds."""
    if comm.servers is not None and comm.servers.serving:
        Server(comm.servers, Replica(module()), AddRule()).run()
        return None
    centre = join_centre(comm, place(module(), comm, WeightPlacement.PRIVATE), AddRule())
    found = program(Visitor(comm, centre))
    centre.leave()
    centre.close()
    return found


WORLDS = {"shared": 0, "served": 1, "two servers": 2}


@pytest.mark.parametrize("servers", WORLDS.values(), ids=WORLDS)
def test_a_message_is_as_old_as_what_was_last_read(servers: int) -> None:
    def program(visitor: Visitor) -> list[float | None]:
        ages = []
        for seconds, what in (
            (2.0, visitor.push),
            (1.0, visitor.exchange),
            (0.5, visitor.pull),
            (4.0, visitor.push),
        ):
            visitor.comm.compute(seconds)
            receipt = what()
            assert receipt.wait_s < 0.01
            ages.append(receipt.age_s)
        return ages

    (found,) = VirtualWorld(1, servers=servers).run(visit, program)[:1]
    assert found == [pytest.approx(age, abs=0.01) for age in (2.0, 3.0, 0.5, 4.0)]


@pytest.mark.parametrize("servers", WORLDS.values(), ids=WORLDS)
def test_messages_and_requests_to_servers_are_counted(servers: int) -> None:
    def program(visitor: Visitor) -> list[int]:
        ticked = visitor.centre.tick(0, [torch.zeros(LENGTH, dtype=torch.float64)])
        receipts = [visitor.push(), visitor.exchange(), visitor.pull(), ticked]
        return [receipt.bytes_sent for receipt in receipts]

    found = VirtualWorld(1, servers=servers).run(visit, program)[0]
    assert found == [NBYTES + servers * HEADER] * 2 + [servers * HEADER] * 2


def test_a_server_counts_what_others_did_since_the_last_reading() -> None:
    def program(visitor: Visitor) -> list[int | None]:
        visitor.comm.compute(0.3 * visitor.comm.rank)
        found = []
        for what in (visitor.push, visitor.exchange, visitor.pull, visitor.push, visitor.exchange):
            visitor.comm.compute(1.0)
            found.append(what().staleness)
        return found

    # Worker 1 is always 0.3 s behind worker 0.
    first, second = VirtualWorld(2, servers=1).run(visit, program)[:2]
    assert first == [None, 1, 1, None, 0 + 1]
    assert second == [None, 2, 0, None, 2]


@pytest.mark.parametrize("servers", [0, 1])
def test_a_message_that_is_applied_again_is_not_sent_again(servers: int) -> None:
    def train(comm: Communicator) -> tuple[list[int], list[float]] | None:
        replica = Replica(module())
        rule = OptimizerRule(optim.SGD(replica.module.parameters(), lr=1.0), replica, keep=True)
        if comm.servers is not None and comm.servers.serving:
            Server(comm.servers, replica, rule).run()
            return None
        centre = join_centre(comm, replica, rule)
        sent = []
        for value, again in ((1.0, False), (1.0, True), (3.0, False)):
            message = [torch.full((LENGTH,), value, dtype=torch.float64)]
            sent.append(centre.push(message, again).bytes_sent)
        weights = torch.zeros(LENGTH, dtype=torch.float64)
        centre.read([weights])
        centre.close()
        return sent, weights.tolist()

    found = VirtualWorld(1, servers=servers).run(train)[0]
    assert found is not None
    sent, weights = found
    assert sent[0] - sent[1] == sent[2] - sent[1] == NBYTES
    assert weights == [-5.0] * LENGTH


def test_all_read_the_same_weights_though_one_continues_at_once() -> None:
    def program(visitor: Visitor) -> list[float]:
        into = torch.zeros(LENGTH, dtype=torch.float64)
        visitor.centre.read([into])
        visitor.push()
        return into.tolist()

    # The request of the worker on the other host is half a second under way.
    network = Network(latency_s=0.5, bandwidth_bytes_per_s=1e9)
    assert VirtualWorld(2, 1, network, servers=1).run(visit, program) == [[0.0] * LENGTH] * 2


@pytest.mark.parametrize("servers", WORLDS.values(), ids=WORLDS)
def test_a_waiting_worker_continues_when_the_slower_one_leaves(servers: int) -> None:
    def program(visitor: Visitor) -> tuple[float, int | None]:
        if visitor.comm.rank:
            visitor.comm.compute(5.0)
            return 0.0, 0
        ticked = visitor.centre.tick(0, [torch.zeros(LENGTH, dtype=torch.float64)])
        return ticked.wait_s, ticked.staleness

    (wait_s, staleness), _ = VirtualWorld(2, servers=servers).run(visit, program)[:2]
    assert wait_s == pytest.approx(5.0, abs=0.01)
    assert staleness == 0


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("servers", WORLDS.values(), ids=WORLDS)
def test_workers_wait_for_each_other_after_they_rejoin(servers: int, first: int) -> None:
    def program(visitor: Visitor) -> float:
        into = [torch.zeros(LENGTH, dtype=torch.float64)]
        centre, is_first, wait_s = visitor.centre, visitor.comm.rank == first, 0.0
        if not is_first:
            visitor.comm.compute(3.0)
            wait_s = centre.tick(0, into).wait_s
        centre.leave()
        centre.rejoin()
        if is_first:
            return centre.tick(0, into).wait_s
        visitor.comm.compute(5.0)
        centre.tick(0, into)
        return wait_s

    found = VirtualWorld(2, servers=servers).run(visit, program)
    assert (found[first], found[1 - first]) == (pytest.approx(5.0, abs=0.01), pytest.approx(0.0, abs=0.01))


def test_a_tick_tells_the_wait_for_the_others_and_that_for_the_weights() -> None:
    """The third worker has left, and holds the weights from 2 s to 4 s."""

    def train(comm: Communicator) -> float:
        into = [torch.zeros(LENGTH, dtype=torch.float64)]
        rule = Slow(comm)
        visitor = Visitor(comm, SharedCentre(comm, private_flats(comm), rule))
        if comm.rank == 0:
            return visitor.centre.tick(0, into).wait_s
        if comm.rank == 1:
            comm.compute(3.0)
            return visitor.centre.tick(0, into).wait_s
        visitor.centre.leave()
        comm.compute(2.0)
        return visitor.push().wait_s

    assert VirtualWorld(3).run(train) == [pytest.approx(wait, abs=0.01) for wait in (4.0, 1.0, 0.0)]


def test_a_worker_waits_while_another_holds_a_slot() -> None:
    def train(comm: Communicator) -> tuple[float, float]:
        rule = Slow(comm)
        visitor = Visitor(comm, SharedCentre(comm, private_flats(comm), rule))
        comm.compute(0.5 * comm.rank)
        receipt = visitor.pull() if comm.rank == 2 else visitor.push()
        return receipt.wait_s, receipt.update_s

    assert VirtualWorld(3).run(train) == [
        (pytest.approx(0.0, abs=0.01), pytest.approx(2.0, abs=0.01)),
        (pytest.approx(1.5, abs=0.01), pytest.approx(2.0, abs=0.01)),
        (pytest.approx(3.0, abs=0.01), 0.0),
    ]


def test_the_answer_to_a_held_message_comes_when_its_round_closes() -> None:
    def train(comm: Communicator) -> tuple[list[float], Tensor, int | None]:
        visitor, rule = in_rounds(comm)
        waits = []
        for number, seconds in enumerate(((1.0, 4.0), (2.0, 1.0), (1.0, 3.0))):
            rule.round = number
            comm.compute(seconds[comm.rank])
            waits.append(visitor.exchange().wait_s)
        weights = torch.zeros(LENGTH, dtype=torch.float64)
        visitor.centre.read([weights])
        return waits, weights, comm.waiting(CLOSED_TAG)

    for found, waits in zip(VirtualWorld(2).run(train), ((3.0, 0.0, 2.0), (0.0, 1.0, 0.0)), strict=True):
        assert found[0] == [pytest.approx(wait, abs=0.01) for wait in waits]
        assert found[1].tolist() == [-6.0] * LENGTH
        assert found[2] is None


def test_weights_that_are_rounded_divide_nothing() -> None:
    def train(comm: Communicator) -> list[float]:
        visitor, rule = in_rounds(comm)
        rule.share = (0.7, 0.2, 0.1)[comm.rank]
        assert 0.7 + 0.2 + 0.1 < 1
        comm.compute(1.0 + comm.rank)
        visitor.exchange()
        weights = torch.zeros(LENGTH, dtype=torch.float64)
        visitor.centre.read([weights])
        return weights.tolist()

    assert VirtualWorld(3).run(train) == [[-3.0] * LENGTH] * 3


def in_rounds(comm: Communicator) -> tuple[Visitor, Rounds]:
    """A visitor of a centre that moves by the sum of all workers' gradients."""
    replica = place(module(), comm, WeightPlacement.PRIVATE)
    rule = Rounds(optim.SGD(replica.module.parameters(), lr=1.0), replica, comm.size, rank=comm.rank)
    return Visitor(comm, SharedCentre(comm, replica.flats, rule, 2)), rule


def test_a_visit_that_takes_its_hosts_centre_up_tells_the_way_there_too() -> None:
    def program(visitor: Visitor) -> list[tuple[int, float]]:
        found = []
        visitor.comm.compute(3.0 * visitor.comm.rank)
        for _ in range(4):
            visitor.comm.compute(10.0)
            receipt = visitor.push()
            found.append((receipt.bytes_sent, receipt.wait_s))
        return found

    network = Network(latency_s=0.5, bandwidth_bytes_per_s=1e9)
    # The server is on the host of worker 0.
    _, found = VirtualWorld(2, 1, network, servers=1, levels=2, server_period=2).run(visit, program)
    above = NBYTES + HEADER
    assert [sent for sent, _ in found] == [NBYTES, NBYTES + above] * 2
    assert [wait_s for _, wait_s in found] == [pytest.approx(0.0, abs=0.01), pytest.approx(1.0, abs=0.1)] * 2
