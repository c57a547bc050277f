"""The headline: Tables 1, 2 and 4 in one, ours with the paper's number in brackets, for the README's first screen."""

from __future__ import annotations

from pathlib import Path

from sparring.paper import specs
from sparring.paper.collect import collect, hardware, images, lines
from sparring.paper.results import Result
from sparring.report.comparison import Line, rounded

ROWS = {
    "table1": ("madry", "fat-8", "fat-16"),
    "table2": ("trades", "fat-trades-8", "fat-trades-16"),
    "table4": ("mart", "fat-mart-8", "fat-mart-16"),
}
COLUMNS = ("Natural", "PGD-20", "C&W", "AutoAttack")


def headline(folder: Path) -> str:
    """Markdown: the methods that are measured; empty where none is."""
    shown: list[Line] = []
    behind: list[Result] = []
    commands: list[str] = []
    for name, rows in ROWS.items():
        item = specs.find(name)
        collected = collect(item, folder)
        for row, line in zip(item.rows, lines(collected), strict=True):
            if row.name in rows and line.ours:
                shown.append(line)
                behind += collected.of(row)
                commands.append(f"`sparring reproduce {name}`")
    if not shown:
        return ""
    head = ["", *COLUMNS, "BPs"]
    table = [head, ["---", *["---:"] * (len(head) - 1)], *(_row(line) for line in shown)]
    body = "\n".join(f"| {' | '.join(row)} |" for row in table)
    about = "; ".join(dict.fromkeys(line.about for line in shown))
    papers = ", ".join(dict.fromkeys(line.paper_about for line in shown))
    each = ", ".join(dict.fromkeys(commands))
    told = (
        f"Ours: {about}. {hardware(behind)} {images(behind)}In brackets the paper's: {papers}; those of the originals "
        "are other authors' numbers or models there. BPs: mean back-propagations per image to make the training data, "
        f"of 10. Attacks are those of each table, so compare within one: {each}."
    )
    return f"{body}\n\n{told}\n"


def _row(line: Line) -> list[str]:
    cells = []
    for column in COLUMNS:
        ours = rounded(line.ours[column].middle) if column in line.ours else ""
        theirs = f" ({rounded(line.paper[column][0])})" if column in line.paper else ""
        cells.append(f"{ours}{theirs}".strip())
    backprops = "" if line.backprops is None else f"{line.backprops:.1f}"
    return [line.label, *cells, backprops]
