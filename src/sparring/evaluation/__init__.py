"""How well a model withstands attack: protocols, verdicts per example, the worst case, and doubts about the numbers."""

from sparring.evaluation.evaluator import evaluate
from sparring.evaluation.protocols import PROTOCOLS, Climb, Ensemble, Part, Protocol
from sparring.evaluation.result import Record, Result, Run

__all__ = ["PROTOCOLS", "Climb", "Ensemble", "Part", "Protocol", "Record", "Result", "Run", "evaluate"]
