"""A model that fails, or returns what no logits are, is told in one line that quotes it and guesses nothing."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import sparring
from sparring.attacks import failures
from sparring.errors import RunFailed, UserError

NET = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
X, Y = torch.full((20, 1, 2, 2), 0.5), torch.arange(20) % 3
CALLS = {
    "pgd": lambda model: sparring.pgd(model, X, Y, steps=2),
    "friendly_pgd": lambda model: sparring.friendly_pgd(model, X, Y, steps=2),
    "evaluate": lambda model: sparring.evaluate(model, X, Y, "quick", doubts=False),
}


def raising(error: Exception):
    def model(x: Tensor) -> Tensor:
        raise error

    return model


def at_most_16(x: Tensor) -> Tensor:
    """The images that an evaluation tries first pass; its batches do not."""
    assert len(x) <= 16, "at most 16\nimages"
    return NET(x)


class NoWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise KeyError("two\nlines")


MODELS = {
    "int": (lambda x: NET(x).round().long(), "logits are torch.int64, .*Return the scores before argmax"),
    "bool": (lambda x: NET(x) > 0, "logits are torch.bool, .*Return the scores before argmax"),
    "complex": (lambda x: NET(x) * 1j, "logits are torch.complex64, .*Return its real part"),
    "elsewhere": (lambda x: NET(x).to("meta"), r"logits are on meta, its images on cpu. Return logits.to\(x.device\)"),
    "KeyError": (raising(KeyError("a\nb")), r"the model raised KeyError: 'a\\nb', on \d+ images of shape \(1, 2, 2\)"),
    "TypeError": (raising(TypeError("no\nsecond line")), r"the model raised TypeError: no, on .*Call model\(x\)"),
    "AssertionError": (raising(AssertionError()), r"the model raised AssertionError, on \d+ images"),
    "control": (raising(RuntimeError("a\x1b[31m")), r"the model raised RuntimeError: 'a\\x1b\[31m', on"),
    "long": (raising(ValueError("z" * 5000)), "z…, on"),
    "its own size": (raising(ValueError("the batch size must be 8")), "the model raised ValueError: the batch size"),
    "later": (at_most_16, "the model raised AssertionError: at most 16, on 20 images"),
    "shape": (lambda x: NET[1](x), r"does not accept images of shape \(1, 2, 2\) .*the data set it was trained on"),
    "backward": (lambda x: NET(NoWayBack.apply(x)), r"the backward pass of the model raised KeyError: 'two\\nlines'"),
    "numpy": (
        lambda x: torch.from_numpy(NET(x).numpy()),
        "cannot be differentiated .*Take NumPy .* out",
    ),
    "meta": (
        nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Linear(3, 3, device="meta")),
        "2 parameters of the model are on the meta device, without values, the first 2.weight",
    ),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("name", MODELS)
def test_one_line_says_what_the_model_did(call: str, name: str) -> None:
    model, message = MODELS[name]
    with pytest.raises(UserError, match=message) as caught:
        CALLS[call](model)
    assert str(caught.value).isprintable() and str(caught.value).endswith(".")
    if name != "shape":
        assert "data set" not in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_logits_are_converted_by_attacks_and_refused_by_verdicts(dtype: torch.dtype) -> None:
    seen = []

    def loss(logits: Tensor, y: Tensor) -> Tensor:
        seen.append(logits.dtype)
        return nn.functional.cross_entropy(logits, y, reduction="none")

    for attack in (sparring.pgd, sparring.friendly_pgd):
        attack(lambda x: NET(x).to(dtype), X, Y, steps=2, loss=loss)
    assert set(seen) == {torch.float32}
    with pytest.raises(UserError, match=f"logits are {dtype}; verdicts are fp32. Take autocast and .half"):
        CALLS["evaluate"](lambda x: NET(x).to(dtype))


@pytest.mark.parametrize("error", [UserError("mine."), RunFailed("mine."), torch.OutOfMemoryError("mine")])
def test_what_says_its_own_fix_stays(error: Exception) -> None:
    with pytest.raises(type(error), match="mine") as caught:
        CALLS["pgd"](raising(error))
    assert caught.value is error


def test_parameters_on_two_devices_are_named() -> None:
    class Scattered(nn.Module):
        def parameters(self, recurse=True):
            return [SimpleNamespace(device=torch.device("cuda", index), is_floating_point=bool) for index in (0, 1)]

    said = failures.told(RuntimeError("all on the same device"), Scattered(), X)
    assert isinstance(said, UserError)
    assert str(said) == (
        "the model's parameters are on cuda:0 and cuda:1, and it fails (RuntimeError: all on the same device). "
        "Move all to one: model.to('cpu')."
    )


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(3, 2, 1), nn.Conv2d(1, 2, 5), nn.BatchNorm2d(2), nn.BatchNorm1d(1), nn.LayerNorm(3), nn.Linear(3, 1)],
    ids=lambda layer: type(layer).__name__,
)
def test_torchs_own_words_for_a_shape_are_known(layer: nn.Module) -> None:
    with pytest.raises((RuntimeError, ValueError)) as caught:
        layer.eval()(X)
    assert failures.is_of_shape(caught.value)
