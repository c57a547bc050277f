"""One table: every attack against every property that all attacks share."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
from torch import nn

from sparring.attacks import ball, fosc_pgd, friendliest_pgd, friendly_pgd, losses, margin_pgd, pgd, pgd_until
from sparring.errors import UserError
from tests.attacks.conftest import images, network

COMMON = {"eps": 0.12, "step_size": 0.03, "steps": 5}


def plain(**fixed):
    return lambda model, x, y, **changes: pgd(model, x, y, **(COMMON | fixed | changes))


def found_by(search, **fixed):
    return lambda model, x, y, **changes: search(model, x, y, **(COMMON | fixed | changes)).x_adv


def mixed(model, x, y, **changes):
    """Every example its own number of steps, 0 among them."""
    settings = {"steps": torch.arange(len(y)) % 5 if isinstance(y, torch.Tensor) else 5}
    return pgd_until(model, x, y, **(COMMON | settings | changes)).x_adv


def from_tensor(search):
    """An attack from points that the caller draws."""

    def attack(model, x, y, *, generator=None, eps=0.12, **changes):
        generator = generator or torch.Generator().manual_seed(0)
        if "start" not in changes:
            changes["start"] = ball.random_start(x.clone(), eps=eps, start="uniform", generator=generator)
        return search(model, x, y, eps=eps, **changes)

    return attack


ATTACKS = {  # whose loss the caller chooses
    "pgd-ce": plain(),
    "pgd-kl": plain(loss="kl"),
    "pgd-cw": plain(loss="cw"),
    "pgd-tensor": from_tensor(plain()),
    "friendly-0": found_by(friendly_pgd, tau=0, start="uniform"),
    "friendly-2": found_by(friendly_pgd, tau=2, start="uniform"),
    "friendly-noise": found_by(friendly_pgd, tau=1, start="uniform", noise=0.02),
    "friendly-normal": found_by(friendly_pgd, tau=1, start="normal"),
    "friendly-tensor": from_tensor(found_by(friendly_pgd, tau=1)),
}
OTHERS = {
    "fosc": found_by(fosc_pgd, criterion=0.1),
    "margin": found_by(margin_pgd, margin=0.2),
    "mixed": mixed,
    "friendliest-loss": found_by(friendliest_pgd, rho=0.1),
    "friendliest-probability": found_by(friendliest_pgd, rho=0.1, by="probability"),
}
EVERY = ATTACKS | OTHERS
attacks = pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS.keys())
every = pytest.mark.parametrize("attack", EVERY.values(), ids=EVERY.keys())


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


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
def test_keeps_shape_dtype_and_device(attack, dtype, batch):
    model, x, y = batch
    model, x = model.to(dtype), x.to(dtype)
    x_adv = attack(model, x, y)
    assert (x_adv.shape, x_adv.dtype, x_adv.device) == (x.shape, x.dtype, x.device)
    assert not x_adv.requires_grad
    slack = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 0.005}[dtype]  # a bf16 pixel has 8 bits
    assert (x_adv - x).abs().amax() <= COMMON["eps"] + slack


@pytest.mark.parametrize("name", EVERY)
def test_order_is_the_callers(name, batch):
    model, x, y = batch
    turned = torch.arange(len(x) - 1, -1, -1)
    same = {"start": None} | ({"noise": 0.0} if name == "friendly-noise" else {})
    # At the image itself the gradient of the KL is 0 up to rounding, whose sign may change with the order.
    same |= {"loss": "ce"} if name == "pgd-kl" else {}
    same |= {"steps": 3} if name == "mixed" else {}  # its steps follow the place in the batch
    one, other = EVERY[name](model, x, y, **same), EVERY[name](model, x[turned], y[turned], **same)
    assert torch.allclose(one, other[turned], rtol=0, atol=1e-12)


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
    one, same, other = (attack(*batch, generator=seeded(seed), step_size=1e-3) for seed in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


@every
def test_works_inside_no_grad_and_inference_mode(attack, batch):
    model, x, y = batch
    expected = attack(model, x, y, generator=seeded())
    with torch.no_grad():
        assert torch.equal(attack(model, x, y, generator=seeded()), expected)
    with torch.inference_mode():
        inside = attack(model, x.clone(), y.clone(), generator=seeded())
    assert torch.equal(inside, expected)


@every
def test_uses_running_statistics(attack):
    """In eval mode batch-norm does not normalise by the batch."""
    model = network()
    x, y = images(model, 3)
    expected = attack(model, x, y, generator=seeded())
    assert torch.equal(attack(model.train(), x, y, generator=seeded()), expected)


@every
def test_any_image_size_and_class_count_and_an_empty_batch(attack):
    model = network(3, (5, 7), 2)
    x, y = images(model, 9, 3, (5, 7))
    for count in (9, 1, 0):
        assert attack(model, x[:count], y[:count]).shape == (count, 3, 5, 7)


@attacks
def test_raises_the_loss(attack, batch):
    """Each its own: TRADES' KL leads away from the clean prediction, not from the label."""
    model, x, y = batch
    x_adv = attack(model, x, y, generator=seeded())
    if attack is ATTACKS["pgd-kl"]:
        begin = ball.random_start(x, eps=0.12, start="uniform", generator=seeded())
        assert losses.kl(model(x), model(x_adv)).mean() > losses.kl(model(x), model(begin)).mean()
    else:
        assert nn.functional.cross_entropy(model(x_adv), y) > nn.functional.cross_entropy(model(x), y)


