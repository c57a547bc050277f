"""The headline: Tables 1, 2 and 4 in one, ours with the paper's number in brackets, for the README's first screen."""

from __future__ import annotations

from pathlib import Path

from sparring.recipes import paper
from sparring.report.beside import Line
from sparring.reproduce.collect import collect, lines

ROWS = {
    "table1": ("madry", "fat-8", "fat-16"),
    "table2": ("trades", "fat-trades-8", "fat-trades-16"),
    "table4": ("mart", "fat-mart-8", "fat-mart-16"),
}
COLUMNS = ("Natural", "PGD-20", "C&W", "AutoAttack")


def headline(folder: Path) -> str:
    """Markdown: the methods that are measured; empty where none is."""
    shown: list[Line] = []
    for name, rows in ROWS.items():
        item = paper.find(name)
        every = dict(zip((row.name for row in item.rows), lines(collect(item, folder)), strict=True))
        shown += [every[row] for row in rows if every[row].ours]
    if not shown:
        return ""
    head = ["", *COLUMNS, "BPs", "training"]
    table = [head, ["---", *["---:"] * (len(head) - 1)], *(_row(line) for line in shown)]
    about = "; ".join(dict.fromkeys(line.about for line in shown))
    papers = ", ".join(dict.fromkeys(line.paper_about for line in shown))
    counts = sorted({line.ours["AutoAttack"].n for line in shown if "AutoAttack" in line.ours})
    images = f" AutoAttack: {' or '.join(f'{n:,}' for n in counts)} images." if counts else ""
    body = "\n".join(f"| {' | '.join(row)} |" for row in table)
    return f"{body}\n\nOurs: {about}. In brackets the paper's: {papers}. Each under its own table's attacks.{images}\n"


def _row(line: Line) -> list[str]:
    cells = []
    for column in COLUMNS:
        ours = f"{line.ours[column].middle:.1f}" if column in line.ours else ""
        theirs = f" ({line.paper[column][0]:.1f})" if column in line.paper else ""
        cells.append(f"{ours}{theirs}".strip())
    backprops = "" if line.backprops is None else f"{line.backprops:.1f}"
    beside = f" ({line.at_once} at once)" if line.at_once > 1 else ""
    seconds = "" if line.seconds is None else f"{line.seconds:.0f} s{beside}"
    return [line.label, *cells, backprops, seconds]
