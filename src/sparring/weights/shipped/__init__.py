"""Trained models that are part of the package, by name: `sparring.load_model("fat-digits")`.

Each is one .safetensors file beside this module, with its architecture, its threat and its measured accuracies as
metadata. Knows where the files are; reading them is `load`'s part.
"""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of the models that ship with Sparring."""
    return sorted(file.stem for file in _FOLDER.glob("*.safetensors"))


def find(path: Path) -> Path | None:
    """The file of the shipped model that `path` names, or None. A file or folder of that name comes first."""
    if len(path.parts) != 1 or path.exists() or path.name not in names():
        return None
    return _FOLDER / f"{path.name}.safetensors"
