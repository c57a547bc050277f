"""The copy of the model in the update: bf16 weights are never stale, batch-norm's counts right, the model untouched."""

from __future__ import annotations

import copy
import importlib.util
from functools import partial

import pytest
import torch
from torch import nn

from sparring.engine.cuda_graphs import Captured
from sparring.engine.plain import PlainUpdate
from sparring.engine.update import step as step_module
from sparring.engine.update.amp_copy import AmpCopy
from sparring.engine.update.step import FastUpdate
from sparring.objectives import OBJECTIVES
from tests.attacks.conftest import images, network

if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    KERNELS, NORMS = [None], None
else:  # by Triton's interpreter (tests/conftest.py)
    from sparring.engine.triton import batch_norm, pooling, sgd

    KERNELS, NORMS = [None, sgd], (batch_norm, pooling)
by_triton = pytest.mark.skipif(NORMS is None, reason="by Triton's interpreter, which needs Triton and no CUDA")

BATCH = 16
STEPS = [(0.1, 16, 0.0), (0.05, 16, 0.0), (0.05, 7, 0.0), (0.05, 16, 0.02), (0.02, 7, 0.02), (0.02, 16, 0.0)]


def objective(name: str):
    return lambda m, x, x_adv, y: OBJECTIVES[name]().loss(m, x, x_adv, y)


def fast(model, loss, *, half, kernels=None, compiled=False, momentum=0.9, norms=None):
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=momentum, weight_decay=5e-4)
    given = {"batch": BATCH, "shape": (1, 6, 6), "device": torch.device("cpu"), "after": lambda: None}
    return FastUpdate(model, optimizer, loss, half=half, compiled=compiled, kernels=kernels, norms=norms, **given)


def plain(model, loss, *, half):
    """The reference: torch's own SGD under autocast, which casts weights and gradients by itself; the loss in fp32."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4)

    def cast(m, x, x_adv, y):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return loss(lambda given: m(given).float(), x, x_adv, y)

    return PlainUpdate(model, optimizer, cast)


def models(count: int):
    made = [network().float().train() for _ in range(count)]
    for model in made:
        model.to(memory_format=torch.channels_last)
    return made


def batch(count: int, seed: int):
    x, y = images(network(), count, seed=seed)
    return x.float(), (x + 0.01).clamp(0, 1).float(), y


def assert_same(one: nn.Module, other: nn.Module, tolerance: float) -> None:
    for (name, a), b in zip(one.state_dict().items(), other.state_dict().values(), strict=True):
        if a.is_floating_point():
            assert (a - b).norm() <= tolerance * a.norm(), name
        else:
            assert torch.equal(a, b), name


def assert_not_stale(made: AmpCopy, *, exact: bool) -> None:
    assert len(made.copies) == 4  # three weights, and the bias of the linear layer
    for leaf, weight in zip(made.copies, made.weights, strict=True):
        assert leaf.stride() == weight.stride()
        expected = weight.to(torch.bfloat16)
        assert torch.equal(leaf, expected) if exact else torch.allclose(leaf, expected, rtol=2**-7, atol=0)


@pytest.mark.parametrize("name", ["madry", "trades"])
@pytest.mark.parametrize("kernels", KERNELS)
def test_bf16_equals_autocast(name, kernels):
    """Full and partial batches, with and without a perturbation of the weights, one after the other."""
    ours, theirs, far = models(3)
    loss = objective(name)
    step, reference = fast(ours, loss, half=True, kernels=kernels), plain(theirs, loss, half=True)
    assert {leaf.dtype for leaf in step.amp_copy.leaves} == {torch.bfloat16, torch.float32}
    for number, (lr, count, awp) in enumerate(STEPS):
        given = batch(count, number)
        value, expected = step(*given, lr, awp), reference(*given, lr, awp)
        assert abs(value - expected) <= 1e-5 * expected
        assert_not_stale(step.amp_copy, exact=kernels is None)
        with torch.no_grad():  # Triton's interpreter cuts where a GPU rounds, and that is not in question here
            torch._foreach_copy_(step.amp_copy.copies, step.amp_copy.weights)
    assert_same(theirs, ours, 1e-5)
    assert (theirs[0].weight - far[0].weight).norm() > 0.01 * far[0].weight.norm()  # it has moved since
    assert ours[1].num_batches_tracked == 1 + len(STEPS) * (2 if name == "trades" else 1)


@pytest.mark.parametrize("name", ["madry", "trades", "mart"])
@pytest.mark.parametrize("half", [True, False])
def test_a_loss_is_in_fp32(name, half):
    """Torch's cross entropy would not be, on a GPU: it asks for a log-softmax in the precision of the logits."""
    (model,) = models(1)
    loss, seen = objective(name), []

    def watched(m, *given):
        def logits(x):
            seen.append(m(x))
            return seen[-1]

        return loss(logits, *given)

    step = fast(model, watched, half=half)
    for count in (BATCH, 5):
        assert step(*batch(count, 0), 0.1).dtype == torch.float32
    assert seen and all(logits.dtype == torch.float32 for logits in seen)


