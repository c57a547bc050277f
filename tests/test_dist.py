"""The source archive does not depend on when, by whom and in which order it was packed. `make dist` compares builds."""

import importlib.util
import io
import tarfile
from pathlib import Path

spec = importlib.util.spec_from_file_location("dist", Path(__file__).parents[1] / "release" / "dist.py")
dist = importlib.util.module_from_spec(spec)
spec.loader.exec_module(dist)


def archive(files, *, time, owner, mode):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as packed:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.uid, member.uname, member.mode = len(content), time, 7, owner, mode
            packed.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def test_equal_files_make_equal_archives():
    files = [("p/a", b"one"), ("p/b", b"two" * 1000)]
    first = archive(files, time=1.5, owner="me", mode=0o600)
    second = archive(files[::-1], time=2_000_000_000, owner="you", mode=0o664)
    assert first != second
    assert dist.packed_anew(first, 1000) == dist.packed_anew(second, 1000)
    assert dist.packed_anew(first, 1000) != dist.packed_anew(first, 2000)
    assert dist.packed_anew(first, 1000) != dist.packed_anew(archive([("p/a", b"One")], time=1, owner="", mode=0), 1000)


def test_the_content_is_kept():
    packed = dist.packed_anew(archive([("p/run", b"#!")], time=1, owner="me", mode=0o775), 1000)
    with tarfile.open(fileobj=io.BytesIO(packed)) as opened:
        (member,) = opened.getmembers()
        assert opened.extractfile(member).read() == b"#!" and (member.mode, member.mtime, member.uname) == (
            493,
            1000,
            "",
        )
