"""The command `sparring`: one module per subcommand, and the exit codes.

0 done; 2 the user can fix it (one line, no traceback); 1 the run failed or was stopped; 130 Ctrl-C.
"""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sparring._version import __version__
from sparring.cli import cpu_early, cuda_early
from sparring.errors import Cancelled, RunFailed, UserError, did_you_mean
from sparring.training import signals, torchrun

# Name -> (module, what it does). A module is imported only when its command runs, so `sparring --help` is fast.
COMMANDS = {
    "demo": (
        "sparring.cli.demo",
        "train three models on digits in about a minute and compare them",
    ),
    "train": ("sparring.cli.train", "train a model from a recipe, on a built-in data set or your own images"),
    "sweep": ("sparring.cli.sweep", "train many runs of a recipe, on this machine or a Slurm cluster"),
    "evaluate": ("sparring.cli.evaluate", "measure how robust a model is"),
    "reproduce": (
        "sparring.cli.reproduce",
        "reproduce a table or figure of the paper, beside the paper's own numbers",
    ),
    "compare": ("sparring.cli.compare", "print what differs between runs, and what came out"),
    "report": ("sparring.cli.report", "write one HTML page about runs and reproduced results"),
    "bound": ("sparring.cli.bound", "check the paper's theorem on a model: risk, friendly bound, conventional bound"),
    "predict": ("sparring.cli.predict", "predict the classes of image files with a trained model"),
    "export": ("sparring.cli.export", "write a trained model for other code: safetensors, pt2, ONNX, a model hub"),
    "recipes": ("sparring.cli.recipes", "list the recipes, or show one"),
    "bench": ("sparring.cli.bench", "measure the speed of training on this machine, against plain PyTorch"),
    "data": ("sparring.cli.data", "list the data sets, or fetch one"),
}
_OF_FILES = {  # why a file cannot be read or written, where the user can fix it
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT),
}
_OF_DISKS = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}  # of a disk or a mount, and no file is to blame
_IN_SEVERAL = ("train", "evaluate", "bench")  # what torchrun may start in several processes
USAGE = """usage: sparring COMMAND [options]

{commands}

Examples:
  sparring demo
  sparring train fat-digits --out runs/first
  sparring train fat-cifar10-resnet18 --epochs 30 --attack.eps 8/255 --seed 3
  sparring train fat-cifar10-resnet18 --data folder:my-images --validation 100
  sparring reproduce fig-motivation
  sparring COMMAND --help"""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = sys.argv[1:] if argv is None else argv
    if torchrun.launched():  # before torch is loaded: when a process ends, it prints pages in every other one
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a character shows ?
            stream.reconfigure(errors="replace")
    try:
        with _terminable():
            try:
                return _dispatch(words)
            finally:
                sys.stdout.flush()  # a closed pipe raises here, not while Python shuts down
    except UserError as error:
        return _fail(error, 2)
    except RunFailed as error:
        return _fail(error, 130 if isinstance(error, Cancelled) else 1)
    except KeyboardInterrupt as error:
        return _fail("interrupted." if torchrun.rank() == 0 else "", 1 if isinstance(error, _Terminated) else 130)
    except BrokenPipeError:  # `sparring recipes | head`
        from sparring.cli.console import let_go

        let_go()
        return 0
    except OSError as error:
        if error.filename is not None and error.errno in _OF_FILES:
            return _fail(f"{error.filename} cannot be read or written: {str(error.strerror).lower()}.", 2)
        if error.filename is not None and error.errno in _OF_DISKS:
            return _fail(f"{error.filename}: {str(error.strerror).lower()}. Check the disk, and try again.", 1)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise  # about a file, not about the output
        from sparring.cli.console import let_go

        let_go()  # the buffered output cannot be written either
        return _fail(f"the output could not be written: {error.strerror}.", 1)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM acts like Ctrl-C, so that temporary files are removed; training sets its own handlers inside."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which unwinds as Ctrl-C does."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    signals.note(number)
    raise _Terminated


@contextmanager
def _deferring_ctrl_c() -> Iterator[None]:
    """Ctrl-C takes effect after this block: libraries interrupted while loading print errors of their own."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    handlers = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    # SIG_IGN: a background job that ignores Ctrl-C. None: a handler that was not set from Python.
    replaced = [(number, handler) for number, handler in handlers if handler not in (signal.SIG_IGN, None)]
    for number, _ in replaced:
        signal.signal(number, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        for number, handler in replaced:
            signal.signal(number, handler)
    if received:
        signals.note(received[-1])
        raise _Terminated if received[-1] == signal.SIGTERM else KeyboardInterrupt


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        width = max(map(len, COMMANDS))
        print(USAGE.format(commands="\n".join(f"  {name:{width}}  {about}" for name, (_, about) in COMMANDS.items())))
        return 0
    if words[0] in ("-V", "--version"):
        print(f"sparring {__version__}")
        return 0
    name, rest = words[0], words[1:]
    if name not in COMMANDS:
        raise UserError(f"unknown command {name!r}.{did_you_mean(name, COMMANDS)} Known: {', '.join(COMMANDS)}.")
    if torchrun.size() > 1 and name not in _IN_SEVERAL:
        raise UserError(f"sparring {name} runs in one process. Start it without torchrun.")
    cpu_early.start()
    cuda_early.start(words)
    with _deferring_ctrl_c():
        run = importlib.import_module(COMMANDS[name][0]).run
    code: int = run(rest)
    return code


def _fail(message: str | UserError | RunFailed, code: int) -> int:
    """Report why a command ends, in one line; of several processes one does it."""
    if not isinstance(message, str) and torchrun.launched():
        from sparring.training.distributed import reported_elsewhere

        if reported_elsewhere(message):
            return code
    if message == "":
        return code
    with suppress(BrokenPipeError):  # `sparring train 2>&1 | head`: only the exit code can be reported
        print(f"sparring: {message}", file=sys.stderr, flush=True)
    return code
