"""Sparring: friendly adversarial training. Attacks which do not kill training make it stronger."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparring._version import __version__
from sparring.errors import RunFailed, UserError

if TYPE_CHECKING:
    from sparring.evaluation import evaluate
    from sparring.weights import load_model

__all__ = ["RunFailed", "UserError", "__version__", "evaluate", "load_model"]
# Imported when first asked for: they bring torch, and the command answers `--help` and Ctrl-C before that is read.
_LATER = {"evaluate": "sparring.evaluation", "load_model": "sparring.weights"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
