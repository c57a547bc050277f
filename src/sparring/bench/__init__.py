"""How fast training is, measured: steps, epochs, start-up, runs side by side; the plain ways in the same run."""

from sparring.bench.measure import Benchmark, Options
from sparring.bench.start_up import told_start

__all__ = ["Benchmark", "Options", "told_start"]
