"""The headline: Tables 1, 2 and 4 in one short table, our numbers with the paper's in brackets."""

from __future__ import annotations

from pathlib import Path

from sparring.paper import specs
from sparring.paper.collect import collect, table_rows
from sparring.paper.notes import hardware, images
from sparring.paper.results import JobResult
from sparring.report.comparison import TableRow, rounded

ROWS = {
    "table1": ("madry", "fat-8", "fat-16"),
    "table2": ("trades", "fat-trades-8", "fat-trades-16"),
    "table4": ("mart", "fat-mart-8", "fat-mart-16"),
}
COLUMNS = ("Natural", "PGD-20", "C&W", "AutoAttack")


def headline(folder: Path) -> str:
    """The methods that are measured, in Markdown; '' if none is."""
    shown: list[TableRow] = []
    used: list[JobResult] = []
    commands: list[str] = []
    for name, rows in ROWS.items():
        item = specs.find(name)
        collected = collect(item, folder)
        for row, entry in zip(item.rows, table_rows(collected), strict=True):
            if row.name in rows and entry.ours:
                shown.append(entry)
                used += collected.of(row)
                commands.append(f"`sparring reproduce {name}`")
    if not shown:
        return ""
    head = ["", *COLUMNS, "BPs"]
    table = [head, ["---", *["---:"] * (len(head) - 1)], *(_cells(row) for row in shown)]
    body = "\n".join(f"| {' | '.join(row)} |" for row in table)
    about = "; ".join(dict.fromkeys(row.about for row in shown))
    papers = ", ".join(dict.fromkeys(row.paper_about for row in shown))
    each = ", ".join(dict.fromkeys(commands))
    caption = (
        f"Ours: {about}. {hardware(used)} {images(used)}In brackets: the paper's numbers ({papers}); its baselines are "
        "other authors' numbers or models. BPs: mean backward passes of the attack per training image, of 10. Each "
        f"table has its own attacks, so compare methods within a table: {each}."
    )
    return f"{body}\n\n{caption}\n"


def _cells(row: TableRow) -> list[str]:
    cells = []
    for column in COLUMNS:
        ours = rounded(row.ours[column].median) if column in row.ours else ""
        theirs = f" ({rounded(row.paper[column][0])})" if column in row.paper else ""
        cells.append(f"{ours}{theirs}".strip())
    backprops = "" if row.backprops is None else f"{row.backprops:.1f}"
    return [row.label, *cells, backprops]
