"""Which path an engine takes, what it says about it, and that every path trains alike."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sparring import UserError, engine
from sparring.attacks.checks import TwoPasses
from sparring.data import hold_out, load
from sparring.engine import attack_path, select
from sparring.engine.cuda_graphs import Captured, NotCapturable
from sparring.objectives import FAT, TRADES, KTauPGD, NoAttack
from sparring.schedules import parse
from sparring.seeds import Draw, derive_seed
from sparring.training import loop, run_folder
from sparring.training.validation import validate
from tests.attacks.conftest import images, network
from tests.engine.networks import Branches, Plainest, Syncs, SyncsInGraph, Transformed

CPU = torch.device("cpu")
PGD = KTauPGD(eps=0.1, step_size=0.03, steps=4, tau=0, loss="ce", start="uniform")


def prepared(model: nn.Module, **changes) -> engine.Engine:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    given = {"batch": 8, "shape": (1, 6, 6), "classes": 4, "device": CPU, "half": False, "kind": "auto"}
    return engine.prepare(model, changes.pop("optimizer", optimizer), FAT().loss, **(given | changes))


def test_off_without_cuda_with_one_line_of_why():
    made = prepared(network(), half=True)
    assert isinstance(made.step, engine.PlainUpdate) and made.runner is None
    assert made.line.startswith("engine: plain, fp32 (captured graphs need CUDA); attack: batch-norm folded")
    assert prepared(network(), kind="plain").line == "engine: plain, fp32 (as asked)"
    for kind in ("auto", "fast"):
        assert prepared(network(), half=True, fp8=True, kind=kind).line.count("fp8 needs a GPU") == 1


def test_a_part_that_is_not_known():
    with pytest.raises(UserError, match="manual"):
        prepared(network(), kind="fast", without=("by_magic",))


def made(kind: type[nn.Module], *given) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = kind(*given)
        with torch.no_grad():
            for _ in range(3):
                model.train()(torch.rand(16, 1, 6, 6))
    return model


REFUSED = {
    "syncs with the host": (lambda: made(Syncs), "its forward cannot be traced (TypeError"),
    "LayerNorm and GELU": (lambda: made(Transformed), "the model itself (LayerNorm is not folded)"),
    "control flow": (lambda: made(Branches), "a forward with data-dependent control flow cannot be traced"),
    "padding same": (lambda: made(Plainest, "same"), "a convolution with padding='same' is not folded"),
}


def trained(model: nn.Module, made: engine.Engine, steps: int = 6) -> list[torch.Tensor]:
    """The losses, and back-propagations, of a few steps of FAT."""
    found = []
    model.train()
    for step in range(steps):
        draw = torch.Generator().manual_seed(step)
        x, y = torch.rand(8, 1, 6, 6, generator=draw), torch.randint(0, 4, (8,), generator=draw)
        attacked = made.attack(PGD, x, y, draw)
        found.append(attacked.backprops.double())
        found.append(made.update(x, attacked.x_adv, y, 0.05, 0.0).double().reshape(1))
        assert not made.failed() and model.training
    return found


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_folded_trains_as_it_is(name, half):
    build, why = REFUSED[name]
    model = build()
    made = prepared(model, kind="fast", half=half)
    assert why in made.line, made.line
    found, expected = trained(model, made), trained(twin := build(), prepared(twin, kind="plain"))
    if not half:
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


class Refuses(Captured):
    """A capture that fails after its warm-up, as one does whose work waits for the device."""

    def __init__(self, work, pool, **given):
        super().__init__(work, None)
        if pool is not None:
            work()
            raise NotCapturable("it makes the host wait")


def refuse(monkeypatch, *modules: str) -> None:
    for module in modules:
        monkeypatch.setattr(f"sparring.engine.{module}.pool_for", lambda device: "pool")
        monkeypatch.setattr(f"sparring.engine.{module}.Captured", Refuses)


@pytest.mark.parametrize("name", [*REFUSED, "a traced sync"])
def test_what_cannot_be_captured_runs_uncaptured(name, monkeypatch):
    build = REFUSED[name][0] if name in REFUSED else lambda: made(SyncsInGraph)
    expected = trained(twin := build(), prepared(twin, kind="plain"))
    refuse(monkeypatch, "attack_path", "attack.runner", "update.step")
    model = build()
    refused = prepared(model, kind="fast")
    attack, update = refused.line.split("; ")[1:]
    assert attack.endswith("uncaptured (it makes the host wait)") and attack.startswith("attack: ")
    assert update == "update: plain layers, uncaptured (it makes the host wait)"
    for one, other in zip(trained(model, refused), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("module", ["attack.runner", "update.step"])
def test_a_capture_that_fails_at_its_first_use_changes_the_line(module, monkeypatch, caplog):
    """A rehearsal may succeed where a later capture has no memory."""
    model = made(Plainest)
    expected = trained(twin := made(Plainest), prepared(twin, kind="plain"))
    fast = prepared(model, kind="fast")
    for name in ("attack_how", "update_how"):
        monkeypatch.setattr(fast, name, "folded, captured")
    refuse(monkeypatch, module)
    if module == "update.step":
        fast.step.pool = "pool"
        fast.step.graphs.clear()
    else:
        fast.runner.pool = "pool"
    before = fast.line
    for one, other in zip(trained(model, fast), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "uncaptured (it makes the host wait)" in fast.line != before
    assert caplog.messages == [fast.line]  # once


def test_an_attack_that_fails_to_compile_is_the_plain_one(monkeypatch):
    model = made(Plainest)
    fast = prepared(model, kind="fast")

    def fails(search):
        raise ValueError("no compiler")

    monkeypatch.setattr(fast.runner, "capture", fails)
    expected = trained(twin := made(Plainest), prepared(twin, kind="plain"))
    for one, other in zip(trained(model, fast), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert "attack: plain (ValueError: no compiler)" in fast.line


def test_the_next_path_is_taken_where_one_fails(monkeypatch):
    """Fused operations that cannot be compiled, then a folded network that fails: the model itself is left."""
    model, tried = made(Plainest), []

    def rehearse(path, *given):
        tried.append(path)
        if len(tried) < 2:
            raise ValueError("no compiler")

    monkeypatch.setattr(attack_path, "_rehearse", rehearse)
    found = prepared(model, kind="fast").line
    assert "attack: the model itself (batch-norm folded fails: ValueError: no compiler), uncaptured (no CUDA)" in found


def test_a_folded_network_that_is_not_the_model_is_not_used(monkeypatch):
    """Real images are what it is checked on: this network differs from its trace on bright ones alone."""

    class Fickle(Plainest):
        bright = False

        def forward(self, x):
            if type(x) is torch.Tensor:  # a traced forward never gets here
                self.bright = float(x.detach().mean()) > 0.9
            return super().forward(x) * (2.0 if self.bright else 1.0)

    assert "batch-norm folded" in prepared(made(Fickle), kind="fast").line
    line = prepared(made(Fickle), kind="fast", images=torch.ones(4, 1, 6, 6)).line
    assert "the model itself (the folded network's logits are off by" in line


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5), "SGD with dampening is not captured"),
        (lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True), "Adam with amsgrad is not captured"),
        (lambda p: torch.optim.RMSprop(p, lr=0.1), "RMSprop is not captured"),
    ],
)
def test_another_optimiser_takes_its_own_steps(optimizer, why):
    model = made(Plainest)
    fast = prepared(model, kind="fast", half=True, optimizer=optimizer(model.parameters()))
    assert why in fast.line and "update: plain, fp32" in fast.line and fast.check_every == 1
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trained(model, fast)
    assert all(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_kernels_that_fail_are_reported(monkeypatch):
    """Batch-norm's, on a device on which they do not run; what runs instead is tested in test_amp_copy.py."""
    broken = SimpleNamespace(takes=lambda x: True)  # and nothing else
    monkeypatch.setattr(select, "norms_for", lambda device: (broken, broken))
    line = prepared(made(Plainest), kind="fast", half=True).line
    assert "update: plain layers (batch-norm kernels fail on this device (AttributeError" in line


