"""Processes side by side: all end, or all are stopped, and none is left running."""

from __future__ import annotations

import os
import stat
import sys
import time

import pytest
import torch

from sparring.errors import RunFailed, UserError
from sparring.training.gpu_sharing import Ended, fair_share, one_gpu, run_queue, run_together
from sparring.training.run_folder import environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Prints that it runs, and obeys SIGTERM as sparring does: it "saves", reports it and exits with 1.
PATIENT = """
import signal, sys, time
def stop(*_):
    open(sys.argv[1], "w").write("saved")
    sys.exit("sparring: stopped; saved.")
signal.signal(signal.SIGTERM, stop)
print("here", flush=True)
time.sleep(60)
"""


def python(code, *words):
    return [sys.executable, "-c", code, *map(str, words)]


def test_commands_run_in_parallel_and_their_output_is_passed_on(tmp_path):
    """Each waits for the other: in sequence they would never end."""
    meet = """
import sys, time, pathlib
folder, me, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
(folder / me).touch()
while not (folder / other).exists(): time.sleep(0.01)
print(me, "met", other)
"""
    output = []
    commands = [python(meet, tmp_path, "a", "b"), python(meet, tmp_path, "b", "a")]
    assert run_together(commands, device=CPU, tell=output.append)
    assert sorted(output) == ["a met b", "b met a"]


def test_cores_are_divided(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    output = []
    run_together([python("import os; print(os.environ['OMP_NUM_THREADS'])")] * 2, device=CPU, tell=output.append)
    assert output == ["4", "4"]


@pytest.mark.parametrize(
    ("count", "share", "expected"),
    [(2, 100, "100"), (2, 25, "25"), (1, None, "100"), (2, None, "100"), (3, None, "66")],
)
def test_every_process_gets_its_share(count, share, expected, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    output = []
    code = "import os; print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    run_together([python(code)] * count, device=CPU, share=share, tell=output.append)
    assert output == [expected] * count


def test_share_in_the_environment_is_kept_unless_one_is_given(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "20")
    output = []
    code = "import os; print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    for share in (None, 100):
        run_together([python(code)], device=CPU, share=share, tell=output.append)
    assert output == ["20", "100"]


def test_fair_share():
    assert [fair_share(count) for count in (1, 2, 3, 4, 8, 11, 500)] == [100, 100, 66, 50, 25, 18, 1]


def test_environment_records_the_number_of_parallel_runs():
    output = []
    code = "from sparring.training import run_folder as r; print(r.environment(r.torch.device('cpu'))['at_once'])"
    run_together([python(code)] * 2, device=CPU, tell=output.append)
    assert output == ["2", "2"] and environment(CPU)["at_once"] == 1


def test_failure_stops_the_others_which_save(tmp_path):
    saved = tmp_path / "saved"
    output = []
    fails = """
import sys, time, pathlib
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)
print("a note", file=sys.stderr)
sys.exit("sparring: the disk is full.")
"""
    ready = tmp_path / "ready"

    def tell(line):
        output.append(line)
        ready.touch()

    with pytest.raises(RunFailed, match=r"^the disk is full\.$"):
        run_together([python(PATIENT, saved), python(fails, ready)], device=CPU, tell=tell)
    assert output == ["here"] and saved.read_text() == "saved"


def test_user_error_stays_a_user_error():
    with pytest.raises(UserError, match=r"^no such folder\.$"):
        run_together(
            [python("import sys; print('sparring: no such folder.', file=sys.stderr); sys.exit(2)")], device=CPU
        )


def test_silent_failure_reports_the_exit_status():
    with pytest.raises(RunFailed, match="exit status 7"):
        run_together([python("raise SystemExit(7)")], device=CPU)


def test_stop_is_passed_on_and_is_not_a_failure(tmp_path):
    output = []
    commands = [python(PATIENT, tmp_path / str(number)) for number in range(2)]
    assert not run_together(commands, device=CPU, stop=lambda: len(output) == 2, tell=output.append)
    assert all((tmp_path / str(number)).read_text() == "saved" for number in range(2))


def test_a_queue_runs_as_many_as_it_may_and_goes_on_after_a_failure(tmp_path):
    code = """
import os, sys, time
here = os.path.join(sys.argv[1], "here")
os.mkdir(here)  # fails where another one is running
time.sleep(0.05)
os.rmdir(here)
print(os.environ["SPARRING_AT_ONCE"])
sys.exit(int(sys.argv[2]))
"""
    output = []
    commands = [python(code, tmp_path, status) for status in (0, 3, 0)]
    ended = run_queue(commands, at_once=1, device=CPU, tell=lambda number, line: output.append((number, line)))
    assert output == [(0, "1"), (1, "1"), (2, "1")]
    assert ended == [Ended(0), Ended(3, "one of the processes ended with exit status 3."), Ended(0)]


def test_a_stopped_queue_starts_no_other(tmp_path):
    output = []
    commands = [python(PATIENT, tmp_path / str(number)) for number in range(2)]
    ended = run_queue(
        commands, at_once=1, device=CPU, stop=lambda: bool(output), tell=lambda number, line: output.append(line)
    )
    assert ended == [Ended(None), Ended(None)] and output == ["here"]
    assert (tmp_path / "0").read_text() == "saved" and not (tmp_path / "1").exists()


def test_closed_output_stops_the_processes():
    def gone(line):
        raise BrokenPipeError

    prints = "import time\nwhile True: print('running', flush=True); time.sleep(0.01)"
    with pytest.raises(BrokenPipeError):
        run_together([python(prints)], device=CPU, tell=gone)


def test_interrupt_ends_all_processes(tmp_path):
    def impatient():
        if (tmp_path / "pid").exists():
            raise KeyboardInterrupt
        return False

    code = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_together([python(code, tmp_path / "pid")], device=CPU, stop=impatient)
    assert time.monotonic() - began < 50


@pytest.fixture
def mps(tmp_path, monkeypatch):
    """A fake of NVIDIA's control program that records its calls."""

    def make(code):
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/calls\nexit {code}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        return tmp_path / "calls"

    return make


def test_mps_runs_inside_the_block(mps):
    calls = mps(0)
    with one_gpu(CUDA) as shared:
        folder = shared["CUDA_MPS_PIPE_DIRECTORY"]
        assert calls.read_text() == f"-d {folder}\n"
    assert calls.read_text() == f"-d {folder}\n {folder}\n"


def test_environment_is_unchanged_without_mps_or_where_it_runs(mps, monkeypatch):
    calls = mps(1)
    with one_gpu(CUDA) as shared:
        assert shared == {}
    assert len(calls.read_text().splitlines()) == 1  # started once, refused, and not stopped
    with one_gpu(CPU) as shared:
        assert shared == {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/another/pipe")
    with one_gpu(CUDA) as shared:
        assert shared == {}
    assert len(calls.read_text().splitlines()) == 1
