"""Tables: which columns are inputs and which are targets, and values that are missing."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from tutti.data.arrays import float_dtype
from tutti.data.items import TARGET_WORDS
from tutti.data.rows import Array
from tutti.errors import BadData, BadOption

ABSENT: Final = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts that stand for a missing value, in lower case."""

_INDEX: Final = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""The names of an index that had none, in Parquet files and in CSV files that were read and written again."""

_SHOWN = 20


@dataclass(frozen=True)
class Choice:
    """The columns of a table that are used, by their positions; `group` is None without groups."""

    inputs: tuple[int, ...]
    targets: tuple[int, ...]
    group: int | None = None


@dataclass(frozen=True)
class TargetColumn:
    """A column of targets, or of groups.

    Attributes:
        name: of the column.
        values: numbers, or texts.
        absent: which of them are missing; what is in their place means nothing.
    """

    name: str
    values: Array
    absent: NDArray[np.bool_]


def choose(
    names: Sequence[str],
    target: object,
    columns: object,
    what: str,
    labelled: bool = True,
    group: object = None,
) -> Choice:
    """Choose the columns of a table `what`, by name or by position; None: the target's name says it.

    Inputs are all others, but for the index of a frame and the column `group` by which samples are grouped.
    Without `labelled` there may be no target; it is no input where the table has it, nor read.
    """
    if target is None:
        named = [at for at, name in enumerate(names) if name.strip().lower() in TARGET_WORDS]
        if len(named) != 1 and labelled:
            found = "no column" if not named else "several columns"
            raise BadData(
                f"{what} has {found} with a name such as 'target' or 'label': say which column is to be "
                f"predicted by --data.target NAME; its columns are {_listed(names)}"
            )
        targets = tuple(named)
    else:
        targets = _positions(names, target, "target", what)
    grouped = None
    if group is not None and (labelled or str(group) in names):  # what is to be predicted may lack it
        grouped = _position(names, str(group), "--group-by", what)
    if columns is None:
        left_out = {*targets, grouped}
        inputs = tuple(at for at in range(len(names)) if at not in left_out and not _counts_rows(names[at]))
    else:
        inputs = _positions(names, columns, "columns", what)
    if not inputs:
        raise BadData(f"{what} has no column but the target; add columns that it is to be predicted from")
    if grouped in inputs:
        raise BadOption(
            f"samples are grouped by the column '{group}', and it is an input, too, though no group is met "
            "again; leave it out of --data.columns"
        )
    if not labelled:
        return Choice(inputs, ())
    both = sorted({*inputs} & {*targets})
    if both:
        raise BadOption(f"the column '{names[both[0]]}' is input and target at once; leave it out of one")
    return Choice(inputs, targets, grouped)


def groups_of(column: TargetColumn, kept: NDArray[np.bool_], what: str) -> Array:
    """Return the groups of the rows of the table `what` that are kept; each needs one."""
    lacking = column.absent & kept
    if lacking.any():
        raise BadData(
            f"{what} has no value in row {int(lacking.argmax()) + 1:,} of the column '{column.name}', "
            "by which samples are grouped; give each sample a group"
        )
    if column.values.ndim > 1:
        raise BadData(
            f"{what} has lists in '{column.name}'; give each sample a number or a text as its group"
        )
    return column.values[kept]


def _counts_rows(name: str) -> bool:
    """Return whether a column is the index of a frame, by the names that pandas gives it in files."""
    return name.strip() == "" or _INDEX.fullmatch(name) is not None


def _positions(names: Sequence[str], given: object, option: str, what: str) -> tuple[int, ...]:
    wanted = given if isinstance(given, list | tuple) else [given]
    found = [_position(names, one, f"--data.{option}", what) for one in wanted]
    if not found or len({*found}) < len(found):
        raise BadOption(f"--data.{option} names {'a column twice' if found else 'no column'}; give each once")
    return tuple(found)


def _position(names: Sequence[str], given: object, option: str, what: str) -> int:
    name = str(given)
    matches = [at for at, one in enumerate(names) if one == name]
    if len(matches) > 1:
        raise BadData(f"{what} has {len(matches)} columns called '{name}'; give them different names")
    if matches:
        return matches[0]
    if isinstance(given, int) and not isinstance(given, bool) and -len(names) <= given < len(names):
        return given % len(names)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    meant = f"did you mean '{near[0]}'? " if near else ""
    raise BadData(f"{what} has no column '{name}' ({option}); {meant}its columns are {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(name[:40] for name in names[:_SHOWN]) + (
        f", ... ({len(names)} in all)" if len(names) > _SHOWN else ""
    )


def is_number(text: str) -> bool:
    """Return whether a text is a number, or stands for a missing one."""
    try:
        float(text)
    except ValueError:
        return text.strip().lower() in ABSENT
    return True


def targets_of(columns: Sequence[TargetColumn], missing: str, what: str) -> tuple[Array, NDArray[np.bool_]]:
    """Return the targets, one or several numbers for each row, and which rows are kept."""
    absent = np.logical_or.reduce([column.absent for column in columns])
    if absent.any() and missing != "drop":
        row = int(absent.argmax())
        name = next(column.name for column in columns if column.absent[row])
        raise BadData(
            f"{what} has no value in row {row + 1:,} of the target '{name}'; targets are missing in "
            f"{int(absent.sum()):,} rows: leave these out by --data.missing drop"
        )
    for column in columns:
        if len(columns) > 1 and column.values.dtype.kind not in "biuf":
            raise BadData(
                f"the target '{column.name}' of {what} holds texts, such as '{column.values[0]}'; several "
                "targets must be numbers"
            )
    kept = ~absent
    if len(columns) == 1:
        return columns[0].values[kept], kept
    whole = all(column.values.dtype.kind in "biu" for column in columns)
    stacked = np.stack([column.values[kept] for column in columns], axis=1)
    return stacked if whole else stacked.astype(float_dtype()), kept
