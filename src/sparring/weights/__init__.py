"""Models from files and back: run folders, .safetensors, published checkpoints. Loading runs no code from a file."""

from sparring.weights.load import Exported, Loaded, Which, export, facts, load, load_model

__all__ = ["Exported", "Loaded", "Which", "export", "facts", "load", "load_model"]
