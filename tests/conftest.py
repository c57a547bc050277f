from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its interpreter runs the engine's kernels on a CPU
    os.environ["TRITON_INTERPRET"] = "1"

from sparring.config import Config
from sparring.recipes.quickstart import FAT


@pytest.fixture(scope="session")
def small() -> Config:
    """A run of about a second: three epochs of FAT on digits with few steps."""
    return replace(FAT, epochs=3, batch_size=256, attack=replace(FAT.attack, steps=3), augment="crop-flip")
