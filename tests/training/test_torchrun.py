"""What the environment says of a group, and the real torchrun: one line for a mistake, one save for a stop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from sparring.cli import main
from sparring.errors import RunFailed, UserError
from sparring.training import distributed, peers, run_folder, torchrun
from sparring.training.distributed import World, joined, local_device
from tests.training import group


@pytest.fixture
def environment(monkeypatch):
    """Sets what torchrun sets."""

    def of(rank: int, size: int, **more: object) -> None:
        given = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        for name, value in {**given, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": group.free_port(), **more}.items():
            monkeypatch.setenv(name, str(value))

    return of


def test_a_group_without_a_meeting_place_is_noted(monkeypatch, tmp_path, capsys):
    assert torchrun.half_launched() == ""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not torchrun.launched()
    assert main(["train", "fat-digits", "--epochs", "1", "--out", str(tmp_path / "run"), "--no-tensorboard"]) == 0
    assert "note: WORLD_SIZE is 2, but MASTER_ADDR is not set: this process runs alone." in capsys.readouterr().out
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert torchrun.launched() and torchrun.half_launched() == ""


def test_a_process_by_itself_is_a_world_of_one():
    assert not torchrun.launched() and (torchrun.rank(), torchrun.size()) == (0, 1)
    with joined(torch.device("cpu")) as world:
        assert world is distributed.ALONE and world.first and not world.grouped
        assert world.texts("a") == ["a"] and world.from_first([1]) == [1]
        world.agree({"anything": 1})
        world.wait()
        with pytest.raises(UserError, match="x"), world.together():
            raise UserError("x")


def test_each_process_has_a_gpu_of_its_own(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert local_device("auto") == "auto"  # started by itself
    environment(1, 2)
    assert local_device("auto") == local_device("cuda") == "cuda:1" and local_device("cpu") == "cpu"
    with pytest.raises(UserError, match=r"2 processes cannot all use cuda:0\. Leave out --device"):
        local_device("cuda:0")
    environment(2, 3)
    with pytest.raises(
        UserError, match=r"3 processes on a machine with 2 GPUs: each needs one of its own\. Write --nproc"
    ):
        local_device("auto")
    assert local_device("auto", "gloo") == "cuda:0"


def test_wrong_environments_are_one_line(environment, monkeypatch):
    environment("x", 2)
    with pytest.raises(UserError, match="RANK is 'x' in the environment, expected a whole number"):
        torchrun.rank()
    environment(0, 1)
    for backend, message in (("nccl", "the backend nccl is for CUDA"), ("mpi", "unknown backend 'mpi'")):
        with pytest.raises(UserError, match=message), joined(torch.device("cpu"), backend):
            pass
    monkeypatch.setattr(distributed, "_REACH", distributed.timedelta(seconds=0.5))
    environment(1, 3)
    with pytest.raises(UserError, match=r"process 1 of 3 does not reach 127.0.0.1:\d+ .*Check --rdzv-endpoint"):
        distributed._server(1, 3)


def test_a_store_that_does_not_answer_is_one_line_of_each_process(environment, monkeypatch, capsys):
    monkeypatch.setattr(distributed, "_REACH", distributed.timedelta(seconds=0.3))
    environment(1, 4)
    assert main(["train", "fat-digits"]) == 2
    assert capsys.readouterr().err.startswith("sparring: process 1 of 4 does not reach 127.0.0.1:")


def test_a_process_that_does_not_come_is_named(environment, monkeypatch):
    monkeypatch.setattr(distributed, "_JOIN", distributed.timedelta(seconds=0.3))
    environment(0, 5)
    with pytest.raises(UserError, match=r"process 1 of 5 has not come within .* minutes. Its own output says why"):
        distributed._store(0, 5)


def test_errors_of_a_group_are_reported_once(environment):
    error = RunFailed("no")
    assert not distributed.reported_elsewhere(error)
    environment(1, 2)
    assert distributed.reported_elsewhere(error)  # before they have joined, all meet the same
    environment(0, 2)
    assert not distributed.reported_elsewhere(error)
    error.elsewhere = True
    assert distributed.reported_elsewhere(error)


class Table:
    """A stand-in for the store."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}

    def set(self, name: str, value: str | bytes) -> None:
        self.kept[name] = value.encode() if isinstance(value, str) else value

    def get(self, name: str) -> bytes:
        return self.kept[name]

    def check(self, names: list[str]) -> bool:
        return all(name in self.kept for name in names)

    def add(self, name: str, by: int) -> int:
        self.kept[name] = str(int(self.kept.get(name, b"0")) + by).encode()
        return int(self.kept[name])


