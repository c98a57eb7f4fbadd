"""Programs of several fields, as their authors write them."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn.functional import cross_entropy, log_softmax, mse_loss, softplus
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.optim import Optimizer
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import CLASSES, FEATURES, adam, batches, fit, loop, net, samples, sgd, weights


def _points(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _curve(seed: int = 0) -> nn.Sequential:
    """A function of one number."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()


@loop
def adversaries_with_spectral_norm(job: Job) -> Outcome:
    torch.manual_seed(2)
    maker = nn.Linear(3, FEATURES).double()
    judge = nn.Sequential(
        nn.utils.spectral_norm(nn.Linear(FEATURES, 6)),
        nn.LeakyReLU(0.2),
        nn.utils.spectral_norm(nn.Linear(6, 1)),
    ).double()
    maker, making = job.distribute(maker, adam(maker))
    judge, judging = job.distribute(judge, adam(judge))
    for real, noise in job.shard(DataLoader(TensorDataset(_points(11, FEATURES), _points(11, 3, seed=2)), 4)):
        made = maker(noise)
        judging.zero_grad()
        (softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()).backward()
        judging.step()
        making.zero_grad()
        softplus(-judge(made)).mean().backward()
        making.step()
    return [dict(maker.state_dict()), dict(judge.state_dict())]


