"""Tables on a terminal of any width, which leave columns out and name them; plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tutti.records.untrusted import printable

NAME_COLUMNS: Final = 28
"""Columns of text, a third of the terminal at most, below which names are not folded for numbers."""

FOLDED_COLUMNS: Final = 12
"""Columns of text below which names are not folded for the last numbers."""

TEXT_COLUMNS: Final = 24
"""Columns of text that texts beside the names are folded to."""

_NONE: Final = "-"
"""The cell without a text, so that each row has as many words as the others."""

_GAP: Final = 2
"""Columns of text between two columns of a table."""

_BAR_COLUMNS: Final = 60


def progress_bar(total: int, completed: int) -> RenderableType:
    """A bar on a line of its own: rich's does not end its line."""
    return Group(ProgressBar(total=total, completed=completed, width=_BAR_COLUMNS), Text())


@dataclass(frozen=True)
class _Column:
    """A column: its head, its cells, and the fewest columns of text that it can do with."""

    head: str
    cells: Sequence[str]
    least: int


class FittingTable:
    """A table of texts, printed by a console of rich.

    On a terminal names and other texts are folded where they are long, and columns that have no room are left
    out and named below. Elsewhere every row is one line of plain text with all columns.

    Args:
        heads: of the columns; the first one holds the names of the rows.
        keep: heads of columns that are always shown, besides the first one.
        first_to_go: heads of those that are left out before others, in this order; of the others the last
            one goes first.
        left: heads of columns whose cells begin at the left, besides the first one.
        title: words above it.
    """

    def __init__(
        self,
        heads: Sequence[str],
        *,
        keep: Collection[str] = (),
        first_to_go: Sequence[str] = (),
        left: Collection[str] = (),
        title: str = "",
    ) -> None:
        self._heads, self._title = [printable(head) for head in heads], title
        self._keep, self._first_to_go, self._left = {self._heads[0], *keep}, first_to_go, left
        self._rows: list[tuple[list[str], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row of as many cells as there are heads."""
        self._rows.append(([printable(cell) for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what a console prints."""
        if self._title:
            yield Text(self._title, style="bold", overflow="fold")
        if not console.is_terminal:
            yield from self._lines()
            return
        columns = self._columns(options.max_width)
        shown = self._fitting(columns, options.max_width)
        yield self._table(shown, options.max_width)
        names = [column.head for column in columns if column not in shown]
        if names:
            said = f"There is no room here for: {'; '.join(names)}. A wider terminal, or a pipe, shows all."
            yield Text(said)

    def _lines(self) -> Iterator[Text]:
        rows = [self._heads, *([cell or _NONE for cell in cells] for cells, _ in self._rows)]
        widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
        begins = [self._heads[0], *self._left]
        for row in rows:
            rooms = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
            cells = [
                cell + room if head in begins else room + cell
                for head, cell, room in zip(self._heads, row, rooms, strict=True)
            ]
            yield Text((" " * _GAP).join(cells).rstrip(), no_wrap=True, overflow="ignore")

    def _columns(self, width: int) -> list[_Column]:
        first, *others = self._heads
        table = [*zip(*(cells for cells, _ in self._rows), strict=True)] or [()] * len(self._heads)
        names = table[0]
        longest = max(map(cell_len, (first, *names)))
        found = [_Column(first, names, min(longest, NAME_COLUMNS, width // 3))]
        for head, given in zip(others, table[1:], strict=True):
            values = [value or _NONE for value in given]
            longest = max(map(cell_len, (*values, *head.split())))
            found.append(_Column(head, values, min(longest, TEXT_COLUMNS) if head in self._left else longest))
        return found

    def _fitting(self, columns: Sequence[_Column], width: int) -> list[_Column]:
        """Return the columns that there is room for."""
        found = list(columns)
        of_all = {*self._first_to_go, *self._keep}
        others = [column.head for column in reversed(columns) if column.head not in of_all]
        for head in (*self._first_to_go, *others):
            foldable = max(0, columns[0].least - FOLDED_COLUMNS) if head in others else 0
            if _room_beside(found, width) + foldable >= 0:
                break
            found = [column for column in found if column.head != head]
        return found

    def _table(self, columns: Sequence[_Column], width: int) -> Table:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
        names, *numbers = columns
        room = max(1, names.least + _room_beside(columns, width))
        longest = max(map(cell_len, (names.head, *names.cells)))
        table.add_column(names.head, width=min(longest, room), overflow="fold")
        for column in numbers:
            left = column.head in self._left
            table.add_column(
                column.head, justify="left" if left else "right", width=column.least, overflow="fold"
            )
        for (_, style), *texts in zip(self._rows, *(column.cells for column in columns), strict=True):
            table.add_row(*(Text(text) for text in texts), style=style)
        return table


def _room_beside(columns: Sequence[_Column], width: int) -> int:
    """Return the columns of text that are left over in a line."""
    return width - 1 - sum(column.least + _GAP for column in columns)
