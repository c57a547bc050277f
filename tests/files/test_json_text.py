"""JSON from files: damage and read errors are told apart, each in one line."""

import errno
import os
from pathlib import Path

import pytest

from sparring.files.json_text import DEPTH, Damaged, Unreadable, parse, read_json
from sparring.files.schema import fields, whole


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('{"epoch": 3}')
    assert read_json(path, fields(epoch=whole())) == {"epoch": 3}


@pytest.mark.parametrize(
    ("content", "wrong"),
    [
        (b"{", "it is not JSON"),
        (b"[" * 9_000, "it is not JSON"),
        (b"\xff\xfe", "it is not UTF-8"),
        (b"1" * 5000, "it is not JSON"),  # more digits than Python converts
        (b"[" * (DEPTH + 1) + b"]" * (DEPTH + 1), f"nested deeper than {DEPTH} levels"),
        (b'{"epoch": "3"}', "epoch must be a whole number"),
        (b'{"epoch": 3, "name": "\\ud83d"}', "it holds half a character"),
        (b"{}" + b" " * 10_000, "it is longer than 10,000 bytes"),
    ],
)
def test_damage_is_named(tmp_path, content, wrong):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(Damaged, match=wrong) as caught:
        read_json(path, fields(epoch=whole()), most=10_000)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_whole_character_may_be_spelled_in_halves():
    assert parse('["\\ud83d\\ude00"]', "a text") == ["\U0001f600"]


def test_the_error_ends_in_the_fix_of_its_caller(tmp_path):
    path = tmp_path / "a.json"
    for content in (b"{", b"\xff", b"{}" * 9):
        path.write_bytes(content)
        with pytest.raises(Damaged, match=r"is damaged: .*\. Submit it again\.$"):
            read_json(path, most=10, fix="Submit it again.")


def test_the_deepest_that_is_admitted():
    assert parse("[" * DEPTH + "]" * DEPTH, "a text") is not None


def test_a_read_error_is_not_damage(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    path.write_text("{}")

    def fails(self: Path, *args: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(Unreadable, match=r"cannot read .*a\.json: Input/output error\. Check the disk") as caught:
        read_json(path)
    assert "overwrite" not in str(caught.value) and "damaged" not in str(caught.value)


@pytest.mark.parametrize("kind", ["missing", "fifo", "folder"])
def test_what_is_no_file(tmp_path, kind):
    path = tmp_path / "a.json"
    {"missing": lambda: None, "fifo": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(Unreadable, match=r"regular file is needed|No such file"):
        read_json(path)
