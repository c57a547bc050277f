"""The figures of Sections 5 and 6 and of Appendices B and G: one declaration per point, grids written as loops.

The paper prints no numbers for these figures, so points have no published value. `full` has the paper's epochs and
grid; `lite` (`scales`) is 20 epochs (WRN-34-10 10, SVHN 14) on fewer points. FAT starts at random and adds noise, as in
the authors' code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sparring.objectives import FAT, TRADES, FATForTRADES, Madry, Objective
from sparring.paper.specs.item import Course, Item, Robustness, Row, Scale
from sparring.paper.specs.scales import CYCLE, STEPS, one_cycle, shorter
from sparring.paper.specs.scales import FIGURE_EPOCHS as EPOCHS
from sparring.recipes import cifar10, no_projection
from sparring.schedules import parse
from sparring.training.config import Config, with_objective

NETWORKS = {"small_cnn": "Small CNN", "resnet18": "ResNet-18", "wrn-34-10": "WRN-34-10"}
SIX = {"Natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20", "PGD-100": "pgd100", "C&W": "cw30"}

# Sec. 5.1: 80 epochs, learning rate 0.1, a tenth of it from epoch 60 (73.75 % of 80); tau fixed.
TAU = replace(cifar10.FAT, epochs=80, lr=parse("0.1,0.01@73.75%"))


def at_tau(config: Config, tau: int) -> Config:
    """The same run with a fixed tau; tau = K is worst-case training."""
    return with_objective(config, tau=tau)


def _tau_rows() -> Iterator[Row]:
    for model, network in NETWORKS.items():
        for tau in range(11) if model != "wrn-34-10" else ():
            full = at_tau(replace(TAU, model=model), tau)
            configs: dict[Scale, Config | None] = {"full": full}
            if tau in (0, 1, 2, 3, 5, 10):
                configs["lite"] = one_cycle(full, EPOCHS)
            yield Row(f"{model}-tau{tau}", network, Robustness("tau"), configs, x=tau, group=model)


FIG_TAU = Item(
    name="fig-tau",
    where="Figure 4 (Sec. 5.1)",
    title="The effect of tau: accuracies of FAT by tau (CIFAR-10)",
    claim="Natural accuracy falls as tau grows, while robust accuracy rises up to about tau 2 and then stays.",
    kind="lines",
    rows=tuple(_tau_rows()),
    lite=f"{EPOCHS} epochs of {CYCLE}; tau 0, 1, 2, 3, 5, 10",
    columns=SIX | {"PGD-10": "pgd10"},
    xlabel="tau",
    check="tau",
    marks=(2.0,),
    together=True,
    trials=5,
)

# Sec. 5.2: 100 epochs, a tenth of the learning rate from epochs 60 and 90.
BPS = replace(TAU, epochs=100, lr=parse("0.1,0.01@59%,0.001@89%"))
_METHODS = {"fat": ("FAT", "Madry"), "fat-trades": ("FAT for TRADES", "TRADES")}


def _bps_rows() -> Iterator[Row]:
    for objective, (friendly, original) in _METHODS.items():
        # FAT for TRADES starts beside the image and adds no noise.
        base = replace(BPS, objective=FATForTRADES(**cifar10.NORMAL)) if objective == "fat-trades" else BPS
        for model, network in NETWORKS.items():
            for tau in (0, 1, 2, 3, 10):
                label = f"tau {tau}" if tau < 10 else f"{original} (tau = K)"
                full = at_tau(replace(base, model=model), tau)
                # Shared with fig-tau where possible: Small CNN at full scale, ResNet-18 at lite.
                short = replace(full, lr=TAU.lr, epochs=TAU.epochs)
                if model != "small_cnn":
                    short = one_cycle(short, EPOCHS if model == "resnet18" else 10)
                yield Row(
                    f"{model}-{objective}-tau{tau}",
                    label,
                    Course(),
                    {"full": full, "lite": short},
                    group=f"{friendly}, {network}",
                )


FIG_BPS = Item(
    name="fig-bps",
    where="Figure 5 (Sec. 5.2)",
    title="Back-propagations per image and epoch (CIFAR-10)",
    claim="Friendly training needs fewer than K = 10, and fewer for a smaller tau; they grow as the model becomes "
    "robust, with a jump where the learning rate drops.",
    kind="course",
    rows=tuple(_bps_rows()),
    lite=f"the runs of fig-tau: Small CNN in full, 80 epochs; ResNet-18 {EPOCHS} and WRN-34-10 10 epochs of {CYCLE}",
    xlabel="epoch",
)

# Sec. 6.1: 80 epochs, learning rate 0.01, a tenth of it from epoch 60; alpha = eps/10.
EPS = replace(TAU, lr=parse("0.01,0.001@73.75%"))
# Data -> (full, lite). The paper gives the ranges, 0.03 to 0.15 and 0.01 to 0.06, but not the points.
GRIDS = {
    "cifar10": ((0.03, 0.045, 0.06, 0.075, 0.09, 0.105, 0.12, 0.135, 0.15), (0.03, 0.06, 0.09, 0.12, 0.15)),
    "svhn": ((0.01, 0.02, 0.03, 0.04, 0.05, 0.06), (0.01, 0.03, 0.06)),
}
LITE_EPOCHS = {"cifar10": EPOCHS, "svhn": 14}  # about as many updates: SVHN has 1.5 times as many images
# (data, network, method, K, figure in the paper). Those with K 20 have three points at lite.
PICTURES = (
    ("cifar10", "resnet18", "fat", 10, "Figure 6"),
    ("svhn", "resnet18", "fat", 10, "Figure 7"),
    ("cifar10", "small_cnn", "fat", 10, "App. G.1"),
    ("svhn", "small_cnn", "fat", 10, "App. G.1"),
    ("cifar10", "small_cnn", "fat-trades", 10, "App. G.2"),
    ("cifar10", "resnet18", "fat-trades", 10, "App. G.2"),
    ("cifar10", "small_cnn", "fat", 20, "App. G.3"),
    ("cifar10", "resnet18", "fat", 20, "App. G.3"),
    ("cifar10", "small_cnn", "fat-trades", 20, "App. G.3"),
    ("cifar10", "resnet18", "fat-trades", 20, "App. G.3"),
)
_NAMES = {"cifar10": "CIFAR-10", "svhn": "SVHN"}


def _eps_objective(objective: str, eps: float, steps: int, tau: int) -> Objective:
    """One point; tau = K is the original, without FAT's noise."""
    settings: dict[str, Any] = {"eps": eps, "step_size": eps / 10, "steps": steps}
    if objective == "fat-trades":
        settings = cifar10.NORMAL | settings
        return TRADES(**settings) if tau == steps else FATForTRADES(**settings, tau=tau)
    settings = cifar10.ATTACK | settings
    return Madry(**settings) if tau == steps else FAT(**settings, noise=0.001, tau=tau)


