from __future__ import annotations

import torch
from torch import nn

from sparring.engine import WeightAverage


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))


def test_average_is_exponential_and_unbiased():
    model = made()
    average = WeightAverage(model, 0.75)
    for value in (1.0, 3.0, 7.0):
        with torch.no_grad():
            model[0].weight.fill_(value)
            model[1].running_mean.fill_(-value)
        average.move()
    # Weights 1/4 for the newest, 3/16 and 9/64 for the others; their sum is 37/64.
    expected = (7 / 4 + 3 * 3 / 16 + 9 / 64) / (37 / 64)
    read = average.read()
    torch.testing.assert_close(read[0].weight, torch.full((1, 2), expected))
    torch.testing.assert_close(read[1].running_mean, torch.full((1,), -expected))
    assert not read.training and not read[0].weight.requires_grad
    assert torch.equal(model[0].weight, torch.full((1, 2), 7.0))


def test_average_of_constant_weights_is_the_weights():
    model = made()
    average = WeightAverage(model, 0.999)
    for _ in range(3):
        average.move()
    torch.testing.assert_close(average.read()[0].weight, model[0].weight, rtol=1e-5, atol=0)


def test_counters_are_copied_from_the_model():
    model = made()
    average = WeightAverage(model, 0.9)
    model(torch.rand(4, 2))
    average.move()
    assert average.read()[1].num_batches_tracked == 1


def test_average_continues_from_saved_state():
    model = made()
    one, other = WeightAverage(model, 0.9), WeightAverage(model, 0.9)
    one.move()
    other.restore({name: tensor.clone() for name, tensor in one.state().items()})
    with torch.no_grad():
        model[0].weight.add_(1.0)
    one.move()
    other.move()
    assert torch.equal(one.read()[0].weight, other.read()[0].weight)


def test_tied_weight_is_averaged():
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    average = WeightAverage(model, 0.5)
    for value in (1.0, 4.0):
        with torch.no_grad():
            model[0].weight.fill_(value)
        average.move()
    read = average.read()
    assert read[0].weight is read[1].weight
    torch.testing.assert_close(read[1].weight, torch.full((2, 2), (4 / 2 + 1 / 4) / (3 / 4)))
