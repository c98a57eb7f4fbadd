"""Tables in their stored form, and the preparation of their columns as a model's inputs. Needs no torch.

stored        age │ city (number of a text) │ since (days since 1970)      `Table`, of all rows
fitted on     the training rows: means, deviations, medians, categories    `Preparation`
model's       numbers: age, days since, year │ flags: city is Oslo, ... │ category numbers   `TableInputs`
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tutti.records.json_lines import Record

NUMBER: Final = "number"
TEXT: Final = "text"
DATE: Final = "date"
EMPTY: Final = "empty"
"""The kinds of columns: numbers (or true and false); texts; dates and times; without any value."""

OTHER: Final = "\0"
"""Stands for all texts of a column that have no number of their own."""

MONTHS: Final = 12
WEEKDAYS: Final = 7


class TableInputs(NamedTuple):
    """The inputs of a prepared table: columns of numbers, then of flags, then of category numbers."""

    numbers: int  # the number of inputs with mean 0 and deviation 1
    flags: int  # the number of inputs that are 0 or 1
    # the number of categories of each column of category numbers; 0 means all others
    categories: tuple[int, ...] = ()

    @property
    def width(self) -> int:
        """The number of inputs."""
        return self.numbers + self.flags + len(self.categories)


@dataclass(frozen=True)
class TableColumn(Record):
    """A stored column of a table: one float for each row, NaN for a missing value."""

    name: str  # of the column
    kind: str  # `NUMBER`, `TEXT`, `DATE` or `EMPTY`
    texts: tuple[str, ...] = ()  # the texts stored as 0, 1, 2, ..., sorted
    form: str = ""  # of dates that are written as texts, for `strptime`; empty: another type, or ISO 8601


@dataclass(frozen=True)
class Table(Record):
    """The input columns of a table."""

    columns: tuple[TableColumn, ...]  # the stored ones, in order
    # columns that are not stored, each with the reason
    left_out: dict[str, str] = field(default_factory=dict)
    # the user has named the columns, so that none is left out because it looks like a key
    chosen: bool = False


@dataclass(frozen=True)
class PreparedColumn(Record):
    """The preparation of a column."""

    name: str  # of the column
    kind: str  # as in `TableColumn`
    fill: float = 0.0  # the replacement of a missing number or date
    # of the numbers; of dates three: days since 1970, year, hour (two if there are no hours)
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()  # their deviations; 1 where they never vary
    gaps: bool = False  # training rows lack values, so that there is a flag or a category for it
    categories: tuple[str, ...] = ()  # the texts in the order of their inputs
    others: bool = False  # all other texts have a flag, too; else all flags are 0 for them
    # a text is a category number, not flags: 0 for others, then `categories`, then gaps
    embedded: bool = False
    form: str = ""  # of dates, as in `TableColumn`

    @property
    def inputs(self) -> TableInputs:
        """Its inputs."""
        if self.embedded:
            return TableInputs(0, 0, (1 + len(self.categories) + self.gaps,))
        flags = len(self.categories) + self.others + self.gaps
        flags += MONTHS + WEEKDAYS if self.kind == DATE else 0
        return TableInputs(len(self.mean), flags)


@dataclass(frozen=True)
class TargetUnits(Record):
    """Mean and standard deviation of the amounts that a model was trained on, for each number of a target."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True)
class Preparation(Record):
    """The preparation of a table's columns as a model's inputs, fitted on training rows."""

    columns: tuple[PreparedColumn, ...]  # in the order of the table, without `left_out`
    left_out: dict[str, str] = field(default_factory=dict)  # the other columns, each with the reason
    by_mean: bool = False  # `fill` is the mean of the column, not its median
    # of targets that are amounts, if the network computes in deviations from their mean
    units: TargetUnits | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the columns that other data need."""
        return tuple(column.name for column in self.columns)

    @property
    def inputs(self) -> TableInputs:
        """The model's inputs."""
        each = [column.inputs for column in self.columns]
        return TableInputs(
            sum(one.numbers for one in each),
            sum(one.flags for one in each),
            tuple(count for one in each for count in one.categories),
        )


def table_of(preparations: Iterable[Preparation]) -> Table:
    """Return the table that trained models take; its texts are those that any of them knows, then `OTHER`."""
    columns: dict[str, TableColumn] = {}
    for column in (column for preparation in preparations for column in preparation.columns):
        known = columns[column.name].texts[:-1] if column.name in columns else ()
        texts = dict.fromkeys((*known, *column.categories))
        of_text = (*texts, OTHER) if column.kind == TEXT else ()
        columns[column.name] = TableColumn(column.name, column.kind, of_text, column.form)
    return Table(tuple(columns.values()))
