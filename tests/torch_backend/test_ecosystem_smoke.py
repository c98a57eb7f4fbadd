"""torch's tools over process groups run on ours, with the results of a single process."""

import copy

import pytest
import torch
from torch import distributed, nn

from tests.torch_backend.process_groups import Ranks


@pytest.fixture(scope="module")
def two():
    with Ranks(2) as ranks:
        yield ranks


def net():
    torch.manual_seed(0)
    layers = nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4)
    return nn.Sequential(*layers).double()


def batch():
    torch.manual_seed(1)
    return torch.randn(12, 8).double(), torch.randn(12, 4).double()


def alone():
    """The weights that one process reaches in three steps of SGD on the whole batch."""
    model, (x, y) = net(), batch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def close(found, expected):
    return all(torch.allclose(a, b, rtol=1e-12, atol=1e-12) for a, b in zip(found, expected, strict=True))


def train(model, rank, size=2):
    x, y = (whole.chunk(size)[rank] for whole in batch())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()


def with_ddp(rank, **options):
    model = nn.parallel.DistributedDataParallel(net(), **options)
    train(model, rank)
    return [parameter.detach() for parameter in model.module.parameters()]


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 0.0001}, {"gradient_as_bucket_view": True}])
def test_ddp_trains_as_one_process_does(two, options):
    for found in two.run(lambda rank: with_ddp(rank, **options)):
        assert close(found, alone())


def with_debugging(rank):
    distributed.set_debug_level(distributed.DebugLevel.DETAIL)
    try:
        group = distributed.new_group()
        found = with_ddp(rank, process_group=group)
        distributed.destroy_process_group(group)
    finally:
        distributed.set_debug_level(distributed.DebugLevel.OFF)
    return found


def test_the_debug_mode_of_torch_works(two):
    for found in two.run(with_debugging):
        assert close(found, alone())


def with_hook(rank):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model = nn.parallel.DistributedDataParallel(net())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    train(model, rank)
    return [parameter.detach() for parameter in model.module.parameters()]


def test_ddp_with_a_hook_trains_as_one_process_does(two):
    for found in two.run(with_hook):
        assert close(found, alone())


def with_fsdp(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, mesh = net(), init_device_mesh("cpu", (2,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    train(model, rank)
    return [parameter.full_tensor().detach() for parameter in model.parameters()]


def test_fsdp2_trains_as_one_process_does(two):
    for found in two.run(with_fsdp):
        assert close(found, alone())


def with_tensor_parallel(rank):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(net(), init_device_mesh("cpu", (2,)), plan)
    return model(batch()[0]).detach()


def test_tensor_parallel_computes_what_the_dense_model_does(two):
    for found in two.run(with_tensor_parallel):
        torch.testing.assert_close(found, net()(batch()[0]).detach(), atol=1e-12, rtol=0)


def in_a_pipeline(rank):
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole = net()
    part = copy.deepcopy(nn.Sequential(*list(whole)[:3]) if rank == 0 else nn.Sequential(*list(whole)[3:]))
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=3, loss_fn=nn.functional.mse_loss)
    x, y = batch()
    if rank == 0:
        schedule.step(x)
    else:
        schedule.step(target=y, losses=[])
    return [parameter.grad for parameter in part.parameters()]


def test_a_pipeline_finds_the_gradients_of_the_whole_model(two):
    model, (x, y) = net(), batch()
    nn.functional.mse_loss(model(x), y).backward()
    found = [gradient for part in two.run(in_a_pipeline) for gradient in part]
    assert close(found, [parameter.grad for parameter in model.parameters()])


def with_zero(rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = nn.parallel.DistributedDataParallel(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.5)
    x, y = (whole.chunk(2)[rank] for whole in batch())
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.module.parameters()]


def test_zero_trains_as_one_process_does(two):
    for found in two.run(with_zero):
        assert close(found, alone())


def a_mesh(rank):
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "tensor"))
    vector = torch.ones(3) * (rank + 1)
    distributed.all_reduce(vector, group=mesh["data"].get_group())
    return vector.tolist()


def test_a_device_mesh_of_two_dimensions_has_groups_that_reduce(two):
    assert two.run(a_mesh) == [[3.0] * 3] * 2
