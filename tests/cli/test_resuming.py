"""Runs that somebody has changed, or named twice, before they go on."""

from __future__ import annotations

import shutil
from pathlib import Path

from sparring.training import run_folder

from .conftest import QUICK


def test_a_checkpoint_that_has_gone_is_not_named_as_if_it_were_there(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / run_folder.BEST).unlink()
    said = sparring("train", "--out", folder, "--resume")
    assert (
        said.code == 0
        and f"({folder / run_folder.BEST}: missing)" in said.out
        and f"({folder / run_folder.LAST})" in said.out
    )


def test_a_network_changed_under_a_run(sparring, tmp_path):
    folder = Path(tmp_path / "run")
    assert sparring("train", *QUICK, "--out", folder).code == 0
    text = (folder / run_folder.CONFIG).read_text()
    (folder / run_folder.CONFIG).write_text(
        text.replace('"tiny_cnn"', '"small_cnn"').replace('"epochs": 2', '"epochs": 3')
    )
    sparring("train", "--out", folder, "--resume").user_error("holds another network than config.json")


def test_of_two_folders_the_last_one_counts(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    said = sparring("train", "--out", "nowhere", "--resume", "--out", folder)
    assert said.code == 0 and "already finished: 2 of 2" in said.out
