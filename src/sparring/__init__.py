"""Friendly adversarial training: image classifiers that stay accurate and withstand attack.

Attacks, on any module from pixels in [0, 1] to logits (L-infinity):

    x_adv = sparring.pgd(model, x, y, eps=8/255, step_size=2/255, steps=20)
    found = sparring.friendly_pgd(model, x, y, eps=8/255, step_size=0.007, steps=10, tau=0)   # .x_adv, .backprops

Objectives, in a training loop of your own:

    fat = sparring.FAT(eps=8/255, step_size=0.007, steps=10, tau="0,1@40%,2@75%")
    step = fat(model, x, y, progress=epoch / epochs)                             # .loss, .x_adv, .backprops

The package's own loop, and what it leaves behind:

    model = sparring.train("fat-digits", out="runs/a", epochs=30)
    result = sparring.evaluate(model, x, y, "dat")
    model = sparring.load_model("runs/a")

The command `sparring` does the same from a shell; `sparring --help` lists it all.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparring._version import __version__
from sparring.errors import RunFailed, UserError

if TYPE_CHECKING:
    from sparring.attacks import friendly_pgd, pgd
    from sparring.evaluation import evaluate
    from sparring.objectives import (
        ATES,
        CAT,
        DAT,
        FAT,
        MART,
        TRADES,
        Attack,
        FATForMART,
        FATForTRADES,
        Madry,
        Standard,
    )
    from sparring.recipes.train import train
    from sparring.training.config import Config
    from sparring.weights import load_model

# Imported when first asked for: they bring torch, and the command answers `--help` and Ctrl-C before that is read.
_LATER = {
    "pgd": "sparring.attacks",
    "friendly_pgd": "sparring.attacks",
    "evaluate": "sparring.evaluation",
    "load_model": "sparring.weights",
    "train": "sparring.recipes.train",
    "Config": "sparring.training.config",
} | dict.fromkeys(
    (
        "Attack",
        "Standard",
        "Madry",
        "FAT",
        "TRADES",
        "FATForTRADES",
        "MART",
        "FATForMART",
        "CAT",
        "DAT",
        "ATES",
    ),
    "sparring.objectives",
)

__all__ = [
    "ATES",
    "CAT",
    "DAT",
    "FAT",
    "MART",
    "TRADES",
    "Attack",
    "Config",
    "FATForMART",
    "FATForTRADES",
    "Madry",
    "RunFailed",
    "Standard",
    "UserError",
    "__version__",
    "evaluate",
    "friendly_pgd",
    "load_model",
    "pgd",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
