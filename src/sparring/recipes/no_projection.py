"""Paper Appendix B: a search without projection, over step sizes (CIFAR-10, Small CNN and ResNet-18).

x^(t+1) = x^(t) + alpha sign(grad), from the image itself: what bounds the search is K * alpha, and stopping early. 80
epochs, learning rate 0.01 and a tenth of it from epoch 60, K 10, alpha from 0.003 to 0.015, tau 0, 1, 3, and Madry. The
paper plots the range of alpha and names no values: 0.003 apart is ours, so that K * alpha runs through the radii of its
Section 6.1. It does not say whether Madry projects here; we read that it does not (tau = K of the same search).
Measured by protocol `figure`. One point takes about 80 * 5 s on one H200 with ResNet-18 (from its epochs with tau 0-2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparring.objectives import FAT, Madry
from sparring.recipes import cifar10
from sparring.recipes.recipe import Recipe
from sparring.schedules import parse
from sparring.training.config import Config

GROUP = "no-projection"
ALPHAS = (0.003, 0.006, 0.009, 0.012, 0.015)
MODELS = {"small_cnn": "small-cnn", "resnet18": "resnet18"}
METHODS = {"tau0": 0, "tau1": 1, "tau3": 3, "madry": None}  # tau; None: Madry

BASE = replace(cifar10.MADRY, epochs=80, lr=parse("0.01,0.001@73.75%"))  # epoch 60 of 80
FREE: dict[str, Any] = cifar10.ATTACK | {"start": None, "project": False}


def point(model: str, method: str, alpha: float) -> Config:
    """One point of the figures."""
    settings, tau = FREE | {"step_size": alpha}, METHODS[method]
    return replace(BASE, model=model, objective=Madry(**settings) if tau is None else FAT(**settings, tau=tau))


APPENDIX_B = tuple(
    Recipe(
        f"{GROUP}-{method}-alpha{alpha:g}-cifar10-{name}",
        point(model, method, alpha),
        f"{'Madry' if method == 'madry' else f'FAT, tau {method[3:]}'} without projection, alpha {alpha:g}",
        "80 epochs",
        "not measured yet",
        group=GROUP,
    )
    for model, name in MODELS.items()
    for method in METHODS
    for alpha in ALPHAS
)
