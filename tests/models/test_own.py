"""Names of networks that are not built in: registered, by import path, timm's."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

import sparring
from sparring.errors import UserError
from sparring.models import build, built_in, describe, name_model, own, register_model
from tests.own_networks import Net


@pytest.fixture(autouse=True)
def _forget(monkeypatch):
    monkeypatch.setattr(own, "MADE", {})


def test_what_a_function_asks_for_is_what_it_gets():
    seen = {}

    def every(num_classes, channels, size):
        seen["every"] = (num_classes, channels, size)
        return Net(num_classes, channels)

    def few(*, num_classes, width=4):
        seen["few"] = (num_classes, width)
        return Net(num_classes)

    def rest(**given):
        seen["rest"] = given
        return Net()

    for make in (every, few, rest, Net, lambda: Net()):
        name = f"net-{len(own.MADE)}"
        register_model(name, make)
        assert isinstance(build(name, num_classes=4, channels=2, size=(8, 9)), Net)
    assert seen["every"] == (4, 2, (8, 9)) and seen["few"] == (4, 4)
    assert seen["rest"] == {"num_classes": 4, "channels": 2, "size": (8, 9)}
    assert sparring.register_model is register_model


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("resnet18", Net, "'resnet18' is the name of a built-in model"),
        ("wrn-16-4", Net, "built-in model"),
        ("wrn-16-4-silu", Net, "built-in model"),
        ("a:b", Net, "letters, digits, - and _, got 'a:b'"),
        ("", Net, "letters, digits"),
        (3, Net, "letters, digits, - and _, got 3"),
        ("mine", Net(), r"takes a function .* got Net. For one module: sparring.train\(model=net\)"),
        ("mine", None, "takes a function that makes the network, got NoneType"),
    ],
)
def test_what_cannot_be_registered(name, make, message):
    with pytest.raises(UserError, match=message):
        register_model(name, make)
    assert not own.MADE


def test_a_name_is_taken_once():
    register_model("mine", Net)
    register_model("mine", Net)
    with pytest.raises(UserError, match=r"'mine' is registered already.*overwrite=True"):
        register_model("mine", lambda: Net())
    register_model("mine", lambda: Net(), overwrite=True)
    with pytest.raises(UserError, match=r"unknown model 'mime'. Did you mean 'mine'\?"):
        build("mime", num_classes=10)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: None, "must return an nn.Module, it returned None"),
        (lambda: torch.zeros(1), "it returned a Tensor"),
        (lambda width: Net(), "needs a parameter 'width'"),
        (lambda: [][1], r"making the model 'mine' fails \(IndexError: list index out of range\)"),
    ],
)
def test_what_makes_no_network(make, message):
    register_model("mine", make)
    with pytest.raises(UserError, match=message) as caught:
        build("mine", num_classes=10)
    assert "\n" not in str(caught.value)


def test_build_imports_nothing(tmp_path, monkeypatch):
    (tmp_path / "sneaky_net.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom tests.own_networks import Net\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("sneaky_net:Net", "sneaky_net:Net.__init__"):
        with pytest.raises(UserError, match="no path from a file is followed by itself"):
            build(name, num_classes=10)
        assert describe(name) == f"the network that {name} makes" and not built_in(name)
    assert not (tmp_path / "ran").exists() and "sneaky_net" not in sys.modules
    name_model("sneaky_net:Net")
    assert (tmp_path / "ran").exists()
    assert isinstance(build("sneaky_net:Net", num_classes=10, channels=1), Net)
    with pytest.raises(UserError, match=r"cannot import 'sneaky_nets' .*ModuleNotFoundError"):
        name_model("sneaky_nets:Net")
    with pytest.raises(UserError, match=r"model must be a name or an nn.Module, got int"):
        name_model(3)


@pytest.fixture
def timm(monkeypatch):
    """A stand-in with timm's functions that are called here."""

    def create_model(name, pretrained=False, num_classes=1000, in_chans=3, **more):
        if "img_size" in more and not name.startswith("vit"):
            raise TypeError("ResNet.__init__() got an unexpected keyword argument 'img_size'")
        made = Net(num_classes, in_chans)
        made.given, made.pretrained_cfg = (pretrained, more), {"mean": (0.5, 0.4, 0.3), "std": (0.2, 0.2, 0.2)}
        return made

    fake, names = ModuleType("timm"), ["resnet50", "vit_tiny_patch16_224"]
    fake.create_model, fake.list_models, fake.is_model = create_model, lambda: names, lambda name: name in names
    monkeypatch.setitem(sys.modules, "timm", fake)


