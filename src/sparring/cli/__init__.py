"""The command `sparring`: one module per subcommand, and the exit codes.

0 done; 2 something the user can mend (one line, no traceback); 1 the run failed or was interrupted.
"""

from __future__ import annotations

import errno
import importlib
import io
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from sparring._version import __version__
from sparring.cli import cuda_early
from sparring.errors import RunFailed, UserError, did_you_mean

# Name -> (module, what it does). Modules are imported only when called: `sparring --help` answers at once.
COMMANDS = {
    "demo": ("sparring.cli.demo", "train three models on digits in half a minute and read why friendly training wins"),
    "train": ("sparring.cli.train", "train a model by a recipe, on a built-in data set or your own images"),
    "evaluate": ("sparring.cli.evaluate", "measure how robust a model is"),
    "reproduce": (
        "sparring.cli.reproduce",
        "regenerate a table or figure of the paper, beside the paper's own numbers",
    ),
    "report": ("sparring.cli.report", "make one page to read of runs and reproduced results"),
    "bound": ("sparring.cli.bound", "check the paper's theorem on a model: risk, friendly bound, conventional bound"),
    "export": ("sparring.cli.export", "write a trained model as plain weights"),
    "recipes": ("sparring.cli.recipes", "list the recipes, or show one"),
    "bench": ("sparring.cli.bench", "measure how fast training is here, against the plain ways"),
    "data": ("sparring.cli.data", "list the data sets, or fetch one"),
}
_OF_FILES = {  # what keeps a file from being read or written, and the user can mend
    *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT),
}
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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that lacks a letter shows ? for it
            stream.reconfigure(errors="replace")
    try:
        with _terminable():
            try:
                return _dispatch(words)
            finally:
                sys.stdout.flush()  # a reader that has gone is noticed here, and not when Python ends
    except UserError as error:
        return _say(str(error), 2)
    except RunFailed as error:
        return _say(str(error), 1)
    except KeyboardInterrupt:
        return _say("interrupted.", 1)
    except BrokenPipeError:  # `sparring recipes | head`
        from sparring.cli.console import let_go

        let_go()
        return 0
    except OSError as error:
        if error.filename is not None and error.errno in _OF_FILES:
            return _say(f"{error.filename} cannot be read or written: {str(error.strerror).lower()}.", 2)
        if error.filename is not None or error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise  # of a file, not of what is printed
        from sparring.cli.console import let_go

        let_go()  # what is still to be printed has no place either
        return _say(f"the output could not be written: {error.strerror}.", 1)


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM is a Ctrl-C, so that what is half-done is cleared away; training has its own handlers within this."""
    if threading.current_thread() is not threading.main_thread():  # only there can handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


@contextmanager
def _unbroken() -> Iterator[None]:
    """Ctrl-C takes effect behind this: libraries that are cut off while they load say so in their own words, or not."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    ours = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    # Ignored by a job in the background, which is to go on; None is a handler that Python knows nothing of.
    before = [(number, handler) for number, handler in ours if handler not in (signal.SIG_IGN, None)]
    for number, _ in before:
        signal.signal(number, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        for number, handler in before:
            signal.signal(number, handler)
    if asked:
        raise KeyboardInterrupt


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
    cuda_early.wake(words)
    with _unbroken():
        run = importlib.import_module(COMMANDS[name][0]).run
    code: int = run(rest)
    return code


def _say(message: str, code: int) -> int:
    with suppress(BrokenPipeError):  # `sparring train 2>&1 | head`: the exit code is all that is left to say
        print(f"sparring: {message}", file=sys.stderr, flush=True)
    return code
