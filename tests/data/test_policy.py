"""Augmentation texts, and what each part does to images."""

from __future__ import annotations

import pytest
import torch

from sparring.data import Split, batches, batching, training_batches
from sparring.data.boxes import CutMix, Cutout, Erasing
from sparring.data.policy import check_size, draw, mixes_labels, parse
from sparring.data.warps import Jitter, ResizedCrop
from sparring.errors import UserError

TEXTS = [
    "crop-flip+cutout:3",
    "crop:2+erase:0.5",
    "resized-crop:0.25+flip",
    "jitter:0.4",
    "cutmix:1.0",
    "crop-flip+jitter:0.2+cutout:2+cutmix:0.5",
]


@pytest.fixture
def split():
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randint(0, 256, (37, 3, 6, 7), dtype=torch.uint8, generator=generator), torch.arange(37))


def epoch(split, text, **how):
    return list(training_batches(split, 8, seed=5, epoch=3, augment=text, **how))


def same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("text", TEXTS)
def test_batch_k_is_the_same_wherever_the_epoch_starts_and_however_many_at_once(split, text, monkeypatch):
    whole = epoch(split, text)
    for at_once in (1, 2, 100):
        monkeypatch.setattr(batching, "_batches_at_once", lambda size, device, n=at_once: n)
        for start in (0, 1, 4, 5):
            same(epoch(split, text, start=start), whole[start:])
    assert not torch.equal(whole[0].x, next(iter(training_batches(split, 8, seed=5, epoch=4, augment=text))).x)


@pytest.mark.parametrize("text", TEXTS)
def test_images_stay_in_range_and_the_random_state_untouched(split, text):
    before = torch.get_rng_state()
    for batch in epoch(split, text):
        assert batch.x.dtype == torch.float32 and batch.x.min() >= 0 and batch.x.max() <= 1
        assert (batch.other is not None) == mixes_labels(text)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("text", ["none", "flip", "crop", "crop-flip"])
def test_old_names_give_the_same_batches(split, text):
    same([batch[:2] for batch in epoch(split, text)], list(batches(split, 8, seed=5, epoch=3, augment=text)))


def test_float_images_are_moved_as_uint8_ones_are(split):
    exact = Split(split.x.float() / 255, split.y)
    for text in ("crop-flip+cutout:3", "crop-flip+erase:0.9", "cutmix:1.0"):
        same(epoch(exact, text), epoch(split, text))


def test_cutout_blacks_out_one_square():
    x = torch.full((200, 2, 9, 11), 7, dtype=torch.uint8)
    drawn = Cutout(4).draw(200, (9, 11), 1, 1)
    out = Cutout(4).apply(x, drawn)
    black = (out == 0).all(1)
    assert torch.equal(black, (out == 0).any(1))
    counts = black.sum(dim=(1, 2))
    assert counts.max() == 16 and counts.min() >= 4  # at a corner a quarter is left
    for i, (top, bottom, left, right) in enumerate(drawn[0].tolist()):
        assert black[i, max(top, 0) : bottom, max(left, 0) : right].all()


def test_erasing_fills_a_box_with_one_colour_as_often_as_it_says():
    x = torch.full((2000, 3, 8, 8), 7, dtype=torch.uint8)
    erasing = Erasing(0.3)
    out = erasing.apply(x, erasing.draw(2000, (8, 8), 1, 1))
    changed = (out != 7).any(1)
    assert 0.25 < changed.any(dim=(1, 2)).float().mean() < 0.35
    part = changed.float().mean(dim=(1, 2))
    assert part[part > 0].min() >= 1 / 64 and part.max() < 0.5
    first = int(changed.any(dim=(1, 2)).nonzero()[0])
    assert all(len(out[first, c][changed[first]].unique()) == 1 for c in range(3))


def test_cutmix_pastes_the_next_image_and_says_how_much():
    x = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1).expand(6, 3, 8, 10).contiguous()
    y = torch.arange(6)
    mixed, ours, other, share = CutMix(1.0).apply(x, y, CutMix(1.0).draw(6, (8, 10), 3, 1))
    swapped = 0
    for i in range(6):
        own = (mixed[i, 0] == i).float().mean().item()
        assert set(mixed[i].unique().tolist()) <= {i, (i + 1) % 6}
        assert share[i] >= 0.5 and {int(ours[i]), int(other[i])} == {i, (i + 1) % 6}
        assert share[i].item() == pytest.approx(own if ours[i] == i else 1 - own)
        swapped += int(ours[i] != i)
    boxes = CutMix(1.0).draw(4000, (32, 32), 0, 1)[0]
    area = ((boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2])) / 1024
    assert area.min() >= 0 and area.max() <= 1 and 0.25 < area.mean() < 0.45  # clipped at the border: under a half


