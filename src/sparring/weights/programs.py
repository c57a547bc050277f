"""Write a model as a program that needs no Python code of this package: torch.export's .pt2, or ONNX.

Input `pixels`, (N, channels, height, width) in [0, 1], for any N; output `logits`, (N, classes). Normalisation is part
of the program. What is known of the model (classes, size, eps, norm) is written beside it as JSON.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparring.errors import UserError
from sparring.training import checkpoint

EXTRA_FILE = "sparring.json"  # in a .pt2
_BATCH = 2  # of the example: torch.export would take a batch of one for a constant


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


def _untraceable(form: str, error: Exception) -> UserError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(
        f"this network cannot be exported as {form}: {lines[0].rstrip('.')}. Its weights can: --format safetensors."
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' own notes: they speak of torchvision and of deprecations inside torch."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
