"""Sends and receives between the ranks of a group."""

import pytest
import torch
from torch import distributed

from tests.torch_backend.process_groups import Ranks

LONG = 500_000
"""Elements of a message that no buffer holds."""


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


@pytest.mark.parametrize("length", [0, 1, 100, LONG])
def test_a_message_arrives_as_it_was_sent(three, length):
    def work(rank):
        if rank == 0:
            distributed.send(torch.arange(length), 1)
        elif rank == 1:
            found = torch.zeros(length, dtype=torch.int64)
            return distributed.recv(found, 0), bool((found == torch.arange(length)).all())
        return None

    assert three.run(work)[1] == (0, True)


def test_long_messages_with_one_tag_keep_their_order(three):
    def work(rank):
        if rank == 0:
            works = [distributed.isend(torch.full((LONG,), float(number)), 1, tag=8) for number in range(3)]
        elif rank == 1:
            found = [torch.zeros(LONG) for _ in range(3)]
            works = [distributed.irecv(one, 0, tag=8) for one in found]
        else:
            return None
        for work in reversed(works):
            work.wait()
        return [(float(one.min()), float(one.max())) for one in found] if rank == 1 else None

    assert three.run(work)[1] == [(0.0, 0.0), (1.0, 1.0), (2.0, 2.0)]


def test_a_message_is_found_by_its_tag_whatever_came_before(three):
    def work(rank):
        if rank == 0:
            distributed.isend(torch.zeros(LONG), 1, tag=1)
            distributed.isend(torch.ones(2), 1, tag=2).wait()
        elif rank == 1:
            second, first = torch.zeros(2), torch.ones(LONG)
            distributed.recv(second, 0, tag=2)
            distributed.recv(first, 0, tag=1)
            return second.tolist(), float(first.sum())
        return None

    assert three.run(work)[1] == ([1.0, 1.0], 0.0)


def test_ranks_that_send_long_messages_to_each_other_first_do_not_block(three):
    def work(rank):
        if rank < 2:
            found = torch.zeros(LONG)
            distributed.send(torch.full((LONG,), float(rank)), 1 - rank)
            distributed.recv(found, 1 - rank)
            return float(found.mean())
        return None

    assert three.run(work)[:2] == [1.0, 0.0]
