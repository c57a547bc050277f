"""Several processes as one run: which of them this is, and what they tell each other.

`torchrun` starts the processes and says by the environment who they are. Every process computes its part of every
batch (`sparring.shares`); an update exchanges gradients, loss, running statistics and counts in one all-reduce. What
happens beside the steps goes through a group of its own, on the host: errors, records, agreement. The first process
writes. Knows no objective and no model.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sparring.errors import RunFailed, UserError, unknown
from sparring.shares import Share
from sparring.training import torchrun
from sparring.training.peers import Peers

Backend = Literal["auto", "nccl", "gloo"]
_REACH = timedelta(seconds=60)  # to find the store
_JOIN = timedelta(minutes=10)  # for all processes to come: some have slower disks
_WAIT = timedelta(days=7)  # for a process that is slower than the others; one that has ended is noticed at once


class Lost(RunFailed):
    """Another process of the run has ended."""

    def __init__(self) -> None:
        super().__init__(
            "another process of this run has ended, so this one ends too. Nothing that was saved is lost: give the "
            "same command again, and to a training --resume."
        )


def reported_elsewhere(error: UserError | RunFailed) -> bool:
    """Whether another process reports this error. Before they have joined, one process of each machine does."""
    if error.elsewhere is not None:
        return error.elsewhere
    return torchrun.launched() and torchrun.number("LOCAL_RANK", 0) > 0 and not _initialised()


def local_device(name: str, backend: Backend = "auto") -> str:
    """The device of this process: of the GPUs of its machine the one of its own number."""
    if not torchrun.launched():
        return name
    place, here = torchrun.number("LOCAL_RANK", 0), torchrun.number("LOCAL_WORLD_SIZE", 1)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda:") and here > 1:
        raise UserError(f"{here} processes cannot all use {name}. Leave out --device: each takes a GPU of its own.")
    if name != "cuda" or not torch.cuda.is_available():
        return name
    there = torch.cuda.device_count()
    if torchrun.size() > 1 and "LOCAL_RANK" not in os.environ and there > 1:
        raise UserError("LOCAL_RANK is not set, so processes would share a GPU. Start them with torchrun.")
    if here > there and backend != "gloo":
        raise UserError(
            f"{here} processes on a machine with {there} GPU{'s' if there > 1 else ''}: each needs one of its own. "
            f"Write --nproc-per-node {there}, or share them with --backend gloo, which is slow."
        )
    return f"cuda:{place % there}"


def pick_device(name: str, backend: Backend = "auto") -> torch.device:
    """The device of that name, checked to exist. Of the processes of one machine, each has a GPU of its own."""
    name = local_device(name, backend)
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}. Write auto, cpu, cuda or cuda:N.") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported. Write auto, cpu, cuda or cuda:N.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} does not exist: there are {torch.cuda.device_count()} CUDA devices. Use --device cpu."
        )
    return device


@dataclass(frozen=True, eq=False)
class World:
    """The processes of a run, as seen by one of them. The one of a run by itself exchanges nothing."""

    rank: int = 0
    size: int = 1
    backend: str = ""  # nccl or gloo; empty for a process that was started by itself
    group: Any = None  # of the exchange on the device
    control: Any = None  # of everything beside it, on the host
    peers: Peers | None = None

    @property
    def first(self) -> bool:
        """Whether this process writes and reports."""
        return self.rank == 0

    @property
    def grouped(self) -> bool:
        """Whether there is a group, if only of one process."""
        return self.group is not None

    @property
    def elsewhere(self) -> bool | None:
        """Of an error that all processes find: whether another one reports it."""
        return None if not self.grouped else not self.first

    @property
    def share(self) -> Share:
        """The part of every batch that is this process's."""
        return Share(self.rank, self.size)

    def record(self, *, synchronised: bool) -> dict[str, Any]:
        """What a start of the run records of its processes."""
        statistics = "of all processes" if synchronised else "of each process"
        return {"processes": self.size, "backend": self.backend, "batch_statistics": statistics} if self.grouped else {}

    def texts(self, text: str) -> list[str]:
        """What every process says, in their order."""
        if not self.grouped:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._waiting(lambda: dist.all_gather(sizes, torch.tensor([len(data)]), group=self.control))
        longest = max(int(size) for size in sizes)
        padded = torch.zeros(max(1, longest), dtype=torch.uint8)
        padded[: len(data)] = data
        found = [torch.zeros_like(padded) for _ in range(self.size)]
        self._waiting(lambda: dist.all_gather(found, padded, group=self.control))
        return [bytes(one[: int(size)].tolist()).decode() for one, size in zip(found, sizes, strict=True)]

    def from_first(self, value: Any) -> Any:
        """What the first process says: anything that JSON holds."""
        return json.loads(self.texts(json.dumps(value) if self.first else "")[0]) if self.grouped else value

    def total(self, counts: Tensor) -> Tensor:
        """The sum over all processes, on the host."""
        if not self.grouped:
            return counts
        added = counts.to("cpu", copy=True)
        self._waiting(lambda: dist.all_reduce(added, group=self.control))
        return added

    def wait(self) -> None:
        """Go on once every process is here."""
        self.total(torch.zeros(1))

    @contextmanager
    def together(self) -> Iterator[None]:
        """A block that every process runs. What one of them raises ends all of them, and is reported once."""
        if not self.grouped:
            yield
            return
        raised: UserError | RunFailed | None = None
        try:
            yield
        except (UserError, RunFailed) as error:
            raised = error
        except OSError as error:
            raised = UserError(f"{error.filename or 'a file'} cannot be read or written: {error.strerror or error}.")
        said = self.texts("" if raised is None else f"{int(isinstance(raised, UserError))}{raised}")
        speaker = next((rank for rank, text in enumerate(said) if text), None)
        if speaker is None:
            return
        if raised is None:
            raised = (UserError if said[speaker][0] == "1" else RunFailed)(said[speaker][1:])
        raised.elsewhere = speaker != self.rank
        raise raised

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Refuse to go on where the processes differ in one of these facts; each goes as JSON."""
        digests = {name: _digest(value) for name, value in facts.items()}
        with self.together():
            others = [json.loads(text) for text in self.texts(json.dumps(digests))]
            for name in digests:
                unlike = [rank for rank, other in enumerate(others) if other[name] != others[0][name]]
                if unlike:
                    raise UserError(
                        f"process {unlike[0]} has another {name} than process 0. Start every process with the same "
                        "command, the same files and the same run folder."
                    )

    def synchronise(self, tensors: list[Tensor]) -> None:
        """Give every process the first one's values, for what updates do not exchange: counts of batches."""
        if not self.grouped:
            return
        for tensor in tensors:
            here = tensor.detach().to("cpu", copy=True)
            self._waiting(lambda here=here: dist.broadcast(here, 0, group=self.control))
            tensor.copy_(here)

    def began(self, folder: Path) -> bool:
        """Whether the run in a folder is one that torchrun's processes began, before it started them again as these."""
        if self.peers is None:
            return False
        before = ""
        if self.first and (server := _server(self.rank, self.size)).check([_began(folder)]):
            before = server.get(_began(folder)).decode()
        return bool(self.from_first(before not in ("", _process())))

    def begins(self, folder: Path) -> None:
        """Remember, beyond a restart of the processes, that the run in a folder is theirs."""
        if self.peers is not None and self.first:
            _server(self.rank, self.size).set(_began(folder), _process())

    def _waiting(self, collective: Any) -> None:
        try:
            collective()
        except RuntimeError:
            raise self.lost() from None

    def lost(self) -> Lost:
        """The error of a collective whose other side is gone; one process reports it."""
        error = Lost()
        error.elsewhere = self.peers is not None and not self.peers.speaks()
        return error


