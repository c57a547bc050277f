"""Dynamic adversarial training (DAT; paper Section 5.3, Table 1): CE on adversarial data of a strength that grows.

min_f  1/n sum_i  CE(f(x~_i), y_i)  with x~_i the first point of PGD-K where FOSC <= c_t = max(0, c_max (1 - t/T')).

The schedule is `attack.fosc`, a ramp from c_max to 0 over the share T' of the run. Chosen where the paper is brief: t
counts from 0 and moves within an epoch too; the start is random, as Madry's; nothing is checked after step K.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.attacks import Found, fosc_pgd
from sparring.objectives.base import Bout
from sparring.objectives.madry import MADRY


def to_the_criterion(bout: Bout) -> Found:
    """PGD until FOSC <= c_t. The engine's walk knows no such rule and is not used."""
    return fosc_pgd(bout.model, bout.x, bout.y, criterion=bout.setting.fosc, **bout.numbers)


DAT = replace(MADRY, name="dat", search=to_the_criterion, walks=False, reads=("attack.fosc",))
