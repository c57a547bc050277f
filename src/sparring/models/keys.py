"""Do tensors fit a network? Compared by their names, shapes and kinds, and told in words.

Must not know what the names mean.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from torch import Tensor, nn

Shapes = Mapping[str, tuple[int, ...]]
FIRST_FEW = 3  # keys named in a message; the rest are counted


def shapes_of(state: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor of a state_dict."""
    return {key: tuple(tensor.shape) for key, tensor in state.items()}


def problems(tensors: Mapping[str, Tensor], shapes: Shapes) -> Iterator[tuple[str, str]]:
    """(kind of problem, key) for each key that does not fit."""
    yield from (("missing", key) for key in shapes if key not in tensors)
    yield from (("unexpected", key) for key in tensors if key not in shapes)
    for key, shape in shapes.items():
        if key in tensors and tuple(tensors[key].shape) != shape:
            yield "misshaped", f"{key} {tuple(tensors[key].shape)} instead of {shape}"


def wrong_kinds(tensors: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """(kind of problem, key) for each tensor that has whole numbers where the network has fractions, or is complex."""
    for key, wanted in state.items():
        if key in tensors and wanted.is_floating_point() and not tensors[key].is_floating_point():
            dtype = str(tensors[key].dtype).removeprefix("torch.")
            yield "not floating point", f"{key} ({dtype})"


def not_finite(tensors: Mapping[str, Tensor], free: Collection[str] = ()) -> Iterator[tuple[str, str]]:
    """(kind of problem, key) for each tensor with values that are NaN or infinite; those of `free` may be infinite."""
    for key, tensor in tensors.items():
        if tensor.is_floating_point():
            wrong = int((tensor.isnan() if key in free else ~tensor.isfinite()).sum())
            if wrong:
                yield "not finite", f"{key} ({wrong} of {tensor.numel()} values)"


def masks(model: nn.Module) -> set[str]:
    """The buffers that may hold infinite values, as a mask of attention does: all but statistics of batch-norm."""
    names = {name for name, _ in model.named_buffers()}
    return {name for name in names if not name.endswith(("running_mean", "running_var"))}


def in_words(found: Iterable[tuple[str, str]]) -> str:
    """'missing: a, b, c and 7 more; unexpected: d.' for problems; empty where there are none."""
    kinds: dict[str, list[str]] = {}
    for kind, what in found:
        kinds.setdefault(kind, []).append(what)
    parts = []
    for kind, names in kinds.items():
        more = f" and {len(names) - FIRST_FEW} more" if len(names) > FIRST_FEW else ""
        parts.append(f"{kind}: {', '.join(names[:FIRST_FEW])}{more}")
    return f"{'; '.join(parts)}." if parts else ""
