from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from sparring import models
from sparring.attacks.autoattack import Claim
from sparring.engine.attack.replay import Replayed
from sparring.evaluation import autoattack as parts
from sparring.evaluation import evaluate
from sparring.evaluation import gradient_model as tested
from sparring.evaluation.gradient_model import gradient_model, query_model, replayed
from sparring.evaluation.subject import prepare
from sparring.evaluation.verdicts import exact, is_correct


def with_statistics(model: nn.Module) -> nn.Module:
    """Random batch-norm statistics and weights, so that folding them wrongly changes the output."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()


def build(name: str, **more) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return with_statistics(models.build(name, num_classes=10, **more))


def test_bf16_gradients_have_the_same_direction(trained):
    before = copy.deepcopy(trained.model.state_dict())
    fast = gradient_model(trained.model, trained.x[:16], precision="bf16")

    def gradient(model):
        x = trained.x.clone().requires_grad_()
        logits = model(x)
        assert logits.dtype == torch.float32
        return torch.autograd.grad(nn.functional.cross_entropy(logits, trained.y, reduction="sum"), x)[0].flatten(1)

    ours, theirs = gradient(fast), gradient(trained.model)
    assert not torch.equal(ours, theirs)
    assert nn.functional.cosine_similarity(ours, theirs).median() > 0.99
    assert all(torch.equal(value, before[name]) for name, value in trained.model.state_dict().items())


def test_the_first_layer_stays_fp32():
    """Two pixels that are equal in bf16."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 2)).eval()
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1000.0], [0.0]]))
        model[1].bias.copy_(torch.tensor([-995.0, 0.0]))
    fast = gradient_model(model, torch.full((1, 1, 1, 1), 0.9), precision="bf16")
    assert torch.tensor(0.9990).bfloat16() == torch.tensor(0.9985).bfloat16()
    near, far = fast(torch.tensor([0.9990, 0.9985]).view(2, 1, 1, 1))
    assert not torch.equal(near, far)


def test_a_model_that_reads_its_layers_weights_still_runs():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(9, 3)

        def forward(self, x):
            return self.fc(x.flatten(1)) @ self.fc.weight @ self.fc.weight.t()

    x = torch.rand(4, 1, 3, 3, generator=torch.Generator().manual_seed(0))
    with torch.random.fork_rng():
        model = Tied().eval()
    assert gradient_model(model, x, precision="bf16")(x).shape == (4, 3)
    assert gradient_model(lambda x: x.flatten(1), x, precision="bf16")(x).shape == (4, 9)


def test_verdicts_are_exact_and_settings_are_restored():
    seen = []

    def model(x):
        seen.append((torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, (x @ x).dtype))
        return x

    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            right = is_correct(model, torch.eye(3), torch.tensor([0, 1, 1]))
            assert (torch.eye(3) @ torch.eye(3)).dtype == torch.bfloat16
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
        with pytest.raises(RuntimeError, match="stop"), exact(torch.device("cpu")):
            raise RuntimeError("stop")
        assert torch.get_float32_matmul_precision() == "high" and torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]
    assert seen == [("highest", False, torch.float32)]
    assert right.tolist() == [True, True, False]


def test_nan_logits_are_wrong():
    logits = torch.tensor([[torch.nan, 0.0], [0.0, 1.0]])
    assert is_correct(lambda x: logits, torch.zeros(2, 1), torch.tensor([0, 1])).tolist() == [False, True]


class Viewed(nn.Module):
    """Reshapes with view, which fails on channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 16, 3)

    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))


class NormFirst(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


@pytest.mark.parametrize("make", [Viewed, NormFirst])
def test_custom_forward_passes_get_bf16_gradients(make):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    x = torch.rand(4, 3, 4, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    fast = gradient_model(model, x.detach(), precision="bf16")
    logits = fast(x)
    torch.testing.assert_close(logits, model(x), rtol=0.05, atol=0.05)
    torch.autograd.grad(logits.sum(), x)


@pytest.mark.parametrize("make", [NormFirst, lambda: build("tiny_cnn", size=(8, 8)), lambda: build("resnet18")])
def test_logits_in_bf16_are_not_rounded_to_eight_bits(make):
    """Square's later squares move a logit by less than such a rounding."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    side = 4 if isinstance(model, NormFirst) else 8
    x = torch.rand(20, 3, side, side, generator=torch.Generator().manual_seed(0))
    fast = gradient_model(model, x, precision="bf16")
    logits = fast(x)
    assert (logits != logits.bfloat16().float()).float().mean() > 0.9 and query_model(model, fast, x) is fast


