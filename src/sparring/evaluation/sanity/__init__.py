"""Sanity checks: signs that a robustness number is misleading, and a page on each of them."""

from sparring.evaluation.sanity.measure import Doubt, doubts

__all__ = ["Doubt", "doubts"]
