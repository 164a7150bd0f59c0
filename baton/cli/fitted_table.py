"""A table in the terminal that leaves columns out where there is too little room, so that it cuts no word and no figure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions
from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    name: str
    goes: int = 0
    """When it is left out: the highest number first; 0: never."""
    is_figure: bool = True
    """On the right, and in one line."""


@dataclass(frozen=True, slots=True)
class FittedTable:
    title: str
    columns: Sequence[Column]
    rows: list[list[Text]] = field(default_factory=list[list[Text]])

    def add(self, *cells: str | Text) -> None:
        """Add a row; cells may have markup. Those that are left out at the end are empty."""
        row = [cell if isinstance(cell, Text) else Text.from_markup(cell) for cell in cells]
        self.rows.append(row + [Text()] * (len(self.columns) - len(row)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        shown = [*range(len(self.columns))]
        widths = [self._width(at) for at in shown]
        going = sorted((at for at in shown if self.columns[at].goes), key=lambda at: -self.columns[at].goes)
        while going and sum(widths[at] + _GAP for at in shown) > options.max_width:
            shown.remove(going.pop(0))
        yield self._drawn(shown)

    def _width(self, at: int) -> int:
        return max(len(self.columns[at].name), *(row[at].cell_len for row in self.rows), 0)

    def _drawn(self, shown: Sequence[int]) -> Table:
        table = Table(
            title=self.title,
            title_justify="left",
            title_style="dim",
            box=None,
            pad_edge=False,
            padding=(0, _GAP, 0, 0),
        )
        for column in (self.columns[at] for at in shown):
            justify = "right" if column.is_figure else "left"
            table.add_column(column.name, justify=justify, no_wrap=column.is_figure, overflow="fold")
        for row in self.rows:
            table.add_row(*(row[at] for at in shown))
        return table