ALONE = World()


@contextmanager
def joined(device: torch.device, backend: Backend = "auto") -> Iterator[World]:
    """The group that torchrun has started this process in; a world of one where it was started by itself.

    A group that the caller has initialised is used as it is, and stays.
    """
    if backend not in get_args(Backend):
        raise unknown("backend", str(backend), get_args(Backend))
    if not torchrun.launched() and not _initialised():
        yield ALONE
        return
    if not dist.is_available():
        raise UserError("this build of torch has no distributed part. Start one process, or install another build.")
    if _initialised():
        kind = "nccl" if device.type == "cuda" and "nccl" in str(dist.get_backend_config()) else "gloo"
        control = dist.new_group(backend="gloo", timeout=_WAIT)
        try:
            group = dist.group.WORLD if device.type == "cuda" else control
            world = World(dist.get_rank(), dist.get_world_size(), kind, group, control)
            _connect(world, device)
            with _quiet_unless(world.first):
                yield world
        finally:
            dist.destroy_process_group(control)
        return
    kind = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    if kind == "nccl" and device.type != "cuda":
        raise UserError("the backend nccl is for CUDA. Leave out --backend, or write --backend gloo.")
    with _group(device, kind) as world, _quiet_unless(world.first):
        yield world


@contextmanager
def _group(device: torch.device, kind: str) -> Iterator[World]:
    """A group of all processes that torchrun has started, which ends with the block."""
    rank, size = torchrun.rank(), torchrun.size()
    store = _store(rank, size)
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # `Peers` ends the process, with one line
    peers = Peers(store, rank, size)
    try:
        dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=_WAIT)
        control = dist.new_group(backend="gloo", timeout=_WAIT)
    except RuntimeError as error:
        raise _alone_in(
            f"the {size} processes do not find each other ({str(error).strip().splitlines()[0]}). Check the network "
            "interface, for example GLOO_SOCKET_IFNAME=eth0."
        ) from None
    world, whole = World(rank, size, kind, dist.group.WORLD, control, peers), False
    try:
        with peers:
            _connect(world, device)
            yield world
            whole = True
    except Exception as error:
        said = getattr(error, "elsewhere", None)
        whole = said is not None and not isinstance(error, Lost)  # all processes end, for the same reason
        if said is None:
            peers.speaks()  # this process reports its own; that the others lose it needs no second line
        raise
    finally:
        if whole:  # otherwise the other processes may never answer
            peers.finish()
            gc.collect()  # a graph that nothing refers to any more may still hold a collective of NCCL
            dist.destroy_process_group()


