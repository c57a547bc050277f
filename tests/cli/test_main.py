"""Dispatch, exit codes, signals, closed pipes and limited terminals."""

from __future__ import annotations

import errno
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from sparring import cli
from sparring.cli import COMMANDS
from sparring.errors import Cancelled, RunFailed, UserError

from .conftest import start


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_usage_names_every_command(sparring, words):
    said = sparring(*words)
    assert said.code == 0 and said.err == ""
    for name in COMMANDS:
        assert re.search(rf"^  {name} ", said.out, re.MULTILINE)
    assert "Examples:" in said.out


def test_the_version_is_printed(sparring):
    assert re.fullmatch(r"sparring \d+\.\d+\S*\n", sparring("--version").out)


def test_a_misspelled_command_gets_a_suggestion(sparring):
    sparring("tarin").user_error("unknown command 'tarin'", "Did you mean 'train'?", "Known: demo, train")


@pytest.mark.parametrize("name", COMMANDS)
def test_every_commands_help_has_an_example(sparring, name):
    said = sparring(name, "--help")
    assert said.code == 0 and said.err == ""
    assert said.out.startswith(f"usage: sparring {name}")
    assert re.search(r"Examples?:", said.out) and f"sparring {name}" in said.out.partition("Example")[2]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_refuses_an_unknown_flag(sparring, name, finished):
    needed = {"train": ["fat-digits"], "evaluate": [finished], "bound": [finished], "export": [finished]}
    needed |= {"predict": [finished, "image.png"], "sweep": ["tau.toml"]}
    sparring(name, *needed.get(name, []), "--no-such-flag", "3").user_error("--no-such-flag", f"See `sparring {name}")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (UserError("eps is 8. Write 8/255."), 2, "sparring: eps is 8. Write 8/255.\n"),
        (RunFailed("the loss is not finite."), 1, "sparring: the loss is not finite.\n"),
        (KeyboardInterrupt(), 130, "sparring: interrupted.\n"),
        (Cancelled("stopped."), 130, "sparring: stopped.\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "a"),
            2,
            "sparring: a cannot be read or written: permission denied.\n",
        ),
        (
            OSError(errno.EROFS, "Read-only file system", "a"),
            2,
            "sparring: a cannot be read or written: read-only file system.\n",
        ),
        (
            OSError(errno.EIO, "Input/output error", "a"),
            1,
            "sparring: a: input/output error. Check the disk, and try again.\n",
        ),
        (OSError(errno.ENAMETOOLONG, "Too long", "a"), 2, "sparring: a cannot be read or written: too long.\n"),
    ],
)
def test_errors_become_one_line_and_an_exit_code(sparring, monkeypatch, error, code, line):
    def fail(words):
        raise error

    monkeypatch.setattr(cli, "_dispatch", fail)
    said = sparring("train")
    assert (said.code, said.out, said.err) == (code, "", line)


@pytest.mark.parametrize(
    "bug", [ZeroDivisionError(), FileNotFoundError(errno.ENOENT, "None", "a"), PermissionError(errno.EACCES, "")]
)
def test_a_bug_keeps_its_traceback(sparring, monkeypatch, bug):
    def fail(words):
        raise bug

    monkeypatch.setattr(cli, "_dispatch", fail)
    with pytest.raises(type(bug)):
        sparring("train")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_waits_until_libraries_are_loaded(sparring, monkeypatch, number):
    """Interrupted while loading, numpy prints an error of its own, and some libraries ignore it."""
    real, loaded = importlib.import_module, []

    def slow(name):
        os.kill(os.getpid(), number)
        time.sleep(0.01)
        loaded.append(name)
        return real(name)

    monkeypatch.setattr(cli.importlib, "import_module", slow)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)  # in a background job it may be ignored
    try:
        before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
        said = sparring("recipes")
        assert (said.out, said.err) == ("", "sparring: interrupted.\n")
        assert said.code == (130 if number == signal.SIGINT else 1)
        assert loaded == ["sparring.cli.recipes"]
        assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_job_that_ignores_ctrl_c_continues_to(sparring, monkeypatch):
    real = importlib.import_module
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        monkeypatch.setattr(cli.importlib, "import_module", lambda name: os.kill(os.getpid(), 2) or real(name))
        assert sparring("recipes").code == 0 and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_interrupts_any_command_and_the_handler_is_restored(sparring, monkeypatch):
    def wait(words):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli, "_dispatch", wait)
    said = sparring("data")
    assert (said.code, said.err) == (1, "sparring: interrupted.\n")
    assert signal.getsignal(signal.SIGTERM) is before


def test_main_may_run_in_a_thread(sparring):
    codes = []
    thread = threading.Thread(target=lambda: codes.append(cli.main(["--version"])))
    thread.start()
    thread.join()
    assert codes == [0]


def test_help_does_not_import_torch():
    """Help takes a twentieth of a second; importing torch takes more than one."""
    code = "import sys; from sparring.cli import main; main(['--help']); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode == 0


@pytest.mark.parametrize("words", [["--help"], ["recipes"], ["data", "--help"]])
def test_a_closed_output_pipe_is_no_error(tmp_path, words):
    """`sparring recipes | true`."""
    child = start(*words, cwd=tmp_path)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == ("", 0)
    child.stderr.close()


def test_an_error_on_a_closed_pipe_keeps_its_exit_code(tmp_path):
    """`sparring tarin 2>&1 | true`."""
    child = start("tarin", cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    child.stdout.close()
    assert child.wait() == 2


def test_an_ascii_terminal_is_enough(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("COLUMNS", "60")  # so narrow that rich shortens words with an ellipsis
    listed = start("recipes", cwd=tmp_path)
    out, err = listed.communicate()
    assert listed.returncode == 0 and "fat-digits" in out and err == ""
    refused = start("recipes", "--nam", "x", cwd=tmp_path)
    _, err = refused.communicate()
    assert refused.returncode == 2
    assert err == "sparring: Unrecognized options: --nam, x. See `sparring recipes --help`.\n"
