"""Sparring: friendly adversarial training. Attacks which do not kill training make it stronger."""

from sparring._version import __version__
from sparring.errors import RunFailed, UserError
from sparring.evaluation import evaluate
from sparring.weights import load_model

__all__ = ["RunFailed", "UserError", "__version__", "evaluate", "load_model"]
