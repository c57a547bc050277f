"""Digits: every objective on scikit-learn's 8x8 digits, for a first look on a CPU.

The radius is large (0.3 of the pixel range), because that is where worst-case training begins to cost accuracy and the
difference between the methods can be seen within seconds.
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
from sparring.schedules import OneCycle, parse
from sparring.training.config import Config

EPS = 0.3

MADRY = Config(
    objective=Madry(eps=EPS, step_size="eps/4", steps=10, start="uniform"),
    data="digits",
    model="tiny_cnn",
    epochs=15,
    batch_size=64,
    lr=OneCycle(0.1),
    weight_decay=5e-4,
    validation=120,
    validation_eps="eps",
)
ATTACK: dict[str, Any] = {"eps": EPS, "step_size": "eps/4", "steps": 10, "start": "uniform"}
STANDARD = replace(MADRY, objective=Standard(), validation_eps=EPS)
FAT = replace(MADRY, objective=objectives.FAT(**ATTACK, tau=2))
# At 0.3 the regulariser of TRADES and MART overwhelms this small network; at 0.15 it learns.
NEARER: dict[str, Any] = {"eps": 0.15, "step_size": "eps/4", "steps": 10, "start": "normal"}
TRADES = replace(MADRY, objective=objectives.TRADES(**NEARER, beta=6.0), lr=OneCycle(0.05))
MART = replace(TRADES, objective=objectives.MART(**NEARER, beta=6.0))
FAT_FOR_TRADES = replace(TRADES, objective=FATForTRADES(**NEARER, beta=6.0, tau="0,1@35%,2@60%"))
FAT_FOR_MART = replace(TRADES, objective=FATForMART(**NEARER, beta=6.0, tau="0,1@35%,2@60%"))
DAT = replace(MADRY, objective=objectives.DAT(**ATTACK, fosc="ramp:0.5..0@83.3%"))
# At a patience of 1 PGD gets a step more after every epoch that did not improve; 45 epochs are enough to reach 10.
CAT = replace(MADRY, objective=objectives.CAT(**ATTACK, patience=1), epochs=45)
ATES = replace(MADRY, objective=objectives.ATES(**ATTACK, margin="ramp:0..1@100%"))
# Appendix B: what bounds the search is K * alpha, here 0.3. With longer steps C&W breaks the model.
NO_PROJECTION = replace(
    MADRY, objective=objectives.FAT(eps=EPS, step_size="eps/10", steps=10, start=None, project=False, tau=3)
)
FAT_BY_LOSS = replace(MADRY, objective=FATByLoss(**ATTACK, rho=1.0))
FAT_BY_PROBABILITY = replace(MADRY, objective=FATByProbability(**ATTACK, rho=0.3))
FAT_PACED = replace(MADRY, objective=FATPaced(**ATTACK, share=0.25))
FAT_PATIENT = replace(MADRY, objective=FATPatient(**ATTACK, patience=1))

# Options of any objective: an average of the weights over about an epoch (21 steps), and perturbed weights.
FAT_EMA = replace(FAT, ema=0.95)
FAT_AWP = replace(FAT, awp=parse("0,0.005@10%"))

# How cost and expectation were measured: results/digits-recipes.json. The expectation is natural / PGD-20 in per cent
# at the radius of training.
MEASURED = (
    "on the 450 test images, the range over seeds 0-2, each trained with 1 thread of an x86_64 CPU. Another CPU or "
    "number of threads rounds sums in another order and gives another run, as another seed does: of the same spread, "
    "and not always within the range of these three."
)
DIGITS = (
    Recipe("standard-digits", STANDARD, "no defence", "2 s", "99.3 / 0.0-0.2 at eps 0.3"),
    Recipe("madry-digits", MADRY, "worst-case training (PGD-10)", "6 s", "93.6-94.9 / 53.8-57.6 at eps 0.3"),
    Recipe("fat-digits", FAT, "friendly training (PGD-10-2)", "6 s", "95.8-97.6 / 55.6-57.1 at eps 0.3"),
    Recipe("trades-digits", TRADES, "TRADES, beta 6", "8 s", "97.1 / 83.6-83.8 at eps 0.15"),
    Recipe("fat-trades-digits", FAT_FOR_TRADES, "FAT for TRADES, beta 6", "7 s", "94.4-95.8 / 70.7-76.9 at eps 0.15"),
    Recipe("mart-digits", MART, "MART, beta 6", "7 s", "96.0-98.4 / 79.3-84.7 at eps 0.15"),
    Recipe("fat-mart-digits", FAT_FOR_MART, "FAT for MART, beta 6", "6 s", "99.3-99.8 / 78.9-82.4 at eps 0.15"),
    Recipe("fat-ema-digits", FAT_EMA, "FAT, its weights averaged", "5 s", "95.8-97.8 / 55.3-57.1 at eps 0.3"),
    Recipe("fat-awp-digits", FAT_AWP, "FAT, weights perturbed (AWP)", "6 s", "95.6-97.1 / 53.8-55.3 at eps 0.3"),
    Recipe("dat-digits", DAT, "DAT, FOSC from 0.5 to 0", "6 s", "93.8-94.7 / 54.0-58.0 at eps 0.3"),
    Recipe("cat-digits", CAT, "CAT, k steps from 1 to 10, 45 epochs", "12 s", "98.0-98.7 / 59.3-63.8 at eps 0.3"),
    Recipe("ates-digits", ATES, "ATES, margin from 0 to 1", "6 s", "95.3-96.0 / 54.4-58.9 at eps 0.3"),
    Recipe(
        "no-projection-digits",
        NO_PROJECTION,
        "FAT, tau 3, without projection",
        "6 s",
        "96.9-97.1 / 46.7-50.0 at eps 0.3",
    ),
    Recipe(
        "fat-by-loss-digits",
        FAT_BY_LOSS,
        "friendly by definition, rho 1 nat",
        "6 s",
        "96.4-96.9 / 50.2-53.8 at eps 0.3",
    ),
    Recipe(
        "fat-by-probability-digits",
        FAT_BY_PROBABILITY,
        "friendly by definition, rho 0.3",
        "6 s",
        "96.7-97.6 / 48.4-54.4 at eps 0.3",
    ),
    Recipe(
        "fat-paced-digits", FAT_PACED, "FAT, tau a quarter of the mean BPs", "5 s", "96.2-98.0 / 52.7-54.9 at eps 0.3"
    ),
    Recipe(
        "fat-patient-digits",
        FAT_PATIENT,
        "FAT, tau grows as robustness stalls",
        "5 s",
        "95.6-97.8 / 56.0-58.2 at eps 0.3",
    ),
)
