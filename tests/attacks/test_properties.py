"""One table: every attack against every property of the design."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from sparring.attacks import ball, fosc_pgd, friendliest_pgd, friendly_pgd, losses, margin_pgd, pgd
from sparring.errors import UserError
from tests.attacks.conftest import images, network

COMMON = {"eps": 0.12, "step_size": 0.03, "steps": 5}


def _pgd(model, x, y, **changes):
    return pgd(model, x, y, **(COMMON | changes))


def _friendly(tau, **fixed):
    def attack(model, x, y, **changes):
        return friendly_pgd(model, x, y, **({"tau": tau, "start": "uniform"} | COMMON | fixed | changes)).x_adv

    return attack


ATTACKS = {
    "pgd-ce": _pgd,
    "pgd-kl": lambda model, x, y, **changes: _pgd(model, x, y, **({"loss": "kl"} | changes)),
    "pgd-cw": lambda model, x, y, **changes: _pgd(model, x, y, **({"loss": "cw"} | changes)),
    "friendly-0": _friendly(0),
    "friendly-2": _friendly(2),
    "friendly-noise": _friendly(1, noise=0.02),
    "friendly-normal": _friendly(1, start="normal"),
}


def _other(search, **fixed):
    """A search that has a loss and rules of its own."""

    def attack(model, x, y, **changes):
        return search(model, x, y, **(COMMON | fixed | changes)).x_adv

    return attack


OTHERS = {
    "fosc": _other(fosc_pgd, criterion=0.1),
    "margin": _other(margin_pgd, margin=0.2),
    "friendliest-loss": _other(friendliest_pgd, rho=0.1),
    "friendliest-probability": _other(friendliest_pgd, rho=0.1, by="probability"),
}
EVERY = ATTACKS | OTHERS
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())  # whose loss can be chosen
every = pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY.keys())


@every
def test_stays_inside_the_ball_and_the_pixel_range(attack, batch):
    model, x, y = batch
    x = x.round(decimals=1)  # pixels at 0 and 1 too
    for eps, size in itertools.product((0.001, 0.12, 1.0), (0.03, 1.0)):
        x_adv = attack(model, x, y, eps=eps, step_size=size)
        assert (x_adv - x).abs().max() <= eps + 1e-12
        assert x_adv.min() >= 0
        assert x_adv.max() <= 1


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_keeps_order_shape_dtype_and_device(attack, dtype, batch):
    model, x, y = batch
    model, x = model.to(dtype), x.to(dtype)
    x_adv = attack(model, x, y)
    assert (x_adv.shape, x_adv.dtype, x_adv.device) == (x.shape, x.dtype, x.device)
    assert not x_adv.requires_grad
    slack = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 0.005}[dtype]  # a bf16 pixel has 8 bits
    assert (x_adv - x).abs().amax() <= COMMON["eps"] + slack


@every
def test_order_is_the_callers(attack, batch):
    model, x, y = batch
    turned = torch.arange(len(x) - 1, -1, -1)
    none = {"start": None, "noise": 0.0} if "friendly" in str(attack) else {"start": None}
    one = attack(model, x, y, **none)
    other = attack(model, x[turned], y[turned], **none)
    # The KL at the image itself has no slope but rounding's, so its order is compared where it is decided by more.
    close = (one - other[turned]).abs().flatten(1).amax(dim=1) < 1e-12
    assert close.all() or attack is ATTACKS["pgd-kl"]


@every
@pytest.mark.parametrize("training", [True, False])
def test_leaves_the_model_as_it_was(attack, training, batch):
    model, x, y = batch
    model.train(training)
    model[1].eval()  # a caller may hold one layer in another mode
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    model[3].weight.requires_grad_(False)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    wanted = [parameter.requires_grad for parameter in model.parameters()]
    state = torch.get_rng_state()
    image, label = x.clone(), y.clone()
    attack(model, x, y)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all((parameter.grad == 7.0).all() for parameter in model.parameters())
    assert [parameter.requires_grad for parameter in model.parameters()] == wanted
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(x, image)
    assert torch.equal(y, label)


@attacks
def test_leaves_the_model_as_it_was_when_it_fails(attack, batch):
    model, x, y = batch
    model.train()

    def broken(logits, labels):
        raise RuntimeError("broken loss")

    with pytest.raises(RuntimeError, match="broken loss"):
        attack(model, x, y, loss=broken)
    assert all(module.training for module in model.modules())


@every
def test_same_seed_same_result_and_another_seed_another(attack, batch):
    model, x, y = batch
    one, same, other = (
        attack(model, x, y, generator=torch.Generator().manual_seed(seed), step_size=1e-3) for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@every
def test_works_inside_no_grad_and_inference_mode(attack, batch):
    model, x, y = batch
    expected = attack(model, x, y, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(attack(model, x, y, generator=torch.Generator().manual_seed(0)), expected)
    with torch.inference_mode():
        inside = attack(model, x.clone(), y.clone(), generator=torch.Generator().manual_seed(0))
    assert torch.equal(inside, expected)


@every
def test_uses_running_statistics(attack):
    """Eval mode: with a batch of one, train-mode batch-norm would see nothing but that one."""
    model = network()
    x, y = images(model, 3)
    model.train()
    assert torch.equal(
        attack(model, x, y, generator=torch.Generator().manual_seed(0)),
        attack(model.eval(), x, y, generator=torch.Generator().manual_seed(0)),
    )


@attacks
def test_climbs(attack, batch):
    """Each its own loss: TRADES' KL leads away from the clean prediction, not from the label."""
    model, x, y = batch
    x_adv = attack(model, x, y, generator=torch.Generator().manual_seed(0))
    if attack is ATTACKS["pgd-kl"]:
        begun = ball.random_start(x, eps=0.12, start="uniform", generator=torch.Generator().manual_seed(0))
        assert losses.kl(model(x), model(x_adv)).mean() > losses.kl(model(x), model(begun)).mean()
    else:
        assert nn.functional.cross_entropy(model(x_adv), y) > nn.functional.cross_entropy(model(x), y)


