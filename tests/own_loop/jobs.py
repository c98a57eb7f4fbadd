"""The lines in which a program with plain torch and the same program with tutti differ.

A loop under test is a function of a `Job`. It makes its models, optimizers and loaders, hands them to
`job.distribute` and `job.shard`, and returns what it ended with; nothing else in it may know which job it is.
A loss that is divided by something else than its samples asks `job.total` what that is in the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti import errors
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.stepper import OwnLoop

Outcome: TypeAlias = Any
"""Tensors, numbers and text, in dicts and lists."""


class Job(Protocol):
    """What they are called on."""

    @property
    def rank(self) -> int: ...

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, reduction: str | None = None
    ) -> tuple[nn.Module, Optimizer]: ...

    def shard(self, batches: Iterable[Any]) -> Iterable[Any]: ...

    def total(self, value: Tensor) -> Tensor: ...


Loop: TypeAlias = Callable[[Job], Outcome]


class _Watched:
    """Remembers what weights the models came with."""

    def __init__(self) -> None:
        self._before: list[tuple[nn.Module, list[Tensor]]] = []

    def watch(self, model: nn.Module) -> None:
        self._before.append((model, [p.detach().clone() for p in model.parameters()]))

    @property
    def moved(self) -> bool:
        """Whether an update has been made to any of the models."""
        return any(
            not torch.equal(now, then)
            for model, weights in self._before
            for now, then in zip(model.parameters(), weights, strict=True)
        )


class Plain(_Watched):
    """Plain torch: the lines are not there."""

    rank = 0

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, reduction: str | None = None
    ) -> tuple[nn.Module, Optimizer]:
        self.watch(model)
        return model, optimizer

    def shard(self, batches: Iterable[Any]) -> Iterable[Any]:
        return batches

    def total(self, value: Tensor) -> Tensor:
        return value


class Distributed(_Watched):
    """The lines, on one of the ranks of a communicator."""

    def __init__(self, comm: Communicator) -> None:
        super().__init__()
        distribute._loop = OwnLoop(comm)
        self.rank = comm.rank

    def distribute(
        self, model: nn.Module, optimizer: Optimizer, reduction: str | None = None
    ) -> tuple[nn.Module, Optimizer]:
        self.watch(model)
        return distribute.distribute(model, optimizer, reduction)

    def shard(self, batches: Iterable[Any]) -> Iterable[Any]:
        return distribute.shard(batches)

    def total(self, value: Tensor) -> Tensor:
        return distribute.total(value)


@dataclass(frozen=True)
class Refused:
    """An error of tutti's that came before the first update.

    Attributes:
        kind: the error's class.
        sentence: its message.
    """

    kind: str
    sentence: str


def run_plain(loop: Loop) -> Outcome:
    """What `loop` ends with in plain torch; it must have moved the weights."""
    job = Plain()
    outcome = _plain(loop(job))
    assert job.moved
    return outcome


def run_rank(comm: Communicator, loop: Loop) -> Outcome:
    """What `loop` ends with on this rank, or how it was refused.

    Raises:
        Exception: whatever `loop` raised, if that is no error of tutti's before the first update.
    """
    job = Distributed(comm)
    try:
        return _plain(loop(job))
    except errors.TuttiError as error:
        if job.moved or isinstance(error, errors.PeerLost):
            raise
        return Refused(type(error).__name__, str(error))
    finally:
        distribute._loop = None


def _plain(value: Outcome) -> Outcome:
    """A copy in memory of its own."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


def differences(found: Outcome, wanted: Outcome, where: str = "") -> list[str]:
    """Where two outcomes differ by more than rounding in float64, each with both values."""
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        alike = found.dtype == wanted.dtype and found.shape == wanted.shape
        close = alike and torch.allclose(found, wanted, rtol=1e-10, atol=1e-12, equal_nan=True)
        return [] if close else [f"{where}: seen {_short(found)}, wanted {_short(wanted)}"]
    if isinstance(wanted, dict) and isinstance(found, dict):
        missing = (
            [f"{where}: seen keys {list(found)}, wanted {list(wanted)}"]
            if found.keys() != wanted.keys()
            else []
        )
        both = [key for key in wanted if key in found]
        return missing + [
            line for key in both for line in differences(found[key], wanted[key], f"{where}.{key}")
        ]
    if isinstance(wanted, list) and isinstance(found, list):
        if len(wanted) != len(found):
            return [f"{where}: seen {len(found)} items, wanted {len(wanted)}"]
        pairs = enumerate(zip(found, wanted, strict=True))
        return [line for number, (one, two) in pairs for line in differences(one, two, f"{where}[{number}]")]
    if isinstance(wanted, float) and isinstance(found, float):
        return differences(
            torch.tensor(found, dtype=torch.float64), torch.tensor(wanted, dtype=torch.float64), where
        )
    return (
        []
        if type(wanted) is type(found) and wanted == found
        else [f"{where}: seen {found!r}, wanted {wanted!r}"]
    )


def _short(tensor: Tensor) -> str:
    values = tensor.flatten()[:4].tolist()
    return (
        f"{tensor.dtype} {tuple(tensor.shape)} {values}{' ...' if tensor.numel() > 4 else ''}".removeprefix(
            "torch."
        )
    )
