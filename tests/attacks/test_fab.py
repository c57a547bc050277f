"""FAB's steps: the package's own, image by image."""

from __future__ import annotations

import pytest
import torch
from pyautoattack import fab_base
from pyautoattack.fab_pt import FABAttack_PT
from torch import nn

from sparring.attacks import fab
from sparring.attacks.autoattack import attack_part
from sparring.attacks.hyperplane import steps_to_hyperplane


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.Softplus(), nn.Flatten(), nn.Linear(8 * 5 * 5, 6)
    return nn.Sequential(*layers).eval().requires_grad_(False)


class Bent(nn.Module):
    """Far from linear: where a step ends depends on how far it goes back to the image."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x):
        return self.net(x) + torch.sin(9 * self.net(x.flip(3))) / 4


def problem(count: int = 24):
    model = network()
    x = torch.rand(count, 3, 7, 7, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(1)
    y[::6] = (y[::6] + 1) % 6  # some are misclassified without attack
    return model, x, y


def search(predict, steps: int = 30, **changes) -> FABAttack_PT:
    found = FABAttack_PT(predict, n_iter=steps, eps=0.03, seed=0, targeted=True, device=torch.device("cpu"))
    found.n_target_classes = 5
    for name, value in changes.items():
        setattr(found, name, value)
    return found


@pytest.mark.parametrize("target", [2, 4, 6])
@pytest.mark.parametrize(("steps", "make"), [(1, network), (3, network), (30, network), (4, Bent)])
def test_they_find_the_points_of_the_package(monkeypatch, target, steps, make):
    """With the same projections, whose rounding is tested in test_hyperplane.py."""
    monkeypatch.setattr(fab_base, "projection_linf", steps_to_hyperplane)
    _, x, y = problem()
    model = make()
    y[1::6] = model(x[1::6]).argmax(1)
    attack = search(model, steps, target_class=target)
    assert fab.fits(attack)
    theirs = attack.attack_single_run(x, y, is_targeted=True)
    ours = fab.run(attack, x, y)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    moved = (ours != x).flatten(1).any(1)
    assert torch.equal(moved, (theirs != x).flatten(1).any(1)) and not moved[model(x).argmax(1) != y].any()
    assert (model(ours[moved]).argmax(1) != y[moved]).all()
    if steps == 30:
        assert moved.sum() > 10


def test_the_whole_attack_breaks_what_the_package_s_breaks(monkeypatch):
    """With the package's own projections. The largest change of a pixel is what FAB makes small."""
    model, x, y = problem(60)
    eps = 0.1
    ours = attack_part("fab-t", model, x, y, eps=eps)
    monkeypatch.setattr(fab, "fits", lambda attack: False)
    theirs = attack_part("fab-t", model, x, y, eps=eps)
    assert torch.equal(ours.claimed, theirs.claimed) and 10 < int(ours.claimed.sum()) < 50
    sizes = [(claim.x_adv - x).abs().flatten(1).amax(1) for claim in (ours, theirs)]
    torch.testing.assert_close(*sizes, rtol=0, atol=1e-5)


def test_images_that_are_wrong_from_the_start_are_left_alone():
    model, x, y = problem(6)
    assert torch.equal(fab.run(search(model, target_class=2), x, (y + 1 + (y == model(x).argmax(1))) % 6)[1:], x[1:])
    wrong = (model(x).argmax(1) + 1) % 6
    calls = []

    def counted(images):
        calls.append(len(images))
        return model(images)

    assert torch.equal(fab.run(search(counted, target_class=2), x, wrong), x) and calls == [6]


def test_nan_is_no_success():
    """A gradient of NaN makes a point of NaN, which no comparison takes."""
    model, x, y = problem(6)

    def failing(images):
        return model(images) * (torch.nan if images.requires_grad else 1)

    found = fab.run(search(failing, target_class=2), x, y)
    assert found.isfinite().all()


def test_a_model_that_writes_into_its_input_does_no_harm():
    model, x, y = problem(6)

    def greedy(images):
        logits = model(images * 1.0)
        images.data.zero_()
        return logits

    ours = fab.run(search(greedy, target_class=2), x.clone(), y)
    assert torch.equal(ours, fab.run(search(model, target_class=2), x, y))


def test_autoattack_steps_so(monkeypatch):
    model, x, y = problem(8)
    used, own = [], fab.run
    monkeypatch.setattr(fab, "run", lambda *given, **more: used.append(len(given[1])) or own(*given, **more))
    attack_part("fab-t", model, x, y, eps=0.1)
    assert len(used) == 5 and used[0] == 6  # targets; images that are right
    used.clear()
    attack_part("fab-t", model, x, y, eps=0.5, norm="l2")
    assert not used


@pytest.mark.parametrize("changes", [{"norm": "L2"}, {"n_restarts": 2}, {"targeted": False}])
def test_other_settings_are_left_to_the_package(changes):
    assert not fab.fits(search(network(), **changes))
