import io
import tarfile

import pytest

from sparring.data import archives
from sparring.data.archives import read_named
from sparring.errors import UserError


def hostile(path, members):
    """(name, bytes) pairs, or (name, type, link)."""
    with tarfile.open(path, "w:gz") as archive:
        for name, *rest in members:
            member = tarfile.TarInfo(name)
            if len(rest) == 2:
                member.type, member.linkname = rest
                archive.addfile(member)
            else:
                member.size = len(rest[0])
                archive.addfile(member, io.BytesIO(rest[0]))
    return path


def test_reads_by_base_name(tmp_path, make_tar):
    path = make_tar(tmp_path / "a.tgz", {"package/one": b"1", "./two": b"2", "package/other": b"x"})
    assert read_named(path, {"one", "two", "three"}) == {"one": b"1", "two": b"2"}


def test_reads_a_folder_and_its_subfolders(tmp_path):
    (tmp_path / "inner" / "deep").mkdir(parents=True)
    (tmp_path / "one").write_bytes(b"1")
    (tmp_path / "inner" / "two").write_bytes(b"2")
    (tmp_path / "inner" / "deep" / "three").write_bytes(b"3")
    assert read_named(tmp_path, {"one", "two", "three"}) == {"one": b"1", "two": b"2"}


@pytest.mark.parametrize(
    "member",
    [
        ("../one", b"evil"),
        ("package/../../one", b"evil"),
        ("/tmp/one", b"evil"),
        ("one", tarfile.SYMTYPE, "/etc/passwd"),
        ("one", tarfile.LNKTYPE, "../../etc/passwd"),
        ("one", tarfile.FIFOTYPE, ""),
        ("one", tarfile.CHRTYPE, ""),
        ("one", tarfile.DIRTYPE, ""),
    ],
)
def test_members_cannot_escape(tmp_path, member):
    inner = tmp_path / "inner"
    inner.mkdir()
    path = hostile(inner / "a.tgz", [member])
    assert read_named(path, {"one"}) == {}
    assert sorted(tmp_path.rglob("*")) == [inner, path]


def test_a_duplicate_name_is_refused(tmp_path):
    with pytest.raises(UserError, match="twice"):
        read_named(hostile(tmp_path / "a.tgz", [("a/one", b"1"), ("b/one", b"2")]), {"one"})


def test_an_oversized_member_is_refused(tmp_path, make_tar, monkeypatch):
    monkeypatch.setattr(archives, "_LARGEST", 2**20)
    with pytest.raises(UserError, match="larger than"):
        read_named(make_tar(tmp_path / "a.tgz", {"one": b"\0" * (2**20 + 1)}), {"one"})


def test_truncated_and_foreign_files(tmp_path, make_tar):
    whole = make_tar(tmp_path / "a.tgz", {"one": bytes(range(256)) * 200, "two": b"2" * 5000}).read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 2] ^= 0xFF
    for content in (whole[: len(whole) // 2], whole[:15], bytes(damaged), b"", b"<html>not found</html>" * 100):
        (tmp_path / "b.tgz").write_bytes(content)
        with pytest.raises(UserError, match="download it again"):
            read_named(tmp_path / "b.tgz", {"one", "two"})


def test_a_missing_path_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such file"):
        read_named(tmp_path / "none", {"one"})
