"""Friendly adversarial training: image classifiers that stay accurate and withstand attack.

Attacks, on any module from pixels in [0, 1] to logits; norm="linf" or "l2":

    x_adv = sparring.pgd(model, x, y, eps=8/255, step_size=2/255, steps=20)
    found = sparring.friendly_pgd(model, x, y, eps=8/255, step_size=0.007, steps=10, tau=0)   # .x_adv, .backprops

    pgd            images after `steps` steps of projected gradient descent
    friendly_pgd   the same, where each attack stops soon after it has succeeded (PGD-K-tau)

Objectives, in a training loop of your own:

    fat = sparring.FAT(eps=8/255, step_size=0.007, steps=10, tau="0,1@40%,2@75%")
    step = fat(model, x, y, progress=epoch / epochs)                             # .loss, .x_adv, .backprops

    FAT            friendly adversarial training: cross-entropy on friendly data
    Madry          worst-case training: cross-entropy on the data of PGD
    TRADES, FATForTRADES                  cross-entropy and a KL between natural and adversarial predictions
    MART, FATForMART                      boosted cross-entropy and a weighted KL
    CAT, DAT, ATES                        curriculum, dynamic, and early-stopped adversarial training
    Standard       no attack
    Attack         the fields that they share: eps, step_size, steps, start, norm
    soft_targets   class probabilities for label smoothing and mixed images

The package's own loop, with a run folder, exact resume, and the fast engine on a GPU:

    model = sparring.train("fat-digits", out="runs/a", epochs=30)                              # a recipe
    model = sparring.train(objective=fat, model=net, data=(train_loader, test_loader), out="runs/b", epochs=30)
    model = sparring.train("fat-digits", out="runs/c", init="runs/a", epochs=5)                # fine-tune

    train            any recipe, network, data and optimiser, trained into a run folder
    Config           every setting of a run; `train` takes its fields as arguments
    register_model   give a network of your own a name

What comes out:

    result = sparring.evaluate(model, x, y, protocol=("dat", "autoattack"))      # result["pgd20"].accuracy, .doubts
    model = sparring.load_model("runs/a")                                        # or "fat-digits", which ships with it

    evaluate         accuracy under attack, the worst case, and reasons to doubt the numbers
    load_model       the model of a run folder, an export, or a published checkpoint

    UserError        a mistake in the call; its one line says what to do
    RunFailed        a run that failed although the call was right

`help(sparring.train)` and the like have the arguments. The command `sparring` does the same from a shell; `sparring
recipes` lists the recipes.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparring._version import __version__
from sparring.errors import RunFailed, UserError

if TYPE_CHECKING:
    from sparring.attacks import friendly_pgd, pgd
    from sparring.attacks.losses import soft_targets
    from sparring.evaluation import evaluate
    from sparring.models import register_model
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
    "soft_targets": "sparring.attacks.losses",
    "evaluate": "sparring.evaluation",
    "register_model": "sparring.models",
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
    "register_model",
    "soft_targets",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sparring' has no attribute {name!r}")
    return getattr(import_module(_LATER[name]), name)


def __dir__() -> list[str]:
    return __all__
