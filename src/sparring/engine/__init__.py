"""How a training step runs: the plain path, or folded networks, captured graphs and bf16. Knows no method."""

from sparring.engine.attack.runner import FastWalk
from sparring.engine.attack.split_batch import Network
from sparring.engine.cuda_graphs import on
from sparring.engine.ema import Average
from sparring.engine.select import Engine, Judged, Kind, prepare
from sparring.engine.update.step import FastUpdate, PlainUpdate, Update

__all__ = [
    "Average",
    "Engine",
    "FastUpdate",
    "FastWalk",
    "Judged",
    "Kind",
    "Network",
    "PlainUpdate",
    "Update",
    "on",
    "prepare",
]
