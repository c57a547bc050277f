"""An item of the paper on the screen: its table, what must be known about it, and the files it was drawn to."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.measure import Measurement
from rich.table import Table

from sparring.cli.screen import Screen
from sparring.recipes.paper import Item
from sparring.report.beside import Line, as_printed, best
from sparring.reproduce.collect import Collected, lines, notes
from sparring.reproduce.draw import draw
from sparring.reproduce.verdict import seen


def show(collected: Collected, screen: Screen) -> None:
    """The table on the screen, what must be known about it, and the files it was drawn to."""
    if collected.item.kind == "table":
        table = _table(collected.item, lines(collected))
        if Measurement.get(screen, screen.options.update(max_width=1000), table).maximum > screen.width:
            table = _table(collected.item, lines(collected), between="\n± ")
        screen.print(table)
    told: Callable[[str], None] = lambda line: screen.print(line, highlight=False)  # noqa: E731
    for note in notes(collected):
        told(note)
    if collected.found:
        told(f"What we see: {seen(collected)}")
    drawn = draw(collected) if collected.found or collected.begun else {}
    for caption in dict.fromkeys(drawn.values()):
        if caption:
            told(caption)
    for path in drawn:
        screen.print(f"wrote {path}", highlight=False, soft_wrap=True)


def _table(item: Item, each: Sequence[Line], between: str = " ± ") -> Table:
    """Two lines a method: ours, and the paper's. Columns that are empty for everybody are left out.

    Args:
        between: stands before a deviation; with a line break a narrow screen has room for the table.
    """
    title = f"{item.where}: {item.title}. Test accuracy, %"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    table.add_column("", no_wrap=True)
    columns = [column for column in item.columns if any(column in line.ours or column in line.paper for line in each)]
    costs = ["BPs"] if any(line.backprops is not None for line in each) else []
    for column in (*columns, *costs):
        table.add_column(column, justify="right", no_wrap=True)
    for line in each:
        ours = []
        for column in columns:
            cell = line.ours.get(column)
            star = "*" if cell is not None and cell.text == best(each, column) else ""
            ours.append("" if cell is None else f"{star}{cell.text}".replace(" ± ", between))
        backprops = ["" if line.backprops is None else f"{line.backprops:.1f}"] if costs else []
        table.add_row(line.label, "ours" if line.ours else "not yet", *ours, *backprops)
        cells = [
            as_printed(line.paper[column]).replace(" ± ", between) if column in line.paper else "" for column in columns
        ]
        table.add_row("", "paper", *cells, *[""] * len(costs), style="dim", end_section=True)
    ours_are = dict.fromkeys(line.about for line in each if line.ours)
    papers = dict.fromkeys(line.paper_about for line in each)
    if ours_are:
        starred = " (* the best)" if sum(bool(line.ours) for line in each) > 1 else ""
        table.caption = f"Ours: {'; '.join(ours_are)}{starred}. The paper's: {', '.join(papers)}."
        table.caption_justify = "left"
    return table
