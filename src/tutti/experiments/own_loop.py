"""For people with a training loop of their own: `init`, `distribute` and `shard`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from itertools import islice
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tutti import strategies
from tutti.comm.base import Communicator, cut
from tutti.errors import BadOption
from tutti.launch.join import join
from tutti.replica import Replica
from tutti.strategies.base import Clip, Strategy, Worker

Model = TypeVar("Model", bound=nn.Module)

AHEAD = 32
"""Batches of indices that rank 0 draws from the loader's sampler at a time."""


@dataclass
class Dealt:
    """How many samples this rank got of the batch that `shard` dealt last, and how many all ranks did."""

    own: int = 1
    all: int = 1


@dataclass
class Job:
    """What `init` found, and what the loop deals."""

    comm: Communicator
    dealt: Dealt


_job: Job | None = None


def init() -> Communicator:
    """Join the ranks that this program was started with; call it once, before anything else of tutti.

    `tutti run -n 4 PROGRAM`, `mpirun -n 4 python PROGRAM` and `srun -n 4 python PROGRAM` start four ranks;
    a plain `python PROGRAM` is a world of one.

    Returns:
        The communicator of all ranks; `.rank` and `.size` say who this process is.
    """
    global _job
    if _job is None:
        _job = Job(join(), Dealt())
        _job.dealt = Dealt(1, _job.comm.size)
    return _job.comm


def distribute(
    model: Model,
    optimizer: Optimizer,
    strategy: Strategy | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
) -> tuple[Model, Optimizer]:
    """Train `model` on all ranks: from here on `optimizer.step()` is the strategy's step.

    Every rank goes on from rank 0's weights. The loss of each rank must be the mean over the samples that
    `shard` dealt to it; its gradient then counts by how many these are.

    Args:
        model: its parameters are re-pointed into flat vectors, values kept.
        optimizer: any torch optimizer over the model's parameters. Schedulers attached to it keep working.
        strategy: how to train; `Sync()` by default.
        clip_norm: largest 2-norm of the gradient of the whole model. Clip here, not in the loop: a rank knows
            only its own part of the gradient there.
        clip_value: largest absolute value of an element of the gradient.

    Returns:
        The same two objects.

    Raises:
        BadOption: the strategy cannot use this many ranks.
    """
    comm = init()
    chosen = strategy if strategy is not None else strategies.Sync()
    chosen.check(comm.size)
    replica = strategies.place(model, comm, chosen.home)
    worker = chosen.worker(replica, comm, optimizer, Clip(clip_norm, clip_value))
    stepper = Stepper(replica, worker, chosen.passes, _current().dealt)
    stepper.take_over(optimizer)
    return model, optimizer


