"""Write a model as a program that needs no Python code of this package: torch.export's .pt2, or ONNX.

Input `pixels`, (N, channels, height, width) in [0, 1], for any N; output `logits`, (N, classes). Normalisation is part
of the program. What is known of the model (classes, size, eps, norm) is written beside it as JSON.
"""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.files.regular import shown
from sparring.training import checkpoint

EXTRA_FILE = "sparring.json"  # in a .pt2
_BATCH = 2  # of the example: torch.export would take a batch of one for a constant
_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_LONGEST = 160  # characters of torch's own words in a message


def write_pt2(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Write the model by torch.export; `torch.export.load(path).module()` is called like the model."""
    with _quiet():
        try:
            program = torch.export.export(model, (_example(facts),), dynamic_shapes=_any_batch())
        except Exception as error:  # whatever a network's code does that cannot be traced
            raise _untraceable("pt2", error) from None
        written = io.BytesIO()
        torch.export.save(program, written, extra_files={EXTRA_FILE: json.dumps(dict(facts), sort_keys=True)})
    with checkpoint.replacing(path) as temporary:
        temporary.write_bytes(written.getbuffer())


def write_onnx(path: Path, model: nn.Module, facts: Mapping[str, Any]) -> None:
    """Write the model as ONNX, with the facts as metadata: classes, size, eps and norm by name, the rest as JSON."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UserError(f"ONNX needs the package {error.name}. Run: pip install onnx onnxscript") from None
    with _quiet():
        try:
            program = torch.onnx.export(
                model,
                (_example(facts),),
                dynamo=True,
                verbose=False,
                input_names=["pixels"],
                output_names=["logits"],
                dynamic_shapes=_any_batch(),
            )
        except Exception as error:
            raise _untraceable("onnx", error) from None
        assert program is not None  # torch's signature: None where it is asked to write the file itself
        proto = program.model_proto
    if any(_first_axis_is_fixed(value) for value in (*proto.graph.input, *proto.graph.output)):
        raise _one_batch_size("onnx")  # torch's ONNX exporter itself says nothing of it
    for key, value in _properties(facts).items():
        proto.metadata_props.add(key=key, value=value)
    with checkpoint.replacing(path) as temporary:
        temporary.write_bytes(proto.SerializeToString())


def _properties(facts: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of an ONNX file: what its user looks for first by name, everything as JSON."""
    known = {key: facts["model"].get(key) for key in ("classes", "size")} | dict(facts.get("threat") or {})
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in known.items()}
    return {key: texts[key] for key in known if known[key] is not None} | {
        "sparring": json.dumps(dict(facts), sort_keys=True)
    }


def _example(facts: Mapping[str, Any]) -> Tensor:
    return torch.zeros(_BATCH, facts["model"]["channels"], *facts["model"]["size"])


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim("batch", min=1)},)


def _first_axis_is_fixed(value: Any) -> bool:
    """Whether an input or output of an ONNX graph has a number as its first axis, the batch."""
    axes = value.type.tensor_type.shape.dim
    return bool(axes) and axes[0].HasField("dim_value")


def _untraceable(form: str, error: BaseException) -> UserError:
    while type(error).__module__.startswith("torch.onnx") and error.__cause__ is not None:
        error = error.__cause__  # the exporter's own text tells its steps, not the reason
    text = _ANSI.sub("", str(error)).strip()
    if text.startswith("Constraints violated"):
        return _one_batch_size(form)
    first = re.sub(r"\s+", " ", text.partition("\n")[0].partition(" (unhinted")[0]).strip() or type(error).__name__
    return UserError(
        f"this network cannot be exported as {form}: {shown(first, _LONGEST).rstrip('.')}. Its weights can: "
        "--format safetensors."
    )


def _one_batch_size(form: str) -> UserError:
    return UserError(
        f"this network cannot be exported as {form} for batches of any size: its forward makes the batch size a "
        "constant, as len(x) and int(x.shape[0]) do. Write x.shape[0] there, or export its weights: --format "
        "safetensors."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what torch's exporters log and print: notes on torch itself, and whole graphs before an error."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