def test_timm_networks(timm):
    made = build("timm:resnet50", num_classes=7, channels=1, size=(64, 64))
    assert made.given == (False, {}) and made.fc.out_features == 7
    assert build("timm:vit_tiny_patch16_224", num_classes=7, size=(32, 48)).given == (False, {"img_size": (32, 48)})
    wrapped = build("timm:resnet50?pretrained", num_classes=7, size=(64, 64))
    assert wrapped.network.given[0] and wrapped.normalize.mean.flatten().tolist() == pytest.approx([0.5, 0.4, 0.3])
    again = build("timm:resnet50?pretrained", num_classes=7, pretrained=False)
    assert not again.network.given[0] and again.state_dict().keys() == wrapped.state_dict().keys()
    grey = build("timm:resnet50?pretrained", num_classes=7, channels=1)
    assert grey.normalize.mean.flatten().tolist() == pytest.approx([0.4])
    assert describe("timm:resnet50") == "timm's resnet50"


def test_wrong_timm_names(timm, monkeypatch):
    with pytest.raises(UserError, match=r"timm has no model 'resnet5'. Did you mean 'resnet50'\?"):
        build("timm:resnet5", num_classes=10)
    for name in ("timm:", "timm:hf-hub:some/one", "timm:../x", "timm:resnet50?weights"):
        with pytest.raises(UserError, match=r"is not a name of timm's. Write timm:resnet50"):
            build(name, num_classes=10)
    monkeypatch.setitem(sys.modules, "timm", None)  # not installed
    monkeypatch.setattr(importlib, "import_module", _absent)
    with pytest.raises(
        UserError, match=r"timm:resnet50 needs timm, which is not installed: pip install 'sparring\[timm\]'"
    ):
        build("timm:resnet50", num_classes=10)
    monkeypatch.setattr(importlib, "import_module", _broken)
    with pytest.raises(
        UserError, match=r"needs timm, which does not import here .operator torchvision::nms does not exist.. Install"
    ):
        build("timm:resnet50", num_classes=10)


def _absent(name):
    raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def _broken(name):
    raise RuntimeError("operator torchvision::nms does not exist")


def test_the_real_timm():
    try:
        importlib.import_module("timm")
    except Exception as error:
        pytest.skip(f"timm does not import here: {error}")
    model = build("timm:resnet10t", num_classes=7, channels=1, size=(32, 32))
    assert model(torch.rand(2, 1, 32, 32)).shape == (2, 7)
    with pytest.raises(UserError, match=r"timm has no model 'resnet5o'. Did you mean"):
        build("timm:resnet5o", num_classes=7)


@pytest.mark.parametrize("name", ["wrn-28-10-silu", "preact_resnet18"])
@pytest.mark.parametrize("side", [32, 64])
def test_both_sizes(name, side):
    with torch.device("meta"):
        assert build(name, num_classes=5, size=(side, side))(torch.rand(2, 3, side, side)).shape == (2, 5)


def test_silu_takes_the_place_of_every_relu():
    relu, silu = build("wrn-10-1", num_classes=5), build("wrn-10-1-silu", num_classes=5)
    silu.load_state_dict(relu.state_dict())
    calls = []
    for module in silu.modules():
        if hasattr(module, "activation"):
            module.activation = lambda h: calls.append(1) or nn.functional.relu(h)
    x = torch.rand(2, 3, 32, 32)
    assert torch.equal(silu.eval()(x), relu.eval()(x)) and len(calls) == 7
    assert "silu" in describe("wrn-10-1-silu").lower()
