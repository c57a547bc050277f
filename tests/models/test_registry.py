"""Names, and errors that end in the fix."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparring.errors import UserError
from sparring.models import Normalize, build, describe, list_models
from sparring.models.wide_resnet import blocks_per_stage


def test_listed_names_build_and_describe_themselves() -> None:
    names = list_models()
    wide = ["wrn-28-10-silu", "wrn-32-10", "wrn-34-10", "wrn-58-10", "wrn-40-4"]
    assert names == ["tiny_cnn", "small_cnn", "resnet18", "preact_resnet18", *wide]
    for name in names:
        assert describe(name)
        with torch.device("meta"):
            build(name, num_classes=10)


def test_any_wrn_can_be_built_by_name() -> None:
    with torch.device("meta"):
        assert build("wrn-28-10", num_classes=10)(torch.empty(2, 3, 32, 32, device="meta")).shape == (2, 10)
    assert "4 blocks" in describe("wrn-28-10")


@pytest.mark.parametrize(
    ("depth", "n"), [(8, 1), (10, 1), (16, 2), (28, 4), (32, 5), (34, 5), (40, 6), (58, 9), (56, 9)]
)
def test_both_depth_conventions_of_a_wrn(depth: int, n: int) -> None:
    assert blocks_per_stage(depth) == n


@pytest.mark.parametrize(
    ("depth", "nearest"), [(0, "8."), (4, "8."), (7, "8."), (9, "8 or 10."), (33, "32 or 34."), (36, "34 or 38.")]
)
def test_a_wrong_depth_names_the_nearest(depth: int, nearest: str) -> None:
    with pytest.raises(UserError, match=f"got {depth}. The nearest: {nearest}"):
        build(f"wrn-{depth}-10", num_classes=10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"name": "resnet-18"}, "Did you mean 'resnet18'"),
        ({"name": "WRN-34-10"}, "Did you mean 'wrn-34-10'"),
        ({"name": "wrn-34"}, "wrn-D-W"),
        ({"name": "wrn-34-0"}, "width"),
        ({"name": "wrn-60004-1"}, "a depth of at most 1002 and a width of at most 64, got 'wrn-60004-1'"),
        ({"name": "wrn-34-65"}, "a width of at most 64"),
        ({"name": f"wrn-{'9' * 5000}-1"}, "unknown model"),
        ({"size": (10**9, 10**9)}, "must be at most 16,384"),
        ({"num_classes": 1}, "num_classes must be a whole number of at least 2, got 1"),
        ({"num_classes": 10.0}, "num_classes"),
        ({"num_classes": True}, "num_classes"),
        ({"channels": 0}, "channels must be a whole number of at least 1, got 0"),
        ({"size": (7, 32)}, "'resnet18' needs images of at least 8x8, got 7x32.*'tiny_cnn'"),
        ({"size": (32, 3)}, "needs images of at least 8x8, got 32x3. Enlarge the images[.]"),
        ({"name": "small_cnn", "size": (8, 7)}, "at least 8x8"),
        ({"name": "tiny_cnn", "size": (3, 8)}, "at least 4x4"),
        ({"name": "wrn-16-2", "size": (4, 3)}, "at least 4x4"),
        ({"size": (32,)}, "height, width"),
        ({"size": (32.0, 32)}, "height"),
        ({"normalize": ([0.5], [0.5])}, "3 means and stds, one per channel, got 1"),
        ({"normalize": ([0.5] * 3, [0.5])}, "one mean and one std per channel, got 3 and 1"),
        ({"normalize": ([0.5] * 3, [0.5, 0.5, 0.0])}, "above 0"),
        ({"normalize": ([0.5] * 3, [0.5, 0.5, float("inf")])}, "finite"),
        ({"normalize": ([0.5, 0.5, float("nan")], [0.5] * 3)}, "finite"),
        ({"normalize": ([0.5] * 3,)}, "mean, std"),
    ],
)
def test_errors_say_what_to_do(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        build(**{"name": "resnet18", "num_classes": 10, **given})


def test_normalisation_refuses_images_of_other_channels() -> None:
    with pytest.raises(UserError, match="normalises 3 channels, but the images have 1"):
        Normalize([0.5] * 3, [0.5] * 3)(torch.rand(2, 1, 8, 8))
    with pytest.raises(UserError, match="one mean and one std"):
        Normalize([], [])
