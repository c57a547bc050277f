"""How fast training is: steps, epochs, start-up, runs side by side, what hand-written parts buy, the plain paths."""

from sparring.bench.measure import Benchmark, BenchmarkOptions
from sparring.bench.parts import AblationOptions, ablation
from sparring.bench.scaling import in_words as scaling_in_words
from sparring.bench.scaling import measure as measure_scaling
from sparring.bench.start_up import start_in_words

__all__ = [
    "AblationOptions",
    "Benchmark",
    "BenchmarkOptions",
    "ablation",
    "measure_scaling",
    "scaling_in_words",
    "start_in_words",
]