@by_triton
@pytest.mark.parametrize(("name", "half"), [("madry", False), ("madry", True)])
def test_fused_batch_norm_trains_alike(name, half):
    """The interpreter cuts bf16 where a GPU rounds, so there it is alike and not the same."""
    tolerance = 0.05 if half else 1e-5
    ours, theirs, far = models(3)
    loss = objective(name)
    step, reference = fast(ours, loss, half=half, norms=NORMS), plain(theirs, loss, half=half)
    assert step.amp_copy.fused is not None and not step.amp_copy.not_fused
    assert_same(far, ours, 0.0)  # though it has been tried
    for number, (lr, count, awp) in enumerate(STEPS):
        given = batch(count, number)
        value, expected = step(*given, lr, awp), reference(*given, lr, awp)
        assert abs(value - expected) <= tolerance * expected
    if not half:
        assert_same(theirs, ours, tolerance)
    vectors = [torch.cat([t.flatten() for t in (*m.parameters(), *m.buffers())]) for m in (ours, theirs, far)]
    assert (vectors[0] - vectors[1]).norm() < 0.05 * (vectors[1] - vectors[2]).norm()
    assert ours[1].num_batches_tracked == 1 + len(STEPS) * (2 if name == "trades" else 1)


@by_triton
@pytest.mark.parametrize("fault", ["raises", "wrong", "statistics"])
def test_kernels_that_fail_are_not_used(fault, monkeypatch):
    right = NORMS[0].forward

    def forward(x, gain, shift, running, arrived, **how):
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if fault == "statistics":
            running = [torch.zeros_like(tensor) for tensor in running]
        return right(x, 2 * gain if fault == "wrong" else gain, shift, running, arrived, **how)

    monkeypatch.setattr(NORMS[0], "forward", forward)
    ours, theirs = models(2)
    ours[1].eval()
    modes = [module.training for module in ours.modules()]
    step = fast(ours, objective("madry"), half=False, norms=NORMS)
    assert step.amp_copy.not_fused and step.amp_copy.fused is None
    assert_same(theirs, ours, 0.0)
    assert [module.training for module in ours.modules()] == modes
    reference = plain(theirs, objective("madry"), half=False)
    theirs[1].eval()
    step(*batch(BATCH, 0), 0.1), reference(*batch(BATCH, 0), 0.1)
    assert_same(theirs, ours, 1e-5)


@pytest.mark.parametrize("count", [BATCH, 7])
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("how", ["load", "in place", "optimizer"])
def test_weights_changed_from_outside_are_seen(how, kernels, count):
    (model,) = models(1)
    step = fast(model, objective("madry"), half=True, kernels=kernels)
    step(*batch(BATCH, 0), 0.1)
    if how == "load":
        other = network(seed=5).float().state_dict()
        model.load_state_dict(other)
    elif how == "in place":
        with torch.no_grad():
            model[3].weight.mul_(-1.5)
    else:
        model(batch(BATCH, 1)[0]).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    fresh = copy.deepcopy(model)
    value = step(*batch(count, 2), 0.0)
    expected = fast(fresh, objective("madry"), half=True)(*batch(count, 2), 0.0)
    assert torch.equal(value, expected)
    assert_not_stale(step.amp_copy, exact=kernels is None)


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_a_warm_up_moves_is_put_back(kernels, monkeypatch):
    """As a capture does it: the step is taken twice beforehand."""
    warmed = []

    class Warmed(Captured):
        def __init__(self, work, pool):
            super().__init__(work, None)
            for _ in range(2):
                work()
            warmed.append(work)

    ours, theirs = models(2)
    loss = objective("madry")
    expected = fast(theirs, loss, half=True, kernels=kernels)
    values = [expected(*batch(BATCH, number), 0.1, awp).clone() for number, awp in enumerate([0.0, 0.02, 0.0])]
    monkeypatch.setattr(step_module, "Captured", Warmed)
    step = fast(ours, loss, half=True, kernels=kernels)
    for number, awp in enumerate([0.0, 0.02, 0.0]):
        assert torch.equal(step(*batch(BATCH, number), 0.1, awp), values[number])
    assert len(warmed) == 2
    assert_same(theirs, ours, 0.0)
    for one, other in zip(expected.descent.state, step.descent.state, strict=True):
        assert torch.equal(one, other)
    assert not step.failed()


def test_a_failing_warm_up_is_forgotten(monkeypatch):
    """A step at old numbers that fails in the warm-up says nothing of the step to come."""
    (model,) = models(1)
    step = fast(model, objective("madry"), half=True)
    given = batch(BATCH, 0)

    class Failed(Captured):
        def __init__(self, work, pool):
            super().__init__(work, None)
            step.x_adv.fill_(float("nan"))
            work()
            assert step.failed()
            step.x_adv.copy_(given[1])

    monkeypatch.setattr(step_module, "Captured", Failed)
    before = copy.deepcopy(model)
    value = step(*given, 0.1)
    assert not step.failed() and value.isfinite()
    reference = fast(before, objective("madry"), half=True)
    monkeypatch.undo()
    reference(*given, 0.1)
    assert_same(before, model, 0.0)


