"""Processes side by side: all end, or all are stopped, and nobody is left behind."""

from __future__ import annotations

import os
import stat
import sys
import time

import pytest
import torch

from sparring.errors import RunFailed, UserError
from sparring.training.gpu_sharing import fair_share, one_gpu, run_together
from sparring.training.run_folder import environment

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
# Says that it is there, and obeys a SIGTERM as sparring does: it "saves", says so and exits with 1.
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


def test_all_run_at_the_same_time_and_are_heard(tmp_path):
    """Each waits for the other: one after the other they would never end."""
    meet = """
import sys, time, pathlib
folder, me, other = pathlib.Path(sys.argv[1]), *sys.argv[2:]
(folder / me).touch()
while not (folder / other).exists(): time.sleep(0.01)
print(me, "met", other)
"""
    heard = []
    commands = [python(meet, tmp_path, "a", "b"), python(meet, tmp_path, "b", "a")]
    assert run_together(commands, device=CPU, tell=heard.append)
    assert sorted(heard) == ["a met b", "b met a"]


def test_cores_are_shared(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    heard = []
    run_together([python("import os; print(os.environ['OMP_NUM_THREADS'])")] * 2, device=CPU, tell=heard.append)
    assert heard == ["4", "4"]


@pytest.mark.parametrize(
    ("count", "share", "said"),
    [(2, 100, "100"), (2, 25, "25"), (1, None, "100"), (2, None, "100"), (3, None, "66")],
)
def test_each_has_its_share(count, share, said, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    heard = []
    says = "import os; print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    run_together([python(says)] * count, device=CPU, share=share, tell=heard.append)
    assert heard == [said] * count


def test_a_share_that_is_set_already_is_kept_unless_another_is_given(monkeypatch):
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "20")
    heard = []
    says = "import os; print(os.environ['CUDA_MPS_ACTIVE_THREAD_PERCENTAGE'])"
    for share in (None, 100):
        run_together([python(says)], device=CPU, share=share, tell=heard.append)
    assert heard == ["20", "100"]


def test_two_runs_go_to_each_processor():
    assert [fair_share(count) for count in (1, 2, 3, 4, 8, 11, 500)] == [100, 100, 66, 50, 25, 18, 1]


def test_a_run_in_company_says_so():
    heard = []
    says = "from sparring.training import run_folder as r; print(r.environment(r.torch.device('cpu'))['at_once'])"
    run_together([python(says)] * 3, device=CPU, tell=heard.append)
    assert heard == ["3", "3", "3"] and environment(CPU)["at_once"] == 1


def test_one_that_fails_stops_the_others_which_save(tmp_path):
    saved = tmp_path / "saved"
    heard = []
    fails = """
import sys, time, pathlib
while not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.01)
print("a note", file=sys.stderr)
sys.exit("sparring: the disk is full.")
"""
    ready = tmp_path / "ready"

    def tell(line):
        heard.append(line)
        ready.touch()

    with pytest.raises(RunFailed, match=r"^the disk is full\.$"):
        run_together([python(PATIENT, saved), python(fails, ready)], device=CPU, tell=tell)
    assert heard == ["here"] and saved.read_text() == "saved"


def test_what_the_user_can_mend_stays_that():
    with pytest.raises(UserError, match=r"^no such folder\.$"):
        run_together(
            [python("import sys; print('sparring: no such folder.', file=sys.stderr); sys.exit(2)")], device=CPU
        )


def test_one_that_fails_without_a_word():
    with pytest.raises(RunFailed, match="exit status 7"):
        run_together([python("raise SystemExit(7)")], device=CPU)


def test_a_stop_is_passed_on_and_is_no_failure(tmp_path):
    heard = []
    commands = [python(PATIENT, tmp_path / str(number)) for number in range(2)]
    assert not run_together(commands, device=CPU, stop=lambda: len(heard) == 2, tell=heard.append)
    assert all((tmp_path / str(number)).read_text() == "saved" for number in range(2))


def test_a_listener_who_goes_away_stops_them():
    def gone(line):
        raise BrokenPipeError

    talks = "import time\nwhile True: print('still here', flush=True); time.sleep(0.01)"
    with pytest.raises(BrokenPipeError):
        run_together([python(talks)], device=CPU, tell=gone)


def test_an_interrupt_leaves_nobody_behind(tmp_path):
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
    """A stand-in for NVIDIA's control program: it writes down how it was called."""

    def make(code):
        program = tmp_path / "nvidia-cuda-mps-control"
        program.write_text(f'#!/bin/sh\necho "$1 $CUDA_MPS_PIPE_DIRECTORY" >> {tmp_path}/calls\nexit {code}\n')
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
        return tmp_path / "calls"

    return make


def test_mps_runs_for_the_time_of_the_block(mps):
    calls = mps(0)
    with one_gpu(CUDA) as shared:
        folder = shared["CUDA_MPS_PIPE_DIRECTORY"]
        assert calls.read_text() == f"-d {folder}\n"
    assert calls.read_text() == f"-d {folder}\n {folder}\n"


def test_without_mps_or_where_it_runs_already_nothing_is_set(mps, monkeypatch):
    calls = mps(1)
    with one_gpu(CUDA) as shared:
        assert shared == {}
    assert len(calls.read_text().splitlines()) == 1  # asked, refused, and not told to quit
    with one_gpu(CPU) as shared:
        assert shared == {}
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/somebody/elses")
    with one_gpu(CUDA) as shared:
        assert shared == {}
    assert len(calls.read_text().splitlines()) == 1
