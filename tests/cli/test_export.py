"""`sparring export` as a command; the files it writes are tested in tests/weights."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

import sparring as library


def test_the_printed_lines_load_the_export(sparring, finished, tmp_path):
    said = sparring("export", finished, "--out", "an export")
    assert said.code == 0 and said.err == ""
    assert "wrote an export/run-last.safetensors" in said.out and "wrote an export/run-last.pt" in said.out
    x = torch.rand(3, 1, 8, 8)
    lines = [line.strip() for line in said.out.splitlines() if line.startswith("    ")]
    scope = {"x": x, "torch": torch, "net": library.load_model(finished, which="best")}
    exec("\n".join(lines), scope)  # the printed lines
    expected = library.load_model(finished)(x)
    assert torch.equal(scope["logits"], expected) and torch.equal(scope["net"](x), expected)
    assert sparring("export", finished, "--out", "an export").code == 0  # its own files may be replaced


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["PATH is missing"]),
        (["none"], ["there is no checkpoint at none"]),
        (["RUN", "--which", "worst"], ["'worst'", "('last', 'best')"]),
        (["RUN", "--out", "file"], ["cannot create the folder file", "--out"]),
        (["text.pth"], ["text.pth is a text file"]),
    ],
)
def test_user_errors_are_one_line(sparring, finished, tmp_path, words, says):
    (tmp_path / "file").write_text("")
    (tmp_path / "text.pth").write_text("hello")
    sparring("export", *[finished if word == "RUN" else word for word in words]).user_error(*says)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_full_disk_is_an_error(sparring, finished, tmp_path, monkeypatch, nth):
    written, really = iter(range(1, 10)), Path.write_bytes

    def write(self, data):
        if next(written) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really(self, data)

    monkeypatch.setattr(Path, "write_bytes", write)
    sparring("export", finished).user_error("cannot write export/run-last.", "the disk is full")
    assert len(list(tmp_path.glob("export/*"))) == nth - 1


@pytest.mark.parametrize("form", ["pt2", "hub"])
def test_the_printed_lines_of_other_formats_run(sparring, form):
    said = sparring("export", "fat-digits", "--format", form)
    assert said.code == 0 and said.err == ""
    x = torch.rand(3, 1, 8, 8)
    lines = [line.strip() for line in said.out.splitlines() if line.startswith("    ")]
    scope = {"x": x}
    exec("\n".join(lines), scope)  # the printed lines
    expected = library.load_model("fat-digits")(x)
    torch.testing.assert_close(scope["logits"], expected)
    if form == "hub":
        torch.testing.assert_close(scope["hub_model"](x), expected)
        card = Path("export/fat-digits/README.md").read_text()
        assert "| autoattack | 34.44 % | 450 | Linf 0.3 |" in card
