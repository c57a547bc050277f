"""Digits: every objective on scikit-learn's 8x8 digits, for a first look on a CPU.

The radius is large (0.3 of the pixel range), because that is where worst-case training begins to cost accuracy and the
difference between the methods can be seen within seconds.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.config import Config
from sparring.objectives import Attack
from sparring.recipes.recipe import Recipe
from sparring.schedules import OneCycle, constant, parse

EPS = 0.3

MADRY = Config(
    objective="madry",
    data="digits",
    model="tiny_cnn",
    attack=Attack(eps=constant(EPS), step_size=EPS / 4, steps=10, start="uniform"),
    epochs=15,
    batch_size=64,
    lr=OneCycle(0.1),
    weight_decay=5e-4,
    validation=120,
    validation_eps=EPS,
)
STANDARD = replace(MADRY, objective="standard")
FAT = replace(MADRY, objective="fat", attack=replace(MADRY.attack, tau=constant(2)))
# At 0.3 the regulariser of TRADES and MART overwhelms this small network; at 0.15 it learns.
TRADES = replace(
    MADRY,
    objective="trades",
    beta=6.0,
    attack=replace(MADRY.attack, eps=constant(0.15), step_size=0.15 / 4, start="normal"),
    lr=OneCycle(0.05),
    validation_eps=0.15,
)
MART = replace(TRADES, objective="mart")
FAT_FOR_TRADES = replace(TRADES, objective="fat-trades", attack=replace(TRADES.attack, tau=parse("0,1@35%,2@60%")))
FAT_FOR_MART = replace(MART, objective="fat-mart", attack=replace(MART.attack, tau=parse("0,1@35%,2@60%")))

_COST = "under a minute on 2 CPU cores"
DIGITS = (
    Recipe("standard-digits", STANDARD, "no defence", _COST, "high natural accuracy, none under attack"),
    Recipe("madry-digits", MADRY, "worst-case training (PGD-10)", _COST, ""),
    Recipe("fat-digits", FAT, "friendly training (PGD-10-2)", _COST, ""),
    Recipe("trades-digits", TRADES, "TRADES, beta 6", _COST, ""),
    Recipe("fat-trades-digits", FAT_FOR_TRADES, "FAT for TRADES, beta 6", _COST, ""),
    Recipe("mart-digits", MART, "MART, beta 6", _COST, ""),
    Recipe("fat-mart-digits", FAT_FOR_MART, "FAT for MART, beta 6", _COST, ""),
)
