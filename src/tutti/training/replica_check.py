"""A look at what several ranks hold alike: whose values have changed, as by a bit of memory that has flipped?

    rank 0   checksums │ all-gather: equal                  │ step ...
    rank 1   checksums │ all-gather: equal                  │ step ...

    rank 0   checksums │ all-gather: not equal │ by name    │ 2 of 3 have this: rank 2 is wrong
    rank 2   checksums │ all-gather: not equal │ by name    │ 2 of 3 have that: rank 2 is wrong

A checksum is exact: each change of one bit changes it. Where no value is that of most ranks, as where two
have it, nobody knows who is right.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from tutti.checksum import FACTOR, MODULUS, checksum
from tutti.comm.base import Communicator
from tutti.errors import ReplicasDiffer
from tutti.processor import processor_name
from tutti.replica import Replica
from tutti.state import TensorPiece, name_of, whole_piece
from tutti.strategies.base import Replicated
from tutti.training.forward_writes import max_norm_of

Sums = Mapping[tuple[str, int], int]
"""Checksums by the name of a tensor and the number of the first element."""


@dataclass(frozen=True)
class Verdict:
    """What checksums say.

    Attributes:
        wrong: the ranks that hold another value than most.
        torn: those that hold one of which none is that of most.
        name: of the first tensor that differs.
        others: how many tensors differ besides.
        holders: how many ranks hold that tensor.
    """

    wrong: tuple[int, ...]
    torn: tuple[int, ...]
    name: str
    others: int
    holders: int


def judge(told: Sequence[Sequence[tuple[int, Sums]]]) -> Verdict | None:
    """Compare what ranks hold alike.

    Args:
        told: by each rank, for each of the same number of sets, its group and its checksums.

    Returns:
        Who differs; None: what all of a group have is equal.
    """
    found: defaultdict[tuple[int, int, tuple[str, int]], dict[int, int]] = defaultdict(dict)
    for rank, sets in enumerate(told):
        for number, (group, sums) in enumerate(sets):
            for key, value in sums.items():
                found[number, group, key][rank] = value
    wrong, torn, names = set[int](), set[int](), dict[str, int]()
    for (_, _, (name, _)), values in found.items():
        # The ranks that have changed a parameter by themselves do not tell it.
        (usual, count), *rest = Counter(values.values()).most_common()
        if not rest:
            continue
        names[name] = len(values)
        if 2 * count > len(values):
            wrong |= {rank for rank, value in values.items() if value != usual}
        else:
            torn |= values.keys()
    if not names:
        return None
    name, holders = next(iter(names.items()))
    return Verdict(tuple(sorted(wrong)), tuple(sorted(torn)), name, len(names) - 1, holders)


class FixedParameters:
    """The parameters that are not trained, of which each rank has its own copy.

    Of those that the program itself changes, such as an average of other weights, nothing is said: ranks
    without a sample may not have changed them.
    """

    def __init__(self, replica: Replica) -> None:
        moved = {id(parameter) for parameter in replica.names}
        moved |= {id(parameter) for _, parameter in replica.scattered}
        for layer in replica.module.modules():
            if max_norm_of(layer) is not None:
                moved.add(id(layer.weight))  # a look at a row changes it
        self._known = [
            (name_of("weights", name), parameter, _mark(parameter))
            for name, parameter in replica.module.named_parameters()
            if id(parameter) not in moved and type(parameter.data) is Tensor and parameter.is_cpu
        ]

    def replicated(self) -> Replicated:
        """Return those that are as they were."""
        same = [(name, one) for name, one, mark in self._known if _mark(one) == mark]
        return Replicated(0, [whole_piece(name, one) for name, one in same])


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    return parameter._version, parameter.data_ptr()


class ReplicaCheck:
    """The comparison of what the ranks of a run hold alike (collective over the ranks).

    Args:
        comm: the ranks.
        replica: the model.
        every: the steps from one to the next; 0: there is none at all.
    """

    def __init__(self, comm: Communicator, replica: Replica, every: int) -> None:
        self._comm, self._every = comm, every if comm.size > 1 else 0
        self._fixed = FixedParameters(replica)
        self._alike: bool | None = None
        self._equal_at: int | None = None

    def is_due(self, step: int) -> bool:
        """Tell whether the ranks compare after this step, which all of them make."""
        return self._every > 0 and step % self._every == 0

    def compare(self, held: Callable[[], Sequence[Replicated]], step: int) -> None:
        """Compare, unless there is nothing to be compared.

        Args:
            held: gives what this rank's worker holds as others do; as many sets on each rank.
            step: the number of steps that were made.

        Raises:
            ReplicasDiffer: on all ranks, if anything is not equal.
        """
        if not self._every or not self._processors_are_alike():
            return
        sets = [*held(), self._fixed.replicated()]
        sums = [(one.group, _checksums(one.pieces)) for one in sets]
        if not self._are_equal(sums):
            told = self._comm.all_gather_objects(sums)
            verdict = judge(cast("Sequence[Sequence[tuple[int, Sums]]]", told))
            if verdict is not None:
                raise _error(verdict, step, self._equal_at)
        self._equal_at = step

    def _are_equal(self, sums: Sequence[tuple[int, Sums]]) -> bool:
        """Tell whether all ranks of each group have the same sums, taken together."""
        table = torch.zeros(self._comm.size, 2 * len(sums), dtype=torch.int64)
        whole = [_signed(number) for group, one in sums for number in (group, _joined(one))]
        table[self._comm.rank] = torch.tensor(whole)
        self._comm.all_gather(table.view(-1))
        return all(
            len({tuple(row) for row in column.tolist()}) == len(set(column[:, 0].tolist()))
            for column in table.view(self._comm.size, -1, 2).unbind(1)
        )

    def _processors_are_alike(self) -> bool:
        """Tell whether all round alike: kernels for other processors may differ in the last bit."""
        if self._alike is None:
            here = processor_name(), torch.backends.cpu.get_cpu_capability()
            found = cast("list[tuple[str, str]]", self._comm.all_gather_objects(here))
            self._alike = len(set(found)) == 1
        return self._alike


def _checksums(pieces: Collection[TensorPiece]) -> Sums:
    return {(piece.name, piece.start): checksum(piece.values) for piece in pieces}


def _joined(sums: Sums) -> int:
    total = 0
    for key in sorted(sums):
        total = (total * FACTOR + sums[key]) % MODULUS
    return total


def _signed(number: int) -> int:
    return number - MODULUS if number >= MODULUS // 2 else number


def _error(verdict: Verdict, step: int, before: int | None) -> ReplicasDiffer:
    more = f" and {verdict.others} more" if verdict.others else ""
    when = f"after step {step:,}" + ("" if before is None else f" (they were equal after step {before:,})")
    flipped = "a bit of memory may have flipped"
    if verdict.torn:
        ranks = ", ".join(map(str, sorted({*verdict.torn, *verdict.wrong})))
        return ReplicasDiffer(
            (),
            f"ranks {ranks} hold different values of '{verdict.name}'{more} {when}: {flipped}, and nobody "
            "can tell on which of them, as no value is that of most",
        )
    are = ("are", "they are", "them") if verdict.others else ("is", "it is", "it")
    return ReplicasDiffer(
        verdict.wrong,
        f"'{verdict.name}'{more} {are[0]} not there what {are[1]} on most of the {verdict.holders} ranks "
        f"that hold {are[2]}, {when}: {flipped}",
    )
