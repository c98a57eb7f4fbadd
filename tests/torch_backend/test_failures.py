"""Failures are reported on every rank, and leave nothing behind."""

import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed
from torch.distributed import ReduceOp

from tests.torch_backend.process_groups import Ranks
from tutti.errors import CallsDiffer, PeerLost
from tutti.torch_backend.errors import Absent, Closed


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture
def doomed():
    """Three ranks for tests that end some of them."""
    with Ranks(3) as ranks:
        yield ranks


def said_by(function):
    """The error that a call raises."""
    try:
        function()
    except RuntimeError as error:
        return type(error), str(error)
    return None, ""


def said_behind_barrier(function):
    """The error that a call raises behind a barrier, in which those are missed, too, who end behind it."""
    return said_by(lambda: (distributed.barrier(), function()))


def splits_that_disagree(rank):
    return distributed.all_to_all_single(torch.zeros(2), torch.zeros(2), [2 - rank, rank], [1, 1])


MISMATCHES = {
    "operation": (
        lambda rank: (
            distributed.all_reduce(torch.ones(2)) if rank else distributed.broadcast(torch.ones(2), 0)
        ),
        "broadcast(2",
        "all_reduce(sum, 2 x torch.float32)",
    ),
    "size": (lambda rank: distributed.all_reduce(torch.ones(2 + rank)), "(sum, 2 x", "(sum, 3 x"),
    "dtype": (
        lambda rank: distributed.all_reduce(torch.ones(2).to([torch.float32, torch.int32][rank])),
        "torch.float32",
        "torch.int32",
    ),
    "reduction": (
        lambda rank: distributed.all_reduce(torch.ones(2), [ReduceOp.SUM, ReduceOp.MAX][rank]),
        "sum",
        "max",
    ),
    "root": (lambda rank: distributed.broadcast(torch.ones(2), rank), "root 0", "root 1"),
    "barrier": (
        lambda rank: distributed.barrier() if rank else distributed.all_reduce(torch.ones(2)),
        "all_reduce",
        "barrier()",
    ),
    "splits": (splits_that_disagree, "1 elements for rank 0", "to receive 2"),
}


@pytest.mark.parametrize("what", MISMATCHES)
def test_a_mismatched_call_raises_on_all_ranks_and_names_both_calls(two, what):
    call, *words = MISMATCHES[what]
    for kind, text in two.run(lambda rank: said_by(lambda: call(rank))):
        assert kind is CallsDiffer
        for word in words:
            assert word in text


def test_the_group_works_after_a_mismatch(two):
    def work(rank):
        said_by(lambda: distributed.all_reduce(torch.ones(2 + rank)))
        tensor = torch.ones(1)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    assert two.run(work) == [[2.0], [2.0]]


BAD_CALLS = {
    "an unknown operation": (
        lambda: distributed.group.WORLD.allreduce([torch.ones(2)], "sum of squares"),
        "there is no reduce operation sum of squares; give one of ReduceOp.SUM",
    ),
    "a tensor without memory": (
        lambda: distributed.all_reduce(torch.ones(2, device="meta")),
        "on the device meta",
    ),
    "a sparse tensor": (lambda: distributed.broadcast(torch.ones(2).to_sparse(), 0), "sparse"),
    "too small an output": (
        lambda: distributed.all_gather_into_tensor(torch.zeros(3), torch.zeros(2)),
        "2 times as many",
    ),
    "splits that do not add up": (
        lambda: distributed.all_to_all_single(torch.zeros(3), torch.zeros(3), [1, 1], [1, 2]),
        "add up",
    ),
    "a rank outside of the group": (
        lambda: distributed.group.WORLD.send([torch.zeros(1)], 5, 0),
        "names rank 5, but the group has 2",
    ),
}


@pytest.mark.parametrize("what", BAD_CALLS)
def test_a_call_that_cannot_be_made_says_why(two, what):
    call, words = BAD_CALLS[what]
    for _, text in two.run(lambda rank: said_by(call)):
        assert words in text


