"""The two passes of a folded network on a CPU against autograd of the model itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.attacks import friendly_pgd, pgd
from sparring.engine import cpu
from sparring.engine.attack.cpu_passes import CPUPasses
from sparring.engine.attack.folded import fold
from sparring.models import build
from tests.attacks.oracle import literal_friendly_pgd
from tests.engine.networks import Transformed

NETWORKS = {
    "tiny_cnn": (1, (8, 8)),
    "small_cnn": (3, (12, 12)),
    "resnet18": (3, (8, 8)),
    "preact_resnet18": (3, (8, 8)),
    "wrn-10-1": (3, (8, 8)),
}


def trained(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A network whose batch-norm has statistics, images, and labels of which some are wrong."""
    channels, size = NETWORKS[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        normalize = ((0.4,) * channels, (0.3,) * channels)
        model = build(name, num_classes=4, channels=channels, size=size, normalize=normalize).to(dtype)
        with torch.no_grad():
            for _ in range(3):
                model.train()(torch.rand(16, channels, *size, dtype=dtype))
        x = torch.rand(6, channels, *size, dtype=dtype)
    y = model.eval()(x).argmax(dim=1)
    y[0] = (y[0] + 1) % 4
    return model, x, y


@pytest.mark.parametrize("name", NETWORKS)
def test_the_passes_are_those_of_autograd(name):
    model, x, _ = trained(name)
    point = x.clone().requires_grad_()
    expected = model(point)
    (gradient,) = torch.autograd.grad(expected.square().sum(), point)
    logits, back = CPUPasses(fold(model, dtype=torch.float64, fused=False)).forward_back(x)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-10 * float(expected.detach().abs().max()))
    close = {"rtol": 0, "atol": 1e-10 * float(gradient.abs().max())}
    assert torch.allclose(back(2 * logits, None), gradient, **close)
    some = torch.tensor([4, 1, 1])
    assert torch.allclose(back(2 * logits[some], some), gradient[some], **close)


@pytest.mark.parametrize("tau", [0, 2, 5])
def test_an_attack_equals_the_literal_loop(tau):
    model, x, y = trained("tiny_cnn")
    network = CPUPasses(fold(model, dtype=torch.float64, fused=False))
    given = {"eps": 0.2, "step_size": 0.05, "steps": 5, "loss": "ce", "start": None}
    found = friendly_pgd(network, x, y, tau=tau, **given)
    x_adv, backprops = literal_friendly_pgd(model, x, y, tau=tau, noise=0.0, project=True, seed=0, **given)
    assert torch.equal(found.backprops, backprops)
    assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)
    if tau == 5:
        assert torch.equal(found.x_adv, pgd(network, x, y, **given))


def test_weights_are_read_again():
    model, x, _ = trained("tiny_cnn")
    network = CPUPasses(fold(model, dtype=torch.float64, fused=False))
    with torch.no_grad():
        model.bn2.running_mean += 1.0
    network.refresh()
    assert torch.allclose(network.forward_back(x)[0], model(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("unit", "half", "dtype"), [("AMX", True, "bf16"), ("", True, "fp32"), ("AMX", False, "fp32")])
def test_bf16_where_it_is_asked_for_and_the_cpu_has_it(unit, half, dtype, monkeypatch):
    model, x, _ = trained("tiny_cnn", torch.float32)
    monkeypatch.setattr(cpu, "bf16_unit", lambda: unit)
    found = cpu.attack_for(model, x, half=half)
    assert found.network is not None
    assert found.network.folded.dtype == (torch.bfloat16 if dtype == "bf16" else torch.float32)
    assert found.how == ("bf16 (this CPU has AMX), batch-norm folded" if dtype == "bf16" else "batch-norm folded")
    logits, back = found.network.forward_back(x)
    assert logits.dtype == back(logits, None).dtype == torch.float32


def test_passes_that_are_not_those_of_autograd_are_not_taken(monkeypatch):
    model, x, _ = trained("tiny_cnn", torch.float32)
    forward_back = CPUPasses.forward_back

    def wrong(self, x):
        logits, back = forward_back(self, x)
        return logits, lambda gradient, among: -back(gradient, among)

    monkeypatch.setattr(CPUPasses, "forward_back", wrong)
    assert cpu.attack_for(model, x, half=False).how == "the model itself (its passes differ from autograd)"


def test_a_network_that_cannot_be_folded_runs_itself():
    found = cpu.attack_for(Transformed(), torch.rand(2, 1, 6, 6), half=False)
    assert found.network is None and found.how == "the model itself (LayerNorm is not folded)"
