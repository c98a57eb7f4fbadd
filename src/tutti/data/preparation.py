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
from typing import Any, Final, NamedTuple

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
    MONTHS,
    NUMBER,
    WEEKDAYS,
    Preparation,
    PreparedColumn,
    Table,
    TableColumn,
)

GAP: Final = -1
"""Stands for a missing text."""

_CYCLE: Final = 146_097
"""Days of 400 years, after which the calendar repeats, weekdays included."""

_YEARS: Final = 400


@dataclass(frozen=True, kw_only=True)
class PreparedTable(Scale):
    """The map from the rows of a table to a model's inputs. Made by `prepared`."""

    fitted: Preparation  # the preparation of each column
    table: Table  # the columns of the rows; its texts may have other numbers than in training

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

    @override
    def apply(self, stored: Tensor) -> Tensor:
        """Return the model's inputs, of shape (samples, inputs), given (samples, stored columns).

        See `tutti.records.preparation.TableInputs` for their order.
        """
        plan, missing = self._plan, stored.isnan()
        filled = torch.where(missing, plan.fill.to(stored), stored)
        if len(plan.dates):
            filled = torch.cat([filled, *date_parts(filled.index_select(1, plan.dates))], 1)
        made = stored.new_zeros(stored.shape[0], plan.width)  # `len` would tie a program to it
        if len(plan.codes):
            codes = filled.index_select(1, plan.codes).long().add_(plan.starts)
            columns = plan.lookup.index_select(0, codes.view(-1)).view(codes.shape)
            made.scatter_(1, columns[:, : plan.one_hot], 1)
            made[:, plan.first_category : plan.inputs] = columns[:, plan.one_hot :]
        # These overwrite what stands for texts without a flag.
        numbers = made[:, : len(plan.numbers)]
        torch.sub(filled.index_select(1, plan.numbers), plan.mean.to(stored), out=numbers)
        numbers.div_(plan.std.to(stored))
        made[:, len(plan.numbers) : plan.first_flag] = missing.index_select(1, plan.gaps)
        return made if plan.width == plan.inputs else made[:, : plan.inputs].contiguous()

    @override
    def on(self, device: str) -> PreparedTable:
        moved = PreparedTable(fitted=self.fitted, table=self.table)
        plan: list[Any] = [one.to(device) if isinstance(one, Tensor) else one for one in self._plan]
        vars(moved)["_plan"] = _Plan(*plan)
        return moved


def prepared(preparation: Preparation, table: Table) -> PreparedTable:
    """Return the map from the rows of a table, which may differ from the training's."""
    there = {column.name: column.kind for column in table.columns}
    for column in preparation.columns:
        kind = there.get(column.name)
        if kind is None:
            raise BadData(f"there is no column '{column.name}', on which the model was trained; add it")
        if kind not in (column.kind, EMPTY):
            raise BadData(
                f"the column '{column.name}' holds values of the kind {kind}, and the model was trained on "
                f"those of the kind {column.kind}; give these"
            )
    return PreparedTable(fitted=preparation, table=table)


class _Plan(NamedTuple):
    """The sources of the inputs; numbers of columns count the stored ones, then the `date_parts`."""

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
    gaps = [number for number, column in amounts if column.gaps]
    fill, numbers = np.full(len(at), float(GAP)), list[int]()
    for number, column in amounts:
        fill[number] = column.fill
        # Behind the stored columns come the years of all dates, then their hours, months and weekdays.
        parts = [len(at) + part * len(dates) + dates.index(number) for part in range(len(column.mean) - 1)]
        numbers += [number, *parts]
    inputs = preparation.inputs
    first_flag, first_category = inputs.numbers + len(gaps), inputs.numbers + inputs.flags
    nothing, flag = 0 if numbers else first_category, first_flag
    flags: list[tuple[int, Indices]] = []
    categories: list[tuple[int, Indices]] = []
    for number, column in of:
        some = []
        if column.kind == DATE:
            place = len(at) + 2 * len(dates) + dates.index(number)
            some = [(place, np.arange(GAP, MONTHS)), (place + len(dates), np.arange(GAP, WEEKDAYS))]
        elif column.embedded:
            categories.append((number, _places(column, table.columns[number])))
        elif column.kind != NUMBER:
            some = [(number, _places(column, table.columns[number]))]
        for where, places in some:
            flags.append((where, np.where(places < 0, nothing, places + flag)))
            flag += column.inputs.flags if column.kind != DATE else len(places) - 1
    both = [*flags, *categories]
    return _Plan(
        torch.from_numpy(fill),
        _whole(dates),
        _whole(numbers),
        torch.tensor([mean for _, column in amounts for mean in column.mean], dtype=torch.float64),
        torch.tensor([std for _, column in amounts for std in column.std], dtype=torch.float64),
        _whole(gaps),
        _whole([number for number, _ in both]),
        _whole([0, *accumulate(len(found) for _, found in both)][:-1]) - GAP,
        torch.from_numpy(np.concatenate([*(found for _, found in both), np.empty(0)]).astype(np.int64)),
        len(flags),
        first_flag,
        first_category,
        inputs.width,
        max(inputs.width, nothing + 1),
    )


def _whole(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _places(column: PreparedColumn, stored: TableColumn) -> Indices:
    """Return the flag, or the category number, of a gap and of each code of a column; -1: none."""
    first, count = int(column.embedded), len(column.categories)
    numbers = {text: number for number, text in enumerate(column.categories, first)}
    other = 0 if column.embedded else count if column.others else -1
    gap = first + count + column.others if column.gaps else other
    return np.array([gap, *(numbers.get(text, other) for text in stored.texts)])


def date_parts(days: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the years, hours, months (from 0) and weekdays (from 0 for Monday) of days since 1970.

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
