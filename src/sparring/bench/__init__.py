"""How fast training is: steps, epochs, start-up, runs side by side, what hand-written parts buy, the plain paths."""

from sparring.bench.measure import Benchmark, BenchmarkOptions
from sparring.bench.parts import AblationOptions, ablation
from sparring.bench.start_up import start_in_words

__all__ = ["AblationOptions", "Benchmark", "BenchmarkOptions", "ablation", "start_in_words"]
