"""`evaluate(model, data)`: every kind of data gives the verdicts of `evaluate(model, x, y)`."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sparring
from sparring import models
from sparring.data import load
from sparring.errors import UserError


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))


def test_every_kind_gives_the_same_verdicts(model):
    data = load("digits")
    x, y = data.test.x[:24], data.test.y[:24]
    how = {"protocol": "quick", "limit": 24, "doubts": False}
    expected = sparring.evaluate(model, x, y, **how).worst_case.correct
    floats = x.float() / 255
    for given in (
        (x, y),
        (floats, y),
        (x.numpy(), y.numpy()),
        (x.permute(0, 2, 3, 1).numpy(), y.tolist()),
        TensorDataset(x, y),
        DataLoader(TensorDataset(floats, y), batch_size=9),
        data.test,
        data,
        "digits",
    ):
        assert torch.equal(sparring.evaluate(model, given, **how).worst_case.correct, expected), type(given)
    arrays = sparring.evaluate(model, floats.numpy(), y.numpy(), **how)
    assert torch.equal(arrays.worst_case.correct, expected)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda x, y: (x,), "there are no labels"),
        (lambda x, y: (x, "quick"), "looks like a protocol. Write evaluate.model, data, protocol="),
        (lambda x, y: (DataLoader(TensorDataset(x, y)), y), "Give it alone: evaluate.model, loader."),
        (lambda x, y: ((x.numpy() * 1.0, y.numpy()),), "Divide by 255"),
        (lambda x, y: (x.numpy(), y.numpy()[:-1]), "images and 11 labels"),
        (lambda x, y: (((x, y), (x, y)),), "Give the test part"),
        (lambda x, y: ("digit",), "Did you mean 'digits'"),
        (lambda x, y: (3,), "data is a int"),
    ],
)
def test_bad_input_is_one_line(model, make, says):
    test = load("digits").test
    with pytest.raises(UserError, match=says) as caught:
        sparring.evaluate(model, *make(test.x[:12], test.y[:12]), doubts=False)
    assert "\n" not in str(caught.value)


class WithView(nn.Module):
    """Flattens as old code does, which takes no channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(1, 4, 3, padding=1), nn.Linear(4 * 64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).view(len(x), -1))


def test_grey_images_of_any_strides_are_for_a_network_that_uses_view():
    test = load("digits").test
    x, y = test.x[:12], test.y[:12]
    strided = torch.from_numpy(x.numpy().reshape(12, 8, 8, 1).transpose(0, 3, 1, 2))
    assert strided.stride() == (64, 1, 8, 1)
    how = {"protocol": "quick", "eps": 0.1, "doubts": False}
    found = [sparring.evaluate(WithView(), given, y, **how)["natural"].correct for given in (strided, strided / 255)]
    assert all(len(correct) == 12 for correct in found)
