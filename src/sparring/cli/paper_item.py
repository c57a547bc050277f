"""An item of the paper on the screen: its table, its notes and findings, and the files written."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.measure import Measurement
from rich.table import Table

from sparring.cli.console import Screen
from sparring.paper.collect import Collected, table_rows
from sparring.paper.findings import findings
from sparring.paper.leaderboard import board
from sparring.paper.notes import notes
from sparring.paper.render import draw, listed
from sparring.paper.specs import Item
from sparring.report.comparison import TableRow, as_printed, best

_LABEL = 8  # least width of a method's name, which may wrap: FAT for, TRADES, 16/255


def show(collected: Collected, screen: Screen) -> None:
    """Print an item's table, notes and findings, write its table or figures to files, and print their captions."""
    if collected.item.kind == "table":
        screen.print(_fitting(collected.item, table_rows(collected), screen))
    if collected.item.kind == "benchmark":
        screen.print(_lines(collected))
    found = [listed("What we find:", findings(collected))] if collected.found else []
    drawn = draw(collected) if collected.found or collected.begun else {}
    for text in [*notes(collected), *found, *filter(None, dict.fromkeys(drawn.values()))]:
        screen.print(text, highlight=False)
    for path in drawn:
        screen.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _fitting(item: Item, rows: Sequence[TableRow], screen: Screen) -> Table:
    """The table as the screen allows: in full, with deviations on lines of their own, or one number per line."""
    wide, narrow = _table(item, rows), _table(item, rows, between="\n± ")
    room = screen.options.update(max_width=1000)
    if Measurement.get(screen, room, wide).maximum <= screen.width:
        return wide
    return narrow if Measurement.get(screen, room, narrow).minimum <= screen.width else _tall(item, rows)


def _table(item: Item, rows: Sequence[TableRow], between: str = " ± ") -> Table:
    """Two lines per method: ours, and the paper's. Columns without any number are left out.

    Args:
        between: printed before a deviation; a line break makes the table narrower.
    """
    table, columns = _titled(item), _columns(item, rows)
    costs = ["BPs"] if any(row.backprops is not None for row in rows) else []
    table.add_column("", min_width=min(_LABEL, max(len(row.label) for row in rows)))
    table.add_column("", no_wrap=True)
    for column in (*columns, *costs):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ours = [_ours(row, column, rows).replace(" ± ", between) for column in columns]
        paper = [_paper(row, column).replace(" ± ", between) for column in columns]
        backprops = [_backprops(row)] if costs else []
        table.add_row(row.label, "ours" if row.ours else "to do", *ours, *backprops)
        table.add_row("", "paper", *paper, *[""] * len(costs), style="dim", end_section=True)
    return _captioned(table, rows)


def _tall(item: Item, rows: Sequence[TableRow]) -> Table:
    """One number per line, ours and the paper's side by side."""
    table = _titled(item)
    table.add_column("")
    for name in ("ours", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(row.label, "" if row.ours else "to do", "", style="bold")
        accuracies = {column: (_ours(row, column, rows), _paper(row, column)) for column in _columns(item, rows)}
        for name, numbers in (accuracies | {"BPs": (_backprops(row), "")}).items():
            if any(numbers):
                table.add_row(f"  {name}", *numbers)
    return _captioned(table, rows)


def _lines(collected: Collected) -> Table:
    """A benchmark: one line per method, ours in bold."""
    table, shown = _titled(collected.item), board(collected)
    table.add_column("")
    for column in shown.columns:
        table.add_column(column, justify="right", no_wrap=True)
    for line in shown.lines:
        numbers = [line.numbers.get(column, "") for column in shown.columns]
        name = line.name if line.numbers else f"{line.name} (to do)"
        table.add_row(name, *numbers, style="bold" if line.ours else "dim")
    return table


def _titled(item: Item) -> Table:
    title = f"{item.where}: {item.title}. Test accuracy, %"
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _ours(row: TableRow, column: str, rows: Sequence[TableRow]) -> str:
    """Our number, with a star if it is the best of all rows."""
    cell = row.ours.get(column)
    return "" if cell is None else f"{'*' if cell.text == best(rows, column) else ''}{cell.text}"


def _paper(row: TableRow, column: str) -> str:
    return as_printed(row.paper[column]) if column in row.paper else ""


def _backprops(row: TableRow) -> str:
    return "" if row.backprops is None else f"{row.backprops:.1f}"


def _columns(item: Item, rows: Sequence[TableRow]) -> list[str]:
    """The columns in which some row has a number."""
    return [column for column in item.columns if any(column in row.ours or column in row.paper for row in rows)]


def _captioned(table: Table, rows: Sequence[TableRow]) -> Table:
    """The table with a caption that names the networks."""
    ours = dict.fromkeys(row.about for row in rows if row.ours)
    papers = dict.fromkeys(row.paper_about for row in rows)
    if ours:
        starred = " (* the best)" if sum(bool(row.ours) for row in rows) > 1 else ""
        table.caption = f"Ours: {'; '.join(ours)}{starred}. The paper's: {', '.join(papers)}."
        table.caption_justify = "left"
    return table
