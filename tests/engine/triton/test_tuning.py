"""Tuned numbers: those of the H200 are fixed, and every other GPU gets numbers that are correct and follow its size."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparring.engine.triton import tuning


def test_the_numbers_of_the_h200():
    """Measured, results/engine/tuning-*: a change here changes the speed on that GPU."""
    h200 = tuning.TUNED["NVIDIA H200"]
    assert h200.cuts == {32: (16, 16), 56: (32, 24), 64: (32, 32), 80: (40, 40), 112: (96, 16), 128: (96, 32)}
    assert (h200.processors, h200.bucket) == (132, 16)
    norm, conv, first = h200.batch_norm, h200.conv, h200.first_layer
    assert (norm.channels, norm.rows, norm.rows_back, norm.programs, norm.tile, norm.parts, norm.stages) == (
        *(32, 128, 32, 264, 4096, 64, 4),
    )
    assert (first.places, first.pixels, first.large_from) == (128, 256, 45_000)
    assert (conv.large, conv.medium, conv.medium_shared, conv.tall) == ((792, 1000), (160, 448), 264, 480)
    assert (conv.tall_resident, conv.small_resident, conv.shared_long, conv.shared_short) == (396, 528, 256, 160)
    assert conv.cudnn_forward == ((36, 512), (18, 20_000), (0, 100_000)) and conv.cudnn_back_strided == ()
    assert conv.cudnn_forward_strided == ((18, 384),) and conv.cudnn_back == ((36, 512),)


@pytest.mark.parametrize(("name", "processors"), [("NVIDIA A100", 108), ("NVIDIA GeForce RTX 2060", 30), ("X", 512)])
def test_another_gpu_has_numbers_of_its_size(name, processors, monkeypatch):
    found = SimpleNamespace(name=name, multi_processor_count=processors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    made = tuning.of.__wrapped__(torch.device("cuda:0"))
    assert made.processors == processors and made.batch_norm.programs == 2 * processors and not made.cuts
    assert made.conv.cudnn_forward == made.conv.cudnn_back == ((0, 0),)  # always cuDNN's
    # conv.py has 256 counters, one for each of the programs that share sums.
    assert max(made.conv.shared_long, made.conv.shared_short, made.conv.medium_shared) <= 512
    assert min(*made.conv.large, *made.conv.medium, made.conv.tall, made.conv.small_resident) >= 1


def test_the_h200_is_known_by_name(monkeypatch):
    found = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    assert tuning.of.__wrapped__(torch.device("cuda:0")) is tuning.TUNED["NVIDIA H200"]


def test_cuts_are_cuts():
    for tuned in tuning.TUNED.values():
        assert all(sum(cut) == size and len(cut) > 1 and min(cut) > 0 for size, cut in tuned.cuts.items())
