"""Networks from pixels in [0, 1] to logits, by name; their numbered layers; their cost.

Must not know attacks, data or training.
"""

from sparring.models.features import layers, tap
from sparring.models.flops import count_parameters, forward_flops, seconds_on_a_cpu
from sparring.models.normalize import Normalize
from sparring.models.own import own_name
from sparring.models.probe import check_network
from sparring.models.registry import (
    build,
    built_in,
    describe,
    list_models,
    name_model,
    register_model,
    with_normalisation,
)
from sparring.models.timm_networks import has_weights

__all__ = [
    "Normalize",
    "build",
    "built_in",
    "check_network",
    "count_parameters",
    "describe",
    "forward_flops",
    "has_weights",
    "layers",
    "list_models",
    "name_model",
    "own_name",
    "register_model",
    "seconds_on_a_cpu",
    "tap",
    "with_normalisation",
]
