"""Build the wheel and the source archive of the last commit twice, in different folders, and keep them if they agree.

    python release/dist.py [FOLDER]

The times inside are that of the commit (SOURCE_DATE_EPOCH). setuptools writes the wheel the same every time, but packs
the source archive with the times, owners and permissions of its own working files, so that one is packed anew.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MASK = 0o022  # of new files: a wheel keeps their permissions


def main() -> int:
    """Build twice, compare, and move the result to the folder."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "dist")
    epoch = int(_git("log", "-1", "--format=%ct"))
    if _git("status", "--porcelain"):
        print("note: the working tree has changes that are not committed; they are not built.", file=sys.stderr)
    with tempfile.TemporaryDirectory() as scratch:
        builds = [_build(Path(scratch) / name, epoch) for name in ("a", "another")]
        first, second = ({path.name: _digest(path) for path in files} for files in builds)
        if first != second:
            differ = sorted(name for name in first.keys() | second.keys() if first.get(name) != second.get(name))
            print(f"two builds of one commit differ in {', '.join(differ)}.", file=sys.stderr)
            return 1
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for path in builds[0]:
            shutil.copyfile(path, target / path.name)
    for name, digest in sorted(first.items()):
        print(f"{digest}  {name}")
    return 0


def packed_anew(archive: bytes, epoch: int) -> bytes:
    """A .tar.gz with the same files in the order of their names, one time, one owner, and two kinds of permissions."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(archive), mode="r:gz") as old,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as stream,
        tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            plain = tarfile.TarInfo(member.name)
            plain.type, plain.size, plain.mtime = member.type, member.size, epoch
            plain.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            new.addfile(plain, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


def _build(folder: Path, epoch: int) -> list[Path]:
    """The wheel and the source archive, built from the commit's files in a new folder."""
    folder.mkdir(parents=True)
    old = os.umask(MASK)
    try:
        commit = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(commit)) as files:
            files.extractall(folder, filter="data")
        # The tools that build are pinned as well.
        environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PIP_CONSTRAINT": str(ROOT / "constraints.txt")}
        command = [sys.executable, "-m", "build", "--outdir", str(folder / "out")]
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    finally:
        os.umask(old)
    for path in (folder / "out").glob("*.tar.gz"):
        path.write_bytes(packed_anew(path.read_bytes(), epoch))
    return sorted((folder / "out").iterdir())


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
