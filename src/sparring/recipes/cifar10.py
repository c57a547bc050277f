"""CIFAR-10 with ResNet-18: every objective, with the paper's schedules as shares of the run.

The lengths and schedules are those of Tables 1, 2 and 4 (there for wide ResNets); starts are in per cent, so that
`--epochs 30` gives the same recipe in short, but for the patience of CAT and fat-patient, which counts epochs. eps is
the paper's 8/255 (authors' code: 0.031).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sparring import objectives
from sparring.objectives import FATForMART, FATForTRADES, Madry, Standard
from sparring.objectives.contrib.by_definition import FATByLoss, FATByProbability
from sparring.objectives.contrib.paced import FATPaced
from sparring.objectives.contrib.patient import FATPatient
from sparring.recipes.recipe import Recipe
from sparring.schedules import parse
from sparring.training.config import Config

ATTACK: dict[str, Any] = {"eps": 8 / 255, "step_size": 0.007, "steps": 10, "start": "uniform"}
MADRY = Config(
    objective=Madry(**ATTACK),
    data="cifar10",
    model="resnet18",
    epochs=120,
    batch_size=128,
    lr=parse("0.1,0.01@49.2%,0.001@74.2%,0.0005@91%"),  # Table 1: epochs 60, 90 and 110 of 120
    weight_decay=2e-4,
    augment="crop-flip",
    validation=1000,
    validation_eps=8 / 255,
    precision="bf16",
)
STANDARD = replace(MADRY, objective=Standard())
FAT = replace(
    MADRY,
    # authors' code: noise of 0.001 at every step (not in the paper)
    # authors' code: tau 1 from epoch 51 and 2 from 91 of 120; paper: at epochs 50 and 90
    objective=objectives.FAT(**ATTACK, noise=0.001, tau="0,1@41.7%,2@75%"),
)
NORMAL: dict[str, Any] = ATTACK | {"start": "normal"}
TRADES = replace(
    MADRY,
    objective=objectives.TRADES(**NORMAL, beta=6.0),
    epochs=85,
    lr=parse("0.1,0.01@87%"),  # Table 2: epoch 75 of 85
)
FAT_FOR_TRADES = replace(
    TRADES,
    objective=FATForTRADES(**NORMAL, beta=6.0, tau="0,1@35.3%,2@58.8%,3@82.3%"),  # authors' code: 31, 51, 71 of 85
)
MART = replace(
    TRADES,
    objective=objectives.MART(**NORMAL, beta=6.0),
    epochs=90,
    lr=parse("0.1,0.01@66%,0.001@98.8%"),  # Table 4: epochs 60 and 90 of 90
)
FAT_FOR_MART = replace(
    MART,
    objective=FATForMART(**NORMAL, beta=6.0, tau="0,1@22.2%,2@44.4%,3@66.6%,4@88.8%"),  # authors' code
)
# Table 1's baselines. DAT: c_t reaches 0 after 100 of 120 epochs, alpha eps/4. CAT: with a patience of 10 k grows at
# most every 11 epochs and is 10 from epoch 100 at the earliest; a shorter run needs less. ATES: the schedule is ours.
QUARTERS: dict[str, Any] = ATTACK | {"step_size": "eps/4"}
DAT = replace(MADRY, objective=objectives.DAT(**QUARTERS, fosc="ramp:0.5..0@83.3%"))
CAT = replace(MADRY, objective=objectives.CAT(**QUARTERS, patience=10))
ATES = replace(MADRY, objective=objectives.ATES(**ATTACK, margin="ramp:0..1@100%"))
# Ours: friendly data by the definition of Section 3.1 and Appendix A, and tau by rule instead of by epoch.
FAT_BY_LOSS = replace(MADRY, objective=FATByLoss(**ATTACK, rho=0.5))
FAT_BY_PROBABILITY = replace(MADRY, objective=FATByProbability(**ATTACK, rho=0.2))
FAT_PACED = replace(MADRY, objective=FATPaced(**ATTACK, noise=0.001, share=0.25))
FAT_PATIENT = replace(MADRY, objective=FATPatient(**ATTACK, noise=0.001, patience=10))
# The most robustness for a minute and a half of an H200: a larger batch (the floor under small active sets is paid half
# as often), five longer steps instead of ten, which buys half as many epochs again, one cycle, an average of the
# weights. Chosen on held-out images: results/engine/fast-recipe-trials-h200.json.
FAST = replace(
    FAT,
    objective=objectives.FAT(**ATTACK | {"steps": 5, "step_size": 0.0125}, noise=0.001, tau="0,1@65%"),
    epochs=45,
    batch_size=256,
    lr=parse("one-cycle:0.3"),
    weight_decay=5e-4,
    ema=0.997,
)
# Options of any objective. AWP: its authors' 0.005, once training has begun to settle. EMA: over half an epoch.
FAT_AWP = replace(FAT, awp=parse("0,0.005@10%"))
FAT_EMA = replace(FAT, ema=0.995)


def _short(natural: float, pgd20: float, other: str = "") -> str:
    """The table of docs/methods.md: one seed, test set (n = 10,000); results/methods/h200.json."""
    return f"with 15 epochs{other} (docs/methods.md): {natural:.1f} natural / {pgd20:.1f} PGD-20"


CIFAR10 = (
    Recipe("standard-cifar10-resnet18", STANDARD, "no defence", "no attack", _short(91.9, 0.0)),
    Recipe(
        "madry-cifar10-resnet18",
        MADRY,
        "worst-case training (PGD-10)",
        "4.4 s an epoch on one H200",
        _short(75.8, 46.9),
    ),
    Recipe(
        "fat-cifar10-resnet18",
        FAT,
        "friendly training, tau 0 to 2",
        "2.6-3.6 s an epoch on one H200 (2.0 to 6.2 BPs)",
        # One seed, test set (n = 10,000), protocol dat: results/engine/fat-20-epochs-h200.json.
        "with --epochs 20 --lr one-cycle:0.2 --weight-decay 5e-4 and tau 0,1@40%,2@75%: 84.1 natural / 47.9 PGD-20",
    ),
    Recipe(
        "fast-cifar10-resnet18",
        FAST,
        "FAT in a minute and a half",
        "98 s on one H200 in all, 137 s with empty compile caches",
        # Three seeds, test set (n = 10,000), protocols dat and autoattack: results/engine/fast-recipe-h200.json.
        "86.5-86.7 natural / 50.7-51.2 PGD-20 / 48.5-48.8 C&W / 45.6-45.8 AutoAttack",
    ),
    Recipe(
        "fat-ema-cifar10-resnet18",
        FAT_EMA,
        "FAT, its weights averaged",
        "4.6 BPs an image",
        _short(82.3, 46.4, ", ema 0.99"),
    ),
    Recipe("fat-awp-cifar10-resnet18", FAT_AWP, "FAT, weights perturbed (AWP)", "4.7 BPs an image", _short(80.7, 46.7)),
    Recipe("trades-cifar10-resnet18", TRADES, "TRADES, beta 6", "10 BPs an image", _short(76.0, 47.9)),
    Recipe(
        "fat-trades-cifar10-resnet18",
        FAT_FOR_TRADES,
        "FAT for TRADES, tau 0 to 3",
        "5.9 BPs an image",
        _short(78.3, 47.6),
    ),
    Recipe("mart-cifar10-resnet18", MART, "MART, beta 6", "10 BPs an image", _short(70.2, 49.6)),
    Recipe(
        "fat-mart-cifar10-resnet18",
        FAT_FOR_MART,
        "FAT for MART, beta 6, tau 0 to 4",
        "5.2 BPs an image",
        _short(74.1, 51.8),
    ),
    Recipe("dat-cifar10-resnet18", DAT, "DAT, FOSC from 0.5 to 0", "4.8 BPs an image", _short(77.8, 48.1)),
    Recipe("cat-cifar10-resnet18", CAT, "CAT, PGD-1 to PGD-10", "1.3 BPs an image", _short(86.4, 35.1, ", patience 1")),
    Recipe("ates-cifar10-resnet18", ATES, "ATES, margin from 0 to 1", "8.1 BPs an image", _short(77.3, 48.5)),
    Recipe(
        "fat-by-loss-cifar10-resnet18",
        FAT_BY_LOSS,
        "friendly by definition, rho 0.5 nats",
        "4.8 BPs an image",
        _short(83.0, 44.3),
    ),
    Recipe(
        "fat-by-probability-cifar10-resnet18",
        FAT_BY_PROBABILITY,
        "friendly by definition, rho 0.2",
        "6.2 BPs an image",
        _short(81.1, 45.3),
    ),
    Recipe(
        "fat-paced-cifar10-resnet18",
        FAT_PACED,
        "FAT, tau a quarter of the mean BPs",
        "4.0 BPs an image",
        _short(83.6, 43.5),
    ),
    Recipe(
        "fat-patient-cifar10-resnet18",
        FAT_PATIENT,
        "FAT, tau grows as robustness stalls",
        "4.5 BPs an image",
        _short(83.8, 44.4, ", patience 2"),
    ),
)
