"""A prepared table: its columns as they are stored become the inputs of a model, batch by batch.

stored      age     city    since            floats; texts by their numbers, NaN where there is no value
expanded    age     city    since  year  hour  month  weekday
model's     age  since  year │ age is missing │ city is Oslo  city is Rome  month is 1 ... │ zip code 17
            numbers            flags                                                         categories
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tutti.data.parts import Scale
from tutti.data.rows import Indices
from tutti.errors import BadData
from tutti.records.preparation import (
    DATE,
    EMPTY,
    FLAG,
    MONTHS,
    NUMBER,
    WEEKDAYS,
    Preparation,
    PreparedColumn,
    Table,
    TableColumn,
)

GAP: Final = -1
"""Stands for a missing text or flag."""

_NONE: Final = Preparation(())

_EMPTY: Final = Table(())

_CYCLE: Final = 146_097
"""Days of 400 years, after which the calendar repeats, weekdays included."""

_YEARS: Final = 400


@dataclass(frozen=True)
class PreparedTable(Scale):
    """The map from the rows of a table to a model's inputs. Made by `prepared`.

    Attributes:
        fitted: how each column is prepared.
        table: the columns of the rows; its texts may have other numbers than those of training.
    """

    fitted: Preparation = _NONE
    table: Table = _EMPTY

    @property
    @override
    def preparation(self) -> Preparation:
        return self.fitted

    @override
    def shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        return (self.fitted.inputs.width,)

    @cached_property
    def _plan(self) -> _Plan:
        return _plan(self.fitted, self.table)

    @cached_property
    def _of_dtype(self) -> dict[torch.dtype, tuple[Tensor, Tensor, Tensor]]:
        return {}

    def _floats(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        """Return the numbers of the plan in the type of the rows, which are converted once."""
        if dtype not in self._of_dtype:
            plan = self._plan
            self._of_dtype[dtype] = plan.fill.to(dtype), plan.mean.to(dtype), plan.std.to(dtype)
        return self._of_dtype[dtype]

    @override
    def apply(self, stored: Tensor) -> Tensor:
        """Return the model's inputs.

        Args:
            stored: of shape (samples, stored columns).

        Returns:
            Of shape (samples, inputs), as `tutti.records.preparation.TableInputs` counts them.
        """
        plan, (fill, mean, std) = self._plan, self._floats(stored.dtype)
        missing = stored.isnan()
        filled = torch.where(missing, fill, stored)
        if len(plan.dates):
            filled = torch.cat([filled, *date_parts(filled.index_select(1, plan.dates))], 1)
        made = stored.new_zeros(len(stored), plan.width)
        if len(plan.codes):
            codes = filled.index_select(1, plan.codes).long().add_(plan.starts)
            found = plan.lookup.index_select(0, codes.view(-1)).view(codes.shape)
            made.scatter_(1, found[:, : plan.one_hot], 1)
            made[:, plan.first_category : plan.inputs] = found[:, plan.one_hot :]
        # These overwrite what stands for texts without a flag.
        numbers = made[:, : len(plan.numbers)]
        torch.sub(filled.index_select(1, plan.numbers), mean, out=numbers).div_(std)
        made[:, len(plan.numbers) : plan.first_flag] = missing.index_select(1, plan.gaps)
        return made if plan.width == plan.inputs else made[:, : plan.inputs].contiguous()

    @override
    def on(self, device: str) -> PreparedTable:
        moved = PreparedTable(fitted=self.fitted, table=self.table)
        plan = self._plan._asdict()
        tensors = {name: one.to(device) for name, one in plan.items() if isinstance(one, Tensor)}
        vars(moved)["_plan"] = self._plan._replace(**tensors)
        return moved


def prepared(preparation: Preparation, table: Table) -> PreparedTable:
    """Return the map from the rows of a table, which may be another than that of training.

    Raises:
        BadData: the table lacks a column, or has another kind of values in it.
    """
    there = {column.name: column for column in table.columns}
    for column in preparation.columns:
        kind = there[column.name].kind if column.name in there else "column"
        if kind == "column":
            raise BadData(f"there is no column '{column.name}', on which the model was trained; add it")
        if kind not in (column.kind, EMPTY) and (kind, column.kind) != (FLAG, NUMBER):
            raise BadData(
                f"the column '{column.name}' holds values of the kind {kind}, and the model was trained on "
                f"those of the kind {column.kind}; give these"
            )
    return PreparedTable(fitted=preparation, table=table)


class _Plan(NamedTuple):
    """Where the inputs come from; numbers of columns count the stored ones, then the `date_parts`."""

    fill: Tensor  # what stands for NaN in each stored column
    dates: Tensor  # stored columns of dates
    numbers: Tensor  # columns of numbers
    mean: Tensor  # of each
    std: Tensor
    gaps: Tensor  # stored columns with a flag for missing values
    codes: Tensor  # columns of codes: those that become flags, then those that become category numbers
    starts: Tensor  # where code 0 of each is in the lookup
    lookup: Tensor  # the inputs that are 1 for the codes of all columns, or their category numbers
    one_hot: int  # how many columns of codes become flags
    first_flag: int  # of codes, among the inputs
    first_category: int
    inputs: int
    width: int  # the inputs, or one more: codes without a flag write to a column that is not theirs


def _plan(preparation: Preparation, table: Table) -> _Plan:
    at = {column.name: number for number, column in enumerate(table.columns)}
    of = [(at[column.name], column) for column in preparation.columns]
    amounts = [(number, column) for number, column in of if column.mean]
    dates = [number for number, column in of if column.kind == DATE]
    fill = np.full(len(at), float(GAP))
    numbers: list[int] = []
    for number, column in amounts:
        fill[number] = column.fill
        # Behind the stored columns come the years of all dates, then their hours, months and weekdays.
        parts = [len(at) + part * len(dates) + dates.index(number) for part in range(len(column.mean) - 1)]
        numbers += [number, *parts]
    lookups = _Lookups()
    for number, column in of:
        if column.kind == DATE:
            place = len(at) + dates.index(number)
            lookups.add_flags(place + 2 * len(dates), np.arange(-1, MONTHS), MONTHS)
            lookups.add_flags(place + 3 * len(dates), np.arange(-1, WEEKDAYS), WEEKDAYS)
        elif column.kind != NUMBER:
            found = _places(column, table.columns[number])
            if column.embedded:
                lookups.categories.append((number, found))
            else:
                lookups.add_flags(number, found, column.inputs.flags)
    both = [*lookups.one_hot, *lookups.categories]
    starts = [0, *accumulate(len(found) for _, found in both)][:-1]
    inputs = preparation.inputs
    first_category = inputs.numbers + inputs.flags
    first_flag = first_category - lookups.flags
    nothing = 0 if numbers else first_category
    flags = [np.where(found < 0, nothing, found + first_flag) for _, found in lookups.one_hot]
    lookup = np.concatenate([*flags, *(found for _, found in lookups.categories), np.empty(0)])
    return _Plan(
        torch.from_numpy(fill),
        torch.tensor(dates, dtype=torch.int64),
        torch.tensor(numbers, dtype=torch.int64),
        torch.tensor([mean for _, column in amounts for mean in column.mean], dtype=torch.float64),
        torch.tensor([std for _, column in amounts for std in column.std], dtype=torch.float64),
        torch.tensor([number for number, column in amounts if column.gaps], dtype=torch.int64),
        torch.tensor([number for number, _ in both], dtype=torch.int64),
        torch.tensor(starts, dtype=torch.int64) - GAP,
        torch.from_numpy(lookup.astype(np.int64)),
        len(lookups.one_hot),
        first_flag,
        first_category,
        inputs.width,
        max(inputs.width, nothing + 1),
    )


class _Lookups:
    """The columns of codes, each with the place of every code, the one for `GAP` first; -1: it has none."""

    def __init__(self) -> None:
        self.one_hot: list[tuple[int, Indices]] = []
        self.categories: list[tuple[int, Indices]] = []
        self.flags = 0

    def add_flags(self, number: int, places: Indices, flags: int) -> None:
        """Add a column whose codes become flags; the places count its own."""
        self.one_hot.append((number, np.where(places < 0, places, places + self.flags)))
        self.flags += flags


def _places(column: PreparedColumn, stored: TableColumn) -> Indices:
    """Return the flag, or the category number, of a gap and of each code of a column of texts or flags."""
    if column.kind == FLAG:
        return np.array([1 if column.gaps else -1, -1, 0])
    count, first = len(column.categories), int(column.embedded)
    numbers = {text: number for number, text in enumerate(column.categories, first)}
    other = count if column.others else -1
    other = 0 if column.embedded else other
    gap = first + count + column.others if column.gaps else other
    return np.array([gap, *(numbers.get(text, other) for text in stored.texts)])


def date_parts(days: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the years, hours, months from 0, and weekdays from 0 for Monday, of days since 1970.

    All are of shape (samples, dates).
    """
    whole = days.floor()
    of_cycle = whole.remainder(_CYCLE)
    found = _calendar(days.device, days.dtype).index_select(0, of_cycle.long().view(-1))
    year, month, weekday = found.view(*days.shape, 3).unbind(2)
    cycles = (whole - of_cycle).div_(_CYCLE)
    return year + cycles.mul_(_YEARS), (days - whole).mul_(24), month, weekday


@cache
def _calendar(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return year, month and weekday of each day from 1970 on, over a whole cycle."""
    days = np.arange(_CYCLE).astype("datetime64[D]")
    months = days.astype("datetime64[M]").astype(np.int64)
    found = np.stack([1970 + months // 12, months % 12, (np.arange(_CYCLE) + 3) % 7], axis=1)
    return torch.from_numpy(found).to(device, dtype)
