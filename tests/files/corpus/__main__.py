"""The child process: every reader in a process of its own, with a limit of memory, and a line of JSON per case."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

from sparring.errors import UserError
from tests.files.corpus.cases import READ, REFUSED
from tests.files.corpus.readers import READERS, Reader
from tests.files.corpus.records import sound

ROOM = 2**30  # bytes over what the process has when the corpus begins
HANG = 30  # seconds: a guard, not a measurement


class Hangs(BaseException):
    """A case took too long; no reader may catch it."""


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def outcome(reader: Reader, path: Path) -> tuple[str, str]:
    """("read" or "refused" or "failed", what was said)."""
    try:
        reader(path)
    except UserError as error:
        return REFUSED, str(error)
    except Hangs:
        return "failed", "it hangs"
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return READ, ""


def stop(*_: object) -> None:
    raise Hangs


def carry_out(name: str, folder: Path) -> None:
    reader, cases = READERS[name]
    signal.signal(signal.SIGALRM, stop)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for number, (what, must, write) in enumerate(cases()):
        place = folder / f"{number}"
        place.mkdir(parents=True)
        path = write(place)
        before, began = peak(), time.perf_counter()
        resource.setrlimit(resource.RLIMIT_AS, (size + 3 * ROOM, resource.RLIM_INFINITY))
        signal.alarm(HANG)
        found, said = outcome(reader, path)
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        seconds, more = time.perf_counter() - began, peak() - before
        line = {"reader": name, "case": what, "must": must, "found": found, "said": said}
        print(json.dumps({**line, "seconds": round(seconds, 3), "bytes": more}), flush=True)


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["SPARRING_DATA"] = str(folder / "cache")
    sound()  # once, for every process
    chosen = sys.argv[2:] or list(READERS)
    for number, name in enumerate(chosen):
        child = os.fork()
        if child == 0:
            carry_out(name, folder / f"reader{number}")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            print(json.dumps({"reader": name, "case": "the process", "must": READ, "found": f"status {status}"}))


if __name__ == "__main__":
    main()