def test_a_resized_crop_of_everything_is_the_image(split):
    drawn = (torch.tensor([[0.0, 1.0, 0.0, 1.0]]).expand(37, 4),)
    assert torch.allclose(ResizedCrop(1.0).apply(split.x, drawn), split.x.float() / 255, atol=1e-6)
    boxes = ResizedCrop(0.25).draw(5000, (8, 8), 0, 1)[0]
    area = boxes[:, 1] * boxes[:, 3]
    assert area.min() > 0.24 and area.max() <= 1
    assert (boxes[:, 0] + boxes[:, 1] <= 1.0001).all() and (boxes[:, 2] + boxes[:, 3] <= 1.0001).all()


def test_a_resized_crop_takes_the_part_it_says():
    x = torch.zeros(1, 1, 8, 8)
    x[:, :, :4, 4:] = 1  # the upper right quarter
    out = ResizedCrop(0.25).apply(x, (torch.tensor([[0.0, 0.5, 0.5, 0.5]]),))
    assert (out[0, 0, :7, 1:] > 0.99).all()  # but for the border to the other quarters


def test_jitter_changes_what_it_says(split):
    none = (torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(37, 4),)
    assert torch.allclose(Jitter(0.4).apply(split.x, none), split.x.float() / 255, atol=2e-3)
    grey = Jitter(0.4).apply(split.x, (torch.tensor([[1.0, 1.0, 0.0, 0.0]]).expand(37, 4),))
    assert torch.allclose(grey[:, 0], grey[:, 1], atol=1e-5) and torch.allclose(grey[:, 1], grey[:, 2], atol=1e-5)
    dark = Jitter(0.4).apply(split.x, (torch.tensor([[0.5, 1.0, 1.0, 0.0]]).expand(37, 4),))
    assert torch.allclose(dark, split.x.float() / 510, atol=2e-3)
    changes = Jitter(0.4).draw(3000, (8, 8), 0, 1)[0]
    assert changes[:, :3].min() >= 0.6 and changes[:, :3].max() <= 1.4 and changes[:, 3].abs().max() <= 0.26
    assert Jitter(0.4).apply(split.x[:, :1], none).shape == (37, 1, 6, 7)


def test_a_square_as_large_as_the_images_is_refused():
    check_size("crop-flip+cutout:7", (8, 8))
    with pytest.raises(UserError, match=r"cutout:8 is as large as the images of 8x8.* Write for example cutout:4"):
        check_size("crop-flip+cutout:8", (8, 8))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("rotate", "unknown augmentation 'rotate'"),
        ("crop-flip+cutot:8", "Did you mean 'cutout'"),
        ("crop+crop-flip", "names crop twice"),
        ("none+flip", "Leave out none"),
        ("crop+resized-crop:0.5", "crops twice"),
        ("cutout", "Write cutout:8"),
        ("cutout:2.5", "number of pixels"),
        ("flip:3", "takes no number"),
        ("cutmix:-1", "cutmix:1.0"),
        ("erase:2", r"\(0, 1\]"),
        ("jitter:x", "jitter:0.4"),
        ("resized-crop:0.9-0.2", "resized-crop:0.25-1.0"),
        ("resized-crop", "resized-crop:0.25"),
        ("", "unknown augmentation ''"),
        (None, "must be a text"),
    ],
)
def test_a_wrong_text_is_refused(text, says):
    with pytest.raises(UserError, match=says):
        parse(text)


def test_parts_are_read():
    policy = parse("cutout:8+crop:6")
    assert (policy.moves, policy.pad, policy.steps, policy.cutmix) == ("crop", 6, (Cutout(8),), None)
    assert parse("resized-crop:0.25-0.8+flip").steps == (ResizedCrop(0.25, 0.8),)
    assert draw(parse("crop:6"), 3, (8, 8), seed=0, epoch=1).moves.pad == 6


def test_mixed_labels_need_batches_that_carry_them(split):
    with pytest.raises(UserError, match="training_batches"):
        batches(split, 8, seed=1, augment="cutmix:1.0")


def test_erasing_takes_any_number_of_channels():
    policy = parse("erase:1.0")
    for channels in (1, 3, 6):
        x = torch.zeros(8, channels, 8, 8, dtype=torch.uint8)
        drawn = draw(policy, 8, (8, 8), seed=0, epoch=1)
        assert drawn.apply(x, slice(0, 8)).shape == x.shape and bool((drawn.apply(x, slice(0, 8)) > 0).any())
