"""Load and export models: run folders, .safetensors, published checkpoints. Loading runs no code from a file."""

from sparring.weights.export import FORMATS, Exported, Format, export
from sparring.weights.initial import initial
from sparring.weights.load import Loaded, Which, facts, load, load_model

__all__ = ["FORMATS", "Exported", "Format", "Loaded", "Which", "export", "facts", "initial", "load", "load_model"]
