"""Sparring: friendly adversarial training. Attacks which do not kill training make it stronger."""

from sparring._version import __version__
from sparring.errors import RunFailed, UserError

__all__ = ["RunFailed", "UserError", "__version__"]
