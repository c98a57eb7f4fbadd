"""Tables of texts for terminals and pipes, by rich."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tutti.records.texts import printable
from tutti.terminal import UNBOUNDED

_BAR_COLUMNS: Final = 60


def progress_bar(total: int, completed: int) -> RenderableType:
    """Return a progress bar that ends its line, as rich's does not."""
    return Group(ProgressBar(total=total, completed=completed, width=_BAR_COLUMNS), Text())


class TextTable:
    """A table of texts.

    In a pipe every row is one line with all columns. On a terminal texts are folded, and columns without
    room are left out and named below.
    """

    def __init__(
        self,
        heads: Sequence[str],
        *,
        left: Collection[str] = (),  # heads of left-aligned columns, besides the first one
        drop: Sequence[str] = (),  # heads of columns that may be left out, the first one first
        title: str = "",
    ) -> None:
        self._heads, self._left, self._drop, self._title = heads, {heads[0], *left}, drop, title
        self._rows: list[tuple[list[str], str]] = []

    def add_row(self, *cells: str, style: str = "") -> None:
        """Add a row with one cell per head; an empty cell becomes a dash."""
        self._rows.append(([printable(cell) or "-" for cell in cells], style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what a console prints."""
        if self._title:
            yield Text(self._title, style="bold", overflow="fold")
        shown, drop = list(self._heads), list(self._drop)
        unlimited = options.update(max_width=UNBOUNDED)
        while console.is_terminal and drop:
            table = self._table(shown, console.is_terminal)
            if Measurement.get(console, unlimited, table).minimum <= options.max_width:
                break
            shown.remove(drop.pop(0))
        yield self._table(shown, console.is_terminal)
        left_out = [head for head in self._heads if head not in shown]
        if left_out:
            yield Text(
                f"There is no room here for: {'; '.join(left_out)}. A wider terminal, or a pipe, shows all."
            )

    def _table(self, shown: Sequence[str], folded: bool) -> Table:
        """Return the table with these columns; numbers are never folded, their heads are."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="")
        numbers = [number for number, head in enumerate(self._heads) if head in shown]
        for number in numbers:
            head = printable(self._heads[number])
            text = self._heads[number] in self._left
            words = [*(cells[number] for cells, _ in self._rows), *head.split()]
            width = max(map(cell_len, words)) if folded and not text else None
            table.add_column(head, justify="left" if text else "right", overflow="fold", width=width)
        for cells, style in self._rows:
            table.add_row(*(Text(cells[number]) for number in numbers), style=style)
        return table
