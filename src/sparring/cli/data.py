"""`sparring data`: list the data sets, or fetch one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.table import Table

from sparring import data
from sparring.cli.arguments import parse
from sparring.cli.console import Screen
from sparring.errors import UserError

DESCRIPTION = """List the data sets, or fetch one.

Examples:
  sparring data
  sparring data fetch cifar10
  sparring data fetch cifar10 --source ~/Downloads/cifar-10-python.tar.gz
  sparring data fetch svhn --source folder-with-the-mat-files
  sparring data fetch mnist --source folder-with-the-idx-files"""


@dataclass(frozen=True)
class Options:
    """What to do: list or fetch."""

    action: Annotated[Literal["list", "fetch"], tyro.conf.Positional] = "list"
    """List the data sets, or fetch one."""
    name: Annotated[str | None, tyro.conf.Positional] = None
    """The data set to fetch."""
    source: Path | None = None
    """An archive, file or folder you already have."""
    root: Path | None = None
    """Where data sets are kept; $SPARRING_DATA or ~/.cache/sparring unless given."""


def run(argv: list[str]) -> int:
    """Run the command."""
    options = parse(Options, argv, prog="sparring data", description=DESCRIPTION)
    if options.action == "list":
        table = Table("data", "present", box=None, pad_edge=False)
        for title in ("where", "how to get it"):  # a truncated path is useless
            table.add_column(title, overflow="fold")
        for found in data.describe(root=options.root):
            table.add_row(found.name, "yes" if found.present else "no", found.where, found.how)
        Screen().print(table)
        return 0
    if options.name is None:
        raise UserError(f"no data set given. {_FETCHABLE} Write for example: sparring data fetch cifar10")
    began = time.time_ns()
    path = data.fetch(options.name, root=options.root, source=options.source)
    print(f"{options.name} is ready: {path}")
    if options.source is not None and path.is_file() and path.stat().st_mtime_ns < began - 10**9:
        print(f"note: it was already present and is intact; {options.source} was not read.")
    return 0


_FETCHABLE = f"Available: {', '.join(data.FETCHABLE)}."
