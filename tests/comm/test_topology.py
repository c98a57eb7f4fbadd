"""Topologies: words, ways, contention message by message, and closed forms worked by hand."""

from __future__ import annotations

from random import Random

import pytest
import torch

from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.rounds import Branches, Pairs, Rings, Round, messages
from tutti.comm.topology import Sites
from tutti.comm.virtual.group import Cluster
from tutti.comm.virtual.scheduler import Scheduler
from tutti.comm.virtual.world import VirtualWorld

WORDS = [
    *("10gbit,50us", "1.5gbit,800ns", "100mbit,0s", "10gbit,50us,fat-tree:16:4", "10gbit,50us,shared:8"),
    *("10gbit,50us,ring", "10gbit,50us,torus:4x4", "10gbit,50us,sites:2:100mbit:20ms"),
]


@pytest.mark.parametrize("words", WORDS)
def test_a_network_has_the_words_that_it_is_read_from(words: str) -> None:
    assert str(Network.parse(words)) == words


def test_words_mean_what_they_say() -> None:
    assert Network.parse("10gbit, 50us") == Network(50e-6, 1.25e9)
    assert Network.parse("1gbit,1ms,switch") == Network(1e-3, 1.25e8)
    expected = Network(50e-6, 1.25e9, topology=Sites(2, 1.25e7, 0.02))
    assert Network.parse("10gbit,50us,sites:2:100mbit:20ms") == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("10gbit", "expected RATE,LATENCY or"),
        ("10,50us", "found '10'; expected a number and a unit: kbit, mbit"),
        ("10gbit,fast", "found 'fast'; expected a number and a unit: ns, us"),
        ("0gbit,50us", "bandwidth_bytes_per_s is 0.0; expected more than 0"),
        ("10gbit,-1us", "latency_s is -1e-06; expected 0 or more"),
        ("10gbit,50us,star", "'star'; expected a word such as switch, fat-tree:16:4"),
        ("10gbit,50us,torus:4x", "'torus:4x'; expected a word such as torus:4x4"),
        ("10gbit,50us,torus:4x0", "expected numbers above 0"),
        ("10gbit,50us,fat-tree:16", "'fat-tree:16'; expected a word such as fat-tree:16:4"),
        ("10gbit,50us,fat-tree:0:4", "expected numbers above 0"),
        ("10gbit,50us,fat-tree:4:0", "expected numbers above 0"),
        ("10gbit,50us,shared:0", "expected numbers above 0"),
        ("10gbit,50us,sites:0:1mbit:20ms", "expected numbers above 0"),
        ("10gbit,50us,sites:2:0mbit:20ms", "expected numbers above 0"),
    ],
)
def test_wrong_words_are_refused(words: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Network.parse(words)


def test_a_topology_must_have_all_hosts() -> None:
    network = Network.parse("10gbit,50us,torus:2x2")
    with pytest.raises(ValueError, match="torus:2x2, which has 4 hosts; expected at least 5"):
        network.all_reduce_s([1] * 5, 8)
    with pytest.raises(ValueError, match="expected the number of hosts"):
        Network.parse("10gbit,50us,ring").route(0, 1)


@pytest.mark.parametrize(
    ("topology", "here", "there", "ports"),
    [
        ("switch", 0, 3, [("out", 0), ("into", 3)]),
        ("fat-tree:4:2", 0, 3, [("out", 0), ("into", 3)]),
        ("fat-tree:4:2", 0, 5, [("out", 0), ("up", 0), ("down", 1), ("into", 5)]),
        ("sites:3:1mbit:1ms", 5, 6, [("out", 5), ("up", 1), ("down", 2), ("into", 6)]),
        ("ring", 1, 3, [("link", 1, 1), ("link", 2, 1)]),
        ("ring", 1, 7, [("link", 1, -1), ("link", 0, -1)]),
        ("torus:3x3", 0, 8, [("link", 0, -1), ("link", 2, -3)]),
        ("torus:3x3", 4, 3, [("link", 4, -1)]),
    ],
)
def test_a_message_takes_the_shortest_way(
    topology: str, here: int, there: int, ports: list[tuple[object, ...]]
) -> None:
    network = Network.parse(f"10gbit,50us,{topology}")
    size = 9 if topology.startswith(("sites", "torus")) else 8
    assert [hop.port for hop in network.route(here, there, size)] == ports


# Message by message: a host's link carries one float32 a second, with a second of latency.


def arrivals(topology: str, sends: dict[int, int], length: int = 2, hosts: int = 4) -> list[float]:
    """Return when the receivers have messages that are all sent at time 0."""
    network = Network.parse(f"0.032kbit,1s,{topology}")

    def program(comm: Communicator) -> float:
        if comm.rank in sends:
            comm.send(torch.zeros(length), sends[comm.rank])
        elif comm.rank in sends.values():
            comm.recv(torch.zeros(length))
            return comm.clock()
        return 0.0

    clocks = VirtualWorld(hosts, 1, network).run(program)
    return [clocks[receiver] for receiver in sends.values()]


@pytest.mark.parametrize(
    ("topology", "sends", "expected"),
    [
        ("switch", {0: 2, 1: 3}, [3, 3]),
        ("fat-tree:2:1", {0: 2, 1: 3}, [3, 3]),  # the link to the core carries both at once
        ("fat-tree:2:2", {0: 2, 1: 3}, [3, 5]),  # and here one after the other
        ("fat-tree:2:2", {0: 1, 2: 3}, [3, 3]),  # nothing leaves a switch
        ("fat-tree:2:2", {0: 3, 2: 1}, [3, 3]),  # up and down are two ports
        ("shared:2", {0: 2, 1: 3}, [3, 5]),
        ("sites:2:0.016kbit:9s", {0: 2, 1: 3}, [1 + 9 + 4, 1 + 9 + 8]),
        ("ring", {0: 2}, [2 + 2]),
        ("ring", {0: 1, 3: 2}, [3, 3]),
        ("ring", {0: 2, 1: 3}, [2 + 2, 2 + 3 + 2]),  # both go from 1 to 2, the second one after 3 s
        ("torus:2x2", {0: 3, 1: 2}, [2 + 2, 2 + 2]),
    ],
)
def test_messages_take_turns_where_they_share_a_port(
    topology: str, sends: dict[int, int], expected: list[float]
) -> None:
    assert arrivals(topology, sends) == pytest.approx(expected)


def test_a_slow_link_delays_its_host_alone() -> None:
    network = Network(1.0, 4.0, link_speeds=(1.0, 1.0, 0.5))

    def program(comm: Communicator) -> float:
        if comm.rank == 0:
            comm.send(torch.zeros(2), 1)
            comm.send(torch.zeros(2), 2)
        else:
            comm.recv(torch.zeros(2))
        return comm.clock()

    assert VirtualWorld(3, 1, network).run(program) == pytest.approx([4.0, 3.0, 2.0 + 1.0 + 4.0])


def test_a_message_from_afar_delays_no_rank_before_it_comes() -> None:
    """Rank 3 is at another place; its message takes 100 s, and is sent first."""

    def program(comm: Communicator) -> list[tuple[int, float]]:
        if comm.rank:
            comm.compute(1.0 if comm.rank == 1 else 0.0)
            if comm.rank != 2:
                comm.send(torch.zeros(1), 0)
            return []
        return [(comm.recv(torch.zeros(1)), comm.clock()) for _ in range(2)]

    network = Network.parse("0.032kbit,1s,sites:2:0.032kbit:99s")
    assert VirtualWorld(4, 1, network).run(program)[0] == [(1, 3.0), (3, 101.0)]


def test_messages_do_not_overtake_each_other() -> None:
    """A short one would fit between messages of others, into a gap too small for the one before it."""
    network, random = Network.parse("0.032kbit,1s,sites:2:0.064kbit:30s"), Random(1)
    cluster = Cluster(Scheduler([]), network, (0, 1, 2, 3))
    last: dict[tuple[int, int], float] = {}
    for at in range(0, 2000, 2):
        sender, receiver = random.sample(range(4), 2)
        _, arrival = cluster.transmit(sender, receiver, random.choice([4, 8, 16, 40]), at)
        assert arrival >= last.get((sender, receiver), 0.0)
        last[sender, receiver] = arrival


def test_a_processor_takes_its_overhead_at_both_ends() -> None:
    def program(comm: Communicator) -> float:
        for _ in range(2):
            if comm.rank:
                comm.send(torch.zeros(1), 0)
            else:
                comm.recv(torch.zeros(1))
        return comm.clock()

    network = Network(1.0, 4.0, overhead_s=10.0)
    receiver, sender = VirtualWorld(2, 1, network).run(program)
    assert sender == pytest.approx(2 * (10 + 1))
    assert receiver == pytest.approx(2 * (10 + 1) + 1 + 10)


# Closed forms. α = 1 ms, β = 1 us a byte, vectors of n bytes with nβ = 8 s.

A, B, N = 1e-3, 1e-6, 8e6


@pytest.mark.parametrize(
    ("topology", "hosts", "expected"),
    [
        ("switch", 4, 4 * A + 1.5 * N * B),
        # Fewer bytes leave a switch around a ring: n/4 in each of 6 rounds, at half a host's bandwidth.
        ("fat-tree:2:4", 4, 2 * (A + 3 / 4 * N * 2 * B)),
        # Twice, a pair of hosts sends n/4 each over the narrow link, and n/2 to its neighbour.
        ("sites:2:80kbit:20ms", 4, 2 * (2 * A + 20e-3 + N / 4 * 2 * 100 * B + N / 2 * B)),
        ("ring", 8, 14 * (A + N / 8 * B)),
        ("torus:3x3", 9, 16 * (A + N / 9 * B)),
    ],
)
def test_all_reduce_finds_the_narrowest_cut(topology: str, hosts: int, expected: float) -> None:
    network = Network.parse(f"8mbit,1ms,{topology}")
    assert network.all_reduce_s([1] * hosts, N) == pytest.approx(expected)


def test_broadcast_crosses_a_narrow_link_once() -> None:
    network = Network.parse("8mbit,1ms,sites:2:80kbit:20ms")
    assert network.broadcast_s([1] * 4, N) == pytest.approx(2 * A + 20e-3 + N * 100 * B + N * B)
    assert network.barrier_s([1] * 4) == pytest.approx(2 * A + 20e-3)


def test_the_slowest_link_holds_all_up() -> None:
    network = Network(A, 1 / B, link_speeds=(1.0, 1.0, 1.0, 0.25))
    assert network.all_gather_s([1] * 4, N) == pytest.approx(A + 3 / 4 * N * 4 * B)
    assert network.all_gather_s([1] * 3, N) == pytest.approx(2 * A + 2 / 3 * N * B)


def test_overhead_and_adding_come_on_top() -> None:
    network, gamma = Network(A, 1 / B, overhead_s=2 * A, adding_s_per_byte=B / 4), B / 4
    expected = 4 * 5 * A + 1.5 * N * B + 3 / 4 * N * gamma
    assert network.all_reduce_s([1] * 4, N) == pytest.approx(expected)
    assert network.reduce_scatter_s([1] * 4, N) == pytest.approx(2 * 5 * A + 3 / 4 * N * (B + gamma))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Pairs(2), [(0, 2), (1, 3), (2, 0), (3, 1)]),
        (Branches(1), [(1, 0), (3, 2), (5, 4)]),
        (Branches(4), [(4, 0)]),
        (Rings(3), [(0, 1), (1, 2), (2, 0), (3, 4), (4, 5), (5, 3)]),
        (Rings(2, 3), [(0, 3), (1, 4), (2, 5), (3, 0), (4, 1), (5, 2)]),
    ],
    ids=str,
)
def test_rounds_of_six_ranks(kind: Round, expected: list[tuple[int, int]]) -> None:
    assert sorted(messages(kind, 6)) == expected
