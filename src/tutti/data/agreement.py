"""The hosts of a run must have read the same data; what one of them could not read, all of them are told."""

from __future__ import annotations

from typing import cast

from tutti.comm.base import Communicator
from tutti.data.parts import DataSet
from tutti.errors import BadData, UserError

Outline = tuple[DataSet, int]
"""A data set whose tensors have no memory, and a checksum of its targets."""


def agreed(outcome: Outline | UserError, comm: Communicator) -> DataSet:
    """Return the data set that all hosts found, or raise the first one's error on all ranks (collective)."""
    outcomes = cast("list[Outline | UserError]", comm.all_gather_objects(outcome))
    found: list[Outline] = []
    for rank, other in enumerate(outcomes):
        if isinstance(other, UserError):
            raise other
        found.append(other)
        # Their texts have all shapes and types; tensors without memory cannot be compared.
        if repr(other) != repr(found[0]):
            raise BadData(
                f"the hosts read different data: rank 0 has '{_summary(*found[0])}', "
                f"rank {rank} has '{_summary(*other)}'; copy the same files to every host"
            )
    return found[0][0]


def _summary(found: DataSet, checksum: int) -> str:
    parts = (found.train, found.validation, found.test)
    train, validation, test = (0 if part is None else len(part) for part in parts)
    return (
        f"{found.name}: {train:,} train, {validation:,} validation, {test:,} test, "
        f"inputs {found.shape}, checksum of the targets {checksum:08x}"
    )
