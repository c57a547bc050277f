from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.config import Config
from sparring.recipes.quickstart import FAT


@pytest.fixture(scope="session")
def small() -> Config:
    """A run of about a second: three epochs of FAT on digits with few steps."""
    return replace(FAT, epochs=3, batch_size=256, attack=replace(FAT.attack, steps=3), augment="crop-flip")