def dies(rank):
    if rank == 1:
        distributed.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    return *said_behind_barrier(lambda: distributed.all_reduce(torch.ones(2))), time.monotonic() - started


def test_a_killed_rank_is_named_by_the_others_soon(doomed):
    doomed.start(dies)
    for rank in (0, 2):
        kind, text, waited_s = doomed.outcome(rank)
        assert kind is PeerLost
        assert "lost rank 1" in text
        assert waited_s < 20


def test_a_rank_that_destroys_its_group_early_is_named_by_waiting_ranks(doomed):
    def leave(rank):
        if rank == 1:
            distributed.barrier()
            return distributed.destroy_process_group()
        return said_behind_barrier(lambda: distributed.all_reduce(torch.ones(100_000)))

    doomed.start(leave)
    for rank in (0, 2):
        kind, text = doomed.outcome(rank)
        assert kind is PeerLost
        assert "lost rank 1: it left while others still waited for it" in text


def test_a_wait_fails_if_another_thread_ends_the_group(two):
    def wait(rank):
        group = distributed.new_group()
        if rank == 1:
            return None

        def abort():
            while not group._progress._waiting:
                time.sleep(0.001)
            time.sleep(0.05)  # Until it sleeps between two looks.
            group.abort()

        aborting = threading.Thread(target=abort)
        aborting.start()
        kind, _ = said_by(lambda: distributed.all_reduce(torch.ones(1), group=group))
        aborting.join()
        return kind

    assert two.run(wait)[0] is Closed


def test_a_timeout_names_the_absent_ranks():
    def late(rank):
        group = distributed.new_group(timeout=timedelta(seconds=1))
        distributed.barrier()
        return said_by(lambda: distributed.all_reduce(torch.ones(1), group=group)) if rank != 1 else None

    with Ranks(3) as ranks:
        ranks.start(late)
        assert ranks.outcome(1) is None
        for rank in (0, 2):
            kind, text = ranks.outcome(rank)
            assert kind is Absent
            assert text.startswith("all_reduce timed out: rank 1 did not come within 1 s")


def test_a_barrier_has_a_timeout_of_its_own(doomed):
    def late(rank):
        # From here on the others come at almost the same moment.
        distributed.barrier()
        if rank == 1:
            return None
        half = timedelta(seconds=0.5)
        return said_by(lambda: distributed.group.WORLD.barrier(timeout=half).wait())

    doomed.start(late)
    for rank in (0, 2):
        assert "rank 1 did not come within 0.5 s" in doomed.outcome(rank)[1]


def test_a_wait_has_a_timeout_of_its_own_and_can_be_repeated(two):
    def late(rank):
        store = distributed.distributed_c10d._get_default_store()
        if rank == 1:
            store.wait(["rank 0 has waited"])
        tensor = torch.ones(1)
        pending = distributed.all_reduce(tensor, async_op=True)
        said = ""
        if rank == 0:
            said = said_by(lambda: pending.wait(timedelta(seconds=0.2)))[1]
            store.set("rank 0 has waited", "1")
        pending.wait()
        return said, tensor.tolist()

    (said, found), _ = two.run(late)
    assert "all_reduce timed out: rank 1 did not come within 0.2 s" in said
    assert found == [2.0]


def left_behind(rank):
    """The traces of a group in this process and on this host."""
    threads = [thread.name for thread in threading.enumerate() if "tutti" in thread.name]
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    return threads, [name for name in files if "memfd:tutti" in name or "anon_inode:[pidfd]" in name]


@pytest.mark.serial
def test_nothing_is_left_after_the_group_is_destroyed_and_it_can_be_made_again(two):
    def work(rank):
        group = distributed.new_group()
        pending = distributed.all_reduce(torch.ones(100_000), group=group, async_op=True)
        pending.wait()
        distributed.destroy_process_group()
        return left_behind(rank)

    before = set(os.listdir("/dev/shm"))
    for _ in range(3):
        assert two.run(work) == [([], [])] * 2
    assert set(os.listdir("/dev/shm")) <= before
