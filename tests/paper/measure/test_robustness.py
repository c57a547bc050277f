"""What a result says of its images: as many as the protocol takes, and AutoAttack where the protocol has it."""

from __future__ import annotations

import torch

from sparring.data import Dataset, Split
from sparring.evaluation.protocols import PROTOCOLS
from sparring.models import build
from sparring.paper.measure import robustness
from sparring.paper.specs import Robustness

CPU = torch.device("cpu")


def dataset(count: int) -> Dataset:
    """Random images of 10 classes."""
    torch.manual_seed(0)
    split = Split(torch.randint(256, (count, 1, 8, 8), dtype=torch.uint8), torch.arange(count) % 10)
    return Dataset("random", tuple("abcdefghij"), split, split, "random images")


def measured(what: Robustness, count: int, folder, limit: int | None = None):
    torch.manual_seed(0)
    model = build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
    same = {"device": CPU, "seed": 0, "limit": limit, "folder": folder, "about": {"which": "last"}, "progress": False}
    return robustness.measure(what, model, dataset(count), **same)


def test_a_protocols_own_number_of_images(tmp_path):
    assert PROTOCOLS["quick"].limit == 500
    found = measured(Robustness("quick"), 510, tmp_path / "all")
    assert (found["n"], found["attacks"]["pgd10"]["n"]) == (500, 500)
    found = measured(Robustness("quick"), 510, tmp_path / "few", limit=20)
    assert (found["n"], found["attacks"]["pgd10"]["n"]) == (20, 20)


def test_autoattack_of_a_protocol_is_at_its_radius(tmp_path):
    found = measured(Robustness("figure-twice"), 12, tmp_path)
    assert set(found["attacks"]) == {"natural", "pgd20", "cw30", "autoattack", "worst"}
    assert all(
        fact["n"] == 12 and fact["eps"] == 16 / 255 for name, fact in found["attacks"].items() if name != "natural"
    )
