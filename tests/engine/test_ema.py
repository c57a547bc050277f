from __future__ import annotations

import torch
from torch import nn

from sparring.engine import WeightAverage


def made() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 1, bias=False), nn.BatchNorm1d(1))


def test_the_average_of_all_weights_so_far():
    model = made()
    average = WeightAverage(model, 0.75)
    for value in (1.0, 3.0, 7.0):
        with torch.no_grad():
            model[0].weight.fill_(value)
            model[1].running_mean.fill_(-value)
        average.move()
    # The newest counts 1/4, the one before 3/16, the first 9/64, of 37/64 in all.
    expected = (7 / 4 + 3 * 3 / 16 + 9 / 64) / (37 / 64)
    read = average.read()
    torch.testing.assert_close(read[0].weight, torch.full((1, 2), expected))
    torch.testing.assert_close(read[1].running_mean, torch.full((1,), -expected))
    assert not read.training and not read[0].weight.requires_grad
    assert torch.equal(model[0].weight, torch.full((1, 2), 7.0))


def test_constant_weights_are_their_own_average():
    model = made()
    average = WeightAverage(model, 0.999)
    for _ in range(3):
        average.move()
    torch.testing.assert_close(average.read()[0].weight, model[0].weight, rtol=1e-5, atol=0)


def test_counters_are_the_live_models():
    model = made()
    average = WeightAverage(model, 0.9)
    model(torch.rand(4, 2))
    average.move()
    assert average.read()[1].num_batches_tracked == 1


def test_it_continues_from_a_checkpoint():
    model = made()
    one, other = WeightAverage(model, 0.9), WeightAverage(model, 0.9)
    one.move()
    other.restore({name: tensor.clone() for name, tensor in one.state().items()})
    with torch.no_grad():
        model[0].weight.add_(1.0)
    one.move()
    other.move()
    assert torch.equal(one.read()[0].weight, other.read()[0].weight)


def test_a_weight_of_two_names_is_averaged_too():
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
