"""Names and shapes identify the network: architecture, classes, channels, image size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparring import models
from sparring.weights import identify
from sparring.weights.identify import Identified


def tensors(name: str, **described: object) -> dict[str, Tensor]:
    with torch.device("meta"):
        return models.build(name, **{"num_classes": 10, **described}).state_dict()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*models.list_models(), "wrn-28-10", "wrn-10-1", "wrn-70-16"])
@pytest.mark.parametrize("num_classes", [2, 100])
def test_every_architecture_is_identified(name: str, num_classes: int) -> None:
    there = tensors(name, num_classes=num_classes, channels=1)
    found = identify.name_of(there)
    # One network has two names, and an activation leaves no trace in the tensors.
    assert found == ("wrn-34-10" if name == "wrn-32-10" else name.removesuffix("-silu"))
    network = identify.read_off(found, there)
    assert (network.num_classes, network.channels) == (num_classes, 1)
    assert identify.fits(there, network.shapes())


@pytest.mark.parametrize(("name", "size"), [("tiny_cnn", 4), ("tiny_cnn", 50), ("small_cnn", 8), ("small_cnn", 90)])
def test_the_image_size_is_identified(name: str, size: int) -> None:
    there = tensors(name, size=(size, size))
    assert identify.fits(there, identify.read_off(name, there).shapes())


@pytest.mark.parametrize("size", [8, 64])
def test_the_size_is_the_nearest_where_none_fits(size: int) -> None:
    there = tensors("tiny_cnn", size=(size, size))
    del there["fc.bias"]
    shapes = identify.read_off("tiny_cnn", there | {"odd": torch.ones(1)}).shapes()
    assert identify.differences(there, shapes) == "missing: fc.bias."


def test_batch_counters_and_normalisation_do_not_matter() -> None:
    there = tensors("resnet18", normalize=([0.5] * 3, [0.2] * 3))
    assert identify.name_of({k: v for k, v in there.items() if not k.endswith("num_batches_tracked")}) == "resnet18"


def test_differences_are_named_and_counted() -> None:
    there = tensors("tiny_cnn", size=(8, 8))
    shapes = Identified("tiny_cnn", num_classes=5, size=(8, 8)).shapes()
    n = shapes["fc.weight"][1]
    assert identify.differences(there, shapes) == (
        f"misshaped: fc.weight (10, {n}) instead of (5, {n}), fc.bias (10,) instead of (5,)."
    )
    del there["conv1.weight"]
    assert "missing: conv1.weight" in identify.differences({**there, "odd": torch.ones(1)}, shapes)
    assert "unexpected: odd" in identify.differences({**there, "odd": torch.ones(1)}, shapes)
    assert identify.differences({}, shapes).startswith("missing: conv1.weight, bn1.weight, bn1.bias and ")


def test_the_nearest_architecture_is_named() -> None:
    there = tensors("resnet18")
    there["layer3.2.conv1.weight"] = torch.ones(1)
    assert identify.name_of(there) is None
    assert identify.nearest(there)[0] == "resnet18"
    assert "nearest architecture is 'resnet18', with 99% of the keys in common" in identify.advice(there)


def test_facts_are_the_arguments_of_build() -> None:
    facts = Identified("resnet18", 7, 3, (32, 32), ([0.5] * 3, [0.2] * 3)).facts()
    assert facts == {
        "name": "resnet18",
        "num_classes": 7,
        "channels": 3,
        "size": [32, 32],
        "normalize": [[0.5] * 3, [0.2] * 3],
    }