BAD_SETTINGS = [
    ({"eps": 8, "start": None}, r"eps must lie in \(0, 1\], got 8\. For 8/255 write 8/255"),
    ({"eps": 0.0, "start": None}, "eps must lie"),
    ({"eps": -0.1, "start": None}, "eps must lie"),
    ({"eps": float("nan"), "start": None}, "eps must lie"),
    ({"eps": "8/255", "start": None}, "eps must be a number"),
    ({"step_size": 0}, "step_size must lie"),
    ({"steps": 0}, "steps must be a whole number of at least 1"),
    ({"steps": 2.5}, "steps must be a whole number"),
    ({"start": "unifrom"}, "start must be None, 'uniform' or 'normal'"),
    ({"start": 0}, "start must be None, 'uniform' or 'normal'"),
]


@every
def test_bad_settings_are_refused_before_the_model_runs(attack, batch):
    model, x, y = batch
    model.register_forward_pre_hook(lambda module, inputs: pytest.fail("the model was called"))
    for changes, message in BAD_SETTINGS:
        with pytest.raises(UserError, match=message):
            attack(model, x, y, **changes)


@attacks
def test_a_bad_loss_is_refused(attack, batch):
    with pytest.raises(UserError, match=r"unknown loss 'cee'. Did you mean 'ce'"):
        attack(*batch, loss="cee")
    with pytest.raises(UserError, match="one value per example"):
        attack(*batch, loss=lambda logits, y: nn.functional.cross_entropy(logits, y))


@pytest.mark.parametrize(
    ("changes", "message"), [({"tau": -1}, "tau"), ({"tau": 0.5}, "tau"), ({"noise": -1.0}, "noise")]
)
def test_bad_friendly_settings_are_refused(changes, message, batch):
    with pytest.raises(UserError, match=f"{message} must be"):
        friendly_pgd(*batch, **({"tau": 0} | COMMON | changes))


BAD_BATCHES = [
    (lambda x, y: ((x * 255).byte(), y), r"For uint8 images: x\.float\(\) / 255"),
    (lambda x, y: (x * 255, y), r"pixels must be finite and lie in \[0, 1\]"),
    (lambda x, y: (x - 0.5, y), "put normalisation into the model"),
    (lambda x, y: (torch.where(x > 0.5, torch.nan, x), y), "pixels must be finite"),
    (lambda x, y: (torch.where(x > 0.5, torch.inf, x), y), "pixels must be finite"),
    (lambda x, y: (x[0, 0, 0], y), "x must be a batch"),
    (lambda x, y: (x, y.int()), r"y\.long\(\)"),
    (lambda x, y: (x, y.double()), "int64"),
    (lambda x, y: (x, nn.functional.one_hot(y)), "one label per image"),
    (lambda x, y: (x, y[:-1]), "one label per image"),
    (lambda x, y: (x, y - 10), "labels count from 0"),
    (lambda x, y: (x, y + 4), "the model has 4 classes, found label"),
    (lambda x, y: (x, y.tolist()), "int64 tensor"),
]


@every
def test_bad_batches_are_refused(attack, batch):
    model, x, y = batch
    for change, message in BAD_BATCHES:
        with pytest.raises(UserError, match=message):
            attack(model, *change(x, y), start=None)


@every
def test_a_model_that_returns_no_logits_is_refused(attack, batch):
    _, x, y = batch
    one_output, no_batch, a_map, a_pair, too_few = (
        lambda x: x.flatten(1)[:, :1],
        lambda x: x.flatten(1)[0],
        lambda x: x,
        lambda x: (x.flatten(1), None),
        lambda x: x.flatten(1)[:-1],
    )
    active = 19 if attack is mixed else 24
    for model in (one_output, no_batch, a_map, a_pair, too_few):
        with pytest.raises(UserError, match=f"the model must map {active} images to logits of shape"):
            attack(model, x, y)


@every
def test_a_model_without_a_gradient_is_refused(attack, batch):
    model, x, y = batch
    with pytest.raises(UserError, match="differentiable"):
        attack(lambda points: model(points).detach(), x, y)
