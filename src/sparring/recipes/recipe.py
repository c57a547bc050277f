"""What a recipe is: a configuration with a name, a cost and an expectation."""

from __future__ import annotations

from dataclasses import dataclass

from sparring.training.config import Config


@dataclass(frozen=True)
class Recipe:
    """One line of `sparring recipes`."""

    name: str
    config: Config
    about: str
    cost: str  # measured, with the hardware
    expect: str  # measured, with n; or "not measured here yet"
    group: str = ""  # the points of one figure: the list shows them as one line

    @property
    def command(self) -> str:
        """How to run it."""
        return f"sparring train {self.name}"
