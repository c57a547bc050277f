import pytest
import torch

from sparring.data.augment import AUGMENTS, Moves, apply, draw
from sparring.errors import UserError


def literal(x, moves):
    """One image at a time: pad with black, crop, mirror."""
    out = []
    for image, top, left, flip in zip(x, moves.top, moves.left, moves.flip, strict=True):
        channels, height, width = image.shape
        canvas = torch.zeros(channels, height + 2 * moves.pad, width + 2 * moves.pad, dtype=image.dtype)
        canvas[:, moves.pad : moves.pad + height, moves.pad : moves.pad + width] = image
        cut = canvas[:, top : top + height, left : left + width]
        out.append(cut.flip(2) if flip else cut)
    return torch.stack(out)


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize(
    ("shape", "pad"), [((20, 3, 8, 8), 4), ((7, 1, 5, 9), 2), ((1, 4, 3, 3), 0), ((6, 3, 2, 2), 5)]
)
def test_equals_the_literal_loop(augment, shape, pad):
    x = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    moves = draw(len(x), augment=augment, pad=pad, generator=torch.Generator().manual_seed(2))
    moved = apply(x, moves)
    assert moved.dtype == torch.uint8 and torch.equal(moved, literal(x, moves))
    if augment == "none":
        assert torch.equal(moved, x)


def test_every_corner_and_both_sides_are_drawn():
    moves = draw(5000, augment="crop-flip", pad=4, generator=torch.Generator().manual_seed(0))
    assert moves.top.bincount().shape == (9,) and moves.top.bincount().min() > 400
    assert moves.left.bincount().shape == (9,) and moves.left.bincount().min() > 400
    assert 0.45 < moves.flip.float().mean() < 0.55
    assert abs(torch.corrcoef(torch.stack([moves.top, moves.left]).float())[0, 1]) < 0.05


def test_flip_draws_are_the_same_with_and_without_crop():
    flips = [draw(9, augment=a, pad=4, generator=torch.Generator().manual_seed(5)).flip for a in ("flip", "crop-flip")]
    assert torch.equal(*flips)


def test_an_empty_batch_stays_empty():
    empty = torch.zeros(0, dtype=torch.int64)
    assert apply(torch.zeros(0, 3, 4, 4, dtype=torch.uint8), Moves(empty, empty, empty.bool(), 4)).shape == (0, 3, 4, 4)


def test_refuses_unknown_names_and_negative_padding():
    with pytest.raises(UserError, match="Did you mean 'crop-flip'"):
        draw(1, augment="crop-flp", pad=4, generator=torch.Generator())
    with pytest.raises(UserError, match="pad must be"):
        draw(1, augment="crop", pad=-1, generator=torch.Generator())
