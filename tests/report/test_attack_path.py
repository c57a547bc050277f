"""An attack path is what the attacks do, step by step; the friendly attack leaves it where it stops."""

import numpy as np
import pytest
import torch
from torch import nn

from sparring.attacks import friendly_pgd, pgd
from sparring.report.attack_path import attack_path, choose

SETTING = {"eps": 0.3, "step_size": 0.05, "steps": 8}


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 5)).eval()


@pytest.fixture(scope="module")
def batch(model):
    x = torch.rand(60, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        y = model(x).argmax(dim=1)
    return x, y


@pytest.mark.parametrize("tau", [0, 1, 3, 8])
def test_frames_are_the_attacks_iterates(model, batch, tau):
    x, y = batch[0][:4], batch[1][:4]
    for i, found in enumerate(attack_path(model, x, y, tau=tau, **SETTING)):
        one, label = x[i : i + 1], y[i : i + 1]
        assert found.steps == 8 and (found.eps, found.step_size) == (SETTING["eps"], SETTING["step_size"])
        assert [frame.step for frame in found.frames] == list(range(9))
        assert np.array_equal(found.frames[0].image, one[0, 0].numpy())
        for k in range(1, 9):
            at_k = SETTING | {"steps": k}
            assert np.array_equal(found.frames[k].image, pgd(model, one, label, start=None, **at_k)[0, 0].numpy())
            friendly = friendly_pgd(model, one, label, tau=tau, **at_k)
            here = found.friendly[min(k, found.stopped_at)]
            assert np.array_equal(here.image, friendly.x_adv[0, 0].numpy())
        assert found.stopped_at == int(friendly_pgd(model, one, label, tau=tau, **SETTING).backprops)
        assert len(found.friendly) == found.stopped_at + 1


def test_a_path_of_k_steps_costs_k_gradients(model, batch):
    x, y = batch[0][:3], batch[1][:3]
    forwards, backwards = [], []
    hooks = [
        model.register_forward_pre_hook(lambda *_: forwards.append(1)),
        model.register_full_backward_hook(lambda *_: backwards.append(1)),
    ]
    attack_path(model, x, y, tau=1, **SETTING)
    for hook in hooks:
        hook.remove()
    assert (len(forwards), len(backwards)) == (3 * 9, 3 * 8)


def test_frames_report_what_the_model_predicts(model, batch):
    x, y = batch[0][:3], batch[1][:3]
    names = ["ant", "bee", "cat", "dog", "emu"]
    for i, found in enumerate(attack_path(model, x, y, tau=0, classes=names, **SETTING)):
        assert found.label == names[y[i]]
        for frame in found.frames:
            with torch.no_grad():
                chances = model(torch.from_numpy(frame.image)[None, None]).softmax(dim=1)[0]
            assert frame.prediction == names[chances.argmax()]
            assert frame.right == (frame.prediction == found.label)
            assert frame.confidence == pytest.approx(float(chances[y[i]]), abs=1e-6)


def test_with_tau_0_the_stop_is_the_crossing(model, batch):
    x, y = batch
    chosen = choose(model, x, y, **SETTING)
    for found in attack_path(model, x[chosen], y[chosen], tau=0, **SETTING):
        assert found.crossed_at == found.stopped_at
        assert 0 < found.stopped_at < found.steps


def test_an_image_wrong_from_the_start_stays_there(model, batch):
    x, y = batch[0][:1], (batch[1][:1] + 1) % 5
    (found,) = attack_path(model, x, y, tau=0, **SETTING)
    assert found.crossed_at == 0 and found.stopped_at == 0 and len(found.friendly) == 1


def test_colour_images_are_channels_last():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(3 * 6 * 5, 3))
    (found,) = attack_path(net, torch.rand(1, 3, 6, 5), torch.tensor([0]), eps=0.1, step_size=0.02, steps=2, tau=0)
    assert found.frames[0].image.shape == (6, 5, 3)


def test_choose_takes_instructive_images_of_different_classes(model, batch):
    x, y = batch
    chosen = choose(model, x, y, count=3, **SETTING)
    taken = friendly_pgd(model, x, y, tau=0, **SETTING).backprops
    assert len(chosen) == 3
    assert all(2 <= taken[i] <= 6 for i in chosen)
    assert len(set(y[chosen].tolist())) == 3
    assert torch.equal(chosen, choose(model, x, y, count=3, **SETTING))


def test_choose_takes_fewer_where_there_are_fewer(model, batch):
    x, y = batch
    assert len(choose(model, x, (y + 1) % 5, **SETTING)) == 0  # all wrong from the start
    assert len(choose(model, x, y, eps=1e-4, step_size=1e-5, steps=2)) == 0  # none is fooled
    same = (y == y[0]).nonzero()[:, 0]
    assert len(choose(model, x[same], y[same], count=3, **SETTING)) > 1  # one class only: it comes more than once


def test_leaves_the_model_as_it_was(model, batch):
    x, y = batch[0][:2], batch[1][:2]
    model.train()
    try:
        before = [value.clone() for value in model.state_dict().values()]
        attack_path(model, x, y, tau=0, **SETTING)
        choose(model, x, y, **SETTING)
        assert model.training and all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(a, b) for a, b in zip(before, model.state_dict().values(), strict=True))
    finally:
        model.eval()
