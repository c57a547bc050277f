"""`sparring export`: write a trained model as files that other code can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from sparring import weights
from sparring.cli import arguments
from sparring.cli.subject import sizes
from sparring.errors import UserError
from sparring.weights import Exported, Format

_DESCRIPTION = """Write a model for other code. Every format takes pixels in [0, 1] of any batch size to logits.

  safetensors  NAME.safetensors, with its architecture as metadata, and NAME.pt, a plain state_dict with the key
               names of the published WRN and CIFAR ResNet
  pt2          a program of torch.export
  onnx         a program for onnxruntime and others, input "pixels", output "logits"
  hub          a folder with model.safetensors, config.json and a model card with the measured accuracies

Examples:
  sparring export runs/fat --which best --out export
  sparring export runs/fat --format onnx --out fat.onnx
  sparring export fat-digits --format hub --out my-model"""


@dataclass(frozen=True)
class Export:
    """What to export, and where."""

    run: Positional[Path]
    """A run folder, a checkpoint (.safetensors, .pt, .pth, .pth.tar), or a shipped model: fat-digits."""
    format: Format = "safetensors"
    """safetensors, pt2, onnx or hub."""
    which: Literal["last", "best"] = "last"
    """The checkpoint of a run folder."""
    out: Path | None = None
    """The folder to write to, or a file with the format's suffix; of a hub the folder itself. Unless given, export."""
    sub_block1: bool = False
    """Also write the sub_block1 that TRADES' WRN class has and never uses, so that it loads with strict=True."""
    model: str | None = None
    """The network, where it is your own (package.module:make) or can be neither read nor identified."""
    data: str | None = None
    """The data set that your own network was made for, where its file does not record classes and image size."""


def run(argv: list[str]) -> int:
    """Export, then print what was written and how to load it."""
    asked = arguments.parse(Export, argv, prog="sparring export", description=_DESCRIPTION)
    arguments.name_model(asked.model)
    made_for = sizes(asked.run, asked.which, asked.model, asked.data)
    if asked.data is not None and not made_for:
        raise UserError(
            "--data is for a network of your own (--model package.module:make), from a file that does not record its "
            f"classes and image size. Leave out --data {asked.data}."
        )
    written = weights.export(
        asked.run,
        asked.out,
        format=asked.format,
        which=asked.which,
        sub_block1=asked.sub_block1,
        model=asked.model,
        **made_for,
    )
    for file in written.files:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    for note in written.notes:
        print(f"note: {note}")
    for line in _HOW[asked.format](written):
        print(line)
    if asked.model is not None and asked.format in ("safetensors", "hub"):
        print(f'The network is named again to load it: load_model(..., model="{asked.model}").')
    return 0


def _here(written: Exported) -> list[str]:
    return [
        "\nTo load it here:",
        "    import sparring",
        f'    model = sparring.load_model("{written.path}")',
        "    logits = model(x)  # x: pixels in [0, 1]",
    ]


def _weights(written: Exported) -> list[str]:
    code = f'    net.load_state_dict(torch.load("{written.state_dict}", weights_only=True))'
    return [*_here(written), "In other code:", code]


def _hub(written: Exported) -> list[str]:
    return [
        *_here(written),
        "With huggingface_hub, from this folder or from a repository that holds it:",
        "    from sparring.weights.hub import HubModel",
        f'    hub_model = HubModel.from_pretrained("{written.path}").eval()',
    ]


def _pt2(written: Exported) -> list[str]:
    return [
        "\nTo load it, without Sparring:",
        "    import torch",
        f'    model = torch.export.load("{written.path}").module()',
        "    logits = model(x)  # x: pixels in [0, 1]",
    ]


def _onnx(written: Exported) -> list[str]:
    return [
        "\nTo run it, without Sparring and torch:",
        "    import onnxruntime",
        f'    session = onnxruntime.InferenceSession("{written.path}")',
        '    (logits,) = session.run(["logits"], {"pixels": x})  # x: float32 numpy array in [0, 1]',
    ]


_HOW = {"safetensors": _weights, "pt2": _pt2, "onnx": _onnx, "hub": _hub}
