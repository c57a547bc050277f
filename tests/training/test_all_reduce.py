"""The bucket of an update: its order does not depend on how a process holds its tensors."""

from __future__ import annotations

import torch
from torch import nn

from sparring.training.all_reduce import Mean
from sparring.training.distributed import World

CPU = torch.device("cpu")


class _Half(Mean):
    """The exchange of a process that has half of the images, without the other process; keeps the bucket."""

    def _reduce(self, values):
        self.sent = values.clone()


def network():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1), nn.Flatten(), nn.Linear(5, 2))


def exchanged(tensors):
    exchange = _Half(World(), CPU, network())
    exchange.begin(8, 16, torch.tensor(70.0), stop=False)
    given = [tensor.clone(memory_format=torch.preserve_format) for tensor in tensors]
    exchange(given)
    return given, exchange.sent, exchange.sums


def test_the_bucket_has_one_order_for_every_layout():
    torch.manual_seed(0)
    weights = [torch.randn_like(weight).to(torch.bfloat16).float() for weight in network().parameters()]
    last = [w.contiguous(memory_format=torch.channels_last) if w.dim() == 4 else w for w in weights]
    mixed = [w.to(torch.bfloat16) if w.dim() > 1 else w for w in last]
    buckets = []
    for tensors in (weights, last, mixed):
        given, sent, sums = exchanged(tensors)
        buckets.append(sent)
        assert sums.tolist() == [70.0, 0.0]
        for one, before, weight in zip(given, tensors, weights, strict=True):
            assert one.dtype == before.dtype and one.stride() == before.stride()
            assert torch.equal(one.float(), weight / 2)
    assert torch.equal(buckets[0], buckets[1]) and torch.equal(buckets[0], buckets[2])


def test_tensors_with_gaps_are_exchanged():
    torch.manual_seed(0)
    wide = torch.randn(4, 12)
    given = [wide[:, ::2]]
    exchange = _Half(World(), CPU, network())
    exchange.begin(8, 16, torch.tensor(0.0), stop=False)
    before = wide.clone()
    exchange.mean(given)
    assert torch.equal(wide[:, ::2], before[:, ::2] / 2) and torch.equal(wide[:, 1::2], before[:, 1::2])
