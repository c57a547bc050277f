"""The short scale of tables and figures: a run that keeps the comparison and costs minutes on one H200.

The paper's schedules in shares of fewer epochs, and twice its batch at twice its learning rate: on a GPU an epoch of
batch 256 takes four fifths of the time (docs/performance.md), because small active sets are paid for half as often.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.config import Config
from sparring.schedules import Piecewise

BATCH = 256
TABLE_EPOCHS = 30
FIGURE_EPOCHS = 20


def shorter(config: Config, epochs: int) -> Config:
    """The same over so many epochs, in batches of 256; the learning rate grows with the batch."""
    assert isinstance(config.lr, Piecewise)  # as all of the paper's are
    factor = BATCH / config.batch_size
    lr = Piecewise(config.lr.first * factor, tuple((start, value * factor) for start, value in config.lr.pieces))
    return replace(config, epochs=epochs, batch_size=BATCH, lr=lr)
