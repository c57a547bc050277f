"""The short scale of tables and figures: a run that keeps the comparison and costs minutes on one H200.

Twice the paper's batch: on a GPU an epoch of batch 256 takes four fifths of the time (docs/performance.md), because
small active sets are paid for half as often. Where the paper trains at 0.1, the learning rate makes one cycle: thirty
epochs of its steps, doubled with the batch, are over before Madry has got far (docs/LOG.md, sixth session). Where it
trains at 0.01, because larger radii ask for it, its own steps are kept.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.schedules import OneCycle, Piecewise
from sparring.training.config import Config

BATCH = 256
TABLE_EPOCHS = 30
FIGURE_EPOCHS = 20
PEAK = 0.3  # learning rate; with the weight decay: README's table of methods, where every method trains with both
WEIGHT_DECAY = 5e-4
CYCLE = f"one cycle to a learning rate of {PEAK}, weight decay {WEIGHT_DECAY:g}, batch {BATCH}"
STEPS = f"the paper's learning rates in shares, doubled with the batch ({BATCH})"


def one_cycle(config: Config, epochs: int) -> Config:
    """The same over so many epochs of one cycle. What the method itself schedules (tau, ...) keeps its shares."""
    return replace(config, epochs=epochs, batch_size=BATCH, lr=OneCycle(PEAK), weight_decay=WEIGHT_DECAY)


def shorter(config: Config, epochs: int) -> Config:
    """The same over so many epochs, in batches of 256; the learning rate grows with the batch."""
    assert isinstance(config.lr, Piecewise)  # as all of the paper's are
    factor = BATCH / config.batch_size
    lr = Piecewise(config.lr.first * factor, tuple((start, value * factor) for start, value in config.lr.pieces))
    return replace(config, epochs=epochs, batch_size=BATCH, lr=lr)
