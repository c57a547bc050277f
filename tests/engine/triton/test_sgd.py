"""The SGD kernels equal torch's SGD, run by Triton's interpreter on a CPU (tests/conftest.py)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.triton import sgd
from sparring.engine.update.descent import Descent

SHAPES = [(8, 3, 3, 3), (5,), (33, 70), (1,), (64, 64, 1, 1), (10, 512), (13, 7, 3, 3)]  # from 1 value to three blocks
NARROW = torch.bfloat16


def parameters(seed: int = 0) -> list[torch.nn.Parameter]:
    draw = torch.Generator().manual_seed(seed)
    made = [torch.randn(shape, generator=draw) for shape in SHAPES]
    return [torch.nn.Parameter(t.to(memory_format=torch.channels_last) if t.dim() == 4 else t) for t in made]


def gradients(weights, seed: int) -> list[torch.Tensor]:
    """In bf16 for matrices, as autograd gives it for bf16 leaves; in fp32 for vectors. Laid out like the weights."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for weight in weights:
        values = torch.randn(weight.shape, generator=draw)
        made.append(torch.empty_like(weight, dtype=NARROW if weight.dim() > 1 else None).detach().copy_(values))
    return made


def make_sgd(weights, *, momentum: float, weight_decay: float):
    optimizer = torch.optim.SGD(weights, lr=1.0, momentum=momentum, weight_decay=weight_decay)
    leaves = [torch.nn.Parameter(w.detach().to(NARROW)) if w.dim() > 1 else w for w in weights]
    return Descent(optimizer, weights, leaves, kernels=sgd), optimizer, leaves


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_kernel_equals_torch_sgd(momentum, weight_decay):
    assert max(weight.numel() for weight in parameters()) > 2 * sgd._BLOCK
    ours, theirs = parameters(), parameters()
    step, optimizer, leaves = make_sgd(ours, momentum=momentum, weight_decay=weight_decay)
    reference = torch.optim.SGD(theirs, lr=1.0, momentum=momentum, weight_decay=weight_decay)
    for number, lr in enumerate([0.1, 0.1, 0.02]):
        given = gradients(ours, number)
        for weight, gradient in zip(theirs, given, strict=True):
            weight.grad = gradient.float()
        reference.param_groups[0]["lr"] = lr
        reference.step()
        step.lr.fill_(lr)
        step(torch.tensor(1.0), given)
    for a, b, leaf in zip(ours, theirs, leaves, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)
        if momentum:
            buffers = optimizer.state[a]["momentum_buffer"], reference.state[b]["momentum_buffer"]
            assert torch.allclose(*buffers, rtol=1e-5, atol=1e-6)
        assert (leaf is a) == (a.dim() == 1)
        # The interpreter truncates where a GPU rounds: one unit in the last place.
        assert leaf.stride() == a.stride() and torch.allclose(leaf.float(), a, rtol=2**-7, atol=0)
    assert step.failed == 0


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("where", ["loss", "first", "narrow", "wide", "last"])
def test_non_finite_step_is_skipped_and_remembered(where, number):
    weights = parameters()
    step, _, leaves = make_sgd(weights, momentum=0.9, weight_decay=0.01)
    step.lr.fill_(0.1)
    step(torch.tensor(1.0), gradients(weights, 0))
    before = [t.detach().clone() for t in (*weights, *leaves, *step.state)]
    bad, loss = gradients(weights, 1), torch.tensor(1.0)
    place = {"first": (0, 0), "narrow": (5, 5119), "wide": (1, 4), "last": (6, -1)}
    if where == "loss":
        loss.fill_(number)
    else:
        tensor, value = place[where]
        bad[tensor].as_strided((bad[tensor].numel(),), (1,))[value] = number
    step(loss, bad)
    assert step.failed == 1 and step.skip == 1
    assert all(torch.equal(a, b) for a, b in zip(before, (*weights, *leaves, *step.state), strict=True))
    step(torch.tensor(1.0), gradients(weights, 2))  # a finite step is taken, the flag stays
    assert step.failed == 1 and step.skip == 0
    assert not any(torch.equal(a, b) for a, b in zip(before, (*weights, *leaves, *step.state), strict=True))


def test_gradients_in_other_layouts_and_dtypes():
    weights = parameters()
    step, _, _ = make_sgd(weights, momentum=0.0, weight_decay=0.0)
    step.lr.fill_(1.0)
    before = [weight.detach().clone() for weight in weights]
    given = [gradient.contiguous() for gradient in gradients(weights, 0)]
    assert given[0].stride() != weights[0].stride()
    given[1] = given[1].double()
    given[2] = given[2].half()
    given[5] = given[5].float()
    step(torch.tensor(1.0), given)
    for weight, old, gradient in zip(weights, before, given, strict=True):
        assert torch.allclose(weight, old - gradient.float(), rtol=1e-6, atol=1e-6)


class Recorded:
    """A kernel whose launches are recorded, as by a capture, and run when replayed."""

    def __init__(self, kernel):
        self.kernel, self.launches = kernel, []

    def __getitem__(self, grid):
        return lambda *given: self.launches.append((grid, given))

    def replay(self):
        for grid, given in self.launches:
            self.kernel[grid](*given)


def test_every_capture_keeps_its_own_table(monkeypatch):
    weights = parameters()
    step, _, _ = make_sgd(weights, momentum=0.0, weight_decay=0.0)
    step.lr.fill_(1.0)
    graphs = []
    for number in (0, 1):  # two graphs: with and without a perturbation of the weights
        given = gradients(weights, number)
        with monkeypatch.context() as inside:
            kernels = [Recorded(sgd._doubt), Recorded(sgd._descend)]
            inside.setattr(sgd, "_capturing", lambda: True)
            inside.setattr(sgd, "_doubt", kernels[0])
            inside.setattr(sgd, "_descend", kernels[1])
            table = step.at_once.table.clone()
            step(torch.tensor(1.0), given)
            assert torch.equal(step.at_once.table, table)  # no copy from the host inside a capture
        step.settle()
        graphs.append((kernels, given))
    step(torch.tensor(1.0), gradients(weights, 2))  # an eager step in between, with other gradients
    step.settle()
    for kernels, given in graphs:
        before = [weight.detach().clone() for weight in weights]
        for kernel in kernels:
            kernel.replay()
        for weight, old, gradient in zip(weights, before, given, strict=True):
            assert torch.allclose(weight, old - gradient.float(), rtol=1e-6, atol=1e-6)