def test_a_process_that_falls_silent_ends_the_others(monkeypatch, capfd):
    """Where a collective on a GPU would wait for ever: nothing but the heartbeat can tell."""
    monkeypatch.setattr(peers, "EVERY", 0.02)
    monkeypatch.setattr(peers, "SILENT", 0.3)
    ended: list[tuple[int, float]] = []
    table = Table()
    with peers.Peers(table, 0, 3) as first, peers.Peers(table, 1, 3) as second:  # the third never beats
        monkeypatch.setattr(
            peers.os, "_exit", lambda code: ended.append((code, first.ended.set() or second.ended.set()))
        )
        deadline = time.monotonic() + 20
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
        for each in (first, second):  # the one that reports may be slower
            each.thread.join(20)
    assert ended and ended[0][0] == 1
    assert table.kept["gone"] == b"2"
    assert capfd.readouterr().err.count("another process of this run has ended") == 1


def test_a_process_that_is_done_is_not_missed(monkeypatch):
    monkeypatch.setattr(peers, "EVERY", 0.02)
    monkeypatch.setattr(peers, "SILENT", 0.2)
    monkeypatch.setattr(peers.os, "_exit", lambda code: pytest.fail("ended"))
    table = Table()
    with peers.Peers(table, 0, 2) as first, peers.Peers(table, 1, 2) as second:
        second.finish()
        time.sleep(0.5)
        assert not table.check(["gone"])
        first.finish()


def test_a_group_that_breaks_is_lost_and_reported_once():
    class Broken:
        def __call__(self) -> None:
            raise RuntimeError("Connection closed by peer")

    table = Table()
    worlds = [World(rank, 2, "gloo", object(), object(), peers.Peers(table, rank, 2)) for rank in range(2)]
    errors = []
    for world in worlds:
        with pytest.raises(distributed.Lost) as raised:
            world._waiting(Broken())
        errors.append(raised.value.elsewhere)
    assert errors == [False, True]


TRAIN = ["train", "fat-digits", "--epochs", "40", "--attack.steps", "2", "--batch-size", "100", "--no-tensorboard"]


def launch(folder: Path, *words: str, **options: object) -> subprocess.Popen[str]:
    run = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        *options.pop("run", []),
    ]
    given = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": folder, **options}
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*run, "-m", "sparring", *words], env=environ, start_new_session=True, **given)


def wait_for(there, process: subprocess.Popen[str], patience: float = 120.0) -> None:
    end = time.monotonic() + patience
    while not there():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)


def ended(process: subprocess.Popen[str], patience: float = 120.0) -> str:
    """What it printed; it is killed where it does not end."""
    try:
        return process.communicate(timeout=patience)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def lines(text: str) -> list[str]:
    """Our own lines."""
    return [line for line in text.splitlines() if line.startswith("sparring:")]


def test_torchrun_restarts_after_a_kill_and_a_stop_of_the_launcher_saves_once(tmp_path):
    """One process is killed: torchrun starts all again, which go on. Then the launcher is stopped, and all save."""
    run = tmp_path / "run"
    process = launch(tmp_path, *TRAIN, "--out", "run", run=["--max-restarts", "1"])
    try:
        wait_for((run / run_folder.LAST).exists, process)
        children = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True).stdout.split()
        os.kill(int(children[-1]), signal.SIGKILL)
        wait_for(lambda: len(run_folder.read_environment(run)) == 2, process)
        before = len(run_folder.read_metrics(run))
        wait_for(lambda: len(run_folder.read_metrics(run)) > before + 1, process)
        process.send_signal(signal.SIGINT)
    finally:
        text = ended(process)
    said = lines(text)
    assert "another process of this run has ended" in said[0]
    assert said[1] == "sparring: stopping after this step"
    assert said[2].startswith("sparring: stopped in epoch") and "; saved. Continue with: torchrun" in said[2]
    assert len(said) == 3
    place = run_folder.open_run(run).last().facts
    assert f"epoch {place['epoch'] + 1} after step {place['step']}" in said[2]
    assert [start["processes"] for start in run_folder.read_environment(run)] == [2, 2]


def command(*words: str) -> int:
    """A command in every process of a group."""
    return main(list(words))


def test_a_mistake_is_one_line_of_all_processes(tmp_path):
    out = tmp_path / "out"
    assert group.run(2, command, "train", "fat-digitz", out=out) == [2, 2]
    (said,) = out.read_text().splitlines()
    assert said.startswith("sparring: unknown recipe 'fat-digitz'")
    assert group.run(2, command, "evaluate", str(tmp_path / "nothing"), out=tmp_path / "more") == [2, 2]
    assert len((tmp_path / "more").read_text().splitlines()) == 1


def test_commands_for_one_process_say_so(environment, capsys):
    environment(0, 2)
    assert main(["report"]) == 2
    assert capsys.readouterr().err == "sparring: sparring report runs in one process. Start it without torchrun.\n"


def test_evaluate_prints_one_table(tmp_path):
    words = ["fat-digits", "--protocol", "mart", "--eps", "0.3", "--limit", "40", "--no-doubts"]
    out = tmp_path / "out"
    assert group.run(2, command, "evaluate", *words, "--out", str(tmp_path / "results"), out=out) == [0, 0]
    text = out.read_text()
    assert text.count("natural") == 1 and text.count("wrote ") == 1
