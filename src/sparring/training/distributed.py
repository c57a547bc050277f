"""Several processes as one run: which of them this is, and what they tell each other.

`torchrun` starts the processes and says by the environment who they are. Every process computes its part of every
batch (`sparring.shares`); an update exchanges gradients, loss, running statistics and counts in one all-reduce. What
happens beside the steps goes through a group of its own, on the host: errors, records, agreement. The first process
writes. Knows no objective and no model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from sparring.errors import RunFailed, UserError, unknown
from sparring.shares import Share
from sparring.training import torchrun
from sparring.training.peers import Peers

Backend = Literal["auto", "nccl", "gloo"]
_REACH = timedelta(seconds=60)  # to find the other processes
_WAIT = timedelta(minutes=30)  # for a process that is slower than the others; one that has ended is noticed at once


class Lost(RunFailed):
    """Another process of the run has ended."""

    def __init__(self) -> None:
        super().__init__(
            "another process of this run has ended, so this one ends too. Nothing that was saved is lost: the same "
            "command with --resume continues from the last checkpoint."
        )


def hushed(error: UserError | RunFailed) -> bool:
    """Whether another process reports this error: it said so, or all had it before they joined."""
    return error.elsewhere or (torchrun.rank() > 0 and not _initialised())


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
    if here > there and backend != "gloo":
        raise UserError(
            f"{here} processes on a machine with {there} GPU{'s' if there > 1 else ''}: each needs one of its own. "
            f"Write --nproc-per-node {there}, or share them with --backend gloo, which is slow."
        )
    return f"cuda:{place % there}"


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

    def level(self, tensors: list[Tensor]) -> None:
        """Give every process the first one's values, for what updates do not exchange: counts of batches."""
        if not self.grouped:
            return
        for tensor in tensors:
            here = tensor.detach().to("cpu", copy=True)
            self._waiting(lambda here=here: dist.broadcast(here, 0, group=self.control))
            tensor.copy_(here)

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
        control = dist.new_group(backend="gloo")
        yield World(dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.group.WORLD, control)
        return
    kind = ("nccl" if device.type == "cuda" else "gloo") if backend == "auto" else backend
    if kind == "nccl" and device.type != "cuda":
        raise UserError("the backend nccl is for CUDA. Leave out --backend, or write --backend gloo.")
    rank, size = torchrun.rank(), torchrun.size()
    store = _store(rank, size)
    peers = Peers(store, rank, size)
    try:
        dist.init_process_group(kind, store=store, rank=rank, world_size=size, timeout=_WAIT)
        control = dist.new_group(backend="gloo", timeout=_WAIT)
    except RuntimeError as error:
        raise UserError(
            f"the {size} processes do not find each other ({str(error).strip().splitlines()[0]}). Check the network "
            "interface, for example GLOO_SOCKET_IFNAME=eth0."
        ) from None
    world = World(rank, size, kind, dist.group.WORLD, control, peers)
    done = False
    try:
        with peers:
            if kind == "nccl":  # which connects at its first collective, and must not do so inside a capture
                dist.all_reduce(torch.zeros(1, device=device))
            yield world
            done = True
            peers.finish()
    finally:
        if done:  # after a failure the other processes may never answer
            dist.destroy_process_group()


class Mean:
    """The exchange of an update: one all-reduce of one bucket, weighted by the images of every process.

    The bucket holds the loss, the gradients, the running statistics of batch-norm, which the attack of the next step
    depends on, and the counts of the step. Weights lie in memory: a captured graph reads them.
    """

    def __init__(self, world: World, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        """Made once for a run; `dtype` is the weights'. Gradients in bf16 are added up in fp32."""
        self.world, self.device, self.dtype = world, device, dtype
        self.weight = torch.zeros((), device=device, dtype=dtype)
        self.own = torch.zeros(2, device=device, dtype=dtype)  # backprops, whether to stop
        self.sums = torch.zeros_like(self.own)
        cuda = device.type == "cuda"
        self.not_captured = "gloo exchanges on the host" if cuda and world.backend != "nccl" else ""
        self.rehearsing = False
        self.step = 0
        self.read = [torch.zeros(2, dtype=dtype, pin_memory=cuda) for _ in range(2)]
        self.events = [torch.cuda.Event() for _ in range(2)] if cuda else []  # type: ignore[no-untyped-call]

    def begin(self, images: int, of: int, backprops: Tensor, *, stop: bool) -> None:
        """Before an update: the images here and in all, the steps that their attack took, and whether to stop."""
        self.weight.fill_(images / of)
        self.own[0].copy_(backprops)
        self.own[1].fill_(float(stop))

    def __call__(self, tensors: list[Tensor]) -> None:
        """Make each tensor the mean over the images of all processes, and add up the counts."""
        self._exchange(tensors, self.own)

    def mean(self, tensors: list[Tensor]) -> None:
        """Make each tensor the mean, and nothing else."""
        self._exchange(tensors, self.own[:0])

    def _exchange(self, tensors: list[Tensor], counts: Tensor) -> None:
        if self.rehearsing and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        bucket = torch.cat([*(tensor.reshape(-1).to(self.dtype) for tensor in tensors), counts])
        last = len(bucket) - len(counts)
        bucket[:last].mul_(self.weight)
        try:
            dist.all_reduce(bucket, group=self.world.group)
        except RuntimeError as error:
            if "captur" in str(error):
                raise
            raise self.world.lost() from None
        place = 0
        for tensor in tensors:
            tensor.copy_(bucket[place : place + tensor.numel()].view(tensor.shape))
            place += tensor.numel()
        self.sums[: len(counts)].copy_(bucket[last:])

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """A block in which only a capture exchanges: other processes do not take part in a warm-up."""
        self.rehearsing = True
        try:
            yield
        finally:
            self.rehearsing = False

    @property
    def backprops(self) -> Tensor:
        """The steps that the attack took for all images of the last update."""
        return self.sums[0]

    def stopping(self) -> bool:
        """After an update: whether a process asked to stop. All processes get the same answer.

        On a GPU it is the answer of the update before: that one is finished, so nothing waits.
        """
        if not self.events:
            return bool(self.sums[1] > 0)
        now, before = self.step % 2, (self.step + 1) % 2
        self.read[now].copy_(self.sums, non_blocking=True)
        self.events[now].record()
        self.step += 1
        if self.step == 1:
            return False
        self.events[before].synchronize()
        return bool(self.read[before][1] > 0)


_groups = itertools.count()  # groups of this process, one after the other


@cache
def _server(rank: int, size: int) -> Any:
    """The store through which the processes find each other: torchrun's, or one of the first process."""
    host, port = os.environ["MASTER_ADDR"], torchrun.number("MASTER_PORT")
    first = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        if not first:
            _reach(host, port)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in every build

        return TCPStore(host, port, size, is_master=first, timeout=_REACH)
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(
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
    """Names in the store for one group: torchrun's outlives a restart, and a process may train twice."""
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # not in every build

    return PrefixStore(f"sparring/{torchrun.attempt()}/{next(_groups)}", _server(rank, size))


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _digest(value: Any) -> str:
    return hashlib.blake2b(json.dumps(value, sort_keys=True).encode(), digest_size=16).hexdigest()
