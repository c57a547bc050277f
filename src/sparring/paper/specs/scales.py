"""The lite scale of tables and figures: runs that keep the comparison and take minutes on one H200.

Batches are twice the paper's: an epoch at batch 256 takes four fifths of the time on a GPU, because kernels run half as
often on small active sets. Where the paper trains at a learning rate of 0.1, lite uses one cycle: 30 epochs of the
paper's step schedule, doubled with the batch, are too short for Madry. Where the paper trains at 0.01, for larger
radii, lite keeps its steps.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.schedules import OneCycle, Piecewise
from sparring.training.config import Config

BATCH = 256
TABLE_EPOCHS = 30
FIGURE_EPOCHS = 20
PEAK = 0.3  # learning rate; the table of methods is trained with the same peak and weight decay
WEIGHT_DECAY = 5e-4
CYCLE = f"one cycle to a learning rate of {PEAK}, weight decay {WEIGHT_DECAY:g}, batch {BATCH}"
STEPS = f"the paper's learning rate steps at the same fractions of training, doubled with the batch ({BATCH})"


def one_cycle(config: Config, epochs: int) -> Config:
    """The same run over `epochs` with a one-cycle learning rate. Schedules of the method (tau) keep their fractions."""
    return replace(config, epochs=epochs, batch_size=BATCH, lr=OneCycle(PEAK), weight_decay=WEIGHT_DECAY)


def shorter(config: Config, epochs: int) -> Config:
    """The same run over `epochs` in batches of 256, with the learning rate scaled by the batch size."""
    assert isinstance(config.lr, Piecewise)  # as in all of the paper's runs
    factor = BATCH / config.batch_size
    lr = Piecewise(config.lr.first * factor, tuple((start, value * factor) for start, value in config.lr.pieces))
    return replace(config, epochs=epochs, batch_size=BATCH, lr=lr)
