"""Outputs of numbered layers, for the feature plots of App. C.

Each network's module documents how it numbers its layers, from 1; `layers(model)` lists them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

from torch import Tensor, nn

from sparring.errors import UserError


def layers(model: nn.Module) -> list[str]:
    """The names of the modules whose outputs are layers 1, 2, ...: layer k is `layers(model)[k - 1]`."""
    names = getattr(model, "layer_names", None)
    if names is None:
        raise UserError(
            f"only Sparring's own networks have numbered layers, got {type(model).__name__}. "
            "For another network register a forward hook on the module you want."
        )
    return list(names)


@overload
def tap(model: nn.Module, layer: int, x: Tensor) -> Tensor: ...
@overload
def tap(model: nn.Module, layer: Sequence[int], x: Tensor) -> dict[int, Tensor]: ...
def tap(model: nn.Module, layer: int | Sequence[int], x: Tensor) -> Tensor | dict[int, Tensor]:
    """The output of one numbered layer for `x`, or of several as {number: output}, in one forward pass.

    The model runs in its current mode, and the outputs carry gradients unless the caller is under `no_grad`.
    """
    model = getattr(model, "_orig_mod", model)  # hooks have no effect inside a compiled model
    names = layers(model)
    numbers = [layer] if isinstance(layer, int) else list(layer)
    for number in numbers:
        if not 1 <= number <= len(names):
            raise UserError(
                f"a layer of {type(model).__name__} must lie in 1..{len(names)}, got {number}. "
                f"Layer {len(names)} is the logits."
            )

    outputs: dict[int, Tensor] = {}

    def keep(number: int, output: Tensor) -> None:
        outputs[number] = output

    handles = []
    try:
        for number in numbers:
            module = model.get_submodule(names[number - 1])
            handles.append(module.register_forward_hook(lambda _m, _in, output, number=number: keep(number, output)))
        model(x)
    finally:
        for handle in handles:
            handle.remove()
    return outputs[layer] if isinstance(layer, int) else {number: outputs[number] for number in numbers}
