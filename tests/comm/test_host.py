"""The communicator of one machine: the contract, and what happens when ranks die or leave."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator

import cloudpickle
import pytest
import torch

from tests.comm.ranks import World
from tests.contracts.communicator import CHECKS
from tutti.comm.base import ANY
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.layout import PID, ControlLayout
from tutti.errors import PeerLost

# The ranks cannot import this page by its name: its functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = (1, 2, 3, 5)
SOON_S = 30.0
"""Generous for a loaded machine; a quiet one needs some milliseconds."""


@pytest.fixture(scope="module")
def worlds() -> Iterator[dict[int, World]]:
    """Worlds by their size: started once, and again after a failure."""
    worlds: dict[int, World] = {}
    yield worlds
    for world in worlds.values():
        world.__exit__(None, None, None)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("size", SIZES)
def test_contract(worlds: dict[int, World], size: int, check: Callable[[HostCommunicator], None]) -> None:
    world = worlds.setdefault(size, World(size, cores=2)) if size not in worlds else worlds[size]
    try:
        world.run(check)
    except BaseException:
        worlds.pop(size).__exit__(None, None, None)
        raise


# --- ranks that die


def wait_in_barrier(comm: HostCommunicator, victim: int) -> None:
    comm.barrier()


def wait_in_all_reduce(comm: HostCommunicator, victim: int) -> None:
    comm.all_reduce(torch.ones(1_000_000))


def wait_in_recv_from_a_living_rank(comm: HostCommunicator, victim: int) -> None:
    comm.recv(torch.zeros(1), source=next(r for r in range(comm.size) if r not in (comm.rank, victim)))


def wait_in_recv_from_any(comm: HostCommunicator, victim: int) -> None:
    comm.recv(torch.zeros(1), source=ANY)


def wait_in_send(comm: HostCommunicator, victim: int) -> None:
    while True:  # The victim takes in what comes while it still waits for the other rank.
        comm.send(torch.zeros(1_000_000), to=victim)


def look_for_a_message(comm: HostCommunicator, victim: int) -> None:
    while comm.waiting() is None:
        pass


def lost_in(world: World, rank: int) -> PeerLost:
    """The loss that a rank of a world has met."""
    lost = world.outcome(rank, SOON_S)
    assert isinstance(lost, PeerLost)
    return lost


WAITS = (
    wait_in_all_reduce,
    wait_in_recv_from_a_living_rank,
    wait_in_recv_from_any,
    wait_in_send,
    look_for_a_message,
)


def die_while_the_others_wait(
    comm: HostCommunicator, victim: int, operation: Callable[[HostCommunicator, int], None]
) -> None:
    if comm.rank == victim:
        for _ in range(comm.size - 1):
            comm.recv(torch.zeros(1), source=ANY, tag=1)
        os.kill(os.getpid(), signal.SIGKILL)
    comm.send(torch.zeros(1), to=victim, tag=1)
    operation(comm, victim)


@pytest.mark.parametrize("operation", WAITS)
def test_a_killed_rank_is_named_to_every_rank_that_waits(operation: Callable) -> None:
    victim = 1
    with World(3) as world:
        world.start(die_while_the_others_wait, victim, operation)
        for survivor in (0, 2):
            assert lost_in(world, survivor).ranks == [victim]


def test_a_lost_rank_is_named_by_its_number_in_the_job() -> None:
    with World(2, global_ranks=[4, 7]) as world:
        world.start(die_while_the_others_wait, 1, wait_in_barrier)
        assert lost_in(world, 0).ranks == [7]


def test_a_part_of_a_communicator_notices_the_death_of_a_rank_outside_it() -> None:
    def wait_in_a_part(comm: HostCommunicator) -> None:
        part = comm.split(0 if comm.rank > 0 else None)
        if part is None:
            comm.recv(torch.zeros(1), source=1)
            os.kill(os.getpid(), signal.SIGKILL)
        elif part.rank == 0:
            comm.send(torch.zeros(1), to=0)
            part.recv(torch.zeros(1), source=1)
        else:
            part.barrier()

    with World(3) as world:
        world.start(wait_in_a_part)
        for survivor in (1, 2):
            assert lost_in(world, survivor).ranks == [0]


def test_a_lock_of_a_killed_rank_is_free() -> None:
    def take_it_from_the_dead(comm: HostCommunicator) -> str:
        lock, pids = comm.lock(), comm.all_gather_objects(os.getpid())
        if comm.rank == 1:
            with lock:
                comm.send(torch.zeros(1), to=0)
                signal.pause()
        comm.recv(torch.zeros(1), source=1)
        os.kill(pids[1], signal.SIGKILL)
        with lock:
            return "free"

    with World(2) as world:
        world.start(take_it_from_the_dead)
        assert world.outcome(0, SOON_S) == "free"


# --- ranks that leave, or never come


def leave(comm: HostCommunicator) -> None:
    comm.close()


def test_waiting_for_a_rank_that_left_ends() -> None:
    with World(2) as world:
        world.run(lambda comm: comm.barrier())
        world.start(leave, ranks=[1])
        world.start(lambda comm: comm.recv(torch.zeros(1), source=1), ranks=[0])
        lost = lost_in(world, 0)
        assert lost.ranks == [1]
        assert "left" in lost.why


def test_messages_sent_before_a_rank_left_still_arrive() -> None:
    def send_and_leave(comm: HostCommunicator) -> None:
        comm.send(torch.full((1000,), 5.0), to=0)
        comm.close()
        os._exit(0)

    def receive(comm: HostCommunicator) -> float:
        vector = torch.zeros(1000)
        comm.recv(vector, source=1)
        return vector.sum().item()

    with World(2) as world:
        world.run(lambda comm: comm.barrier())
        world.start(send_and_leave, ranks=[1])
        world.processes[1].join(SOON_S)
        world.start(receive, ranks=[0])
        assert world.outcome(0, SOON_S) == 5000.0


def test_a_rank_that_does_not_come_is_named() -> None:
    with World(3, absent=[1, 2], join_timeout_s=0.3) as world:
        # However busy the machine is, the last one has come by then.
        world.words[ControlLayout(3).line(2) + PID] = os.getpid()
        world.start(lambda comm: comm.barrier())
        lost = lost_in(world, 0)
        assert lost.ranks == [1]
        assert "did not come within 0.3 s" in lost.why


# --- messages


def test_messages_of_every_length_round_the_ring() -> None:
    def stream(comm: HostCommunicator) -> int:
        lengths = [(number * 7919) % 40_000 for number in range(300)]
        for number, length in enumerate(lengths):
            if comm.rank == 0:
                comm.send(torch.full((length,), number % 251, dtype=torch.uint8), to=1)
            else:
                vector = torch.zeros(length, dtype=torch.uint8)
                comm.recv(vector)
                assert (vector == number % 251).all()
        return sum(lengths)

    with World(2) as world:
        moved = world.run(stream)[0]
        assert moved > 5_000_000


def test_a_message_of_another_kind_stays_until_it_is_received_rightly() -> None:
    def mistake(comm: HostCommunicator) -> float | None:
        if comm.rank == 0:
            comm.send(torch.full((5,), 2.0), to=1)
            return None
        with pytest.raises(ValueError, match=r"rank 0 sent 5 elements of torch.float32 .* has 3 elements"):
            comm.recv(torch.zeros(3))
        with pytest.raises(ValueError, match=r"5 elements of torch.float32 .* torch.int32"):
            comm.recv(torch.zeros(5, dtype=torch.int32))
        vector = torch.zeros(5)
        comm.recv(vector)
        return vector.sum().item()

    with World(2) as world:
        assert world.run(mistake)[1] == 10.0


# --- the cost of waiting, and what stays behind


def test_parts_that_are_closed_give_their_memory_back() -> None:
    def use_parts(comm: HostCommunicator) -> None:
        for _ in range(10):
            part = comm.split(0)
            part.all_reduce(torch.ones(300_000))
            part.close()
        comm.barrier()

    with World(3) as world:
        world.run(use_parts)
        before = os.fstat(world.arena.fd).st_blocks * 512
        world.run(use_parts)
        assert os.fstat(world.arena.fd).st_blocks * 512 - before < 200_000


def test_a_rank_keeps_one_descriptor_of_the_arena() -> None:
    def descriptors(comm: HostCommunicator) -> int:
        tensors = [comm.shared(1000) for _ in range(50)]
        paths = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        found = sum("memfd:tutti" in os.readlink(path) for path in paths if os.path.islink(path))
        assert len({tensor.data_ptr() for tensor in tensors}) == 50
        return found

    with World(2) as world:
        assert world.run(descriptors) == [1, 1]


# --- mistakes


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        (("all_reduce", 3, "all_reduce", 4), r"all_reduce\(sum, 4 x torch.float32\) .* all_reduce\(sum, 3 x"),
        (("all_reduce", 3, "all_gather", 3), r"all_gather\(3 .* all_reduce\(sum, 3"),
    ],
)
def test_ranks_that_call_different_collectives_are_told(calls: tuple, words: str) -> None:
    def call(comm: HostCommunicator) -> None:
        getattr(comm, calls[2 * comm.rank])(torch.zeros(calls[2 * comm.rank + 1]))

    with World(2) as world:
        world.start(call)
        mistakes = [world.outcome(rank, SOON_S) for rank in (0, 1)]
        assert all(isinstance(mistake, ValueError) for mistake in mistakes)
        with pytest.raises(ValueError, match=words):
            raise mistakes[1]


@pytest.mark.parametrize("length", [3, 300_000])
def test_a_barrier_does_not_meet_another_collective(length: int) -> None:
    def call(comm: HostCommunicator) -> None:
        for _ in range(2):
            comm.all_reduce(torch.zeros(length))
            comm.barrier()
        comm.barrier() if comm.rank else comm.all_reduce(torch.zeros(length))

    with World(2) as world:
        world.start(call)
        for rank in (0, 1):
            with pytest.raises(ValueError, match=rf"called .*all_reduce\(sum, {length} x"):
                raise world.outcome(rank, SOON_S)


def test_the_ranks_can_continue_after_different_calls() -> None:
    def call(comm: HostCommunicator) -> float:
        with pytest.raises(ValueError, match="must call the same"):
            comm.all_reduce(torch.zeros(3 + 100_000 * comm.rank))
        vector = torch.ones(1000)
        comm.all_reduce(vector)
        return vector.sum().item()

    with World(2) as world:
        assert world.run(call) == [2000.0, 2000.0]


def test_vectors_that_cannot_travel_are_refused() -> None:
    comm = HostCommunicator.alone()
    for vector in (torch.zeros(2, 2), torch.zeros(10)[::2], torch.zeros((), dtype=torch.int64)):
        with pytest.raises(ValueError, match="one-dimensional, contiguous"):
            comm.all_reduce(vector)
    comm.close()


def test_a_world_of_one_does_not_wait_for_itself() -> None:
    comm = HostCommunicator.alone()
    with pytest.raises(ValueError, match="message from itself"):
        comm.recv(torch.zeros(1))
    comm.close()


# --- processors that do not keep stores in order


def test_the_contract_holds_with_fences() -> None:
    def switch_fences(comm: HostCommunicator, ordered: bool) -> None:
        import tutti.comm.shm.barrier
        import tutti.comm.shm.fence
        import tutti.comm.shm.rings

        tutti.comm.shm.fence.ORDERED = tutti.comm.shm.barrier.ORDERED = ordered
        tutti.comm.shm.rings.ORDERED = ordered

    with World(2) as world:
        world.run(switch_fences, False)
        for check in CHECKS:
            world.run(check)
