"""The pages on the doubts, as they are installed with the package: what causes a doubt and what to do."""

from __future__ import annotations

from importlib.resources import files

from sparring.errors import unknown
from sparring.evaluation.sanity.checks import WHY


def command(name: str) -> str:
    """The command that prints the page of a doubt."""
    return f"sparring evaluate --explain {name}"


def page(name: str) -> str:
    """The page of a doubt, as Markdown."""
    if name not in WHY:
        raise unknown("doubt", name, WHY)
    return files(__package__).joinpath("pages", f"{name}.md").read_text(encoding="utf-8")
