"""Networks from pixels in [0, 1] to logits, by name; their numbered layers; their cost.

Must not know attacks, data or training.
"""

from sparring.models.features import layers, tap
from sparring.models.flops import count_parameters, forward_flops, seconds_on_a_cpu
from sparring.models.normalize import Normalize
from sparring.models.registry import build, describe, list_models

__all__ = [
    "Normalize",
    "build",
    "count_parameters",
    "describe",
    "forward_flops",
    "layers",
    "list_models",
    "seconds_on_a_cpu",
    "tap",
]
