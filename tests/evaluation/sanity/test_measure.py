"""Each doubt is raised for a model broken in that way, and none for an honest one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from sparring.attacks import losses
from sparring.errors import UserError
from sparring.evaluation.sanity import Doubt, doubts
from sparring.evaluation.sanity.checks import WHY
from tests.evaluation.sanity import networks
from tests.evaluation.sanity.networks import of_pgd, robust, train

SEEDS = (0, 1, 2)
Forward = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Networks this small are slower with several threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def unseen() -> tuple[Tensor, Tensor]:
    return networks.unseen()


@pytest.fixture(scope="module")
def nets() -> dict[tuple[str, int], nn.Module]:
    """Standard and adversarially trained networks, several seeds each."""
    made = {"standard": lambda seed: train(seed, of_pgd(0.0)), "robust": robust}
    made["very robust"] = lambda seed: train(seed, of_pgd(0.3))
    return {(kind, seed): make(seed) for seed in SEEDS for kind, make in made.items()}


class Broken(nn.Module):
    """A network with a modified forward pass."""

    def __init__(self, net: nn.Module, forward: Forward) -> None:
        super().__init__()
        self.net, self.how = net, forward

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.net, x)


class ScaledGradient(torch.autograd.Function):
    """The identity, with a gradient multiplied by `factor`."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(factor)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return ctx.saved_tensors[0] * gradient, None


def quantised(net: nn.Module, x: Tensor) -> Tensor:
    return net(torch.round(4 * x) / 4)


def saturated(net: nn.Module, x: Tensor) -> Tensor:
    return 1e4 * net(x)


def confident(net: nn.Module, x: Tensor) -> Tensor:
    return 5 * net(x)


def misleading(net: nn.Module, x: Tensor) -> Tensor:
    return net(ScaledGradient.apply(x, torch.tensor(-1.0)))


def shattered(net: nn.Module, x: Tensor) -> Tensor:
    """A gradient whose sign is effectively random from one point to the next."""
    signs = torch.sin(1e5 * x.detach()).sign()
    return net(ScaledGradient.apply(x, signs))


def rippled(net: nn.Module, x: Tensor) -> Tensor:
    """Shattered gradients: a fast, steep ripple in the function itself."""
    return net(x + 0.15 * torch.sin(300 * x))