BAD = {
    "eps of 0-255": ({"eps": 8}, r"eps must lie in \(0, 1\], got 8\. For 8/255 write 8/255"),
    "eps zero": ({"eps": 0.0}, "eps must lie"),
    "eps negative": ({"eps": -0.1}, "eps must lie"),
    "eps nan": ({"eps": float("nan")}, "eps must lie"),
    "eps text": ({"eps": "8/255"}, "eps must lie"),
    "step size": ({"step_size": 0}, "step_size must lie"),
    "steps zero": ({"steps": 0}, "steps must be a whole number of at least 1"),
    "steps real": ({"steps": 2.5}, "steps must be a whole number"),
    "loss": ({"loss": "cee"}, "unknown loss 'cee'. Did you mean 'ce'"),
    "start": ({"start": "unifrom"}, "start must be None, 'uniform' or 'normal'"),
}


@every
@pytest.mark.parametrize(("changes", "message"), BAD.values(), ids=BAD.keys())
def test_bad_settings_are_refused_before_any_work(attack, changes, message, batch):
    if "loss" in changes and attack in OTHERS.values():
        return  # its loss is its own
    model, x, y = batch
    model.register_forward_pre_hook(lambda module, inputs: pytest.fail("the model was called"))
    with pytest.raises(UserError, match=message):
        attack(model, x, y, **changes)


@pytest.mark.parametrize(
    ("changes", "message"), [({"tau": -1}, "tau"), ({"tau": 0.5}, "tau"), ({"noise": -1.0}, "noise")]
)
def test_bad_friendly_settings_are_refused(changes, message, batch):
    with pytest.raises(UserError, match=f"{message} must be"):
        friendly_pgd(*batch, **({"tau": 0} | COMMON | changes))


BAD_BATCHES = {
    "uint8": (lambda x, y: ((x * 255).byte(), y), r"For uint8 images: x\.float\(\) / 255"),
    "0-255": (lambda x, y: (x * 255, y), r"pixels must be finite and lie in \[0, 1\]"),
    "negative": (lambda x, y: (x - 0.5, y), "put normalisation into the model"),
    "nan": (lambda x, y: (torch.where(x > 0.5, torch.nan, x), y), "pixels must be finite"),
    "infinite": (lambda x, y: (torch.where(x > 0.5, torch.inf, x), y), "pixels must be finite"),
    "no batch": (lambda x, y: (x[0, 0, 0], y), "x must be a batch"),
    "int32 labels": (lambda x, y: (x, y.int()), r"y\.long\(\)"),
    "float labels": (lambda x, y: (x, y.double()), "int64"),
    "one-hot labels": (lambda x, y: (x, nn.functional.one_hot(y)), "one label per image"),
    "too few labels": (lambda x, y: (x, y[:-1]), "one label per image"),
    "negative label": (lambda x, y: (x, y - 10), "labels count from 0"),
    "label too large": (lambda x, y: (x, y + 4), "the model has 4 classes, found label"),
    "a list": (lambda x, y: (x, y.tolist()), "int64 tensor"),
}


@every
@pytest.mark.parametrize(("change", "message"), BAD_BATCHES.values(), ids=BAD_BATCHES.keys())
def test_bad_batches_are_refused(attack, change, message, batch):
    model, x, y = batch
    with pytest.raises(UserError, match=message):
        attack(model, *change(x, y))


BAD_MODELS = {
    "one output": lambda x: x.flatten(1)[:, :1],
    "no batch": lambda x: x.flatten(1)[0],
    "a map": lambda x: x,
    "a pair": lambda x: (x.flatten(1), None),
    "too few rows": lambda x: x.flatten(1)[:-1],
}


@every
@pytest.mark.parametrize("forward", BAD_MODELS.values(), ids=BAD_MODELS.keys())
def test_a_model_that_gives_no_logits_is_refused(attack, forward, batch):
    _, x, y = batch
    with pytest.raises(UserError, match="the model must map 24 images to logits of shape"):
        attack(forward, x, y)


@attacks
def test_a_loss_of_the_wrong_shape_is_refused(attack, batch):
    with pytest.raises(UserError, match="one value per example"):
        attack(*batch, loss=lambda logits, y: nn.functional.cross_entropy(logits, y))


@every
def test_a_model_without_a_gradient_is_refused(attack, batch):
    model, x, y = batch
    with pytest.raises(UserError, match="differentiable"):
        attack(lambda points: model(points).detach(), x, y)
