"""Square's queries: the package's own, image by image."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from pyautoattack.square import SquareAttack
from torch import nn

from sparring.attacks import square
from sparring.attacks.autoattack import attack_part
from sparring.errors import UserError


def network(channels: int, size: tuple[int, int]) -> nn.Module:
    """Large weights: some images break soon, some late, some never."""
    torch.manual_seed(0)
    layers = nn.Conv2d(channels, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * (size[0] - 2) * (size[1] - 2), 5)
    return nn.Sequential(*layers).double().eval()


def problem(channels: int, size: tuple[int, int], count: int = 24):
    model = network(channels, size)
    x = torch.rand(count, channels, *size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    with torch.no_grad():
        return model, x, model(x).argmax(1)


def search(predict, x, eps: float, queries: int = 200) -> SquareAttack:
    found = SquareAttack(predict, eps=eps, n_queries=queries, device=torch.device("cpu"), seed=3)
    found.init_hyperparam(x)
    assert square.fits(found)
    return found


@pytest.fixture(autouse=True)
def several_draws(monkeypatch):
    """Squares are drawn in more than one go."""
    monkeypatch.setattr(square, "_DRAWN", 60)


def both(model, x, y, eps: float, queries: int = 200):
    """Ours and the package's, in double precision, whose sums do not depend on the batch in what is compared."""
    found = []
    for mine in (True, False):
        attack = search(model, x, eps, queries)
        torch.manual_seed(3)
        found.append((square.run(attack, x, y) if mine else attack.attack_single_run(x.clone(), y))[1])
    return found


@pytest.mark.parametrize(("channels", "size"), [(1, (8, 8)), (3, (7, 10)), (20, (6, 5))])
@pytest.mark.parametrize("eps", [2**-10, 2**-5, 2**-3, 7 / 8])
def test_they_find_the_points_of_the_package(channels, size, eps):
    model, x, y = problem(channels, size)
    ours, theirs = both(model, x, y, eps)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert (ours - x).abs().max() <= eps + 1e-12 and ours.min() >= 0 and ours.max() <= 1


def test_some_images_break_and_some_do_not():
    """So the comparison above sees images leave the batch, early and late."""
    model, x, y = problem(3, (7, 10))
    broken = [int((model(both(model, x, y, 2**-3, queries)[0]).argmax(1) != y).sum()) for queries in (1, 20, 200)]
    assert 0 <= broken[0] < broken[1] < broken[2] < len(x)


def test_images_that_stay_in_the_batch_stay_as_they_are(monkeypatch):
    """As on a GPU, where images are taken out of the batch only when it pays."""
    model, x, y = problem(3, (7, 10))
    _, theirs = both(model, x, y, 2**-3)
    sizes = []

    def counting(images):
        sizes.append(len(images))
        return model(images)

    monkeypatch.setattr(square, "_ON_CPU", (20, 15 / 16))
    torch.manual_seed(3)
    _, ours = square.run(search(counting, x, 2**-3), x, y)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)
    assert 2 < len(set(sizes)) < 11  # of ten looks


def test_it_stops_once_every_image_is_broken():
    _, x, y = problem(1, (8, 8))
    calls = []

    def wrong_soon(images):
        calls.append(len(images))
        return torch.eye(5, dtype=x.dtype)[(y[: len(images)] + (len(calls) > 7)) % 5]

    square.run(search(wrong_soon, x, 2**-3), x, y)
    assert len(calls) == 8


def test_a_model_that_writes_into_its_input_does_no_harm():
    model, x, y = problem(1, (8, 8))

    def greedy(images):
        logits = model(images)
        images.zero_()
        return logits

    torch.manual_seed(3)
    _, ours = square.run(search(greedy, x, 2**-3), x, y)
    torch.testing.assert_close(ours, both(model, x, y, 2**-3)[1], rtol=0, atol=1e-12)


def test_nan_is_no_improvement():
    model, x, y = problem(1, (8, 8))
    torch.manual_seed(3)
    start, steps = square.run(search(model, x, 2**-3, 0), x, y)[1], []

    def failing(images):
        steps.append(len(images))
        return model(images) * (1 if len(steps) == 1 else torch.nan)

    torch.manual_seed(3)
    assert torch.equal(square.run(search(failing, x, 2**-3), x, y)[1], start)


def test_autoattack_queries_so(monkeypatch):
    model, x, y = problem(1, (8, 8))
    used = []
    own = square.run
    monkeypatch.setattr(square, "run", lambda *given: used.append(len(given[1])) or own(*given))
    claim = attack_part("square", model.float(), x.float(), y, eps=2**-3)
    assert used == [len(x)] and claim.claimed.any()
    used.clear()
    attack_part("square", model, x.float(), y, eps=0.5, norm="l2")
    assert not used


@pytest.mark.parametrize("changes", [{"norm": "L2"}, {"loss": "ce"}, {"targeted": True}, {"return_all": True}])
def test_other_settings_are_left_to_the_package(changes):
    model, x, _ = problem(1, (8, 8))
    found = search(model, x, 2**-3)
    for name, value in changes.items():
        setattr(found, name, value)
    assert not square.fits(found)


@pytest.mark.parametrize("part", ["square", "fab-t", "apgd-ce"])
def test_nothing_keeps_model_and_images_alive(part):
    model, x, y = problem(1, (8, 8), count=2)
    model, seen = model.float(), weakref.ref(model)
    gc.disable()
    try:
        attack_part(part, model, x.float(), y, eps=2**-10)
        del model
        assert seen() is None
    finally:
        gc.enable()


def test_flat_images_are_refused():
    with pytest.raises(UserError, match="Square needs images"):
        attack_part("square", lambda x: x[:, :3], torch.rand(2, 12), torch.zeros(2, dtype=torch.int64), eps=0.1)
