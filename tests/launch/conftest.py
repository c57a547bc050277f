"""The command as in tests/cli."""

from tests.cli.conftest import sparring

__all__ = ["sparring"]
