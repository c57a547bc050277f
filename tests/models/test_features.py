"""Numbered layers: the right outputs, and no hooks left behind."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparring.errors import UserError
from sparring.models import build, layers, list_models, tap


def hooks(model: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "count"), [("tiny_cnn", 4), ("small_cnn", 8), ("resnet18", 18), ("wrn-40-4", 41), ("wrn-34-10", 35)]
)
def test_layers_are_modules_in_forward_order(name: str, count: int) -> None:
    with torch.device("meta"):
        model = build(name, num_classes=10).eval()
    names = layers(model)
    assert len(names) == len(set(names))
    assert len(names) == count
    fired: list[str] = []
    for layer in names:
        model.get_submodule(layer).register_forward_hook(lambda _m, _in, _out, layer=layer: fired.append(layer))
    model(torch.empty(2, 3, 32, 32, device="meta"))
    assert fired == names


def test_wrn_40_4_layers_of_the_paper() -> None:
    with torch.device("meta"):
        names = layers(build("wrn-40-4", num_classes=10))
    assert names[:5] == [
        "conv1",
        "block1.layer.0.conv1",
        "block1.layer.0.convShortcut",
        "block1.layer.0",
        "block1.layer.1.conv1",
    ]
    assert (names[37], names[39], names[40]) == ("block3.layer.4", "block3.layer.5", "fc")


@pytest.mark.parametrize("name", ["tiny_cnn", "small_cnn", "resnet18", "wrn-10-2"])
@pytest.mark.parametrize("training", [False, True])
def test_the_last_layer_is_the_logits_and_the_model_is_unchanged(name: str, training: bool) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=6, size=(16, 16)).train(training)
    x = torch.rand(3, 3, 16, 16)
    last = len(layers(model))
    torch.testing.assert_close(tap(model, last, x), model(x))
    assert all(module.training == training for module in model.modules())
    assert hooks(model) == 0


def test_small_cnn_taps_equal_a_hand_written_forward() -> None:
    torch.manual_seed(0)
    model = build("small_cnn", num_classes=4, size=(16, 16)).eval()
    x = torch.rand(2, 3, 16, 16)
    part = model.get_submodule
    first = part("batchnorm1_1")(part("block1_conv1")(x)).relu()
    outputs = tap(model, [8, 1, 6, 7], x)
    assert list(outputs) == [8, 1, 6, 7]
    torch.testing.assert_close(outputs[1], first)
    assert outputs[6].shape == (2, 196, 4, 4)  # before the last pooling
    seventh = part("fc1")(F.max_pool2d(outputs[6], 2).flatten(1)).relu()
    torch.testing.assert_close(outputs[7], seventh)
    torch.testing.assert_close(outputs[8], part("fc2")(seventh))


def test_resnet_taps_equal_a_hand_written_forward() -> None:
    torch.manual_seed(0)
    model = build("resnet18", num_classes=4, size=(8, 8)).eval()
    x = torch.rand(2, 3, 8, 8)
    part = model.get_submodule
    one = part("bn1")(part("conv1")(x)).relu()
    two = part("layer1.0.bn1")(part("layer1.0.conv1")(one)).relu()
    three = (part("layer1.0.bn2")(part("layer1.0.conv2")(two)) + one).relu()
    outputs = tap(model, [1, 2, 3, 17, 18], x)
    torch.testing.assert_close([outputs[1], outputs[2], outputs[3]], [one, two, three])
    torch.testing.assert_close(outputs[18], part("linear")(outputs[17].mean((2, 3))))


def test_wrn_taps_equal_a_hand_written_forward() -> None:
    torch.manual_seed(0)
    model = build("wrn-10-2", num_classes=4, size=(8, 8)).eval()
    x = torch.rand(2, 3, 8, 8)
    part = model.get_submodule
    one = part("conv1")(x)
    shared = part("block1.layer.0.bn1")(one).relu()
    two, three = part("block1.layer.0.conv1")(shared), part("block1.layer.0.convShortcut")(shared)
    four = three + part("block1.layer.0.conv2")(part("block1.layer.0.bn2")(two).relu())
    outputs = tap(model, [1, 2, 3, 4, 10, 11], x)
    torch.testing.assert_close([outputs[k] for k in (1, 2, 3, 4)], [one, two, three, four])
    torch.testing.assert_close(outputs[11], part("fc")(part("bn1")(outputs[10]).relu().mean((2, 3))))


def test_taps_carry_gradients_to_the_pixels() -> None:
    model = build("tiny_cnn", num_classes=4, channels=1, size=(8, 8)).eval()
    x = torch.rand(2, 1, 8, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(tap(model, 1, x).sum(), x)
    assert (gradient != 0).any()
    with torch.no_grad():
        assert not tap(model, 1, x).requires_grad


def test_hooks_are_removed_when_the_forward_fails() -> None:
    model = build("small_cnn", num_classes=4, size=(16, 16))
    with pytest.raises(RuntimeError):
        tap(model, [1, 2], torch.rand(2, 5, 16, 16))
    assert hooks(model) == 0


@pytest.mark.parametrize("layer", [0, -1, 9])
def test_a_layer_out_of_range_is_refused(layer: int) -> None:
    model = build("small_cnn", num_classes=4, size=(16, 16))
    with pytest.raises(UserError, match=f"must lie in 1..8, got {layer}"):
        tap(model, layer, torch.rand(1, 3, 16, 16))
    with pytest.raises(UserError, match=f"got {layer}"):
        tap(model, [1, layer], torch.rand(1, 3, 16, 16))
    assert hooks(model) == 0


def test_tap_works_on_a_compiled_model() -> None:
    model = build("tiny_cnn", num_classes=4, channels=1, size=(8, 8)).eval()
    x = torch.rand(2, 1, 8, 8)
    torch.testing.assert_close(tap(torch.compile(model, backend="eager"), 1, x), tap(model, 1, x))


def test_other_networks_are_refused_with_advice() -> None:
    with pytest.raises(UserError, match="forward hook"):
        layers(nn.Linear(2, 2))


def test_every_listed_network_numbers_its_layers() -> None:
    for name in list_models():
        with torch.device("meta"):
            assert layers(build(name, num_classes=10))
