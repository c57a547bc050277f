"""Go on from a trained model: another radius, other classes, and a longer run.

`init=` begins a run from the weights of another one. `resume=True` with more epochs makes the same run longer.

    python examples/fine_tuning.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import nn

import sparring
from sparring import data

EPOCHS = 3
IMAGES = 200  # test images to attack, so that this takes seconds


def friendly(eps: float) -> sparring.FAT:
    """FAT at a radius; the step is a part of it and moves with it."""
    return sparring.FAT(eps=eps, step_size="eps/4", steps=5, tau=1)


def report(name: str, model: nn.Module, source: str, eps: float) -> float:
    """Print the accuracy on test images, clean and under PGD, and return the second."""
    result = sparring.evaluate(model, source, protocol="quick", eps=eps, limit=IMAGES, doubts=False)
    natural, robust = (100 * result[attack].accuracy for attack in ("natural", "pgd10"))
    print(f"{name:40} natural {natural:5.1f} %   PGD-10 at {eps} {robust:5.1f} %")
    return robust


def main(folder: Path) -> dict[str, float]:
    """Train a model, then go on from it in three ways."""
    classes = "digits:0+1+2+3+4"
    settings = {"batch_size": 64, "validation": 60, "validation_eps": "eps", "progress": False}
    first = sparring.train(
        "fat-digits", folder / "first", data=classes, objective=friendly(0.1), epochs=EPOCHS, lr=0.05, **settings
    )
    found = {"first": report("trained at 0.1", first, classes, 0.2)}

    # Another radius: the weights of the run, a lower learning rate, a few epochs.
    wider = sparring.train(
        "fat-digits",
        folder / "wider",
        data=classes,
        objective=friendly(0.2),
        init=folder / "first",
        epochs=EPOCHS,
        lr=0.02,
        **settings,
    )
    found["wider"] = report("fine-tuned at 0.2", wider, classes, 0.2)

    # Other classes: a head for another number of classes is replaced, and the run says so.
    every = sparring.train(
        "fat-digits",
        folder / "every",
        objective=friendly(0.1),
        init=folder / "wider",
        epochs=EPOCHS,
        lr=0.05,
        **settings,
    )
    found["every"] = report(f"fine-tuned on {len(data.load('digits').classes)} classes", every, "digits", 0.1)

    # The same run, longer. Its learning rate is constant, so the epochs already trained keep their values.
    longer = sparring.train(out=folder / "every", resume=True, epochs=2 * EPOCHS, progress=False)
    found["longer"] = report(f"the same, {2 * EPOCHS} epochs", longer, "digits", 0.1)
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as runs:
        main(Path(runs))