class Halved(nn.Module):
    """Logits come from an operation in bf16, and not from the linear layer."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) / 2


@pytest.mark.parametrize("around", [lambda net: nn.Sequential(net, nn.LayerNorm(10)), Halved])
def test_the_model_itself_answers_queries_where_logits_would_be_rounded(small, around):
    other = around(small).eval()
    subject = prepare(other, few(6), torch.zeros(6, dtype=torch.int64), precision="bf16", batch_size=None)
    assert subject.precision == "bf16" and subject.fast is not other and subject.steady is other


def test_only_square_asks_that_model(small, monkeypatch):
    other, asked = Halved(small).eval(), {}
    monkeypatch.setattr(
        parts, "attack_part", lambda part, model, x, y, **how: asked.setdefault(part, model) and Claim(x, y < 0)
    )
    x = few(6)
    evaluate(other, x, other(x).argmax(1), "autoattack", eps=0.1, precision="bf16", doubts=False)
    assert [part for part, model in asked.items() if model is other] == ["square"] and len(asked) == 4


def test_captures_are_freed_when_a_batch_does_not_fit():
    """Captures hold memory, so they are freed before a smaller batch is tried."""
    model = models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8)).eval()
    subject = prepare(model, torch.rand(6, 1, 8, 8), torch.zeros(6, dtype=torch.int64), precision="fp32", batch_size=6)
    subject.fast = Replayed(model)
    subject.fast.made[1, 2, 3] = None

    def work(x, y, rows):
        if subject.fast.made:
            raise torch.OutOfMemoryError
        return rows

    parts = [found for _, found in subject.each(torch.arange(6), work)]
    assert torch.cat(parts).tolist() == [0, 1, 2, 3, 4, 5] and [len(part) for part in parts] == [3, 3]


@pytest.fixture
def small():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8)).eval()


def few(count, seed=0):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_a_model_in_its_own_precision_is_replayed_for_few_images(small, monkeypatch):
    assert replayed(small, few(5)) is small  # without CUDA
    monkeypatch.setattr(tested, "on_cuda", lambda device: True)
    assert replayed(small, few(300)) is small
    assert replayed(small.forward, few(5)) == small.forward  # no module
    fast = replayed(small, few(5))
    assert isinstance(fast, Replayed) and list(fast.made) == [(8, 1, 8, 8)]
    for seed, count in enumerate((5, 3, 8, 20, 1, 5)):
        ours, own = (few(count, seed).requires_grad_() for _ in range(2))
        logits, expected = fast(ours), small(own)
        torch.testing.assert_close(logits, expected)
        pair = (torch.autograd.grad(out.square().sum(), x)[0] for out, x in ((logits, ours), (expected, own)))
        torch.testing.assert_close(*pair)


class Crowded(nn.Module):
    """Depends on the other images of its batch."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x):
        return self.net(x) + len(x)


class Choosy(Crowded):
    """Refuses zeros, with which a batch is filled up."""

    def forward(self, x):
        assert x.flatten(1).any(1).all()
        return self.net(x)


class Detached(Crowded):
    """Has no gradient."""

    def forward(self, x):
        return self.net(x).detach()


@pytest.mark.parametrize("kind", [Crowded, Choosy, Detached])
def test_a_model_that_is_another_one_when_replayed_is_not(small, monkeypatch, kind):
    monkeypatch.setattr(tested, "on_cuda", lambda device: True)
    model = kind(small)
    assert replayed(model, few(5)) is model


def test_memory_that_runs_out_for_a_few_images_does_not_shrink_the_rest(small):
    """A small batch, or one of work that needs more, says nothing of the batches to come."""
    x = torch.rand(40, 1, 8, 8)
    subject = prepare(small, x, torch.zeros(40, dtype=torch.int64), precision="fp32", batch_size=40)
    sizes = []

    def work(most):
        def fits(x, y, rows):
            sizes.append(len(x))
            if len(x) > most:
                raise torch.OutOfMemoryError
            return rows

        return fits

    def done(count, most, **how):
        sizes.clear()
        found = torch.cat([found for _, found in subject.each(torch.arange(count), work(most), **how)])
        assert found.tolist() == [*range(count)]
        return subject.batch

    assert done(10, 6) == 40 and sizes == [10, 5, 5]
    assert done(40, 16, parted=2) == 40 and sizes == [20, 10, 10, 10, 10]
    assert done(40, 30) == 20 and sizes == [40, 20, 20]


@pytest.mark.parametrize("kind", [nn.Identity, Viewed])
def test_a_float64_model_keeps_its_precision(kind, caplog):
    """Folded or not: bf16 would need copies of another type."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (nn.Sequential(nn.Flatten(), nn.Linear(48, 3)) if kind is nn.Identity else kind()).double().eval()
    x = torch.rand(6, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = model(x).argmax(1)
    result = evaluate(model, x, y, "quick", eps=0.1, precision="bf16", doubts=False)
    assert result["pgd10"].precision == "fp64"
    assert "gradients are float64, as the model is, and not bf16." in caplog.text


def test_autocast_around_an_evaluation_is_not_the_model_s(small):
    x = few(6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        evaluate(small, x, small(x).argmax(1), "quick", eps=0.1, doubts=False)