class shard:
    """A rank's own samples of every batch; together the ranks see each batch whole, each sample once.

    Iterating yields batches of the same structure. Where a batch has fewer samples than there are ranks, a
    rank without any gets an empty batch under `torch.no_grad()`, and else one sample whose gradient does not
    count.

    Args:
        batches: a `DataLoader` (only this rank's samples are read; the order is that of rank 0's sampler), or
            any iterable that yields the same batches on every rank: tensors, or tuples, lists and dicts of
            them.
    """

    def __init__(self, batches: Iterable[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        comm = init()
        if isinstance(self.batches, DataLoader) and self.batches.batch_sampler is not None:
            yield from _shard_loader(self.batches, comm)
        else:
            for batch in self.batches:
                yield _own_part(batch, comm)

    def __len__(self) -> int:
        return len(cast("Sized", self.batches))


class Stepper:
    """Turns the calls of a user's loop into the steps of a strategy's worker."""

    def __init__(self, replica: Replica, worker: Worker, passes: int, dealt: Dealt) -> None:
        self.replica, self.worker, self.passes, self.dealt = replica, worker, passes, dealt
        self.pending = [torch.zeros_like(flat.grads) for flat in replica.flats] if passes > 1 else []
        self.calls, self.samples, self.clean = 0, 0, False

    def take_over(self, optimizer: Optimizer) -> None:
        """Put our `step` and `zero_grad` in place of the optimizer's own."""

        def step(optimizer: Optimizer, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
            loss = closure() if closure is not None else None
            self.step()
            # torch's schedulers look at this to warn of `scheduler.step()` before `optimizer.step()`.
            optimizer._opt_called = True  # type: ignore[attr-defined]
            return loss

        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            self.zero_grad()

        for function in (step, zero_grad):
            setattr(optimizer, function.__name__, MethodType(function, optimizer))

    def step(self) -> None:
        """One call of the user's `optimizer.step()`; the last of `passes` moves the weights."""
        self.replica.attach()
        self.calls, self.samples = self.calls + 1, self.samples + self.dealt.all
        if self.passes == 1:
            self._scale()
        elif not self._gather():
            return
        self.worker.step()
        self.calls, self.samples, self.clean = 0, 0, True

    def zero_grad(self) -> None:
        """Forget the gradient of a `backward()` that no `step()` used."""
        if not self.clean:
            self.replica.attach()
            self.replica.zero_grad()
        self.clean = False

    def _scale(self) -> None:
        for flat in self.replica.flats:
            if self.dealt.own:
                flat.grads.mul_(self.dealt.own / self.dealt.all)
            else:
                flat.grads.zero_()

    def _gather(self) -> bool:
        """Keep this pass' gradient, weighted by its samples; the last pass puts the mean into the replica."""
        for flat, pending in zip(self.replica.flats, self.pending, strict=True):
            if self.dealt.own:
                pending.add_(flat.grads, alpha=self.dealt.own)
            flat.grads.zero_()
            if self.calls == self.passes:
                torch.div(pending, self.samples, out=flat.grads)
                pending.zero_()
        self.clean = True
        return self.calls == self.passes


def _current() -> Job:
    assert _job is not None, "init() makes the job"
    return _job


class _OwnIndices:
    """A batch sampler: rank 0's batches, cut down to this rank's part."""

    def __init__(self, batches: Iterable[list[Any]], comm: Communicator, deals: list[Dealt]) -> None:
        self.batches, self.comm, self.deals = batches, comm, deals

    def __iter__(self) -> Iterator[list[Any]]:
        source = iter(self.batches) if self.comm.rank == 0 else iter(())
        while True:
            drawn = [list(batch) for batch in islice(source, AHEAD)]
            shared = cast("list[list[Any]]", self.comm.broadcast_object(drawn))
            if not shared:
                return
            for batch in shared:
                own = batch[cut(len(batch), self.comm.size)[self.comm.rank]]
                self.deals.append(Dealt(len(own), len(batch)))
                yield own or batch[:1]


def _shard_loader(loader: DataLoader[Any], comm: Communicator) -> Iterator[Any]:
    deals: list[Dealt] = []
    own = DataLoader(
        loader.dataset,
        batch_sampler=_OwnIndices(cast("Iterable[list[Any]]", loader.batch_sampler), comm, deals),
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    for batch in own:
        deal = deals.pop(0)
        yield _deal(batch, deal)


def _own_part(batch: Any, comm: Communicator) -> Any:
    length = _length(batch)
    part = cut(length, comm.size)[comm.rank]
    deal = Dealt(part.stop - part.start, length)
    return _deal(_map(batch, lambda x: x[part] if deal.own else x[:1]), deal)


def _deal(batch: Any, deal: Dealt) -> Any:
    """Note the counts for the next `step()`; outside training an empty part is really empty."""
    dealt = _current().dealt
    dealt.own, dealt.all = deal.own, deal.all
    if deal.own == 0 and not torch.is_grad_enabled():
        return _map(batch, lambda x: x[:0])
    return batch


def _map(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, dict):
        return {key: _map(value, function) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(_map(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        return type(batch)(_map(value, function) for value in batch)
    raise BadOption(
        f"shard() can cut tensors, and tuples, lists and dicts of them, not {type(batch).__name__}"
    )


def _length(batch: Any) -> int:
    while isinstance(batch, (tuple, list, dict)) and len(batch):
        batch = next(iter(batch.values() if isinstance(batch, dict) else batch))
    if isinstance(batch, Tensor) and batch.dim():
        return len(batch)
    raise BadOption(
        f"shard() needs batches with samples along the first dimension, not {type(batch).__name__}"
    )
