"""What torchrun says by the environment: which of how many processes this is. Loads no torch."""

from __future__ import annotations

import os

from sparring.errors import UserError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether this process was started as one of a group, as torchrun does it."""
    return all(name in os.environ for name in _VARIABLES)


def half_launched() -> str:
    """A note where the environment names a group of several processes, but not where they meet; empty otherwise."""
    missing = [name for name in _VARIABLES if name not in os.environ]
    if not missing or not os.environ.get("WORLD_SIZE", "").isdigit() or int(os.environ["WORLD_SIZE"]) < 2:
        return ""
    return f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set: this process runs alone."


def rank() -> int:
    """The number of this process in its group, from 0; 0 where it was started by itself."""
    return number("RANK") if launched() else 0


def size() -> int:
    """The number of processes of the group; 1 where this one was started by itself."""
    return number("WORLD_SIZE") if launched() else 1


def again() -> list[str]:
    """The words that start as many processes again; on several machines, those of this one."""
    here = number("LOCAL_WORLD_SIZE", 1)
    machines = ["--nnodes", str(-(-size() // here))] if size() > here else []
    return ["torchrun", *machines, "--nproc-per-node", str(here)]


def number(name: str, default: int | None = None) -> int:
    """A whole number in the environment."""
    text = os.environ.get(name, "" if default is None else str(default))
    if not text.isdigit():
        raise UserError(f"{name} is {text!r} in the environment, expected a whole number. Start with torchrun.")
    return int(text)
