"""Friendly adversarial training by its definition (paper Section 3.1, Appendix A), without tau.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with  x~_i = argmin_{x~ in ball} CE(f(x~), y_i)  subject to  margin(x~) >= rho

By loss value (case 1) the margin is CE(f(x~), y) - min_k CE(f(x~), k), by class probability (case 2) max_k p_k - p_y.
rho is the schedule `attack.rho`. PGD-K-tau approximates it by stopping early; here a point that was right is carried
onto the margin, of the network that gradients are taken from: with `precision` bf16 the model may see a little less.

Chosen where the definition leaves it open, or costs too much. A point that meets the margin where the search begins
stays there, as in PGD-K-0, though its loss is not the least: leading it downhill (`attack.downhill`) is nearer to the
definition, costs steps, and did not pay (docs/LOG.md). Where no point seen meets the margin, wrong by less or not at
all, the constraint cannot be met and the data are PGD-K's, the nearest to it.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.attacks import Found, friendliest_pgd
from sparring.attacks.boundary import MOST_RHO, By
from sparring.objectives.base import Bout
from sparring.objectives.madry import MADRY


def by_loss(bout: Bout) -> Found:
    """Case 1."""
    return _by("loss", bout)


def by_probability(bout: Bout) -> Found:
    """Case 2."""
    return _by("probability", bout)


def _by(margin: By, bout: Bout) -> Found:
    """The engine's walk keeps no last point but one and is not used."""
    s = bout.setting
    return friendliest_pgd(bout.model, bout.x, bout.y, rho=s.rho, by=margin, downhill=s.downhill, **bout.numbers)


FAT_BY_LOSS = replace(MADRY, name="fat-by-loss", search=by_loss, walks=False, reads=("attack.rho", "attack.downhill"))
FAT_BY_PROBABILITY = replace(
    FAT_BY_LOSS, name="fat-by-probability", search=by_probability, rho_below=MOST_RHO["probability"]
)