def test_other_searches_get_the_engines_network():
    """And a rehearsal of the update leaves no trace in it."""
    model = network()
    fast = prepared(model, kind="fast")
    x, y = images(model, 5)
    seen = []

    def search(net, x, y, generator):
        seen.append(net)
        return NoAttack()(net, x, y, generator)

    assert torch.equal(fast.attack(search, x, y, torch.Generator()).x_adv, x)
    torch.testing.assert_close(seen[0](x), model(x), rtol=1e-10, atol=1e-10)
    assert seen[0] is not model and fast.judged().gradients is seen[0] and fast.judged().model is model


def test_a_run_by_the_fast_engine_is_the_plain_run(tmp_path, small):
    """On the CPU the engine runs uncaptured; folding and fp32 learning rates leave differences of rounding only."""
    config = replace(small, objective=TRADES(), epochs=1, augment="none")
    for kind in ("plain", "fast"):
        loop.train(config, tmp_path / kind, engine="fast", tensorboard=False)
    one, other = (run_folder.read_metrics(tmp_path / kind)[0] for kind in ("plain", "fast"))
    assert one["loss"] == pytest.approx(other["loss"], rel=1e-2)
    assert one["backprops"] == pytest.approx(other["backprops"], rel=1e-2)
    assert one["natural"] == pytest.approx(other["natural"], abs=0.06)
    json.dumps(other)


