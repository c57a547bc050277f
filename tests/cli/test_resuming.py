"""Resuming runs whose files were changed, and repeated options."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparring.training import run_folder
from tests.doctored import doctor, replaced

from .conftest import QUICK


def test_missing_checkpoint_is_reported(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / run_folder.BEST).unlink()
    result = sparring("train", "--out", folder, "--resume")
    assert (
        result.code == 0
        and f"({folder / run_folder.BEST}: missing)" in result.out
        and f"({folder / run_folder.LAST})" in result.out
    )


def test_changed_network_is_refused(sparring, tmp_path):
    folder = Path(tmp_path / "run")
    assert sparring("train", *QUICK, "--out", folder).code == 0
    doctor(folder, replaced(model="small_cnn", epochs=3))
    sparring("train", "--out", folder, "--resume").user_error("holds another network than SmallCNN")


def test_last_out_option_wins(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    result = sparring("train", "--out", "nowhere", "--resume", "--out", folder)
    assert result.code == 0 and "already finished: 2 of 2" in result.out
