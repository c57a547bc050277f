"""PGD-K-tau against the oracle, and what follows from its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparring.attacks import friendly_pgd, pgd
from sparring.errors import UserError
from tests.attacks.conftest import images, network
from tests.attacks.oracle import literal_friendly_pgd

SETTINGS = {"eps": 0.1, "step_size": 0.02, "steps": 8}


def seeded(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def squared_error(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return ((logits - torch.nn.functional.one_hot(y, logits.shape[1])) ** 2).sum(dim=1)


def compare(model, x, y, *, eps, step_size, steps, tau, loss="ce", start=None, noise=0.0, project=True):
    rest = {"eps": eps, "step_size": step_size, "steps": steps, "tau": tau}
    rest |= {"loss": loss, "start": start, "noise": noise, "project": project}
    found = friendly_pgd(model, x, y, generator=seeded(), **rest)
    x_adv, backprops = literal_friendly_pgd(model, x, y, seed=5, **rest)
    assert torch.equal(found.backprops, backprops)
    # Steps are signs, so a difference is either rounding in the last place or a whole step.
    assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)
    return found


@pytest.mark.parametrize("tau", [0, 1, 3, 8])
@pytest.mark.parametrize("loss", ["ce", "kl", "cw", squared_error], ids=["ce", "kl", "cw", "callable"])
@pytest.mark.parametrize("start", [None, "uniform", "normal"])
def test_equals_the_literal_loop(batch, tau, loss, start):
    # At the image itself the KL is 0 with gradient 0 up to rounding: the sign of rounding is not promised.
    if loss == "kl" and start is None:
        start = "uniform"
    compare(*batch, tau=tau, loss=loss, start=start, **SETTINGS)


@pytest.mark.parametrize("noise", [0.0, 0.01])
@pytest.mark.parametrize("project", [True, False])
@pytest.mark.parametrize("tau", [0, 2])
def test_equals_the_literal_loop_with_noise_and_without_projection(batch, noise, project, tau):
    compare(*batch, tau=tau, noise=noise, project=project, start="uniform", **SETTINGS)


@pytest.mark.parametrize(
    ("channels", "size", "classes", "count"),
    [(3, (5, 7), 2, 9), (1, (9, 3), 7, 5), (4, (4, 4), 13, 1), (2, (6, 6), 3, 2)],
)
def test_odd_shapes_class_counts_and_a_batch_of_one(channels, size, classes, count):
    model = network(channels, size, classes)
    x, y = images(model, count, channels, size)
    compare(model, x, y, tau=1, start="uniform", **SETTINGS)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    count=st.integers(1, 12),
    tau=st.integers(0, 6),
    steps=st.integers(1, 6),
    eps=st.floats(0.01, 0.5),
    share=st.floats(0.05, 1.0),
)
def test_equals_the_literal_loop_on_random_problems(seed, count, tau, steps, eps, share):
    model = network(seed=seed)
    x, y = images(model, count, seed=seed)
    compare(model, x, y, eps=eps, step_size=eps * share, steps=steps, tau=tau, start="uniform", noise=0.003)


def test_wrong_from_the_start_takes_no_step(batch):
    model, x, y = batch
    found = friendly_pgd(model, x, y, tau=0, **SETTINGS)
    assert found.backprops[0] == 0
    assert torch.equal(found.x_adv[0], x[0])
    # With tau left it goes on, and every wrong prediction spends one.
    assert friendly_pgd(model, x, y, tau=2, **SETTINGS).backprops[0] >= 2


def test_all_stop_at_once(batch):
    model, x, _ = batch
    wrong = (model(x).argmax(dim=1) + 1) % 4
    found = friendly_pgd(model, x, wrong, tau=0, **SETTINGS)
    assert torch.equal(found.x_adv, x)
    assert found.backprops.sum() == 0


@pytest.mark.parametrize("tau", [8, 1000])
@pytest.mark.parametrize("loss", ["ce", "kl", "cw"])
@pytest.mark.parametrize("start", [None, "uniform"])
def test_tau_of_k_or_more_is_bitwise_pgd(batch, tau, loss, start):
    model, x, y = batch
    friendly = friendly_pgd(model, x, y, tau=tau, loss=loss, start=start, generator=seeded(), **SETTINGS)
    plain = pgd(model, x, y, loss=loss, start=start, generator=seeded(), **SETTINGS)
    assert torch.equal(friendly.x_adv, plain)
    assert (friendly.backprops == SETTINGS["steps"]).all()


def test_from_given_points_equals_the_literal_loop(batch):
    """From the points that "uniform" draws, given as a tensor."""
    model, x, y = batch
    drawn = torch.rand(x.shape, generator=seeded(), dtype=x.dtype)
    start = (x + 0.1 * (2 * drawn - 1)).clamp(0, 1)
    kept = start.clone()
    found = friendly_pgd(model, x, y, tau=1, start=start, **SETTINGS)
    rest = {"tau": 1, "loss": "ce", "start": "uniform", "noise": 0.0, "project": True, "seed": 5}
    x_adv, backprops = literal_friendly_pgd(model, x, y, **SETTINGS, **rest)
    assert torch.equal(found.backprops, backprops)
    assert torch.allclose(found.x_adv, x_adv, rtol=0, atol=1e-12)
    assert torch.equal(start, kept)


def test_without_projection_a_start_may_lie_outside_the_ball(batch):
    model, x, y = batch
    start = (x + 0.3).clamp(0, 1)
    with pytest.raises(UserError, match="start must lie in the eps-ball"):
        friendly_pgd(model, x, y, start=start, **SETTINGS)
    found = friendly_pgd(model, x, (model(start).argmax(dim=1) + 1) % 4, start=start, project=False, **SETTINGS)
    assert torch.equal(found.x_adv, start)  # wrong there, so no step is taken


def test_an_example_does_not_depend_on_its_neighbours(batch):
    """A shrunk batch must not be compared with un-shrunk labels, a bug of the authors' code until January 2021."""
    model, x, y = batch
    batched = friendly_pgd(model, x, y, tau=1, **SETTINGS)
    for i in range(len(x)):
        alone = friendly_pgd(model, x[i : i + 1], y[i : i + 1], tau=1, **SETTINGS)
        assert torch.allclose(batched.x_adv[i], alone.x_adv[0], rtol=0, atol=1e-12)
        assert batched.backprops[i] == alone.backprops[0]


