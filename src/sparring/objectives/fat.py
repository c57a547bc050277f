"""Friendly adversarial training (paper Sections 4.1, 5, Appendices D, E): the originals, on data of early-stopped PGD.

min_f  1/n sum_i  loss(f(x~_i), y_i)  with x~_i from PGD-K-tau instead of PGD-K. At tau = K each is its original.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.objectives.base import friendly
from sparring.objectives.madry import MADRY
from sparring.objectives.mart import MART
from sparring.objectives.trades import TRADES

FAT = replace(MADRY, name="fat", search=friendly, friendly=True, reads=("attack.tau",))
FAT_FOR_TRADES = replace(TRADES, name="fat-trades", search=friendly, friendly=True, reads=("attack.tau", "beta"))
FAT_FOR_MART = replace(MART, name="fat-mart", search=friendly, friendly=True, reads=("attack.tau", "beta"))
