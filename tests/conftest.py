from __future__ import annotations

import multiprocessing
import os
from dataclasses import replace

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: workers and the commands they start share the cores

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton: its interpreter runs the engine's kernels on a CPU
    os.environ["TRITON_INTERPRET"] = "1"

from sparring.paper import Workspace, carry_out
from sparring.recipes.digits import FAT
from sparring.training.config import Config, with_objective
from tests.paper.tiny import COURSE, TABLE, planned

# Children are forked from a server that has imported what they run: a start takes milliseconds instead of seconds. The
# server is one for all tests of a worker, so this is set before its first use.
FORKED = ["bench.test_scaling", "cli.test_at_once", "evaluation.test_distributed", "objectives.test_own_loop"]
FORKED += ["training.test_distributed", "training.test_loop", "training.test_torchrun"]
multiprocessing.get_context("forkserver").set_forkserver_preload(
    [*(f"tests.{name}" for name in FORKED), "sklearn.datasets", "torch._dynamo"]
)


@pytest.fixture(scope="session")
def small() -> Config:
    """A run of about a second: three epochs of FAT on digits with few steps."""
    return with_objective(replace(FAT, epochs=3, batch_size=256, augment="crop-flip"), steps=3)


@pytest.fixture(scope="session")
def measured(tmp_path_factory):
    """A folder with measurements of the tiny items in tests/paper; tests must not write to it."""
    folder = tmp_path_factory.mktemp("measured")
    carry_out([*planned(TABLE, folder), *planned(COURSE, folder)], Workspace(torch.device("cpu")))
    return folder