def test_a_model_with_frozen_layers():
    ours, theirs = models(2)
    for model in (ours, theirs):
        model[0].weight.requires_grad_(False)
        model[4].requires_grad_(False).eval()  # its statistics stand still too
    step, reference = fast(ours, objective("madry"), half=True), plain(theirs, objective("madry"), half=True)
    assert len(step.amp_copy.copies) == 3
    for number in range(3):
        given = batch(BATCH, number)
        step(*given, 0.1), reference(*given, 0.1)
    assert_same(theirs, ours, 2e-4)
    assert torch.equal(ours[0].weight, network().float()[0].weight)
    assert ours[1].num_batches_tracked == 4 and ours[4].num_batches_tracked == 1


def test_the_modes_are_the_models_own():
    ours, theirs = models(2)
    step, reference = fast(ours, objective("madry"), half=True), plain(theirs, objective("madry"), half=True)
    for model in (ours, theirs):
        model[4].eval()  # after the engine was made
    step(*batch(BATCH, 0), 0.1), reference(*batch(BATCH, 0), 0.1)
    assert_same(theirs, ours, 1e-5)
    assert ours[1].num_batches_tracked == 2 and ours[4].num_batches_tracked == 1


@pytest.mark.parametrize(
    ("awp", "kernels", "norms"), [(0.0, None, None), pytest.param(0.02, KERNELS[-1], NORMS, marks=by_triton)]
)
def test_a_step_that_fails_leaves_the_copies_as_they_were(awp, kernels, norms):
    """With a perturbation of the weights too, which moves the copies and not the weights."""
    (model,) = models(1)
    step = fast(model, objective("madry"), half=True, kernels=kernels, norms=norms)
    step(*batch(BATCH, 0), 0.1)
    step.amp_copy.refresh()  # Triton's interpreter cuts where torch rounds
    held = (*step.parameters, *step.amp_copy.copies, *step.descent.state)
    before = [tensor.detach().clone() for tensor in held]
    x, x_adv, y = batch(BATCH, 1)
    value = step(x, x_adv * float("nan"), y, 0.1, awp)
    assert step.failed() and not value.isfinite()
    assert all(torch.equal(a, b) for a, b in zip(before, held, strict=True))


def test_a_tied_weight_has_one_copy():
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 36, bias=False), nn.ReLU(), nn.Linear(36, 36, bias=False))
    model[3].weight = model[1].weight
    step = fast(model, lambda m, x, x_adv, y: nn.functional.cross_entropy(m(x_adv), y), half=True)
    layers = step.amp_copy.module
    assert layers[1].weight is layers[3].weight is step.amp_copy.leaves[0] is not model[1].weight
    before = model[1].weight.detach().clone()
    step(*batch(BATCH, 0), 0.1)
    assert not torch.equal(before, model[1].weight)


def test_the_model_is_left_as_it_is():
    """Also where the loss raises in the middle of a step: there is nothing to restore."""
    (model,) = models(1)
    before = copy.deepcopy(model.state_dict())
    forward = model.forward

    def loss(m, x, x_adv, y):
        m(x)
        raise ZeroDivisionError

    step = fast(model, loss, half=True)
    with pytest.raises(ZeroDivisionError):
        step(*batch(BATCH, 0), 0.1)
    assert model.forward == forward
    assert [p.dtype for p in model.parameters()] == [torch.float32] * len(list(model.parameters()))
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name in before:
        assert name.startswith(("1.running", "4.running")) or torch.equal(before[name], after[name]), name


def test_a_layer_that_weighs_by_its_count_keeps_it():
    ours, theirs = models(2)
    for model in (ours, theirs):
        model[1].momentum = None  # a running mean of all batches
    step, reference = fast(ours, objective("madry"), half=False), plain(theirs, objective("madry"), half=False)
    for number in range(3):
        given = batch(BATCH, number)
        step(*given, 0.1), reference(*given, 0.1)
    assert_same(theirs, ours, 1e-6)
    assert ours[1].num_batches_tracked == ours[4].num_batches_tracked == 4


@pytest.mark.parametrize("half", [False, True])
def test_one_graph_is_compiled_and_never_again(half, monkeypatch):
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend, fullgraph=True))
    ours, theirs = models(2)
    step = fast(ours, objective("madry"), half=half, compiled=True)
    same = fast(theirs, objective("madry"), half=half)
    for number, (lr, count, awp) in enumerate(STEPS):
        given = batch(count, number)
        assert torch.equal(step(*given, lr, awp), same(*given, lr, awp))
    assert_same(theirs, ours, 0.0)
    assert len(compiled) == 1
    counts = [node for node in compiled[0].graph.nodes if "num_batches" in node.name]
    assert not counts  # nor does the graph count batches
    torch._dynamo.reset()
