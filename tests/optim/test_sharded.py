"""The user's optimizer on slices of the flat vectors."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tutti.errors import BadModel
from tutti.model_parallel.memory import PeakMemory
from tutti.optim.kernels import KERNELS as BY_CLASS
from tutti.optim.sharded import PIECE, ShardedOptimizer, own_slices
from tutti.optim.sliced_optimizer import FUSED
from tutti.replica import ALIGNMENT, Flat, Replica


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(31, 9), nn.ReLU(), nn.Linear(9, 5))


def fill_gradients(module: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad.copy_(torch.randn(parameter.shape, generator=generator))


def whole(replica: Replica) -> list[slice]:
    return [slice(0, len(flat.weights)) for flat in replica.flats]


def flat_of(*sizes: int) -> Flat:
    return Replica(nn.ParameterList([nn.Parameter(torch.ones(size)) for size in sizes])).flats[0]


def adam_over(flat: Flat, **options: object) -> Optimizer:
    return optim.Adam(flat.parameters, **options)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_slices_for_elementwise_optimizers_are_even_and_keep_cache_lines_whole(parts: int) -> None:
    flat = flat_of(1000, 5)
    slices = own_slices(flat, parts, adam_over(flat))
    lengths = [own.stop - own.start for own in slices]
    assert sum(lengths) == len(flat.weights)
    assert max(lengths) - min(lengths) <= ALIGNMENT
    assert all(own.start % ALIGNMENT == 0 for own in slices)


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_slices_for_other_optimizers_end_where_parameters_do(parts: int) -> None:
    flat = flat_of(100, 30, 30, 100, 40, 5)
    slices = own_slices(flat, parts, optim.Adafactor(flat.parameters))
    borders = {span.start for span in flat.spans} | {len(flat.weights)}
    assert {own.start for own in slices} | {own.stop for own in slices} <= borders
    assert [own.start for own in slices[1:]] == [own.stop for own in slices[:-1]]
    assert (slices[0].start, slices[-1].stop) == (0, len(flat.weights))


def test_long_slices_are_moved_in_pieces_that_stay_in_the_cache() -> None:
    replica = Replica(nn.Linear(1000, 300))
    optimizer = optim.SGD(replica.module.parameters(), lr=0.1)
    pieces = ShardedOptimizer(optimizer, replica, whole(replica)).pieces
    assert [piece.place.stop - piece.place.start for piece in pieces][:2] == [PIECE, PIECE]
    assert sum(piece.place.stop - piece.place.start for piece in pieces) == len(replica.flats[0].weights)


@pytest.mark.parametrize("made", sorted(FUSED["cpu"], key=lambda cls: cls.__name__))
def test_fused_kernels_are_chosen_where_torch_has_them(made: type[Optimizer]) -> None:
    replica = Replica(mlp())
    optimizer = made(replica.module.parameters(), lr=0.1)
    (run,) = ShardedOptimizer(optimizer, replica, whole(replica)).pieces[0].runs
    assert run.optimizer.param_groups[0]["fused"] is True
    assert optimizer.param_groups[0]["fused"] is None


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"foreach": True}, {"foreach": False}, {"differentiable": True}], ids=str
)
def test_the_users_own_choice_is_kept(options: dict[str, bool]) -> None:
    replica = Replica(mlp())
    (run,) = ShardedOptimizer(adam_over(replica.flats[0], **options), replica, whole(replica)).pieces[0].runs
    assert not run.optimizer.param_groups[0]["fused"]


KERNELS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "adam": lambda p: optim.Adam(p, lr=0.1, weight_decay=0.1),
    "adam-amsgrad-maximize": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, maximize=True),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, betas=(0.5, 0.7)),
    "sgd": lambda p: optim.SGD(p, lr=0.1, weight_decay=0.1),
    "sgd-momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "sgd-nesterov-maximize": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, maximize=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_the_short_way_to_a_kernel_gives_what_step_gives(name: str) -> None:
    module, plain = mlp().double(), mlp().double()
    for parameter in plain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    replica = Replica(module)
    mine, theirs = KERNELS[name](list(module.parameters())), KERNELS[name](list(plain.parameters()))
    assert type(mine) in BY_CLASS
    sharded = ShardedOptimizer(mine, replica, whole(replica))
    for step in range(5):
        for group in (*mine.param_groups, *theirs.param_groups):
            group["lr"] = 0.1 / (step + 1)
        fill_gradients(module, step)
        fill_gradients(plain, step)
        sharded.step()
        theirs.step()
    for found, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)


def test_an_optimizer_that_may_use_all_parameters_together_steps_itself() -> None:
    class Own(optim.Adam):
        pass

    replica = Replica(mlp())
    optimizer = Own(replica.module.parameters())
    sharded = ShardedOptimizer(optimizer, replica, whole(replica))
    fill_gradients(replica.module, 0)
    sharded.step()
    assert sharded.joint
    assert set(optimizer.state) == set(replica.module.parameters())


def test_state_from_before_is_carried_over_in_memory_order() -> None:
    module = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    optimizer = optim.Adam(module.parameters(), lr=0.1)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    expected = optimizer.state[module.weight]["exp_avg"].clone()
    replica = Replica(module)
    (run,) = ShardedOptimizer(optimizer, replica, whole(replica)).pieces[0].runs
    state = run.optimizer.state[run.parameters[0]]
    assert float(state["step"]) == 1.0
    found = state["exp_avg"][: expected.numel()].view(4, 3, 3, 3).permute(0, 3, 1, 2)
    assert torch.equal(found, expected)
    sharded = state["exp_avg"].data_ptr()
    assert sharded != optimizer.state[module.weight]["exp_avg"].data_ptr()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_state_from_before_is_copied_once_however_many_pieces_there_are(layout: torch.memory_format) -> None:
    module = nn.Conv2d(500, 200, 3, bias=False).to(memory_format=layout)
    optimizer = optim.Adam(module.parameters())
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    replica = Replica(module)
    with PeakMemory() as memory:
        pieces = ShardedOptimizer(optimizer, replica, whole(replica)).pieces
    assert len(pieces) > 5
    assert memory.peak < 2.1 * module.weight.nbytes


def test_each_param_group_has_its_own_options() -> None:
    module = nn.ParameterList([nn.Parameter(torch.ones(16, dtype=torch.float64)) for _ in range(3)])
    replica = Replica(module)
    optimizer = optim.SGD([{"params": [module[0], module[2]], "lr": 0.25}, {"params": [module[1]]}], lr=0.5)
    replica.flats[0].grads.fill_(1.0)
    ShardedOptimizer(optimizer, replica, whole(replica)).step()
    assert [p[0].item() for p in module] == [0.75, 0.5, 0.75]


def test_an_optimizer_over_another_models_parameters_is_refused() -> None:
    replica = Replica(mlp())
    optimizer = optim.SGD([*replica.module.parameters(), nn.Parameter(torch.zeros(3, 4))], lr=0.1)
    with pytest.raises(BadModel, match=r"shape \(3, 4\) that is no trainable parameter of the model"):
        ShardedOptimizer(optimizer, replica, whole(replica))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("made", [optim.SGD, optim.Adam])
def test_weights_of_two_bytes_are_moved_by_every_optimizer(made: type, dtype: torch.dtype) -> None:
    """A vector longer than a processor's registers: torch's fused SGD moves only what is left over."""
    module = nn.Linear(173, 1, bias=False).to(dtype)
    replica = Replica(module)
    before = module.weight.detach().clone()
    replica.flats[0].grads.fill_(1)
    ShardedOptimizer(made(module.parameters(), lr=0.5), replica, whole(replica)).step()
    assert bool((module.weight != before).all())
