"""The virtual world: the contract, its clock, its faults, and how it ends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.contracts.communicator import CHECKS
from tutti.comm.base import ANY, Communicator
from tutti.comm.network import Network
from tutti.comm.virtual.world import Deadlock, Fault, VirtualCommunicator, VirtualWorld
from tutti.errors import PeerLost

WORLDS = {
    "1": VirtualWorld(1),
    "2": VirtualWorld(2),
    "3": VirtualWorld(3),
    "5": VirtualWorld(5),
    "1+1+1": VirtualWorld(3, ranks_per_host=1),
    "2+3": VirtualWorld(5, ranks_per_host=[2, 3]),
}
SLOW = Network(
    latency_s=1.0, bandwidth_bytes_per_s=4.0, local_latency_s=0.1, local_bandwidth_bytes_per_s=40.0
)
"""A link carries one float32 per second between hosts, ten inside a host."""


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS.keys())
def test_contract(world: VirtualWorld, check: Callable[[Communicator], None]) -> None:
    world.run(check)


def in_lanes_of_a_split(comm: VirtualCommunicator) -> Communicator | None:
    return comm.split(comm.rank % 2)


@pytest.mark.parametrize("lane_of", [lambda comm: comm.cross, in_lanes_of_a_split], ids=["cross", "split"])
def test_groups_that_meet_at_the_same_time_share_the_links_of_their_hosts(
    lane_of: Callable[[VirtualCommunicator], Communicator],
) -> None:
    def program(comm: VirtualCommunicator) -> float:
        lane, began = lane_of(comm), comm.clock()
        lane.all_reduce(torch.ones(50))
        return comm.clock() - began

    free_inside = Network(1.0, 4.0, 0.0, float("inf"))
    found = VirtualWorld(6, ranks_per_host=2, network=free_inside).run(program)
    assert found == pytest.approx([free_inside.all_reduce_s([1, 1, 1], 2 * 50 * 4)] * 6)


class TestServers:
    def test_workers_see_each_other_alone_and_reach_the_servers_by_messages(self) -> None:
        def program(comm: VirtualCommunicator) -> object:
            servers = comm.servers
            assert servers is not None
            vector = torch.tensor([float(comm.rank)])
            comm.all_reduce(vector)
            if servers.serving:
                for _ in range(servers.comm.size - len(servers.ranks)):
                    message = torch.zeros(1)
                    source = servers.comm.recv(message, tag=1)
                    servers.comm.send(message * 10 + servers.comm.rank, to=source, tag=2)
                return None
            answer = torch.zeros(1)
            for server in servers.ranks:
                servers.comm.send(torch.tensor([float(comm.rank)]), to=server, tag=1)
                servers.comm.recv(answer, source=server, tag=2)
            return vector.item(), servers.ranks, servers.comm.rank, answer.item()

        assert VirtualWorld(3, servers=2).run(program) == [
            (3.0, (3, 4), 0, 4.0),
            (3.0, (3, 4), 1, 14.0),
            (3.0, (3, 4), 2, 24.0),
        ]


class TestClock:
    def test_message_costs_latency_and_bytes_over_bandwidth(self) -> None:
        def program(comm: Communicator) -> float:
            vector = torch.zeros(3)
            if comm.rank == 0:
                comm.send(vector, to=1)
            else:
                comm.recv(vector)
            return comm.clock()

        assert VirtualWorld(2, 1, SLOW).run(program) == pytest.approx([3.0, 4.0])
        assert VirtualWorld(2, 2, SLOW).run(program) == pytest.approx([0.3, 0.4])

    def test_messages_to_one_host_share_its_link(self) -> None:
        def program(comm: Communicator) -> float:
            if comm.rank > 0:
                comm.send(torch.zeros(2), to=0)
            else:
                for _ in range(comm.size - 1):
                    comm.recv(torch.zeros(2))
            return comm.clock()

        assert VirtualWorld(4, 1, SLOW).run(program) == pytest.approx([1.0 + 3 * 2.0, 2.0, 2.0, 2.0])

    def test_collective_begins_when_the_last_has_come_and_costs_its_closed_form(self) -> None:
        def program(comm: Communicator) -> float:
            comm.compute(float(comm.rank))
            comm.all_reduce(torch.zeros(100))
            return comm.clock()

        expected = 5.0 + SLOW.all_reduce_s((3, 3), 400)
        assert VirtualWorld(6, 3, SLOW).run(program) == pytest.approx([expected] * 6)

    def test_first_come_is_first_served(self) -> None:
        def program(comm: Communicator) -> list[int]:
            if comm.rank > 0:
                comm.compute(10.0 - comm.rank)
                comm.send(torch.zeros(1), to=0)
                return []
            return [comm.recv(torch.zeros(1), source=ANY) for _ in range(comm.size - 1)]

        assert VirtualWorld(5).run(program)[0] == [4, 3, 2, 1]

    def test_lock_serves_in_order_of_time_and_delays_the_others(self) -> None:
        order: list[int] = []

        def program(comm: Communicator) -> float:
            lock = comm.lock()
            comm.compute(float(comm.size - comm.rank))
            with lock:
                order.append(comm.rank)
                comm.compute(10.0)
            return comm.clock()

        clocks = VirtualWorld(3, network=Network.free()).run(program)
        assert order == [2, 1, 0]
        assert clocks == [31.0, 21.0, 11.0]

    def test_runs_are_the_same_every_time(self) -> None:
        def program(comm: Communicator) -> tuple[float, list[float]]:
            seen = []
            generator = torch.Generator().manual_seed(comm.rank)
            for _ in range(20):
                comm.compute(float(torch.rand(1, generator=generator)))
                comm.send(
                    torch.rand(3, generator=generator),
                    to=int(torch.randint(comm.size, (1,), generator=generator)),
                )
            comm.barrier()
            counter = comm.counter()
            for _ in range(5):
                comm.compute(float(torch.rand(1, generator=generator)))
                seen.append(float(counter.add()))
            return comm.clock(), seen

        world = VirtualWorld(16, 4)
        assert world.run(program) == world.run(program)


class TestFaults:
    @staticmethod
    def lost_in(world: VirtualWorld, program: Callable[[Communicator], object]) -> list[object]:
        """What each rank returned, or the ranks that it lost."""

        def guarded(comm: Communicator) -> object:
            try:
                return program(comm)
            except PeerLost as error:
                return error.ranks

        return world.run(guarded)

    def test_rank_dies_at_its_operation_and_ranks_that_meet_it_lose_it(self) -> None:
        steps: list[tuple[int, int]] = []

        def program(comm: Communicator) -> None:
            for step in range(5):
                steps.append((comm.rank, step))
                comm.all_reduce(torch.ones(3))

        world = VirtualWorld(4, faults=[Fault(rank=2, operation=3)])
        assert self.lost_in(world, program) == [[2], [2], None, [2]]
        assert max(step for rank, step in steps if rank == 2) == 3
        assert world.lost == [2]

    @pytest.mark.parametrize("source", [1, ANY])
    def test_receiver_loses_a_dead_sender(self, source: int) -> None:
        def program(comm: Communicator) -> object:
            if comm.rank == 0:
                comm.recv(torch.zeros(1), source=source)
            comm.compute(1.0)
            comm.barrier()
            return None

        world = VirtualWorld(2, faults=[Fault(rank=1, operation=0)])
        assert self.lost_in(world, program)[0] == [1]

    def test_lock_of_a_dead_rank_is_free(self) -> None:
        def program(comm: Communicator) -> float:
            lock = comm.lock()
            comm.compute(float(comm.rank))
            with lock:
                comm.compute(100.0 if comm.rank else 50.0)
                if not comm.rank:
                    comm.send(torch.zeros(1), 0)
            return comm.clock()

        world = VirtualWorld(3, network=Network.free(), faults=[Fault(0, operation=2)])
        assert world.run(program) == [None, 150.0, 250.0]


class TestEnd:
    def test_deadlock_names_each_rank_and_its_wait(self) -> None:
        def program(comm: Communicator) -> None:
            if comm.rank == 0:
                comm.recv(torch.zeros(1), source=1, tag=4)
            else:
                comm.barrier()

        with pytest.raises(Deadlock, match=r"(?s)rank 0: recv from rank 1, tag 4.*rank 1: barrier"):
            VirtualWorld(2).run(program)

    def test_waiting_for_a_rank_that_has_returned_loses_it(self) -> None:
        def program(comm: Communicator) -> None:
            if comm.rank != 1:
                comm.barrier()

        with pytest.raises(PeerLost, match="left") as caught:
            VirtualWorld(3).run(program)
        assert caught.value.ranks == [1]

    def test_exception_of_one_rank_ends_the_run_and_unwinds_the_others(self) -> None:
        unwound = []

        def program(comm: Communicator) -> None:
            try:
                comm.compute(1.0)
                if comm.rank == 1:
                    raise KeyError("on purpose")
                comm.barrier()
            finally:
                unwound.append(comm.rank)

        with pytest.raises(KeyError, match="on purpose") as caught:
            VirtualWorld(3).run(program)
        assert sorted(unwound) == [0, 1, 2]
        assert "virtual rank 1" in caught.value.__notes__[0]

    def test_different_collectives_are_named(self) -> None:
        def program(comm: Communicator) -> None:
            if comm.rank == 0:
                comm.barrier()
            else:
                comm.all_reduce(torch.zeros(3))

        with pytest.raises(ValueError, match=r"rank 0 called barrier.*rank 1 all_reduce\(length=3"):
            VirtualWorld(2).run(program)


class TestTorchState:
    def test_random_numbers_are_each_ranks_own(self) -> None:
        def program(comm: Communicator) -> list[float]:
            torch.manual_seed(comm.rank)
            found = []
            for _ in range(3):
                comm.barrier()
                found.append(torch.rand(1).item())
            return found

        torch.manual_seed(99)
        before = torch.get_rng_state()
        found = VirtualWorld(3).run(program)
        assert torch.equal(torch.get_rng_state(), before)
        for rank, numbers in enumerate(found):
            torch.manual_seed(rank)
            assert numbers == [torch.rand(1).item() for _ in range(3)]


@pytest.mark.parametrize("network", ["1gbit,200us,ring", "1gbit,13us,torus:4x2"])
def test_messages_over_several_links_arrive(network: str) -> None:
    def program(comm: VirtualCommunicator) -> float:
        vector, other = torch.full((1000,), float(comm.rank)), torch.empty(1000)
        for step in range(50):
            comm.compute(1e-4 * (1 + (7 * comm.rank + step) % 13))
            comm.exchange(vector, (comm.rank + 3) % 8, other, (comm.rank - 3) % 8)
        return float(other[0])

    found = VirtualWorld(8, 1, Network.parse(network)).run(program)
    assert found == [float((rank - 3) % 8) for rank in range(8)]
