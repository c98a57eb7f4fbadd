"""torch's C++ and compiler treat a group as they treat Gloo's."""

import pytest
import torch
from torch import distributed, nn
from torch.distributed import BuiltinCommHookType
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.torch_backend.beside_gloo import with_both
from tests.torch_backend.process_groups import Ranks
from tutti.torch_backend.errors import Absent


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as started:
        yield started


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.BatchNorm1d(7), nn.Linear(7, 3)).double()


def inputs(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(4, 5, generator=generator, dtype=torch.float64)


def gradients(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()])


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


# --- C++ that keeps an operation


@pytest.mark.parametrize("initial_size", [True, False])
def test_ranks_with_unequally_many_batches_join_as_over_gloo(two, initial_size):
    @with_both
    def work(group, rank):
        model = nn.parallel.DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with model.join(divide_by_initial_world_size=initial_size):
            for step in range(2 + 3 * rank):
                optimizer.zero_grad()
                model(inputs(rank, step)).square().sum().backward()
                optimizer.step()
        return weights(model)

    for ours, theirs in two.run(work):
        assert not torch.equal(ours, weights(net()))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


HOOKS = {
    "in C++": lambda model, group: model._register_builtin_comm_hook(BuiltinCommHookType.ALLREDUCE),
    "float16": lambda model, group: model.register_comm_hook(group, default_hooks.fp16_compress_hook),
}


@pytest.mark.parametrize("register", HOOKS.values(), ids=HOOKS)
def test_the_hooks_of_ddp_give_the_gradients_that_they_give_over_gloo(two, register):
    @with_both
    def work(group, rank):
        model = nn.parallel.DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.0001)
        register(model, group)
        for step in range(2):
            model.zero_grad()
            model(inputs(rank, step)).square().mean().backward()
        return gradients(model)

    for ours, theirs in two.run(work):
        assert ours.abs().max() > 0
        # Two ranks' sum is rounded once, in either order.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


# --- the compiler


@pytest.mark.parametrize("outside", [True, False], ids=["compile(DDP)", "DDP(compile)"])
def test_a_compiled_model_under_ddp_trains_as_an_uncompiled_one(two, outside):
    def trained(compiled, rank):
        torch._dynamo.reset()
        inner = net()
        if compiled and not outside:
            inner = torch.compile(inner, backend="eager")
        model = called = nn.parallel.DistributedDataParallel(inner)
        if compiled and outside:
            called = torch.compile(model, backend="eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            called(inputs(rank, step)).square().mean().backward()
            optimizer.step()
        return weights(model)

    def work(rank):
        return trained(True, rank), trained(False, rank)

    for compiled, plain in two.run(work):
        assert not torch.equal(plain, weights(net()))
        torch.testing.assert_close(compiled, plain, rtol=0, atol=1e-12)


def test_a_default_device_of_the_program_does_not_reach_into_the_group(two):
    def work(rank):
        with torch.device("meta"):
            columns = torch.full((2, 3), 1.0 + rank, device="cpu").T
            distributed.all_reduce(columns)
            got = torch.zeros(3, 2, device="cpu").T
            if rank == 0:
                distributed.send(columns.T[:, ::2], 1)
            else:
                distributed.recv(got[:, ::2], 0)
            every = [torch.zeros(2, 2, device="cpu").T for _ in range(2)]
            distributed.all_gather(every, every[0] + rank)
        return columns.tolist(), [one.tolist() for one in every]

    for columns, every in two.run(work):
        assert columns == [[3.0] * 2] * 3
        assert every == [[[0.0] * 2] * 2, [[1.0] * 2] * 2]


# --- time-outs


def test_a_barrier_without_a_time_of_its_own_has_the_groups():
    def work(rank):
        if rank == 1:
            return None
        with pytest.raises(Absent) as raised:
            distributed.barrier()
        return raised.value.timeout_s

    with Ranks(2, timeout_s=0.5) as ranks:
        assert ranks.run(work)[0] == 0.5
