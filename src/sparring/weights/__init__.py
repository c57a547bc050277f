"""Load and export models: run folders, .safetensors, published checkpoints. Loading runs no code from a file."""

from sparring.weights.export import Exported, export
from sparring.weights.load import Loaded, Which, facts, load, load_model

__all__ = ["Exported", "Loaded", "Which", "export", "facts", "load", "load_model"]
