"""Robustness evaluation: protocols, a verdict per example, the worst case, and doubts about the numbers."""

from sparring.evaluation.evaluator import evaluate
from sparring.evaluation.protocols import PROTOCOLS, AutoAttackSuite, Part, PGDAttack, Protocol
from sparring.evaluation.result import AttackResult, Repeat, Result

__all__ = [
    "PROTOCOLS",
    "AttackResult",
    "AutoAttackSuite",
    "PGDAttack",
    "Part",
    "Protocol",
    "Repeat",
    "Result",
    "evaluate",
]
