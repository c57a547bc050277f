"""Only regular files are opened."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from sparring.errors import UserError
from sparring.files.regular import irregular, require_regular, shown


def test_a_regular_file_and_a_link_to_it_pass(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "b").symlink_to("a")
    for name in "ab":
        require_regular(tmp_path / name)
        assert irregular(tmp_path / name) == ""


def test_anything_else_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the path of a socket is short
    os.mkfifo("fifo")
    Path("to-fifo").symlink_to("fifo")
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as made:
        made.bind("socket")
    for path, says in [
        ("fifo", "a FIFO"),
        ("to-fifo", "a FIFO"),
        (".", "a folder"),
        ("/dev/zero", "a device"),
        ("socket", "a socket"),
        ("loop", "symbolic links"),
        ("none", "No such file"),
        ("a\0b", "no possible name"),
    ]:
        with pytest.raises(UserError, match=says) as caught:
            require_regular(Path(path))
        assert "\n" not in str(caught.value)


def test_names_from_a_file_stay_short_and_on_one_line() -> None:
    assert shown("x_train") == "x_train"
    assert shown("a\nb\x1b[2J") == "'a\\nb\\x1b[2J'"
    assert len(shown("a" * 10**6)) < 100