def test_an_averaged_run(tmp_path, small):
    """The average is what is returned, judged and kept; a stop and a resume change nothing."""
    config = replace(small, ema=0.8, awp=parse("0,0.005@40%"))
    model = loop.train(config, tmp_path / "whole", engine="fast", tensorboard=False)
    steps = iter(range(100))
    with pytest.raises(loop.Interrupted):
        loop.train(config, tmp_path / "parts", engine="fast", tensorboard=False, stop=lambda: next(steps) == 6)
    loop.train(config, tmp_path / "parts", engine="fast", tensorboard=False, resume=True)
    one, other = (run_folder.open_run(tmp_path / name).last() for name in ("whole", "parts"))
    assert one is not None and other is not None
    assert all(torch.equal(one.tensors[key], other.tensors[key]) for key in one.tensors)
    assert all(torch.equal(tensor, one.part("model")[name]) for name, tensor in model.state_dict().items())
    assert any(not torch.equal(tensor, one.part("model")[name]) for name, tensor in one.part("live").items())
    held = hold_out(load("digits").train, config.validation, seed=derive_seed(config.seed, Draw.HOLD_OUT))[1]
    natural, _ = validate(model, held, eps=config.validation_radius, seed=config.seed)
    assert natural == run_folder.read_metrics(tmp_path / "whole")[-1]["natural"]


def test_cudnn_tunes_inside_a_block_where_sizes_are_few():
    before = torch.backends.cudnn.benchmark
    for given, tunes in (({"kind": "fast"}, True), ({"kind": "fast", "fixed_sizes": False}, before), ({}, before)):
        with prepared(network(), **given).tuned():
            assert torch.backends.cudnn.benchmark == tunes
        assert torch.backends.cudnn.benchmark == before


def test_on_a_cpu_the_attack_follows_the_updates():
    model = network()
    x, y = images(model, 8)
    made = prepared(model)
    before = made.gradients(x)
    made.update(x, x, y, 0.1)
    assert isinstance(made.gradients, TwoPasses)
    assert torch.allclose(made.gradients(x), model.eval()(x), rtol=0, atol=1e-9)
    assert not torch.allclose(made.gradients(x), before, rtol=0, atol=1e-3)
    assert prepared(model, kind="plain").gradients is model