def test_stopped_examples_are_not_computed_again(batch):
    model, x, y = batch
    sizes = []
    model.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    found = friendly_pgd(model, x, y, tau=0, **SETTINGS)
    # One forward pass per step for the active examples: those that took k steps are predicted k + 1 times at most.
    predicted = (found.backprops + 1).clamp(max=SETTINGS["steps"])
    assert sum(sizes) == predicted.sum()
    assert sizes == sorted(sizes, reverse=True)


def test_friendly_data_are_wrong_or_hard(batch):
    model, x, y = batch
    found = friendly_pgd(model, x, y, tau=0, **SETTINGS)
    wrong = model(found.x_adv).argmax(dim=1) != y
    stopped_early = found.backprops < SETTINGS["steps"]
    assert stopped_early.any()
    assert wrong[stopped_early].all()


def test_wrong_predictions_need_not_be_consecutive():
    """tau counts all wrong predictions: a path wrong, right, wrong spends two."""

    class Stripes(torch.nn.Module):
        """Wrong where the (one-pixel) image lies in every second stripe of width 0.05; the loss always grows with x."""

        def forward(self, x):
            wrong = ((x.flatten(1)[:, 0] / 0.05).floor() % 2 == 1).double()
            rise = x.flatten(1)[:, 0] * 1e-3
            return torch.stack([-rise, wrong * 1.0 - 0.5 + rise], dim=1)

    x = torch.full((1, 1, 1, 1), 0.01, dtype=torch.float64)
    y = torch.zeros(1, dtype=torch.int64)
    steps = [
        friendly_pgd(Stripes(), x, y, eps=0.9, step_size=0.05, steps=10, tau=tau, loss="cw").backprops.item()
        for tau in range(4)
    ]
    assert steps == [1, 3, 5, 7]
