"""`sparring export`: write a trained model as files that other code can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from sparring import weights
from sparring.cli import arguments

_DESCRIPTION = """Write a model as NAME.safetensors, with its architecture as metadata, and as NAME.pt, a plain
state_dict with the key names of the published WRN and CIFAR ResNet.

Example: sparring export runs/fat --which best --out export"""


@dataclass(frozen=True)
class Export:
    """What to export, and where."""

    run: Positional[Path]
    """A run folder, or a checkpoint (.safetensors, .pt, .pth, .pth.tar)."""
    which: Literal["last", "best"] = "last"
    """The checkpoint of a run folder."""
    out: Path = Path("export")
    """The folder to write to."""
    sub_block1: bool = False
    """Also write the sub_block1 that TRADES' WRN class has and never uses, so that it loads with strict=True."""


def run(argv: list[str]) -> int:
    """Export, then print what was written and how to load it."""
    asked = arguments.parse(Export, argv, prog="sparring export", description=_DESCRIPTION)
    written = weights.export(asked.run, asked.out, which=asked.which, sub_block1=asked.sub_block1)
    for file in written.files:
        print(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
    for note in written.notes:
        print(f"note: {note}")
    print("\nTo load it here:")
    print("    import sparring")
    print(f'    model = sparring.load_model("{written.safetensors}")')
    print("    logits = model(x)  # x: pixels in [0, 1]")
    print("In other code:")
    print(f'    net.load_state_dict(torch.load("{written.state_dict}", weights_only=True))')
    return 0
