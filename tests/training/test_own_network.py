"""Networks of the caller's own in the loop: trained as they are, kept, resumed exactly, refused in one line."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from sparring import models
from sparring.data import load
from sparring.engine import prepare
from sparring.errors import UserError
from sparring.models import own
from sparring.objectives import FAT, KTauPGD
from sparring.seeds import seeded
from sparring.training import checkpoint, loop, run_folder
from sparring.training.config import with_objective
from sparring.training.loop import Interrupted
from sparring.weights import load_model
from tests.own_networks import Net, Odd, Two, ViT, bottlenecks, convnext, dropout
from tests.training.test_loop import same_run


@pytest.fixture
def quick(small):
    """Two epochs of five steps."""
    return with_objective(replace(small, epochs=2, augment="none", validation=70), steps=1)


def test_a_copy_of_the_module_is_trained_from_its_own_weights(tmp_path, quick):
    net = Net()
    before = copy.deepcopy(net.state_dict())
    trained = loop.train(replace(quick, lr="1e-30", weight_decay=0), tmp_path / "run", model=net, tensorboard=False)
    assert trained is not net and net.training and not trained.training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    weights = dict(trained.named_parameters())
    assert all(torch.allclose(value, weights[name]) for name, value in net.named_parameters())  # no step to speak of
    run = run_folder.open_run(tmp_path / "run")
    assert run.config.model == "own:Net"
    for name in (run_folder.LAST, run_folder.BEST):
        assert checkpoint.read_facts(tmp_path / "run" / name)["model"]["name"] == "own:Net"


@pytest.mark.parametrize("make", [Net, dropout, Odd], ids=["net", "dropout", "odd"])
@pytest.mark.parametrize("ema", [0.0, 0.9])
def test_stopping_and_resuming_is_exact(tmp_path, quick, make, ema):
    """Dropout included; the global random state is neither read nor moved."""
    quick, net = replace(quick, ema=ema), make()
    loop.train(quick, tmp_path / "whole", model=net, tensorboard=False)
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        loop.train(quick, tmp_path / "parts", model=net, tensorboard=False, stop=lambda: next(steps) == 6)
    torch.rand(7)
    before = torch.get_rng_state()
    other = make()
    after = torch.get_rng_state()
    loop.train(quick, tmp_path / "parts", model=other, resume=True, tensorboard=False)
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_tied_frozen_and_integer_state_is_kept(tmp_path, quick):
    net = Odd()
    trained = loop.train(quick, tmp_path / "run", model=net, tensorboard=False)
    assert trained.tied.weight is trained.embed.weight
    assert torch.equal(trained.frozen.weight, net.frozen.weight) and not torch.equal(
        trained.head.weight, net.head.weight
    )
    assert trained.calls == 10 and trained.seen.all() and trained.level.min() > 0
    again = load_model(tmp_path / "run", model=net)
    state = again.state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trained.state_dict().items())
    assert again.tied.weight is again.embed.weight and net.calls == 0


def test_dropout_draws_anew_at_every_step(tmp_path, quick, monkeypatch):
    drawn = []
    real = nn.Dropout.forward
    monkeypatch.setattr(
        nn.Dropout, "forward", lambda self, x: [drawn.append(y := real(self, x)), y][1] if self.training else x
    )
    loop.train(replace(quick, epochs=1), tmp_path / "run", model=dropout(), tensorboard=False)
    masks = {tuple((y[:8] == 0).flatten().tolist()) for y in drawn if len(y) > 8}
    assert len(masks) == sum(len(y) > 8 for y in drawn) >= 5


class NotFinite(Net):
    def forward(self, x):
        return super().forward(x) / 0


class Ends(Net):
    """Its output goes through a function."""

    def __init__(self, end):
        super().__init__()
        self.end = end

    def forward(self, x):
        return self.end(super().forward(x))


def fails(logits):
    raise KeyError("a\nb")


@pytest.mark.parametrize(
    ("net", "message"),
    [
        (Two(), r"must return logits \(B, 10\), it returned a tuple of 2"),
        (Two(only_in_training=True), r"in train mode, it returned a tuple of 2"),
        (Net(num_classes=3), r"it returned \(2, 3\) for 2 images. Its last layer needs 10 outputs"),
        (Net(channels=3), r"does not take images of shape \(1, 8, 8\): RuntimeError"),
        (NotFinite(), "logits are not finite for 2 of 2 grey images. Check the network's weights"),
        (Ends(lambda logits: logits.round().long()), "logits are torch.int64, .* Return the scores before argmax"),
        (Ends(lambda logits: logits > 0), "logits are torch.bool"),
        (Ends(lambda logits: logits * 1j), "logits are torch.complex64, .* Return its real part"),
        (Ends(torch.Tensor.half), r"are torch.float16; the loss is fp32. Return logits.float\(\)"),
        (Ends(torch.Tensor.bfloat16), r"are torch.bfloat16; the loss is fp32. Return logits.float\(\)"),
        (Ends(lambda logits: logits.to("meta")), "logits are on meta, its images on cpu"),
        (Ends(fails), r"the model raised KeyError: 'a\\nb', on 2 images"),
        (Net().to("meta"), "parameters of the model are on the meta device"),
        (nn.Sequential(nn.Flatten()), "no parameters"),
        (Net().requires_grad_(False), "every parameter of the model .* is frozen"),
        (Net().double(), r"are torch.float64. Call model.float\(\)"),
        (lambda: 3, "must return an nn.Module, it returned an int"),
        (lambda width: Net(), "needs a parameter 'width'"),
        (
            lambda: nn.DataParallel(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
            r"DataParallel\. Give the module inside, model\.module",
        ),
        (
            lambda: torch.jit.script(nn.Sequential(nn.Flatten(), nn.Linear(64, 10))),
            r"compiled by torch\.jit\. Give the module that it was compiled from",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(tmp_path, quick, net, message):
    with pytest.raises(UserError, match=message) as caught:
        loop.train(quick, tmp_path / "run", model=net, tensorboard=False)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_an_unused_parameter_is_named(tmp_path, quick):
    net = Net()
    net.spare = nn.Linear(2, 2)
    with pytest.raises(UserError, match=r"never uses spare.weight, spare.bias: no gradient reaches it"):
        loop.train(quick, tmp_path / "run", model=net, tensorboard=False)
    net.spare.requires_grad_(False)
    loop.train(replace(quick, epochs=1), tmp_path / "run", model=net, tensorboard=False)


def test_another_network_is_refused_by_its_keys(tmp_path, quick):
    loop.train(replace(quick, epochs=1), tmp_path / "run", model=Net(), tensorboard=False)
    with pytest.raises(UserError, match=r"another network than Sequential\. missing: 1.weight.*unexpected: bn.bias"):
        loop.train(replace(quick, epochs=1), tmp_path / "run", model=dropout(), resume=True, tensorboard=False)
    assert run_folder.open_run(tmp_path / "run").config.model == "own:Net"
    with pytest.raises(UserError, match=r"handed in from Python \(Net\).*model=net.*--model package.module:make"):
        loop.train(replace(quick, epochs=1, model="own:Net"), tmp_path / "run", resume=True, tensorboard=False)


def test_normalisation_is_put_before_the_network(tmp_path, quick):
    trained = loop.train(replace(quick, epochs=1, normalize=True), tmp_path / "run", model=Net(), tensorboard=False)
    assert [name for name, _ in trained.named_children()] == ["normalize", "network"]
    x = load("digits").test.x[:4].float() / 255
    assert torch.equal(load_model(tmp_path / "run", model=Net())(x), trained(x))


KINDS = {
    "vit": (ViT, (1, 8, 8)),
    "convnext": (convnext, (1, 8, 8)),
    "bottlenecks": (bottlenecks, (3, 64, 64)),
    "preact": (lambda: models.build("preact_resnet18", num_classes=10), (3, 8, 8)),
    "silu": (lambda: models.build("wrn-10-1-silu", num_classes=10), (3, 8, 8)),
    "dropout": (dropout, (1, 8, 8)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_fast_engine_trains_as_the_plain_one(kind):
    """One attack and two updates, uncaptured; the line says what was taken."""
    make, shape = KINDS[kind]
    fat, found = FAT(eps=0.1, step_size=0.03, steps=2), {}
    with seeded("cpu", 1):
        first = make()
        x, y = torch.rand(4, *shape), torch.arange(4)
    for how in ("plain", "fast"):
        model = copy.deepcopy(first).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        given = {"batch": 4, "shape": shape, "classes": 10, "device": torch.device("cpu"), "half": False}
        engine = prepare(model, optimizer, fat.loss, kind=how, **given)
        search = KTauPGD(eps=0.1, step_size=0.03, steps=2, tau=1, loss="ce", start="uniform")
        x_adv = engine.attack(search, x, y, torch.Generator().manual_seed(0)).x_adv.clone()
        for step in range(2):
            with seeded("cpu", 2, step):
                engine.update(x, x_adv, y, 0.01)
        found[how] = (x_adv, model.state_dict(), engine.line)
    assert found["plain"][2] == "engine: plain, fp32 (as asked)"
    line = found["fast"][2]
    assert "update: plain layers, uncaptured (no CUDA)" in line
    folded = kind in ("bottlenecks", "preact", "silu", "dropout")
    assert ("attack: batch-norm folded, uncaptured" if folded else "attack: the model itself (") in line
    # A gradient of almost nothing may have either sign.
    assert ((found["plain"][0] - found["fast"][0]).abs() > 1e-5).float().mean() < 0.01
    for name, value in found["plain"][1].items():
        assert torch.allclose(value, found["fast"][1][name], rtol=1e-2, atol=1e-3), name


def test_the_fast_engine_leaves_the_random_state_and_resumes_dropout(tmp_path, quick):
    before = torch.get_rng_state()
    quick, net = replace(quick, epochs=1), dropout()
    after = torch.get_rng_state()
    loop.train(quick, tmp_path / "whole", model=net, tensorboard=False, engine="fast")
    assert torch.equal(torch.get_rng_state(), after) and not torch.equal(before, after)
    steps = iter(range(100))
    with pytest.raises(Interrupted):
        loop.train(
            quick, tmp_path / "parts", model=net, tensorboard=False, engine="fast", stop=lambda: next(steps) == 2
        )
    loop.train(quick, tmp_path / "parts", model=net, resume=True, tensorboard=False, engine="fast")
    same_run(tmp_path / "whole", tmp_path / "parts")


def test_a_registered_network_is_made_from_the_seed(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(own, "MADE", {})
    models.register_model("my-net", Net)
    quick = replace(quick, epochs=1, model="my-net")
    one, two = (loop.train(quick, tmp_path / name, tensorboard=False).state_dict() for name in ("a", "b"))
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert load_model(tmp_path / "a").conv.weight.shape == (8, 1, 3, 3)
    own.MADE.clear()
    with pytest.raises(UserError, match=r"unknown model 'my-net'.*register_model"):
        load_model(tmp_path / "a")
