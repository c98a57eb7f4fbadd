"""The subsets of the data that trials are trained on with --successive data, small ones first.

    subset 0   a ninth of the training samples   every trial
    subset 1   a third, those of 0 among them    the trials that are among the best third so far
    subset 2   all                               of these again

It is successive halving with samples in place of epochs (subsets of a data set, in Li et al., Hyperband, JMLR
18, 2018), and asynchronous (Li et al., A system for massively parallel hyperparameter tuning, 2020). A run on
a larger subset begins anew, so each is an ordinary run. All are compared on the same validation part, which
is that of an ordinary run. Runs on a rank: it imports torch.
"""

from __future__ import annotations

from typing import Any, Final

from numpy.typing import NDArray

from tutti.data.splits import split
from tutti.errors import BadOption
from tutti.records.splits import Split

LEAST: Final = 2
"""The samples that the smallest subset must have."""


def subsets_of(
    targets: NDArray[Any], validation: float, seed: int, classes: int | None, divisors: tuple[int, ...]
) -> tuple[Split, ...]:
    """Divide the samples: each subset has its share of each class, and the larger ones have the smaller ones.

    Args:
        targets: of all training samples.
        validation: the share of them that is held out, the same for all.
        seed: decides which.
        classes: how many there are; None: the targets are amounts.
        divisors: a subset has one in so many of the samples that are not held out.

    Raises:
        BadData: a part would be empty.
        BadOption: there are too few samples.
    """
    kept, held_out = split(targets, validation, seed, classes)
    if len(kept) < LEAST * max(divisors):
        raise BadOption(
            f"--successive data trains on one in {max(divisors)} samples first, and there are {len(kept):,}; "
            "leave it out"
        )
    parts = (kept if one == 1 else kept[split(targets[kept], 1 / one, seed, classes)[1]] for one in divisors)
    return tuple(Split(part, held_out) for part in parts)
