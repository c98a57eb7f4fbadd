"""Tables: which columns are inputs and which are targets."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from tutti.errors import BadData, BadOption, UnknownName

TARGETS: Final = ("y", "targets", "labels", "target")
"""Words for targets in keys."""

TARGET_WORDS: Final = frozenset({*TARGETS, "label", "class", "cls"})
"""Names of a column, or of an entry of an item, that is to be predicted."""

ABSENT: Final = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts that stand for a missing value, in lower case."""

_INDEX: Final = re.compile(r"__index_level_\d+__|Unnamed: \d+")
"""The names of an index that had none, in Parquet files and in CSV files that were read and written again."""

_SHOWN = 20

PREPARE: Final = "prepare"
CHOICES: Final = {PREPARE: ("auto", "off"), "text": ("auto", "drop")}
"""The options of how columns are read, each with its values, the default first."""

TABLE_OPTIONS: Final = ("target", "columns", "group", "weight", *CHOICES)
"""The column to be predicted, or several; those to predict it from, all others by default; the columns of the
group and the weight of a sample, no inputs; whether columns are prepared; and what becomes of texts."""

LIKE: Final = "like"
"""The option with the columns of another table, as a tuple of `TableColumn`, that these data are to have; no
user gives it."""


OF_ALL: Final = ("classes", "missing")
"""The options that go with every kind of data."""


@dataclass(frozen=True)
class ChosenColumns:
    """The names of the used columns of a table; without groups or weights these are None."""

    inputs: tuple[str, ...]
    targets: tuple[str, ...]
    group: str | None = None
    weight: str | None = None


def check_options(options: Iterable[str], known: Collection[str], what: str) -> None:
    """Refuse options that some data do not have."""
    for name in options:
        if name not in {*known, *OF_ALL, LIKE}:
            raise UnknownName("option", name, {*known, *OF_ALL}, of=what)


def choose(
    names: Sequence[str], options: Mapping[str, Any], what: str, labelled: bool = True
) -> ChosenColumns:
    """Choose the columns of a table `what`, by name or by position.

    Without "target" a column with the name of a target is used; without "columns" the inputs are all others
    but the index of a frame, the "group" and the "weight" of samples. Without `labelled` no target is needed
    or read.
    """
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise BadData(f"{what} has two columns called '{twice}'; give them different names")
    target, columns, like = (options.get(name) for name in ("target", "columns", LIKE))
    group = _no_input(names, options.get("group"), "--group-by", what, labelled)
    weight = _no_input(names, options.get("weight"), "--data.weight", what, labelled)
    if target is None:
        targets = tuple(name for name in names if name.strip().lower() in TARGET_WORDS)
        if len(targets) != 1 and labelled:
            found = "no column" if not targets else "several columns"
            raise BadData(
                f"{what} has {found} with a name such as 'target' or 'label': say which column is to be "
                f"predicted by --data.target NAME; its columns are {listed(names)}"
            )
    else:
        targets = _named(names, target, "--data.target", what)
    if columns is None and like is not None:
        inputs = _named(names, [column.name for column in like], "needed", what)
    elif columns is None:
        others = (*targets, group, weight)
        inputs = tuple(name for name in names if name not in others and not _counts_rows(name))
    else:
        inputs = _named(names, columns, "--data.columns", what)
    if not inputs:
        raise BadData(f"{what} has no column but the target; add columns that it is to be predicted from")
    if group in inputs or weight in inputs:
        raise BadOption(
            f"the column '{group if group in inputs else weight}' is the group or the weight of each sample, "
            "and no input; leave it out of --data.columns"
        )
    if not labelled:
        return ChosenColumns(inputs, ())
    both = sorted({*inputs} & {*targets})
    if both:
        raise BadOption(f"the column '{both[0]}' is input and target at once; leave it out of one")
    return ChosenColumns(inputs, targets, group, weight)


def _no_input(names: Sequence[str], given: object, option: str, what: str, labelled: bool) -> str | None:
    """Return the name of a column that is no input; data for prediction may lack it."""
    if given is None or (not labelled and str(given) not in names):
        return None
    (found,) = _named(names, given if isinstance(given, int) else str(given), option, what)
    return found


def _counts_rows(name: str) -> bool:
    """Return whether a column is the index of a frame, by the names that pandas gives it in files."""
    return name.strip() == "" or _INDEX.fullmatch(name) is not None


def _named(names: Sequence[str], given: object, option: str, what: str) -> tuple[str, ...]:
    """Return the names of columns given by name or by position."""
    found = []
    for one in names_of(given, names):
        if str(one) in names:
            found.append(str(one))
        elif isinstance(one, int) and not isinstance(one, bool) and -len(names) <= one < len(names):
            found.append(names[one])
        else:
            near = difflib.get_close_matches(str(one), names, n=1, cutoff=0.5)
            meant = f"did you mean '{near[0]}'? " if near else ""
            raise BadData(f"{what} has no column '{one}' ({option}); {meant}its columns are {listed(names)}")
    if not found or len({*found}) < len(found):
        raise BadOption(f"{option} names {'a column twice' if found else 'no column'}; give each once")
    return tuple(found)


def names_of(given: object, known: Collection[str]) -> list[object]:
    """Return the names that an option holds: a list, or a text with commas that is not itself a name."""
    if isinstance(given, str) and given not in known:
        return [one.strip() for one in given.split(",") if one.strip()]
    return [*given] if isinstance(given, list | tuple) else [given]


def listed(names: Sequence[str]) -> str:
    """List the first of some names."""
    more = f", ... ({len(names):,} in all)" if len(names) > _SHOWN else ""
    return ", ".join(name[:40] for name in names[:_SHOWN]) + more
