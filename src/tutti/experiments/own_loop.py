"""For people with a training loop of their own: `init`, `distribute`, `shard`, `settled` and `finish`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from tutti import strategies
from tutti.comm.base import Communicator, cut
from tutti.errors import BadOption, refuse_other
from tutti.launch.join import join
from tutti.replica import Replica
from tutti.strategies.base import Clip, Pace, Strategy, Worker
from tutti.training.evaluate import average_buffers

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
    """What `init` found, what the loop deals, and the models that `distribute` was given."""

    comm: Communicator
    dealt: Dealt
    steppers: list[Stepper] = field(default_factory=list)

    @property
    def pace(self) -> Pace:
        """How the workers' steps relate to each other."""
        return self.steppers[0].pace if self.steppers else Pace.TOGETHER


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

    Where the strategy gives every worker weights of its own, evaluate inside `with settled(model)`, and call
    `finish(model)` after the last step.

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
        BadOption: what is given is no model, optimizer or strategy; or the strategy cannot use this many
            ranks, or another model of this program is trained at another pace.
    """
    chosen = strategy if strategy is not None else strategies.Sync()
    refuse_other(model, nn.Module, "model", "nn.Linear(2, 1)")
    refuse_other(optimizer, Optimizer, "optimizer", "torch.optim.Adam(model.parameters())")
    refuse_other(chosen, Strategy, "strategy", "tutti.Sync()")
    comm, job = init(), _current()
    chosen.check(comm.size, comm.hosts)
    if job.steppers and chosen.pace is not job.pace:
        raise BadOption(
            f"strategy '{chosen.name}' ({chosen.pace.value}) cannot train beside that of the first model "
            f"({job.pace.value}): they need other batches; give both the same strategy"
        )
    replica = strategies.place(model, comm, chosen.home)
    worker = chosen.worker(replica, comm, optimizer, Clip(clip_norm, clip_value))
    stepper = Stepper(replica, worker, chosen.passes, chosen.pace, job.dealt)
    stepper.take_over(optimizer)
    job.steppers.append(stepper)
    return model, optimizer


@contextmanager
def settled(model: nn.Module) -> Iterator[None]:
    """Inside, `model` holds the weights to be evaluated, the same on all ranks (collective).

    These are the centre's or the workers' average where the workers have weights of their own; training goes
    on from their own afterwards. BatchNorm's statistics are averaged over the ranks, for good.

    Args:
        model: what `distribute` returned.

    Raises:
        BadOption: `distribute` was not given this model.
    """
    stepper = _stepper_of(model)
    stepper.worker.settle()
    average_buffers(stepper.replica, init())
    try:
        yield
    finally:
        stepper.worker.resume()


def finish(model: nn.Module) -> None:
    """After the last step (collective): afterwards `model` has the final weights, the same on all ranks.

    Args:
        model: what `distribute` returned.

    Raises:
        BadOption: `distribute` was not given this model.
    """
    stepper = _stepper_of(model)
    stepper.worker.finish()
    average_buffers(stepper.replica, init())


class shard:
    """A rank's own samples; together the ranks see each sample once.

    Where the workers make each update together, and where nothing is distributed, that is this rank's part of
    every batch. Where each worker makes its own updates, it is every so many-th batch, whole.

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
        init()
        job = _current()
        loads = isinstance(self.batches, DataLoader) and self.batches.batch_sampler is not None
        own = _from_loader(cast("DataLoader[Any]", self.batches), job) if loads else None
        if job.pace is Pace.TOGETHER:
            yield from own or (_own_part(batch, job) for batch in self.batches)
        else:
            yield from own or _whole_batches(self.batches, job)

    def __len__(self) -> int:
        init()
        job, batches = _current(), len(cast("Sized", self.batches))
        return batches if job.pace is Pace.TOGETHER else len(range(job.comm.rank, batches, job.comm.size))


