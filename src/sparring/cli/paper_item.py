"""An item of the paper on the screen: its table, what must be known about it, and the files it was drawn to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.measure import Measurement
from rich.table import Table

from sparring.cli.console import Screen
from sparring.paper.collect import Collected, lines, notes
from sparring.paper.findings import findings
from sparring.paper.render import draw, listed
from sparring.paper.specs import Item
from sparring.report.comparison import Line, as_printed, best

_LABEL = 8  # columns of a screen for a method's name, in as many lines: FAT for, TRADES, 16/255


def show(collected: Collected, screen: Screen) -> None:
    """The table on the screen, what must be known about it, and the files it was drawn to."""
    if collected.item.kind == "table":
        screen.print(_fitting(collected.item, lines(collected), screen))
    told: Callable[[str], None] = lambda line: screen.print(line, highlight=False)  # noqa: E731
    for note in notes(collected):
        told(note)
    if collected.found:
        told(listed("What we see:", findings(collected)))
    drawn = draw(collected) if collected.found or collected.begun else {}
    for caption in dict.fromkeys(drawn.values()):
        if caption:
            told(caption)
    for path in drawn:
        screen.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _fitting(item: Item, each: Sequence[Line], screen: Screen) -> Table:
    """The table as the screen has room for it: deviations in lines of their own, or one accuracy a line."""
    wide, narrow = _table(item, each), _table(item, each, between="\n± ")
    room = screen.options.update(max_width=1000)
    if Measurement.get(screen, room, wide).maximum <= screen.width:
        return wide
    return narrow if Measurement.get(screen, room, narrow).minimum <= screen.width else _tall(item, each)


def _table(item: Item, each: Sequence[Line], between: str = " ± ") -> Table:
    """Two lines a method: ours, and the paper's. Columns that are empty for everybody are left out.

    Args:
        between: stands before a deviation; with a line break a narrow screen has room for the table.
    """
    table, columns = _titled(item), _columns(item, each)
    costs = ["BPs"] if any(line.backprops is not None for line in each) else []
    table.add_column("", min_width=min(_LABEL, max(len(line.label) for line in each)))
    table.add_column("", no_wrap=True)
    for column in (*columns, *costs):
        table.add_column(column, justify="right", no_wrap=True)
    for line in each:
        ours = [_ours(line, column, each).replace(" ± ", between) for column in columns]
        paper = [_paper(line, column).replace(" ± ", between) for column in columns]
        backprops = [_backprops(line)] if costs else []
        table.add_row(line.label, "ours" if line.ours else "to do", *ours, *backprops)
        table.add_row("", "paper", *paper, *[""] * len(costs), style="dim", end_section=True)
    return _explained(table, each)


def _tall(item: Item, each: Sequence[Line]) -> Table:
    """One accuracy a line, ours and the paper's side by side."""
    table = _titled(item)
    table.add_column("")
    for name in ("ours", "paper"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in each:
        table.add_row(line.label, "" if line.ours else "to do", "", style="bold")
        rows = {column: (_ours(line, column, each), _paper(line, column)) for column in _columns(item, each)}
        for name, numbers in (rows | {"BPs": (_backprops(line), "")}).items():
            if any(numbers):
                table.add_row(f"  {name}", *numbers)
    return _explained(table, each)


def _titled(item: Item) -> Table:
    title = f"{item.where}: {item.title}. Test accuracy, %"
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)


def _ours(line: Line, column: str, each: Sequence[Line]) -> str:
    """With a star where it is the best of all."""
    cell = line.ours.get(column)
    return "" if cell is None else f"{'*' if cell.text == best(each, column) else ''}{cell.text}"


def _paper(line: Line, column: str) -> str:
    return as_printed(line.paper[column]) if column in line.paper else ""


def _backprops(line: Line) -> str:
    return "" if line.backprops is None else f"{line.backprops:.1f}"


def _columns(item: Item, each: Sequence[Line]) -> list[str]:
    """Those that are not empty for everybody."""
    return [column for column in item.columns if any(column in line.ours or column in line.paper for line in each)]


def _explained(table: Table, each: Sequence[Line]) -> Table:
    """With a caption: which networks these are."""
    ours_are = dict.fromkeys(line.about for line in each if line.ours)
    papers = dict.fromkeys(line.paper_about for line in each)
    if ours_are:
        starred = " (* the best)" if sum(bool(line.ours) for line in each) > 1 else ""
        table.caption = f"Ours: {'; '.join(ours_are)}{starred}. The paper's: {', '.join(papers)}."
        table.caption_justify = "left"
    return table