class Reversing:
    """Gives the right gradient 25 times and then the opposite, so that many steps undo a few."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, net: nn.Module, x: Tensor) -> Tensor:
        self.calls += torch.is_grad_enabled()
        return net(ScaledGradient.apply(x, torch.tensor(1.0 if self.calls <= 25 else -1.0)))


def noisy(net: nn.Module, x: Tensor) -> Tensor:
    return net(x + 0.1 * torch.randn_like(x))


def softmaxed(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).softmax(dim=1)


def batch_normed(net: nn.Module, x: Tensor) -> Tensor:
    return net(x - x.mean(dim=0))


def cut(net: nn.Module, x: Tensor) -> Tensor:
    return net(x.detach())


def cut_behind(net: nn.Module, x: Tensor) -> Tensor:
    return net(x).detach()


def through_numpy(net: nn.Module, x: Tensor) -> Tensor:
    return torch.from_numpy(net(x).numpy())


def overflowing(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) / 0.0


def rooted(net: nn.Module, x: Tensor) -> Tensor:
    """The same logits; the root has no gradient where the first pixels are dark."""
    dark = x.flatten(1)[:, :2].sum(1)
    return net(x) + 0 * (dark * (dark > 0.5)).square().sqrt()[:, None]


BROKEN: list[tuple[str, Callable[[], Forward], set[str]]] = [
    (
        "quantised",
        lambda: quantised,
        {
            "zero-gradients",
            "loss-does-not-grow",
            "no-collapse-at-large-eps",
            "square-beats-white-box",
            "noise-hurts-as-much",
        },
    ),
    ("saturated", lambda: saturated, {"zero-gradients", "cw-far-from-ce", "no-collapse-at-large-eps"}),
    ("confident", lambda: confident, {"vanishing-gradients"}),
    ("misleading", lambda: misleading, {"loss-does-not-grow", "no-collapse-at-large-eps", "square-beats-white-box"}),
    ("shattered", lambda: shattered, {"noise-hurts-as-much", "square-beats-white-box"}),
    (
        "rippled",
        lambda: rippled,
        {"no-collapse-at-large-eps", "square-beats-white-box", "smoothing-beats-gradient"},
    ),
    ("reversing", Reversing, {"more-steps-weaker"}),
    ("noisy", lambda: noisy, {"randomness-at-inference"}),
    ("softmaxed", lambda: softmaxed, {"probabilities-not-logits"}),
    ("batch_normed", lambda: batch_normed, {"batch-dependence"}),
    ("cut", lambda: cut, {"non-differentiable"}),
    ("overflowing", lambda: overflowing, {"logits-not-finite"}),
    ("rooted", lambda: rooted, {"gradients-not-finite"}),
    ("cut_behind", lambda: cut_behind, {"non-differentiable"}),
    ("through_numpy", lambda: through_numpy, {"non-differentiable"}),
]


def names(found: list[Doubt]) -> set[str]:
    return {one.name for one in found}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["standard", "robust", "very robust"])
@pytest.mark.parametrize("eps", [8 / 255, 0.3])
def test_an_honest_model_raises_no_doubt(
    nets: dict, unseen: tuple[Tensor, Tensor], kind: str, seed: int, eps: float
) -> None:
    assert doubts(nets[kind, seed], *unseen, eps=eps, seed=seed) == []


def test_an_honest_convolutional_model_raises_no_doubt(trained) -> None:  # type: ignore[no-untyped-def]
    assert doubts(trained.model, trained.x, trained.y, eps=0.1, limit=64) == []


def test_large_logits_raise_no_doubt(unseen: tuple[Tensor, Tensor]) -> None:
    """Logits as large as after long training without weight decay are still honest."""
    net = train(5, of_pgd(0.0))
    gap = -losses.margin(net(unseen[0]), unseen[1])
    scale = 15 / gap.median().item()  # 1 - p_y rounds to 0 in float32 at a gap of 17
    assert doubts(Broken(net, lambda inner, x: scale * inner(x)).eval(), *unseen, eps=0.1) == []


@pytest.mark.parametrize(("name", "make", "expected"), BROKEN, ids=[row[0] for row in BROKEN])
def test_a_broken_model_raises_its_doubts(
    nets: dict,
    unseen: tuple[Tensor, Tensor],
    name: str,
    make: Callable[[], Forward],
    expected: set[str],
) -> None:
    found = doubts(Broken(nets["robust", 0], make()).eval(), *unseen, eps=0.3)
    assert expected <= names(found), f"{name}: {found}"


def test_gradients_are_looked_at_beside_the_images_too(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    x, y = unseen
    brightest = x.flatten(1).sum(1).max() + 1e-3

    def rooted_beyond(net: nn.Module, x: Tensor) -> Tensor:
        left = brightest - x.flatten(1).sum(1)
        return net(x) + 0 * (left * (left > 0)).square().sqrt()[:, None]

    model = Broken(nets["robust", 0], rooted_beyond).eval()
    (gradient,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x)
    assert gradient.isfinite().all()
    assert "gradients-not-finite" in names(doubts(model, x.detach(), y, eps=0.3))


def test_every_doubt_has_a_broken_model() -> None:
    proved = set().union(*(expected for _, _, expected in BROKEN)) | {"train-mode"}
    assert proved == set(WHY)


@pytest.mark.parametrize(
    ("forward", "only"),
    [
        (softmaxed, "probabilities-not-logits"),
        (cut, "non-differentiable"),
        (overflowing, "logits-not-finite"),
        (confident, "vanishing-gradients"),
    ],
)
def test_a_single_fault_gives_a_single_doubt(
    nets: dict, unseen: tuple[Tensor, Tensor], forward: Forward, only: str
) -> None:
    assert names(doubts(Broken(nets["robust", 1], forward).eval(), *unseen, eps=0.1)) == {only}


def test_train_mode(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    net = nets["robust", 0]
    try:
        net.train()
        assert names(doubts(net, *unseen, eps=0.1)) == {"train-mode"}
        assert net.training  # left as it was found
        net.eval()
        net[2].train()  # one forgotten batch-norm
        (found,) = doubts(net, *unseen, eps=0.1)
        assert found.name == "train-mode"
        assert "1 batch-norm or dropout layers, the first 2" in found.evidence
        assert net[2].training
        assert not net.training
    finally:
        net.eval()


def test_the_model_is_left_unchanged(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    net = Broken(nets["robust", 0], noisy).eval()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    state = torch.get_rng_state()
    doubts(net, *unseen, eps=0.1)
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)  # although the model draws from it


def test_the_same_seed_gives_the_same_doubts(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    net = Broken(nets["robust", 0], noisy).eval()
    first = doubts(net, *unseen, eps=0.1, seed=4)
    with torch.random.fork_rng():
        torch.manual_seed(99)  # the global state must not matter
        assert doubts(net, *unseen, eps=0.1, seed=4) == first


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_tiny_batches(nets: dict, unseen: tuple[Tensor, Tensor], n: int) -> None:
    x, y = unseen[0][:n], unseen[1][:n]
    assert doubts(nets["robust", 0], x, y, eps=0.1) == []
    doubts(Broken(nets["robust", 0], quantised), x, y, eps=0.1)


def test_images_broken_by_another_attack_are_not_searched(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    """AutoAttack includes Square: images that it broke say nothing about the gradient."""
    x, y = unseen[0][:100], unseen[1][:100]
    model = Broken(nets["robust", 0], quantised)
    assert "square-beats-white-box" in {doubt.name for doubt in doubts(model, x, y, eps=0.1)}
    all_broken = {"autoattack": torch.zeros(100, dtype=torch.bool)}
    found = {doubt.name for doubt in doubts(model, x, y, eps=0.1, correct=all_broken)}
    assert "square-beats-white-box" not in found and "zero-gradients" in found


def test_the_evidence_of_the_blind_search_counts_images(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    """The checks use fewer images than the evaluation, and the worst case still counts those that the search breaks."""
    model = Broken(nets["robust", 0], quantised)
    stood = torch.arange(len(unseen[0])) % 2 == 0
    found = {doubt.name: doubt for doubt in doubts(model, *unseen, eps=0.1, correct={"worst": stood}, limit=100)}
    evidence = found["square-beats-white-box"].evidence
    counts = re.match(r"Of the 100 images checked (\d+) withstood everything else; .* breaks (\d+) of these", evidence)
    assert counts and 0 < int(counts[2]) <= int(counts[1]) <= 60
    assert evidence.endswith("The worst case still counts them as robust: the true accuracy is lower.")


def test_images_of_another_shape(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    assert doubts(nets["robust", 0], unseen[0].flatten(1), unseen[1], eps=0.1) == []


def test_images_of_one_class_only(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    """At a large eps all may become one grey image, which the model may assign to their class."""
    x, y = unseen
    for label in range(10):
        mine = y == label
        assert doubts(nets["robust", 0], x[mine], y[mine], eps=0.1) == []


# --- known verdicts --------------------------------------------------------------------------------------------------


def verdict(n: int, right: int) -> Tensor:
    return torch.arange(n) < right


def test_known_verdicts_are_used(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    net, (x, y) = nets["robust", 0], unseen
    stated = {"pgd20": verdict(256, 120), "pgd100": verdict(256, 160), "cw30": verdict(256, 158)}
    (found,) = doubts(net, x, y, eps=0.1, correct=stated)
    assert found.name == "more-steps-weaker"
    assert found.evidence == "Accuracy 46.9 % after 20 steps, 62.5 % after 100 (256 images)."
    stated = {"pgd20": verdict(256, 160), "pgd100": verdict(256, 158), "cw30": verdict(256, 100)}
    assert names(doubts(net, x, y, eps=0.1, correct=stated)) == {"cw-far-from-ce"}
    stated = {"fgsm": verdict(256, 90), "pgd20": verdict(256, 160), "cw30": verdict(256, 160)}
    assert names(doubts(net, x, y, eps=0.1, correct=stated)) == {"more-steps-weaker"}


def test_verdicts_of_other_attacks_do_not_mix_in(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    stated = {"natural": verdict(256, 256), "pgd20-2eps": verdict(256, 0), "autoattack": verdict(256, 140)}
    assert doubts(nets["robust", 0], *unseen, eps=0.1, correct=stated) == []


def test_verdicts_of_more_images_than_are_measured(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    stated = {"pgd20": verdict(256, 160), "pgd100": verdict(256, 158), "cw30": verdict(256, 155)}
    assert doubts(nets["robust", 0], *unseen, eps=0.1, correct=stated, limit=32) == []
    with pytest.raises(UserError, match=r"correct\['pgd20'\] must hold one verdict per image, 256, got \(3,\)"):
        doubts(nets["robust", 0], *unseen, eps=0.1, correct={"pgd20": verdict(3, 1)})


def test_bad_input_is_refused(nets: dict, unseen: tuple[Tensor, Tensor]) -> None:
    with pytest.raises(UserError, match="eps must lie in"):
        doubts(nets["robust", 0], *unseen, eps=8)
    with pytest.raises(UserError, match="one label per image"):
        doubts(nets["robust", 0], unseen[0], unseen[1][:3], eps=0.1)
    with pytest.raises(UserError, match="logits of shape"):
        doubts(lambda x: x, *unseen, eps=0.1)


def test_the_checks_hold_in_l2(nets, unseen):
    """An honest network has no doubts in the L2 ball, and a masked gradient is found there too."""
    x, y = unseen
    for kind, eps in (("standard", 0.3), ("robust", 1.0)):
        assert doubts(nets[kind, 0], x, y, eps=eps, norm="l2") == []
    for forward, expected in ((shattered, "square-beats-white-box"), (misleading, "loss-does-not-grow")):
        assert expected in names(doubts(Broken(nets["robust", 0], forward).eval(), x, y, eps=1.0, norm="l2"))
    with pytest.raises(UserError, match="eps must be finite"):
        doubts(nets["robust", 0], x, y, eps=-1.0, norm="l2")


def test_logits_that_are_finite_at_the_images_alone_are_named(nets, unseen):
    x, y = unseen
    clean = x.clone()

    def fragile(net: nn.Module, points: Tensor) -> Tensor:
        here = net(points)
        same = (points.detach()[:, None] == clean[None, : len(clean)]).flatten(2).all(dim=2).any(dim=1)
        return torch.where(same[:, None], here, torch.nan)

    found = doubts(Broken(nets["standard", 0], fragile).eval(), x, y, eps=0.1, limit=40)
    assert [doubt.name for doubt in found] == ["logits-not-finite"]
    assert "logits are not finite for" in found[0].evidence
