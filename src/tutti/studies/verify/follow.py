"""A comparison of parallel with sequential training, on the user's model. Runs on every rank.

Both sides begin with the same weights and see the same batches, step by step. The sequential side is plain
torch on rank 0: the whole batch in one backward pass, torch's clipping and optimizer. After each backward
pass the gradients are compared (before clipping), after each step the weights. If ranks hold a model
together, its parts are gathered for the comparison.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import chain, count, islice
from operator import methodcaller
from typing import cast

import torch
import torch._dynamo  # The first optimizer imports it, which takes a second: do it before the ranks fork.
from torch import Tensor, nn

from tutti.comm.base import Communicator, keep_servers
from tutti.data import Batch, Batches, Round
from tutti.data.columns import mapped
from tutti.errors import BadOption
from tutti.model_parallel.base import Of, gradient_of, taken, values_of
from tutti.model_parallel.layout import Layout, portion_of
from tutti.run.build import (
    Assembly,
    Task,
    assemble,
    augmentation,
    build_chances,
    open_config_data,
    passes_of,
    prepare_task,
    reseed,
    seeded,
)
from tutti.run.checks import check_recipe
from tutti.run.jobs import Recipe, layout_of, load_job
from tutti.run.optimization import build_optimizer, build_schedule
from tutti.run.train import result_for_all, work_or_serve
from tutti.strategies import Clip, Strategy
from tutti.studies.verify.causes import MICROBATCH, by_design, cut_batch, is_random, of_the_loss
from tutti.studies.verify.tolerance import (
    Deviation,
    Distance,
    Verdict,
    VerifyJob,
    describe,
    deviations,
    table,
)
from tutti.training.batch_norm import batch_norms, normalising
from tutti.training.dropout import SampleMasks, drawn_by_sample
from tutti.training.update_gradient import divide_by_weight


@dataclass(frozen=True)
class StepResult:
    """The result of one step. Tensors have all trainable parameters end to end, in float64."""

    loss: float  # the mean over the batch
    gradient: Tensor  # before clipping
    weights: Tensor  # after the step


class Sequential:
    """Plain torch on one process."""

    def __init__(self, recipe: Recipe, task: Task, updates: int) -> None:
        self.task, self.module = task, copy.deepcopy(task.module)
        self.module.train()
        self.names = trained_names(self.module)
        self.optimizer, self._seed = build_optimizer(recipe, self.module), recipe.config.seed
        self.schedule = build_schedule(recipe, self.optimizer, updates, compared=True)
        self.loss, self.gradient = 0.0, torch.zeros(0)

    def backward(self, epoch: int, batches: Iterable[Batch]) -> None:
        """Run forward and backward over the parts of a batch; keep its loss and gradient."""
        self.optimizer.zero_grad()
        total = whole = 0.0
        # The parallel run draws the same random numbers.
        with torch.random.fork_rng(devices=()), drawn_by_sample(self.module, self._seed) as masks:
            for batch in batches:
                masks.begin(epoch, batch.samples)
                computed = self.task.forward(self.module, batch)
                torch.autograd.backward(computed.loss * len(batch.targets))
                total += computed.reported.item() * len(batch.targets)
                whole += computed.weight
        self.loss = total / whole if whole else 0.0
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1 / whole if whole else 0.0)
        self.gradient = self._whole(gradient_of)

    def step(self, clip: Clip) -> StepResult:
        """Clip as torch does, and step."""
        if clip.value is not None:
            nn.utils.clip_grad_value_(self.module.parameters(), clip.value)
        if clip.norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), clip.norm)
        self.optimizer.step()
        if self.schedule is not None:
            self.schedule.step()
        return StepResult(self.loss, self.gradient, self._whole(values_of))

    def _whole(self, of: Of) -> Tensor:
        return end_to_end(taken(self.module, of), self.names)


class Parallel:
    """Training on all ranks. `names` are the trainable parameters of the whole model."""

    def __init__(self, parts: Assembly, names: Sequence[str]) -> None:
        self.task, self.portion, self._names = parts.task, parts.portion, names
        self.batches, self._schedule = parts.schedule.batches, parts.schedule.scheduler
        self.replica, self.worker = parts.workers.replica, parts.workers.worker
        self._statistics, self._part = parts.workers.statistics, parts.task.dataset.train
        self.task.module.train()

    def step(self, number: int, passes: Sequence[Batch]) -> StepResult:
        """Run forward, backward and a step with this rank's samples (collective)."""
        with (
            normalising(self.task.module, self._statistics),
            drawn_by_sample(self.task.module, self.batches.seed) as masks,
        ):
            loss = self._forward_backward(number, passes, masks)
        gradient = end_to_end(self.portion.state(gradient_of), self._names)
        self.portion.data.all_reduce(gradient)
        self.worker.step()
        if self._schedule is not None:
            self._schedule.step()
        return StepResult(loss, gradient, end_to_end(self.portion.state(), self._names))

    def _forward_backward(self, number: int, passes: Sequence[Batch], masks: SampleMasks) -> float:
        """Compute this rank's share of the gradient; return the loss over the whole batch."""
        self.worker.share = sum(batch.share for batch in passes)
        total, weight, samples = torch.zeros(1, dtype=torch.float64), 0.0, 0
        for batch in passes:
            masks.begin(number // self.batches.updates, batch.samples)
            if self.portion.compute is not None:
                computed = self.portion.compute(batch)
                found = computed.loss, len(computed.targets) if computed.weight is None else computed.weight
            elif batch.share:
                passed = self.task.forward(self.task.module, batch)
                torch.autograd.backward(passed.loss * batch.share)
                found = passed.reported.item(), passed.weight
            elif self._statistics is not None:
                inputs, targets = self._part.take(torch.zeros(1, dtype=torch.int64))
                with self._statistics.absent():
                    passed = self.task.forward(self.task.module, Batch(inputs, targets, 0.0))
                    torch.autograd.backward(passed.loss * 0)
                continue
            else:
                continue
            samples += len(batch.targets)
            total += found[0] * batch.share
            weight += found[1]
        self.portion.peers.all_reduce(total)
        if not self.task.objective.loss.weighed:
            return total.item()
        whole, count = divide_by_weight(self.replica, self.portion.peers, weight, samples)
        self.worker.share = weight / whole if whole else 0.0
        return total.item() * count / whole if whole else 0.0


class _Runs:
    """The sequential run, and two runs that differ from it by rounding alone.

    One has the samples of every batch in reverse order, and other last digits of the inputs if BatchNorm
    mixes the samples. The other adds up the gradients of the parts of a batch. Either may happen to round
    like the plain run, for some shapes and processors. If order or parts change more than rounding, as with
    random numbers or a loss that is no mean over the samples, the run is like the plain one.
    """

    def __init__(
        self,
        recipe: Recipe,
        task: Task,
        updates: int,  # the number of steps
        part: str | None,  # the samples that are computed together, in words; None: the whole batch
        parts: int,  # the least number of parts of a batch
        normalised: bool,  # BatchNorm has the statistics of the whole batch
    ) -> None:
        data, size, seed = task.dataset, recipe.config.batch_size, recipe.config.seed
        chances = build_chances(recipe, data)
        whole = Batches(data.train, size, seed=seed, chances=chances)
        whole.augment = augmentation(recipe, data.train)
        _, (first,) = next(whole.epoch(0))
        self._rounds, self._updates = _rounds(whole), whole.updates
        self._random = is_random(task.objective, task.module, first)
        self.reasons: tuple[str, ...] = ()  # why parts differ from the whole by design
        self.causes: tuple[str, ...] = ()  # why they differ by mistake
        if part is not None:
            self.reasons = tuple(by_design(task.objective, task.module, first, parts, part, normalised))
        self._normalised = normalised
        self._task, self._part, self._parts = task, part, parts
        self.plain, self.reversed, self.added_up = (Sequential(recipe, task, updates) for _ in range(3))

    def backward(self) -> None:
        """Run forward and backward of the three runs on the next batch."""
        number, (batch,) = next(self._rounds)
        epoch = number // self._updates
        if self._part is not None and not self.causes:
            cause = of_the_loss(self._task.objective, self.plain.module, batch, self._parts)
            self.causes = () if cause is None else (cause,)
        self.plain.backward(epoch, [batch])
        self.reversed.backward(epoch, [batch] if self._random else [_turned(batch, self._normalised)])
        parts = cut_batch(batch, self._parts) if self._comparable_in_parts else [batch]
        self.added_up.backward(epoch, parts)

    @property
    def _comparable_in_parts(self) -> bool:
        return not (self._random or self._normalised or self.reasons or self.causes)

    def step(self, clip: Clip, parallel: StepResult, distances: dict[str, Deviation], step: int) -> None:
        """Step, and note the distance of the parallel run, and of the runs with other rounding."""
        plain = self.plain.step(clip)
        _note({name: one.found for name, one in distances.items()}, step, parallel, plain)
        _note({name: one.reordered for name, one in distances.items()}, step, self.reversed.step(clip), plain)
        added_up = self.added_up.step(clip)
        if self._comparable_in_parts:
            _note({name: one.added_up for name, one in distances.items()}, step, added_up, plain)


def work(comm: Communicator, payload: bytes) -> Verdict:
    """Compare, on every rank including servers (entry point)."""
    job = load_job(payload, VerifyJob)
    with seeded(job.config.seed):
        strategy = check_recipe(job, comm.size, comm.hosts, compared=True)
        team = keep_servers(comm, job.config.servers, job.config.levels, job.config.server_period)
        task = prepare_task(job, open_config_data(job, comm))
        verdict = work_or_serve(job, team, task.module, strategy, lambda: _verdict(job, team, task, strategy))
        return result_for_all(comm, team, verdict)


def _verdict(job: VerifyJob, comm: Communicator, task: Task, strategy: Strategy) -> Verdict:
    """Compare, and print the findings."""
    config, layout = job.config, layout_of(job.config, comm.size)
    if config.steps is None:
        raise BadOption("a comparison needs a number of steps; give --steps 20")
    part = _part(layout, comm.size, passes_of(config, strategy))
    parts = max(2, comm.size * passes_of(config, strategy))
    sync = config.batch_norm == "sync" and layout is None and passes_of(config, strategy) == 1
    normalised = sync and comm.size > 1 and comm.in_backward and bool(batch_norms(task.module))
    sequential = _Runs(job, task, config.steps, part, parts, normalised) if comm.rank == 0 else None
    names = trained_names(task.module)
    work = task.workload(config.batch_size)
    with closing(portion_of(layout, comm, task.module, work, strategy)) as portion:
        # The speeds of the ranks do not matter.
        even = replace(job, config=replace(config, balance="none"))
        parallel = Parallel(assemble(even, comm, task, strategy, portion), names)
        verdict = _compare(job, comm, parallel, sequential)
        if comm.rank == 0:
            way = strategy.name if layout is None else layout.describe()
            _print(job, comm.size, task, way, verdict)
    return verdict


def _part(layout: Layout | None, ranks: int, passes: int) -> str | None:
    """Return the samples that are computed together, in words; None: the whole batch."""
    if layout is not None and layout.way == "pipeline":
        return MICROBATCH
    if passes > 1:
        return "pass"
    if layout is not None and layout.way == "tensor":
        return "team's own part of the batch" if layout.data > 1 else None
    return "rank's own part of the batch" if ranks > 1 else None


def _compare(job: VerifyJob, comm: Communicator, parallel: Parallel, sequential: _Runs | None) -> Verdict:
    """Train both ways; the verdict is equal on all ranks (collective)."""
    config, peers = job.config, parallel.portion.peers
    clip = Clip(config.clip_norm, config.clip_value)
    distances = deviations(job.dtype)
    for number, passes in islice(_rounds(parallel.batches), config.steps):
        reseed(config.seed, (number + 1) * peers.size + peers.rank)
        if sequential is not None:
            sequential.backward()
        state = parallel.step(number, passes)
        if sequential is not None:
            sequential.step(clip, state, distances, number + 1)
    parallel.worker.finish()
    verdict = sequential and Verdict(distances, sequential.reasons, sequential.causes)
    return cast("Verdict", comm.broadcast_object(verdict))


def trained_names(module: nn.Module) -> list[str]:
    """Return the names of the trainable parameters."""
    return [name for name, parameter in module.named_parameters() if parameter.requires_grad]


def end_to_end(state: Mapping[str, Tensor], names: Iterable[str]) -> Tensor:
    """Return the tensors of a state end to end, in float64, on the CPU."""
    return torch.cat([state[name].reshape(-1).double() for name in names]).cpu()


def _note(distances: dict[str, Distance], step: int, one: StepResult, other: StepResult) -> None:
    distances["loss"].note(step, abs(one.loss - other.loss), abs(other.loss))
    for name in ("gradient", "weights"):
        mine, theirs = getattr(one, name), getattr(other, name)
        distances[name].note(step, (mine - theirs).norm().item(), theirs.norm().item())


def _turned(batch: Batch, rounded: bool) -> Batch:
    """Return a batch in reverse order; if `rounded`, the last digit of each input changes."""
    samples = None if batch.samples is None else batch.samples.flip(0)
    weights = None if batch.weights is None else batch.weights.flip(0)
    inputs = mapped(batch.inputs, methodcaller("flip", 0))
    inputs = mapped(inputs, _nudged) if rounded else inputs
    return Batch(inputs, batch.targets.flip(0), batch.share, samples, weights)


def _nudged(inputs: Tensor) -> Tensor:
    if not inputs.is_floating_point():
        return inputs
    towards = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0), dtype=inputs.dtype) - 0.5
    return inputs.nextafter(towards * torch.inf)


def _rounds(batches: Batches) -> Iterator[Round]:
    """Yield the rounds of all epochs, without end."""
    return chain.from_iterable(map(batches.epoch, count()))


def _print(job: VerifyJob, size: int, task: Task, way: str, verdict: Verdict) -> None:
    print(task.described())
    ranks = f"{size} rank{'' if size == 1 else 's'}"
    print(f"{job.config.steps} steps in {job.dtype}: {way} on {ranks} against plain torch on one\n")
    print(table(verdict), describe(verdict, job.dtype), sep="\n\n", flush=True)
