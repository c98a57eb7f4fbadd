"""The subsets of the data that trials are trained on with --successive data, small ones first.

    subset 0   a ninth of the training samples   every trial
    subset 1   a third, those of 0 among them    the trials that are among the best third so far
    subset 2   all                               of these again

With folds each has such subsets of its training part, and one that is held out whole.

It is successive halving with samples in place of epochs (subsets of a data set, in Li et al., Hyperband, JMLR
18, 2018), and asynchronous (Li et al., A system for massively parallel hyperparameter tuning, 2020). A run on
a larger subset begins anew, so each is an ordinary run. All are compared on the same held-out samples: the
validation part of an ordinary run, or those of the folds. Runs on a rank: it imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from numpy.typing import NDArray

from tutti.data.splits import split
from tutti.errors import BadOption
from tutti.records.splits import Split

LEAST: Final = 2
"""The samples that the smallest subset must have."""


def subsets_of(
    targets: NDArray[Any],
    wholes: Sequence[Split],
    seed: int,
    classes: int | None,
    divisors: tuple[int, ...],
) -> tuple[Split, ...]:
    """Divide training parts: a subset has its share of each class, and the larger ones have the smaller ones.

    Args:
        targets: of all samples.
        wholes: the training parts, with what is held out beside each.
        seed: decides which samples are in a subset.
        classes: how many there are; None: the targets are amounts.
        divisors: a subset has one in so many samples of its training part.

    Returns:
        The subsets of all parts by the first divisor, then those by the next one.

    Raises:
        BadData: a part would be empty.
        BadOption: there are too few samples.
    """
    least = min(len(one.train) for one in wholes)
    if least < LEAST * max(divisors):
        raise BadOption(
            f"--successive data trains on one in {max(divisors)} samples first, and there are {least:,}; "
            "leave it out"
        )

    def subset(whole: Split, divisor: int) -> Split:
        kept = whole.train
        if divisor == 1:
            return whole
        return Split(kept[split(targets[kept], 1 / divisor, seed, classes)[1]], whole.test)

    return tuple(subset(whole, divisor) for divisor in divisors for whole in wholes)