class _Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder, self.decoder = nn.Linear(FEATURES, 4), nn.Linear(2, FEATURES)
        self.spread = nn.Parameter(torch.zeros(()))

    def forward(self, inputs: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(inputs).chunk(2, 1)
        return self.decoder(mean + noise * torch.exp(log_variance / 2)), mean, log_variance


@loop
def a_variational_autoencoder_with_a_warm_up(job: Job) -> Outcome:
    model = _Autoencoder().double()
    model, optimizer = job.distribute(model, adam(model))
    step = 0
    for _ in range(2):
        for inputs, noise in job.shard(
            DataLoader(TensorDataset(_points(11, FEATURES), _points(11, 2, seed=2)), 3)
        ):
            made, mean, log_variance = model(inputs, noise)
            fidelity = ((made - inputs) ** 2 / model.spread.exp() + model.spread).sum() / len(inputs)
            divergence = -(1 + log_variance - mean**2 - log_variance.exp()).sum() / len(inputs) / 2
            optimizer.zero_grad()
            (fidelity + min(1.0, step / 6) * divergence).backward()
            optimizer.step()
            step += 1
    return weights(model)


@loop
def a_policy_that_is_kept_near_the_last_one(job: Job) -> Outcome:
    """After Schulman et al. 2017, "Proximal policy optimization algorithms"."""
    model = net()
    model, optimizer = job.distribute(model, adam(model))
    generator = torch.Generator().manual_seed(9)
    for _ in range(2):
        states = torch.randn(10, FEATURES, generator=generator, dtype=torch.float64)
        actions = torch.randint(CLASSES, (10, 1), generator=generator)
        gains = torch.randn(10, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            before = log_softmax(model(states), 1).gather(1, actions)[:, 0]
        for _ in range(2):
            for chosen in job.shard(list(torch.randperm(10, generator=generator).split(4))):
                now = log_softmax(model(states[chosen]), 1).gather(1, actions[chosen])[:, 0]
                ratio = (now - before[chosen]).exp()
                loss = -torch.min(ratio * gains[chosen], ratio.clamp(0.8, 1.2) * gains[chosen]).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
    return weights(model)


class _Sequences(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return _points(2 + number * 3 % 5, FEATURES, seed=number), number % CLASSES


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(FEATURES, 4, 2, bidirectional=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, sequences: PackedSequence) -> Tensor:
        _, (hidden, _) = self.cells(sequences)
        return self.out(torch.cat([hidden[-1], hidden[-2]], 1))


def _pack(items: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    sequences, labels = zip(*items, strict=True)
    return pack_sequence(sequences, enforce_sorted=False), torch.tensor(labels)


@loop
def packed_sequences(job: Job) -> Outcome:
    model = _Reader().double()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(DataLoader(_Sequences(), 4, collate_fn=_pack)):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


def _tasks() -> DataLoader:
    return DataLoader(TensorDataset(_points(7, 8, 1), torch.linspace(0.5, 2, 7, dtype=torch.float64)), 3)


@loop
def learning_to_learn_through_the_inner_steps(job: Job) -> Outcome:
    """After Finn et al. 2017, "Model-agnostic meta-learning"."""
    model = _curve()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, heights in job.shard(_tasks()):
        losses = []
        for points, height in zip(inputs, heights, strict=True):
            own = dict(model.named_parameters())
            for _ in range(2):
                loss = mse_loss(functional_call(model, own, points[:4]), height * points[:4].sin())
                slopes = torch.autograd.grad(loss, list(own.values()), create_graph=True)
                own = {name: p - 0.1 * slope for (name, p), slope in zip(own.items(), slopes, strict=True)}
            losses.append(mse_loss(functional_call(model, own, points[4:]), height * points[4:].sin()))
        optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        optimizer.step()
    return weights(model)


@loop
def learning_to_learn_by_copies(job: Job) -> Outcome:
    """To first order: the gradient is taken at a copy that plain torch has trained."""
    model = _curve()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, heights in job.shard(_tasks()):
        optimizer.zero_grad()
        for points, height in zip(inputs, heights, strict=True):
            own = copy.deepcopy(model)
            inner = torch.optim.SGD(own.parameters(), lr=0.1)
            mse_loss(own(points[:4]), height * points[:4].sin()).backward()
            inner.step()
            loss = mse_loss(own(points[4:]), height * points[4:].sin()) / len(inputs)
            for p, slope in zip(model.parameters(), torch.autograd.grad(loss, own.parameters()), strict=True):
                p.grad = slope if p.grad is None else p.grad + slope
        optimizer.step()
    return weights(model)


@loop
def a_differential_equation(job: Job) -> Outcome:
    """The residual at the points of the batch, by second derivatives, and the values at both ends."""
    model = _curve()
    model, optimizer = job.distribute(model, adam(model))
    ends = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for (points,) in job.shard(DataLoader(TensorDataset(_points(11, 1)), 4)):
        places = points.clone().requires_grad_()
        values = model(places)
        (slopes,) = torch.autograd.grad(values.sum(), places, create_graph=True)
        (bends,) = torch.autograd.grad(slopes.sum(), places, create_graph=True)
        optimizer.zero_grad()
        (((bends + values.sin()) ** 2).mean() + (model(ends) ** 2).mean()).backward()
        optimizer.step()
    return weights(model)


class _LowRank(nn.Module):
    """After Hu et al. 2021, "LoRA"."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(_points(2, layer.in_features))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2, dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T

    @torch.no_grad()
    def merge(self) -> None:
        self.layer.weight += self.up @ self.down
        self.up.zero_()


@loop
def layers_of_low_rank_that_are_merged(job: Job) -> Outcome:
    model = net()
    model[0] = _LowRank(model[0])
    model, optimizer = job.distribute(model, sgd(model))
    for _ in range(2):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
        model[0].merge()
    return weights(model)


@loop
def weights_averaged_over_epochs(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    averaged, schedule = AveragedModel(model), SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(3):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
        if epoch:
            averaged.update_parameters(model)
            schedule.step()
    update_bn([samples().tensors[0]], averaged)
    return [*weights(model, averaged.module), schedule.get_last_lr()]


@loop
def several_models_at_once(job: Job) -> Outcome:
    models = [net(seed) for seed in range(3)]
    stacked, _ = stack_module_state(models)
    held = nn.ParameterDict({name.replace(".", "_"): p.detach() for name, p in stacked.items()})
    held, optimizer = job.distribute(held, adam(held))
    for inputs, targets in job.shard(batches()):
        known = {name: held[name.replace(".", "_")] for name in stacked}
        scores = vmap(lambda own, x: functional_call(models[0], own, x), (0, None))(known, inputs)
        optimizer.zero_grad()
        sum(cross_entropy(own, targets) for own in scores).backward()
        optimizer.step()
    return weights(held)


@loop
def gradients_by_a_transform(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))

    for batch in job.shard(batches()):

        def loss(own: dict[str, Tensor], batch: list[Tensor] = batch) -> Tensor:
            return cross_entropy(functional_call(model, own, batch[0]), batch[1])

        slopes = grad(loss)(dict(model.named_parameters()))
        for name, p in model.named_parameters():
            p.grad = slopes[name]
        optimizer.step()
    return weights(model)


class _Mixing(nn.Module):
    """Numbers that are drawn once, in buffers of several types."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("order", torch.randperm(FEATURES))
        self.register_buffer("kept", torch.rand(FEATURES) > 0.3)
        self.register_buffer("shift", torch.randn(FEATURES), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.out(inputs[:, self.order] * self.kept + self.shift)


@loop
def buffers_that_each_rank_draws(job: Job) -> Outcome:
    torch.manual_seed(job.rank)
    model = _Mixing().double()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(batches()):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return dict(model.named_buffers()), weights(model)


class _Buckets(Sampler[list[int]]):
    """Batches of several lengths, in another order in each epoch."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(11, generator=self.generator)
        yield from (part.tolist() for part in order.split([1, 5, 2, 3]))


@loop
def batches_of_several_lengths(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    loader = DataLoader(samples(), batch_sampler=_Buckets())
    for _ in range(2):
        for inputs, targets in job.shard(loader):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
    return weights(model)


def _names(inputs: Tensor) -> list[str]:
    return [f"{value:.3f}" for value in inputs[:, 0].tolist()]


@loop
def names_beside_the_tensors_of_a_batch(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    dealt = [
        (inputs, {"names": _names(inputs), "ranks": tuple(targets.tolist())}, 7, ("a",) * 9)
        for inputs, targets in batches(size=3)
    ]
    for inputs, extra, number, others in job.shard(dealt):
        assert extra["names"] == _names(inputs)
        assert (number, len(others)) == (7, 9)
        optimizer.zero_grad()
        fit(model, inputs, torch.tensor(extra["ranks"])).backward()
        optimizer.step()
    return weights(model)


class _Named(Dataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, number: int) -> tuple[Tensor, str, int]:
        return samples()[number][0], f"sample {number}", number % CLASSES


@loop
def names_that_are_counted(job: Job) -> Outcome:
    """The last batch has one sample: the others of the ranks have none, and no name."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, _, targets in job.shard(DataLoader(_Named(), 3)):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    counted = 0
    with torch.no_grad():
        for _, names, _ in job.shard(DataLoader(_Named(), 3)):
            counted += len(names)
    return weights(model), job.total(torch.tensor(counted))


def _right(job: Job, model: nn.Module) -> Tensor:
    right = 0
    with torch.inference_mode():
        for inputs, targets in job.shard(batches(size=2, seed=5)):
            right += int((model(inputs).argmax(1) == targets).sum())
    return job.total(torch.tensor(right))


@loop
def evaluation_in_inference_mode(job: Job) -> Outcome:
    """Before the first epoch, too."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    right = [_right(job, model)]
    for _ in range(2):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
        right.append(_right(job, model))
    return weights(model), right


def _of_single_precision(model: nn.Module) -> Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01), eps=1e-3)


@loop
def a_rate_that_is_a_tensor_of_single_precision(job: Job) -> Outcome:
    """Plain torch rounds the size of a step to the type of the rate."""
    model = net()
    model, optimizer = job.distribute(model, _of_single_precision(model))
    for _ in range(3):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
    return weights(model)
