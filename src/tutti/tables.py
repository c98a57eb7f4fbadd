"""Tables on a terminal of any width, which leave columns out and name them; plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tutti.records.untrusted import printable

NAME_COLUMNS: Final = 12
"""Columns of text that names are folded to, at the most."""

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
        first, *others = map(printable, cells)
        self._rows.append(([first, *(cell or _NONE for cell in others)], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what a console prints."""
        if self._title:
            yield Text(self._title, style="bold", overflow="fold")
        if not console.is_terminal:
            yield self._table(self._heads, None)
            return
        width, shown = options.max_width, list(self._heads)
        least = dict(zip(self._heads, self._least(width), strict=True))
        others = [head for head in reversed(self._heads) if head not in {*self._first_to_go, *self._keep}]
        for head in (*self._first_to_go, *others):
            # Names are folded before the last columns go.
            foldable = max(0, least[self._heads[0]] - NAME_COLUMNS) if head in others else 0
            if sum(least[one] + _GAP for one in shown) - foldable < width:
                break
            shown = [one for one in shown if one != head]
        yield self._table(shown, least)
        left_out = [head for head in self._heads if head not in shown]
        if left_out:
            yield Text(
                f"There is no room here for: {'; '.join(left_out)}. A wider terminal, or a pipe, shows all."
            )

    def _least(self, width: int) -> Iterator[int]:
        """Yield the fewest columns of text that each column can do with on a terminal of this width."""
        for number, head in enumerate(self._heads):
            cells = [*(cells[number] for cells, _ in self._rows), *([head] if number == 0 else head.split())]
            longest = max(map(cell_len, cells))
            if number == 0:
                longest = min(longest, width // 3)
            yield min(longest, TEXT_COLUMNS) if head in self._left else longest

    def _table(self, shown: Sequence[str], least: Mapping[str, int] | None) -> Table:
        """Return the table with these columns; without `least` as plain lines."""
        table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="")
        if least is not None:
            table = Table(box=box.SIMPLE_HEAD, padding=(0, _GAP - 1, 0, 0))
        columns = [number for number, head in enumerate(self._heads) if head in shown]
        for number in columns:
            head = self._heads[number]
            table.add_column(
                head,
                justify="left" if number == 0 or head in self._left else "right",
                width=None if least is None or number == 0 else least[head],
                overflow="fold",
                no_wrap=least is None,
            )
        for cells, style in self._rows:
            table.add_row(*(Text(cells[number]) for number in columns), style=style)
        return table
