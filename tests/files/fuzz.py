"""Damage files of every format from a seed, until the time is over; fail on what no reader may do.

    python -m tests.files.fuzz [--seconds 600] [--seed 0] [--only READER] [--case NUMBER]

It stands beside the corpus because it changes the corpus' own files and reads them with its readers. A case is a
function of (seed, reader, number): `--only READER --case NUMBER` repeats one, with its traceback. It fails on a
traceback, 10 s, 2 GiB, a process that ends, and on a silent difference: a file with a checksum whose bytes were
changed, and that is read as something else than was written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparring.errors import UserError
from sparring.training import run_folder
from tests.files.corpus.cases import READ, Case
from tests.files.corpus.readers import READERS, Reader
from tests.files.corpus.records import run_cases, sound
from tests.files.mutate import BYTES, changed

SECONDS = 10  # of one case
ROOM = 2 * 2**30  # bytes over what the process has
BATCH = 100  # cases of one process
LARGEST = {True: 2**19, False: 2**14}  # bytes of a file that is worth changing: of a sound case, of another
OWN = "own checkpoint"


class Hangs(BaseException):
    """A case took too long; no reader may catch it."""


def read_own(folder: Path) -> object:
    """What a run continues from."""
    found = run_folder.open_run(folder).last()
    if found is None:
        raise UserError("there is none.")
    return found.tensors, found.facts


def own_cases() -> Iterator[Case]:
    yield next(run_cases())


FUZZED: dict[str, tuple[Reader, Any]] = {
    **READERS,
    OWN: (read_own, own_cases),
}
# Where a checksum covers what is read: (reader, begin of the case's name) and the ending of the changed file.
COVERED = {
    (OWN, ""): ".safetensors",
    ("run, loaded", ""): ".safetensors",
    ("run, opened", "sound"): "config.json",
    ("checkpoints", "zip sound"): ".pt",
    ("npz", "npz sound"): ".npz",
    ("npz", "npz packed sound"): ".npz",
    ("tar", "sound"): ".tar.gz",
}


def seeds(name: str, scratch: Path) -> list[tuple[Case, list[Path]]]:
    """The cases of a reader that have files worth changing, and these; sound ones several times."""
    found = []
    for number, case in enumerate(FUZZED[name][1]()):
        folder = scratch / f"seed{number}"
        folder.mkdir()
        case[2](folder)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
        files = [path.relative_to(folder) for path in files if 0 < path.stat().st_size <= LARGEST[case[1] == READ]]
        if name in (OWN, "run, loaded"):
            files = [path for path in files if path.name == run_folder.LAST]
        files = [path for path in files if path.suffix != ".md"]  # a model card is not read
        if files:
            found += [(case, files)] * (20 if case[1] == READ else 1)
        shutil.rmtree(folder)
    return found


def digest(value: Any) -> str:
    """A digest of what a reader returned."""
    found = hashlib.sha256()

    def add(part: Any) -> None:
        if isinstance(part, torch.nn.Module):
            part = [dict(part.state_dict()), list(getattr(part, "classes", ()))]
        if isinstance(part, torch.Tensor):
            part = part.detach().contiguous().numpy()
        if isinstance(part, np.ndarray):
            found.update(f"{part.dtype}{part.shape}".encode() + part.tobytes())
        elif isinstance(part, dict):
            for key in sorted(part, key=repr):
                found.update(repr(key).encode())
                add(part[key])
        elif isinstance(part, list | tuple):
            found.update(f"[{len(part)}".encode())
            for each in part:
                add(each)
        elif hasattr(part, "train") and hasattr(part, "test"):
            add([part.train.x, part.train.y, part.test.x, part.test.y, part.classes])
        else:
            found.update(repr(part).encode())

    add(value)
    return found.hexdigest()


def covered(name: str, case: str, file: Path) -> bool:
    return any(
        name == reader and case.startswith(begin) and file.name.endswith(ending)
        for (reader, begin), ending in COVERED.items()
    )


def one(name: str, number: int, seed: int, given: list[tuple[Case, list[Path]]], folder: Path) -> tuple[str, str]:
    """("read", "refused" or "failed", what was said) of one case."""
    rng = random.Random(f"{seed}/{name}/{number}")
    (what, _, write), files = rng.choice(given)
    folder.mkdir()
    try:
        path, file = write(folder), rng.choice(files)
        told = f"{what}, {file}"
        content = (folder / file).read_bytes()
        expected = None
        if covered(name, what, file):
            expected = digest(FUZZED[name][0](path))
        kind, new = changed(file.name, content, rng)
        (folder / file).unlink()  # a link to a file that other cases share
        (folder / file).write_bytes(new)
        signal.alarm(SECONDS)
        try:
            found = FUZZED[name][0](path)
        except UserError as error:
            said = str(error)
            if "MemoryError" in said or "can't allocate" in said:
                return "failed", f"{told}: memory over the bound: {said[:200]}"
            if not said.isprintable() or len(said) > 900 + len(str(folder)) * 2 or not said.endswith("."):
                return "failed", f"{told}: not one line: {said[:200]!r}"
            return "refused", ""
        finally:
            signal.alarm(0)
        # Own checkpoints have a checksum of everything: no change may pass, also of one part inside.
        if expected is not None and (kind == BYTES or name in (OWN, "run, loaded")) and digest(found) != expected:
            return "failed", f"{told}: a silent difference ({kind})"
        return "read", ""
    except Hangs:
        return "failed", f"{told}: longer than {SECONDS} s"
    except Exception as error:
        if os.environ.get("FUZZ_RAISE"):
            raise
        return "failed", f"{told}: {type(error).__name__}: {str(error)[:200]}"
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)


def stop(*_: object) -> None:
    raise Hangs


def work(name: str, numbers: range, seed: int, given: Any, folder: Path, pipe: int) -> None:
    """A batch of cases, in a process of its own; a line before and after each."""
    signal.signal(signal.SIGALRM, stop)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, resource.RLIM_INFINITY))
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 2)  # warnings of decoders
    for number in numbers:
        os.write(pipe, f"{number}\n".encode())
        os.write(pipe, (json.dumps(one(name, number, seed, given, folder / str(number))) + "\n").encode())


def batch(name: str, numbers: range, seed: int, given: Any, folder: Path) -> Iterator[tuple[int, str, str]]:
    """(number, outcome, what was said) of a batch of cases."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(here)
        try:
            work(name, numbers, seed, given, folder, there)
        finally:
            os._exit(0)
    os.close(there)
    number, hangs = -1, False
    with os.fdopen(here, "rb", buffering=0) as lines:
        rest = b""
        while True:
            if not select.select([lines], [], [], 3 * SECONDS)[0]:  # in compiled code, where no alarm is heard
                hangs = True
                os.kill(child, signal.SIGKILL)
                break
            data = lines.read(2**16)
            if not data:
                break
            *whole, rest = (rest + data).split(b"\n")
            for line in whole:
                if line.startswith(b"["):
                    outcome, said = json.loads(line)
                    yield number, outcome, said
                    number = -1
                else:
                    number = int(line)
    _, status = os.waitpid(child, 0)
    if number >= 0:
        yield number, "failed", f"longer than {3 * SECONDS} s" if hangs else f"the process ended, status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=sorted(FUZZED))
    parser.add_argument("--case", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sound()
    names = [options.only] if options.only else list(FUZZED)
    outcomes: dict[str, Counter[str]] = {name: Counter() for name in names}
    failures: list[str] = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        os.environ["SPARRING_DATA"] = f"{scratch}/cache"
        given = {}
        for number, name in enumerate(names):
            place = Path(scratch) / f"seeds{number}"
            place.mkdir()
            given[name] = seeds(name, place)
        if options.case is not None:
            os.environ["FUZZ_RAISE"] = "1"
            signal.signal(signal.SIGALRM, stop)
            print(one(names[0], options.case, options.seed, given[names[0]], Path(scratch) / "case"))
            return 0
        start = 0
        while time.monotonic() - began < options.seconds:
            for name in names:
                folder = Path(scratch) / f"work{names.index(name)}"
                folder.mkdir(exist_ok=True)
                numbers = range(start, start + BATCH)
                for number, outcome, said in batch(name, numbers, options.seed, given[name], folder):
                    outcomes[name][outcome] += 1
                    if outcome == "failed":
                        failures.append(f"{name}, case {number}: {said}")
                        print(f"FAILED {failures[-1]}", flush=True)
                shutil.rmtree(folder, ignore_errors=True)
                shutil.rmtree(f"{scratch}/cache", ignore_errors=True)
                if time.monotonic() - began >= options.seconds:
                    break
            start += BATCH
    for name, counted in outcomes.items():
        print(
            f"{name:15} {sum(counted.values()):7,} cases: {', '.join(f'{n:,} {what}' for what, n in counted.items())}"
        )
    total = sum(sum(counted.values()) for counted in outcomes.values())
    spent = time.monotonic() - began
    print(f"{total:,} cases in {spent:.0f} s, seed {options.seed}: {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
