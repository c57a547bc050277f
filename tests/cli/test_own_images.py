"""A user's own images: what a run records of them, and which of them are used for testing."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest

import sparring as library
from sparring.cli import train as command
from sparring.data import load
from sparring.training import run_folder
from tests.doctored import doctor

from .conftest import write_images


@pytest.fixture
def own(sparring, tmp_path):
    """A run on a folder of images, stopped after its first epoch."""
    write_images(tmp_path / "mine", 100)
    words = ["fat-digits", "--data", "folder:mine", "--epochs", 2, "--validation", 20, "--attack.steps", 2]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "stopping", lambda: nullcontext(lambda: len(run_folder.read_metrics(Path("run"))) == 1))
        said = sparring("train", *words, "--out", "run")
    assert (
        said.code in (1, 130)
        and "note: images from mine; no test folder: a fifth of every class is test data." in said.out
    )
    return tmp_path


def test_resuming_on_changed_images_is_refused(sparring, own):
    shutil.copytree(own / "mine", own / "kept")
    (next((own / "mine" / "digit 3").iterdir())).unlink()
    refused = sparring("train", "--out", "run", "--resume")
    refused.user_error("the training images of folder:mine differ from those")
    shutil.rmtree(own / "mine")
    shutil.copytree(own / "kept", own / "mine")
    (own / "mine" / "digit 3").rename(own / "mine" / "digit z")  # the labels mean other classes
    sparring("train", "--out", "run", "--resume").user_error("differ from those")
    shutil.rmtree(own / "mine")
    shutil.copytree(own / "kept", own / "mine")
    assert sparring("train", "--out", "run", "--resume").code == 0


def test_moved_images_are_found_by_their_new_path(sparring, own):
    (own / "mine").rename(own / "theirs")
    sparring("train", "--out", "run", "--resume").user_error("no such folder: mine", "--data")
    write_images(own / "others", 90)
    other = sparring("train", "--out", "run", "--resume", "--data", "folder:others")
    other.user_error("another configuration (data folder:mine -> folder:others)")
    assert sparring("train", "--out", "run", "--resume", "--data", "folder:theirs").code == 0
    assert run_folder.open_run(Path("run")).config.data == "folder:theirs"
    (own / "theirs").rename(own / "ours")  # for a finished run
    assert sparring("train", "--out", "run", "--resume", "--data", "folder:ours").code == 0
    assert sparring("evaluate", "run", "--protocol", "quick", "--no-doubts").code == 0


def test_evaluation_uses_images_that_were_not_trained_on(sparring, own):
    assert sparring("train", "--out", "run", "--resume").code == 0
    fast = ["--protocol", "quick", "--no-doubts"]
    own_test = sparring("evaluate", "run", *fast)
    assert "have changed" not in own_test.out and "a fifth of every class" in own_test.out
    parts = len(load("folder:mine").test), len(load("folder:mine").train)
    assert f"on {parts[0]} of {parts[0]} test images" in own_test.out
    write_images(own / "others", 60)
    every = sparring("evaluate", "run", *fast, "--data", "folder:others")  # shares images with the run
    trained = {image.numpy().tobytes() for image in load("folder:mine").train.x}
    others = load("folder:others")
    left = sum(image.numpy().tobytes() not in trained for part in (others.train, others.test) for image in part.x)
    assert 0 < left < 60 and f"on {left} of {left} test images" in every.out
    assert f"note: all images of others except {60 - left} used in training." in every.out
    again = sparring("evaluate", "run", *fast, "--data", f"folder:{own / 'mine'}")  # the same folder by its full path
    assert f"on {parts[0]} of {parts[0]} test images" in again.out
    shutil.copy(next((own / "mine" / "digit 3").iterdir()), own / "mine" / "digit 4" / "0.png")
    assert "have changed since run was trained; the test images may include" in sparring("evaluate", "run", *fast).out
    changed = sparring("evaluate", "run", *fast, "--data", "folder:mine")  # the training images are unknown
    assert "all images" not in changed.out and f"of {len(load('folder:mine').test)} test images" in changed.out
    parted = write_images(own / "parted" / "train", 60).parent
    write_images(parted / "test", 50)
    assert "on 50 of 50 test images" in sparring("evaluate", "run", *fast, "--data", "folder:parted").out
    model = library.load_model("run")
    assert model.classes == tuple(f"digit {i}" for i in range(10))


def test_missing_classes_among_the_first_images_are_noted(sparring, finished, tmp_path):
    digits = load("digits")
    order = digits.test.y.argsort()
    images = {"x_train": digits.train.x, "y_train": digits.train.y}
    images |= {"x_test": digits.test.x[order], "y_test": digits.test.y[order]}
    np.savez(tmp_path / "sorted.npz", **{name: array.numpy() for name, array in images.items()})
    words = ["evaluate", finished, "--protocol", "quick", "--no-doubts", "--data", "npz:sorted.npz", "--out", "there"]
    assert "note: the first 60 of 450 test images hold 2 of 10 classes." in sparring(*words, "--limit", 60).out
    assert "classes." not in sparring(*words).out


def test_a_run_without_a_fingerprint_of_its_images_still_works(sparring, own):
    doctor(Path("run"), lambda content: content.pop("images"))
    assert sparring("train", "--out", "run", "--resume").code == 0
    assert sparring("evaluate", "run", "--protocol", "quick", "--no-doubts").code == 0