def _connect(world: World, device: torch.device) -> None:
    """Let NCCL connect: it does so at its first collective, and must not inside a capture."""
    if world.backend != "nccl":
        return
    try:
        dist.all_reduce(torch.zeros(1, device=device), group=world.group)
    except RuntimeError as error:
        why = str(error).strip().splitlines()[0][:160]
        raise _alone_in(f"NCCL failed ({why}). Set NCCL_DEBUG=WARN for more.") from None


def _alone_in(message: str) -> UserError:
    """An error that this process reports whatever the others do."""
    error = UserError(message)
    error.elsewhere = False
    return error


@contextmanager
def _quiet_unless(first: bool) -> Iterator[None]:
    """Drop the warnings of every process but the first: all have the same."""
    log = logging.getLogger("sparring")
    before = log.level
    if not first:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@cache
def _server(rank: int, size: int) -> Any:
    """The store through which the processes find each other: torchrun's, or one of the first process."""
    host, port = os.environ["MASTER_ADDR"], torchrun.number("MASTER_PORT")
    first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not first:
            _reach(host, port)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in every build

        return TCPStore(host, port, size, is_master=first, timeout=_REACH, wait_for_workers=False)
    except (RuntimeError, ValueError, OSError) as error:
        raise _alone_in(
            f"process {rank} of {size} does not reach {host}:{port} ({str(error).strip().splitlines()[0][:160]}). "
            "Check --rdzv-endpoint, or MASTER_ADDR and MASTER_PORT."
        ) from None


def _reach(host: str, port: int) -> None:
    """Wait until the store answers; torch itself would print pages about one that does not."""
    end = time.monotonic() + _REACH.total_seconds()
    while True:
        try:
            with socket.create_connection((host, port), timeout=5.0):
                return
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.2)


def _store(rank: int, size: int) -> Any:
    """Names in the store for one group, once all processes are there.

    torchrun's store outlives a restart, and a process may train twice. Machines may count different numbers of
    restarts. So the first process names every group anew, and the others wait until it has counted them in.
    """
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every build

    server, name, end = _server(rank, size), uuid.uuid4().hex, time.monotonic() + _JOIN.total_seconds()
    here, missing = [f"here/{other}" for other in range(size)], 0
    try:
        if rank == 0:
            server.set("sparring/group", name)
        while time.monotonic() < end:
            if server.check(["sparring/group"]):  # until the first process comes, that of processes that have ended
                store = PrefixStore(f"sparring/{server.get('sparring/group').decode()}", server)
                store.set(here[rank], name)
                if rank == 0 and store.check(here):
                    store.set("all", " ".join(store.get(key).decode() for key in here))
                if store.check(["all"]) and name in store.get("all").decode():
                    return store
            time.sleep(0.1)
        if server.check(["sparring/group"]):
            missing = next((other for other in range(size) if not store.check([here[other]])), 0)
    except RuntimeError:  # the store ended with the process that held it
        raise Lost() from None
    raise _alone_in(
        f"process {missing} of {size} has not come within {_JOIN.total_seconds() / 60:g} minutes. Its own output says "
        "why."
    )


@cache
def _process() -> str:
    """A name of this process, unlike that of one before it."""
    return uuid.uuid4().hex


def _began(folder: Path) -> str:
    return f"sparring/began/{_digest(str(folder.absolute()))}"


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
