from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparring import engine
from sparring.data import hold_out, load
from sparring.schedules import parse
from sparring.seeds import derive_seed
from sparring.training import loop, run_folder
from tests.attacks.conftest import images, network
from tests.engine.attack.test_folded import Fickle


def prepared(model: nn.Module, shape=(1, 6, 6), **changes) -> engine.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"batch": 8, "shape": shape, "classes": 4, "device": torch.device("cpu"), "half": False, "kind": "auto"}
    return engine.prepare(model, optimizer, lambda m, x, x_adv, y: m(x).sum(), **(given | changes))


def test_off_without_cuda_with_one_line_of_why():
    made = prepared(network(), half=True)
    assert isinstance(made.update, engine.PlainUpdate)
    assert made.line == "engine: plain, fp32 (captured graphs and bf16 need CUDA)"
    assert prepared(network(), kind="plain").line == "engine: plain, fp32 (as asked)"


def test_a_model_that_cannot_be_traced_is_attacked_as_it_is():
    model = Fickle().double().train()
    made = prepared(model, shape=(1, 3, 3), kind="fast")
    assert "cannot be traced" in made.line
    x = torch.rand(3, 1, 3, 3, dtype=torch.float64)
    torch.testing.assert_close(made.network(x), model(x))
    assert model.training


def test_kernels_that_fail_are_told(monkeypatch):
    """Of a device on which batch-norm's do not run; what is used instead is tested in test_working.py."""
    broken = SimpleNamespace(takes=lambda x: True)  # and nothing else
    monkeypatch.setattr("sparring.engine.update.step.norms_for", lambda device: (broken, broken))
    made = prepared(network().float().train(), kind="fast", half=True)
    assert made.line.endswith(", batch-norm in updates by torch's compiler, for our kernels fail on this device")
    monkeypatch.undo()
    assert "torch's compiler" not in prepared(network().float().train(), kind="fast", half=True).line


def test_the_network_stands_for_the_model():
    model = network()
    made = prepared(model, kind="fast")
    x, _ = images(model, 5)
    torch.testing.assert_close(made.network(x), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("objective", ["madry", "fat", "trades", "fat-trades", "mart", "standard"])
def test_a_run_by_the_fast_engine_is_the_plain_run(tmp_path, small, objective):
    """On the CPU the engine runs uncaptured; folding and fp32 learning rates leave differences of rounding only."""
    config = replace(small, objective=objective, epochs=1, augment="none")
    for kind in ("plain", "fast"):
        loop.train(config, tmp_path / kind, engine=kind, tensorboard=False)
    one, other = (run_folder.read_metrics(tmp_path / kind)[0] for kind in ("plain", "fast"))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
    assert one["backprops"] == pytest.approx(other["backprops"], rel=1e-2)
    assert one["natural"] == pytest.approx(other["natural"], abs=0.06)
    json.dumps(other)


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_an_averaged_run(tmp_path, small, kind):
    """The average is what is returned, judged and kept; a stop and a resume change nothing."""
    config = replace(small, ema=0.8, awp=parse("0,0.005@40%"))
    model = loop.train(config, tmp_path / "whole", engine=kind, tensorboard=False)
    steps = iter(range(100))
    with pytest.raises(loop.Interrupted):
        loop.train(config, tmp_path / "parts", engine=kind, tensorboard=False, stop=lambda: next(steps) == 6)
    loop.train(config, tmp_path / "parts", engine=kind, tensorboard=False, resume=True)
    one, other = (run_folder.open_run(tmp_path / name).last() for name in ("whole", "parts"))
    assert one is not None and other is not None
    assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    assert all(torch.equal(tensor, one.part("model")[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, one.part("model")[name]) for name, tensor in one.part("live").items())
    held = hold_out(load("digits").train, config.validation, seed=derive_seed(config.seed, loop._HOLD_OUT))[1]
    natural, _ = loop.validate(model, held, eps=config.validation_eps, seed=config.seed)
    assert natural == run_folder.read_metrics(tmp_path / "whole")[-1]["natural"]


def test_a_fast_run_resumes_exactly(tmp_path, small):
    loop.train(small, tmp_path / "whole", engine="fast", tensorboard=False)
    steps = iter(range(100))
    with pytest.raises(loop.Interrupted):
        loop.train(small, tmp_path / "parts", engine="fast", tensorboard=False, stop=lambda: next(steps) == 6)
    loop.train(small, tmp_path / "parts", engine="fast", tensorboard=False, resume=True)
    one, other = (run_folder.open_run(tmp_path / name).last() for name in ("whole", "parts"))
    assert one is not None and other is not None
    assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)


def test_tuning_is_switched_on_for_a_while():
    before = torch.backends.cudnn.benchmark
    with engine.tuned(prepared(network(), kind="fast")):
        assert torch.backends.cudnn.benchmark
    assert torch.backends.cudnn.benchmark == before
    with engine.tuned(prepared(network())):  # the plain path sees every batch size
        assert torch.backends.cudnn.benchmark == before
