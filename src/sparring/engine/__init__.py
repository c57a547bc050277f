"""How a training step runs: the plain path, or folded networks, captured graphs and bf16. Knows no method."""

from sparring.engine.cuda_graphs import on
from sparring.engine.deterministic import deterministic
from sparring.engine.ema import WeightAverage
from sparring.engine.plain import PlainUpdate
from sparring.engine.select import PARTS, EngineKind, prepare
from sparring.engine.training_engine import Engine, Judged
from sparring.engine.update.step import FastUpdate, Update

__all__ = [
    "PARTS",
    "Engine",
    "EngineKind",
    "FastUpdate",
    "Judged",
    "PlainUpdate",
    "Update",
    "WeightAverage",
    "deterministic",
    "on",
    "prepare",
]
