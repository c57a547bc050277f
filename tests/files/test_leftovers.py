"""Temporary files of killed processes: only dead ones of our own names are removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparring.cli import main
from sparring.evaluation.cache import Store
from sparring.files.leftovers import FRESH, STALE, sweep, target
from sparring.training.checkpoint import replacing


@pytest.fixture(scope="module")
def dead() -> int:
    """The number of a process that has ended."""
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    return ended.pid


def leave(folder: Path, name: str, pid: int, age: float = 2 * FRESH) -> Path:
    """A file as a killed process leaves it, some seconds ago."""
    path = folder / f".{name}.{pid}.tmp"
    path.write_text("half")
    os.utime(path, (time.time() - age,) * 2)
    return path


def any_json(name: str) -> bool:
    return name.endswith(".json")


def test_the_name_of_a_temporary_file(tmp_path):
    with replacing(tmp_path / "a b.json") as temporary:
        temporary.touch()
        assert target(temporary) == ("a b.json", os.getpid())
    for name in ("a.json", ".a.json.tmp", ".a.json.x.tmp", ".a.json.12", ".a.json.012.tmp", "..12.tmp", ".12.tmp"):
        assert target(Path(name)) is None, name


def test_only_dead_files_of_our_own_names_go(tmp_path, dead):
    gone = [leave(tmp_path, "a.json", dead), leave(tmp_path, "b.json", os.getppid(), age=STALE + 60)]
    kept = [
        leave(tmp_path, "c.json", os.getppid()),  # its process is alive, or its number has been given again
        leave(tmp_path, "d.json", dead, age=1.0),  # perhaps of another host, which is writing now
        leave(tmp_path, "e.json", os.getpid(), age=STALE + 60),  # another thread
        leave(tmp_path, "f.npz", dead),  # another command's
        tmp_path / "a.json",
        tmp_path / ".mine.json.tmp",
        tmp_path / f".g.json.{dead}.tmp",
    ]
    (tmp_path / "a.json").touch()
    (tmp_path / ".mine.json.tmp").touch()
    kept[-1].symlink_to(tmp_path / "a.json")
    (tmp_path / f".h.json.{dead}.tmp").mkdir()
    assert sweep(tmp_path, any_json) == gone
    assert all(os.path.lexists(path) for path in kept) and (tmp_path / f".h.json.{dead}.tmp").is_dir()
    assert sweep(tmp_path / "none", any_json) == []


def test_who_holds_the_lock_may_remove_all(tmp_path):
    young = leave(tmp_path, "a.json", os.getppid(), age=0.0)
    assert sweep(tmp_path, any_json, alone=True) == [young]


def test_a_store_of_verdicts_is_swept(tmp_path, dead):
    left, other = leave(tmp_path, "pgd-0.npz", dead), leave(tmp_path, "x.txt", dead)
    Store(tmp_path, 3)
    assert not left.exists() and other.exists()


def test_commands_sweep_where_they_write(tmp_path, dead, monkeypatch, capsys):
    """Also those that end soon after: what counts is that they start."""
    monkeypatch.chdir(tmp_path)
    Path("results/fig-motivation").mkdir(parents=True)
    home = Path("results/fig-motivation")
    left = [leave(home, name, dead) for name in ("plane-lite-seed0.json", "fig-motivation.png")]
    left += [
        leave(Path("results"), "headline.md", dead),
        leave(Path(), "page.html", dead),
    ]
    foreign = [leave(home, "notes.json", dead), leave(Path(), "other.html", dead)]
    assert main(["report", "none", "--out", "page.html"]) == 2
    assert main(["reproduce", "--draw"]) == 2
    assert [path for path in left if path.exists()] == []
    assert all(path.exists() for path in foreign)


def test_an_export_and_a_demo_that_were_killed_can_be_repeated(tmp_path, dead, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("hub").mkdir()
    old, young = leave(Path("hub"), "model.safetensors", dead), leave(Path("hub"), "config.json", dead, age=0.0)
    assert main(["export", "fat-digits", "--format", "hub", "--out", "hub"]) == 0
    assert not old.exists() and young.exists()
    shutil.rmtree("hub")
    Path("demo").mkdir()
    leave(Path("demo"), "demo.json", dead, age=0.0)
    from sparring.cli.demo import _check_folder

    _check_folder(Path("demo"))
