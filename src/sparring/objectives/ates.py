"""Adversarial training with early stopping (ATES; cited in paper Section 5 as found independently of FAT).

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i the first point of PGD-K where max_{j != y} p_j - p_y > lambda_t.

The paper says no more than that it exists, and its authors' abstract that the attack stops at a level of difficulty
which rises over training. The reading here: difficulty is the margin of probability by which the model is wrong, and
lambda_t is the schedule `attack.margin`, our own numbers. At lambda 0 it is FAT with tau = 0, at 1 Madry's training; it
differs from FAT in going on by confidence instead of by tau further steps. The start is random, and nothing is checked
after step K. It does not claim to be its authors' code.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.attacks import Found, margin_pgd
from sparring.objectives.base import Bout
from sparring.objectives.madry import MADRY


def to_the_margin(bout: Bout) -> Found:
    """PGD until the model is wrong by more than lambda_t. The engine's walk knows no such rule and is not used."""
    return margin_pgd(bout.model, bout.x, bout.y, margin=bout.setting.margin, **bout.numbers)


ATES = replace(MADRY, name="ates", search=to_the_margin, walks=False, reads=("attack.margin",))
