"""The promises of `async_op=True`."""

import random

import pytest
import torch
from torch import distributed

from tests.torch_backend.process_groups import Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three():
    with Ranks(3) as ranks:
        yield ranks


def store():
    return distributed.distributed_c10d._get_default_store()


def test_a_call_returns_before_the_others_come(two):
    def work(rank):
        tensor = torch.ones(2)
        if rank == 1:
            store().wait(["rank 0 goes on"])
        pending = distributed.all_reduce(tensor, async_op=True)
        if rank == 0:
            assert not pending.is_completed()
            store().set("rank 0 goes on", "1")
        pending.wait()
        store().delete_key("rank 0 goes on")
        return tensor.tolist(), pending.is_completed(), pending.is_success()

    assert two.run(work) == [([2.0, 2.0], True, True)] * 2


def test_tensors_of_inference_mode_can_be_finished_by_others(two):
    def work(rank):
        with torch.inference_mode():
            tensor, wide = torch.ones(400_000), torch.ones(40, 2)[:, 0]
            if rank == 1:
                store().wait(["rank 0 has called"])
            pending = [distributed.all_reduce(one, async_op=True) for one in (tensor, wide)]
            ended = [one.get_future() for one in pending]
            store().set("rank 0 has called", "1")
            for one in ended:
                one.wait()
            return float(tensor.mean()), float(wide.mean())

    assert two.run(work) == [(2.0, 2.0)] * 2


def test_what_follows_a_collective_may_start_another(two):
    def work(rank):
        first, second = torch.ones(3), torch.ones(2)

        def follow(future):
            return distributed.all_reduce(second, async_op=True).get_future()

        distributed.all_reduce(first, async_op=True).get_future().then(follow).wait().wait()
        return first.tolist(), second.tolist()

    assert two.run(work) == [([2.0] * 3, [2.0] * 2)] * 2


def test_thousands_of_calls_waited_for_in_any_order_come_out_right(three):
    def work(rank):
        # The calls are drawn alike on all ranks, the order of waiting is each rank's own.
        calls, order = random.Random(0), random.Random(rank)
        pending, wrong = [], 0
        for number in range(4_000):
            kind, length = calls.randrange(5), calls.choice([1, 3, 100, 5000])
            tensor = torch.full((length,), float(rank + number % 7))
            base = number % 7
            if kind == 0:
                work = distributed.all_reduce(tensor, async_op=True)
                check = tensor, 3 * base + 3
            elif kind == 1:
                work = distributed.broadcast(tensor, number % 3, async_op=True)
                check = tensor, base + number % 3
            elif kind == 2:
                output = torch.zeros(3 * length)
                work = distributed.all_gather_into_tensor(output, tensor, async_op=True)
                check = output[length : 2 * length], base + 1
            elif kind == 3:
                output = torch.zeros(length)
                work = distributed.reduce_scatter_tensor(output, tensor.repeat(3), async_op=True)
                check = output, 3 * base + 3
            else:
                distributed.isend(tensor, (rank + 1) % 3, tag=1)
                output = torch.zeros(length)
                work = distributed.irecv(output, (rank - 1) % 3, tag=1)
                check = output, base + (rank - 1) % 3
            pending.append((work, *check))
            while len(pending) > order.randrange(1, 60):
                work, found, expected = pending.pop(order.randrange(len(pending)))
                work.wait()
                wrong += not bool((found == expected).all())
        for work, found, expected in pending:
            work.wait()
            wrong += not bool((found == expected).all())
        return wrong

    assert three.run(work) == [0, 0, 0]


def test_an_error_reaches_waiters_and_the_future(two):
    def work(rank):
        pending = distributed.all_reduce(torch.ones(2 + rank), async_op=True)
        future, said = pending.get_future(), []
        for wait in (pending.wait, future.wait):
            try:
                wait()
            except RuntimeError as error:
                said.append("called all_reduce" in str(error))
        return said, pending.is_completed(), pending.is_success(), "all_reduce" in str(pending.exception())

    assert two.run(work) == [([True, True], True, False, True)] * 2
