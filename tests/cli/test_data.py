from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from sparring.cli import data as command


def test_the_list_shows_what_is_present_and_how_to_get_the_rest(sparring, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    for words in ([], ["list"]):
        said = sparring("data", *words, "--root", tmp_path)
        assert said.code == 0
        rows = {line.split()[0]: line for line in said.out.splitlines()}
        assert rows["digits"].split()[1] == "yes" and rows["cifar10"].split()[1] == "no"
        assert "sparring data fetch cifar10" in rows["cifar10"] and "folder:PATH" in rows


@pytest.mark.parametrize(("seconds", "noted"), [(0, False), (60, True)])
def test_a_source_that_was_not_read_is_noted(sparring, tmp_path, monkeypatch, seconds, noted):
    there = tmp_path / "cifar10.npz"

    def fetch(name, *, root, source):
        there.touch()
        os.utime(there, (time.time() - seconds,) * 2)
        return there

    monkeypatch.setattr(command.data, "fetch", fetch)
    said = sparring("data", "fetch", "cifar10", "--source", "mine")
    assert said.code == 0 and ("note: it was already present and is intact; mine was not read." in said.out) == noted


def test_fetching_prints_the_path(sparring, monkeypatch):
    asked = []

    def fetch(name, *, root, source):
        asked.append((name, root, source))
        return root / name

    monkeypatch.setattr(command.data, "fetch", fetch)
    said = sparring("data", "fetch", "svhn", "--source", "my files", "--root", "kept")
    assert said.code == 0 and said.out == "svhn is ready: kept/svhn\n"
    assert asked == [("svhn", Path("kept"), Path("my files"))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["ftech", "cifar10"], ["'ftech'", "('list', 'fetch')"]),
        (["fetch"], ["no data set given", "sparring data fetch cifar10", "cifar10, svhn"]),
        (["fetch", "cifar"], ["unknown data set to fetch 'cifar'", "Did you mean 'cifar10'?"]),
        (["fetch", "digits"], ["digits needs no download"]),
        (["fetch", "cifar10", "--source", "none.tar.gz"], ["no such file or folder: none.tar.gz"]),
        (["fetch", "cifar10", "--source", "cut.tar.gz"], ["is not a complete tar archive", "download it again"]),
        (["fetch", "svhn", "--source", "."], ["train_32x32.mat"]),
        (["fetch", "cifar10", "--source", "cut.tar.gz", "--root", "cut.tar.gz"], ["cannot write cut.tar.gz/"]),
        (["fetch", "cifar10", "svhn"], ["svhn"]),
    ],
)
def test_user_errors_are_one_line(sparring, tmp_path, monkeypatch, words, says):
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path / "kept"))
    (tmp_path / "cut.tar.gz").write_bytes(b"\x1f\x8b cut")
    sparring("data", *words).user_error(*says)
    assert not list(tmp_path.glob("kept/*/*"))