class Stepper:
    """Turns the calls of a user's loop into the steps of a strategy's worker."""

    def __init__(self, replica: Replica, worker: Worker, passes: int, pace: Pace, dealt: Dealt) -> None:
        self.replica, self.worker, self.passes, self.pace, self.dealt = replica, worker, passes, pace, dealt
        self.pending = [torch.zeros_like(flat.grads) for flat in replica.flats] if passes > 1 else []
        self.calls, self.samples, self.own, self.clean = 0, 0, 0, False

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
        self._advance(self.dealt.own, self.dealt.all)

    def skip(self) -> None:
        """The other ranks have a batch, this one has none."""
        self._advance(0, 0)

    def _advance(self, own: int, whole: int) -> None:
        self.replica.attach()
        self.calls, self.samples, self.own = self.calls + 1, self.samples + whole, self.own + own
        if self.passes == 1:
            self._scale(own / whole if whole else 0.0)
        elif not self._gather(own):
            return
        if self.samples:
            if self.pace is Pace.TOGETHER:
                self.worker.share = self.own / self.samples
            self.worker.step()
        else:
            self.worker.skip()
        self.calls, self.samples, self.own, self.clean = 0, 0, 0, True

    def zero_grad(self) -> None:
        """Forget the gradient of a `backward()` that no `step()` used."""
        if not self.clean:
            self.replica.attach()
            self.replica.zero_grad()
        self.clean = False

    def _scale(self, share: float) -> None:
        for flat in self.replica.flats:
            if share == 0:
                flat.grads.zero_()
            elif share != 1:
                flat.grads.mul_(share)

    def _gather(self, own: int) -> bool:
        """Keep this pass' gradient, weighted by its samples; the last pass puts the mean into the replica."""
        for flat, pending in zip(self.replica.flats, self.pending, strict=True):
            if own:
                pending.add_(flat.grads, alpha=own)
            flat.grads.zero_()
            if self.calls == self.passes and self.samples:
                torch.div(pending, self.samples, out=flat.grads)
                pending.zero_()
        self.clean = True
        return self.calls == self.passes


def _current() -> Job:
    assert _job is not None, "init() makes the job"
    return _job


def _stepper_of(model: nn.Module) -> Stepper:
    init()
    for stepper in _current().steppers:
        if stepper.replica.module is model:
            return stepper
    raise BadOption("this model is not trained by tutti; give it to distribute() first")


class _Dealing:
    """A batch sampler: of rank 0's batches this rank's part of each, or every so many-th, whole."""

    def __init__(self, batches: Iterable[list[Any]], job: Job) -> None:
        self.batches, self.job = batches, job
        self.deals: list[Dealt] = []
        self.seen = 0

    def __iter__(self) -> Iterator[list[Any]]:
        comm, together = self.job.comm, self.job.pace is Pace.TOGETHER
        source = iter(self.batches) if comm.rank == 0 else iter(())
        while True:
            drawn = [list(batch) for batch in islice(source, self._ahead())]
            shared = cast("list[list[Any]]", comm.broadcast_object(drawn))
            if not shared:
                return
            for batch in shared:
                mine = self.seen % comm.size == comm.rank
                self.seen += 1
                if together or mine:
                    own = batch[cut(len(batch), comm.size)[comm.rank]] if together else batch
                    self.deals.append(Dealt(len(own), len(batch)))
                    yield own or batch[:1]

    def _ahead(self) -> int | None:
        """How many batches to draw at a time; None: all, so that nobody waits for rank 0 in the epoch."""
        if self.job.pace is Pace.FREE and isinstance(self.batches, Sized):
            return None
        return AHEAD if self.job.pace is Pace.TOGETHER else AHEAD * self.job.comm.size


def _from_loader(loader: DataLoader[Any], job: Job) -> Iterator[Any]:
    dealing = _Dealing(cast("Iterable[list[Any]]", loader.batch_sampler), job)
    own = DataLoader(
        loader.dataset,
        batch_sampler=dealing,
        num_workers=loader.num_workers,
        collate_fn=loader.collate_fn,
        pin_memory=loader.pin_memory,
        timeout=loader.timeout,
        worker_init_fn=loader.worker_init_fn,
        generator=loader.generator,
        prefetch_factor=loader.prefetch_factor,
    )
    for batch in own:
        yield _deal(batch, dealing.deals.pop(0))
    if job.pace is not Pace.TOGETHER:
        _complete_round(dealing.seen, job)


def _whole_batches(batches: Iterable[Any], job: Job) -> Iterator[Any]:
    """Every so many-th batch."""
    seen = 0
    for batch in batches:
        if seen % job.comm.size == job.comm.rank:
            length = _length(batch)
            yield _deal(batch, Dealt(length, length))
        seen += 1
    _complete_round(seen, job)


def _complete_round(batches: int, job: Job) -> None:
    """Skip the last round of an epoch where this rank has no batch in it: all make as many steps or skips."""
    left = batches % job.comm.size
    if left and job.comm.rank >= left and torch.is_grad_enabled():
        for stepper in job.steppers:
            stepper.skip()


def _own_part(batch: Any, job: Job) -> Any:
    comm, length = job.comm, _length(batch)
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
