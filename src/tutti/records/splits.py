"""Splits of a data set's samples into those to train on and those held out, in one file. Needs no torch.

    train-0, test-0      of split 0: the numbers of its samples, int64, ascending
    train-1, test-1      of split 1
    ...
    fingerprint          of the data that they are of
    seed                 by which a function of the user's has made these, if that is known

Nothing in it is pickled, and the same splits make the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from tutti.errors import BadData
from tutti.records.files import refusing, replace_file
from tutti.records.npz import npz_bytes, read_npz

Indices = NDArray[np.int64]

_FINGERPRINT = "fingerprint"
_SEED = "seed"


@dataclass(frozen=True)
class Split:
    """The samples of one split, by their numbers."""

    train: Indices  # to train on, ascending; one may be there several times, as in a bootstrap sample
    test: Indices  # held out, ascending, each once

    @classmethod
    def of(cls, train: ArrayLike, test: ArrayLike, samples: int, what: str) -> Split:
        """Check a split of a number of samples; `what` names it in messages, such as "split 3 of splits.npz".

        Raises:
            BadData: a part is empty or has an invalid number; a sample is held out twice, or trained on
                though it is held out.
        """
        trained = _numbers(train, samples, f"train part of {what}")
        held_out = _numbers(test, samples, f"test part of {what}")
        seen = np.zeros(samples, dtype=bool)
        seen[trained] = True
        both = held_out[seen[held_out]]
        if len(both):
            raise BadData(
                f"{what} has {len(both):,} samples in both parts, the first of them {both[0]:,}; take them "
                "out of one: what a model has been trained on cannot test it"
            )
        twice = held_out[1:][held_out[1:] == held_out[:-1]]
        if len(twice):
            raise BadData(f"the test part of {what} has sample {twice[0]:,} twice; give each once")
        return cls(trained, held_out)


def _numbers(part: ArrayLike, samples: int, what: str) -> Indices:
    """Return the numbers of a part, sorted."""
    found = np.asarray(part)
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu":
        raise BadData(
            f"the {what} has the shape {found.shape} and type {found.dtype}; give the numbers of its "
            "samples, as whole numbers in one dimension, at least one"
        )
    numbers = np.sort(found.astype(np.int64, copy=False))
    if numbers[0] < 0 or numbers[-1] >= samples:
        wrong = numbers[0] if numbers[0] < 0 else numbers[-1]
        raise BadData(
            f"the {what} has sample {wrong:,}, and the data have {samples:,} samples; "
            "split the data that you train on"
        )
    return numbers


def write_splits(path: Path, splits: Sequence[Split], fingerprint: str, seed: int | None = None) -> None:
    """Write the splits of one data set, numbered from 0.

    `fingerprint` is `tutti.data.DataSet.fingerprint`; `seed` is that of the random generators when the data
    were made, if it matters.
    """
    arrays: dict[str, NDArray[Any]] = {
        f"{name}-{number}": part
        for number, split in enumerate(splits)
        for name, part in (("train", split.train), ("test", split.test))
    }
    arrays[_FINGERPRINT] = np.array(fingerprint)
    if seed is not None:
        arrays[_SEED] = np.array(seed)
    with refusing(path):
        replace_file(path, npz_bytes(arrays))


def seed_of_data(path: Path) -> int | None:
    """Read the seed of the random generators when the data were made; None: unknown."""
    found = read_npz(path, [_SEED]).get(_SEED)
    return None if found is None else int(found)


def read_split(path: Path, number: int, samples: int, fingerprint: str) -> Split:
    """Read one split of a data set."""
    names = f"train-{number}", f"test-{number}"
    arrays = read_npz(path, [*names, _FINGERPRINT])
    if _FINGERPRINT not in arrays:
        raise BadData(f"{path} has no array '{_FINGERPRINT}', so it is no file of splits")
    if any(name not in arrays for name in names):
        raise BadData(f"{path} has no split {number}; they are numbered from 0")
    if str(arrays[_FINGERPRINT]) != fingerprint:
        raise BadData(
            f"the splits in {path} are of other data; give the data that they were made of, with the same "
            "options"
        )
    train, test = (arrays[name] for name in names)
    return Split.of(train, test, samples, f"split {number} of {path}")