def _eps_rows() -> Iterator[Row]:
    for data, model, objective, steps, where in PICTURES:
        friendly, original = _METHODS[objective]
        grid, short = GRIDS[data]
        if steps == 20:
            short = (0.03, 0.09, 0.15)
        measure = Robustness("figure" if data == "cifar10" else "figure-svhn")
        for tau in (0, 1, 3, steps):
            method = f"tau{tau}" if tau < steps else original.lower()
            for eps in grid:
                full = replace(EPS, objective=_eps_objective(objective, eps, steps, tau), data=data, model=model)
                configs: dict[Scale, Config | None] = {"full": full}
                if eps in short:
                    configs["lite"] = shorter(full, LITE_EPOCHS[data])
                trades = "-trades" if objective == "fat-trades" else ""
                yield Row(
                    f"{model}-{data}{trades}-k{steps}-{method}-eps{eps:g}",
                    f"tau {tau}" if tau < steps else original,
                    measure,
                    configs,
                    group=f"{friendly}, {NETWORKS[model]}, {_NAMES[data]}, K {steps} ({where})",
                    x=eps,
                )


FIG_EPS = Item(
    name="fig-eps",
    where="Figures 6, 7 (Sec. 6.1) and App. G",
    title="Training at larger radii: FAT with tau 0, 1, 3 against worst-case training",
    claim="Beyond eps 0.06 (SVHN 0.03) worst-case training breaks down; friendly training keeps its natural accuracy "
    "and gains under the stronger attack.",
    kind="lines",
    rows=tuple(_eps_rows()),
    lite=f"{EPOCHS} epochs ({LITE_EPOCHS['svhn']} on SVHN), {STEPS}; five radii on CIFAR-10 (three for K 20), "
    "three on SVHN",
    columns=SIX | {"PGD-20, 2 eps": "pgd20-2eps"},
    xlabel="radius in training (eps)",
    check="radius",
)


# The same runs under attacks of twice the radius, as strong as AutoAttack: does PGD-20 flatter the large radii?
_FIRST = tuple(row for row in FIG_EPS.rows if row.name.startswith("resnet18-cifar10-k10-"))

FIG_EPS_TWICE = Item(
    name="fig-eps-twice",
    where="beyond the paper (the runs of Figure 6)",
    title="Training at larger radii, attacked at 16/255: PGD-20, C&W and AutoAttack",
    claim="The gain of larger radii at 16/255, which Figure 6 shows by PGD-20, holds under C&W and AutoAttack.",
    kind="lines",
    rows=tuple(replace(row, measure=Robustness("figure-twice"), group="ResNet-18, CIFAR-10") for row in _FIRST),
    lite=f"{EPOCHS} epochs, {STEPS}; five radii",
    columns={"Natural": "natural", "PGD-20": "pgd20", "C&W": "cw30", "AutoAttack": "autoattack"},
    xlabel=FIG_EPS.xlabel,
    check="best",
)


ALPHAS_LITE = (0.003, 0.007, 0.011, 0.015)


def _free_rows() -> Iterator[Row]:
    """App. B: the points of `recipes.no_projection` at full scale, four step sizes over the same range at lite."""
    for model in no_projection.MODELS:
        for method, tau in no_projection.METHODS.items():
            for alpha in sorted({*no_projection.ALPHAS, *ALPHAS_LITE}):
                point = no_projection.point(model, method, alpha)
                configs: dict[Scale, Config | None] = {}
                if alpha in no_projection.ALPHAS:
                    configs["full"] = point
                if alpha in ALPHAS_LITE:
                    configs["lite"] = shorter(point, EPOCHS)
                yield Row(
                    f"{model}-{method}-alpha{alpha:g}",
                    "Madry (tau = K)" if method == "madry" else f"tau {tau}",
                    Robustness("figure"),
                    configs,
                    group=NETWORKS[model],
                    x=alpha,
                )


FIG_NO_PROJECTION = Item(
    name="fig-no-projection",
    where="App. B",
    title="Friendly training without projection onto the ball: accuracies by step size (CIFAR-10)",
    claim="Early stopping replaces the ball: without projection, too, larger steps cost friendly training little.",
    kind="lines",
    rows=tuple(_free_rows()),
    lite=f"{EPOCHS} epochs, {STEPS}; alpha 0.003, 0.007, 0.011, 0.015",
    columns=SIX | {"PGD-20, 2 eps": "pgd20-2eps"},
    xlabel="step size in training (alpha)",
)

FIGURES = (FIG_TAU, FIG_BPS, FIG_EPS, FIG_EPS_TWICE, FIG_NO_PROJECTION)
