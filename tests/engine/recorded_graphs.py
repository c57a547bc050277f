"""CUDA graphs without a GPU: operations on the CPU are recorded during a capture and repeated on the same memory.

What makes a capture differ from a call is kept:

- A capture changes nothing. What it wrote is undone at its end.
- A replay runs no Python: numbers, branches and the places of tensors are those of the capture.
- Whatever makes the host wait for the device is refused inside a capture.
- Memory that a capture allocates and that nobody holds any more is the pool's. It is overwritten after every capture
  and every replay, as another graph of the pool might do.
"""

from __future__ import annotations

import gc
from contextlib import nullcontext

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map

from sparring.engine import cuda_graphs

_aten = torch.ops.aten
WAITS = {  # for the device, in the host's code
    _aten._local_scalar_dense.default,
    _aten.equal.default,
    _aten.nonzero.default,
    _aten.masked_select.default,
    _aten._unique2.default,
    _aten.lift_fresh.default,  # torch.tensor(...): a copy from memory of the host that may be gone at the replay
}
MODULES = ("engine.update.step", "engine.attack.runner", "engine.attack.replay", "engine.attack_path")


class Pool:
    """The memory of captures: for every storage that a graph uses, how many recorded tensors refer to it."""

    def __init__(self):
        self.recorded: dict[int, int] = {}
        self.allocated: dict[int, torch.Tensor] = {}

    def alias(self, tensor):
        """The same memory as a tensor that nobody else has: its owner may still let go of the memory."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        place = _place(tensor)
        self.recorded[place] = self.recorded.get(place, 0) + 1
        return tensor.detach()

    def overwrite(self):
        """Fill all memory that is recorded but held by nobody. Returns how many pieces there were."""
        free = [place for place, tensor in self.allocated.items() if _held(tensor) == self.recorded[place]]
        for place in free:
            self.allocated[place].untyped_storage().fill_(255)  # NaN as a float, -1 as an integer
        return len(free)


def _place(tensor):
    return tensor.untyped_storage()._cdata


def _held(tensor):
    """How many tensors share a tensor's memory, itself included."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # without `storage`


class Recorder(TorchDispatchMode):
    """The operations of one capture."""

    def __init__(self, pool):
        super().__init__()
        self.pool, self.operations, self.before = pool, [], {}
        self.new = set()  # places of the memory that this capture allocates

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in WAITS or (func is _aten.index.Tensor and _masked(args[1])):
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        self._keep(_written(func, args, kwargs))
        out = func(*args, **kwargs)
        given = tree_map(self.pool.alias, (args, kwargs))
        known = {_place(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        for tensor in tree_iter(out):
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in known:
                self._allocate(tensor)
        self.operations.append((func, *given, tree_map(self.pool.alias, out), known))
        return out

    def _allocate(self, tensor):
        place = _place(tensor)
        if place not in self.new:
            self.new.add(place)
            self.pool.recorded[place] = self.pool.recorded.get(place, 0) + 1
            self.pool.allocated[place] = tensor.detach()

    def _keep(self, tensors):
        """Remember what lay in memory that is about to be written and is not the capture's own."""
        for tensor in tensors:
            if _place(tensor) not in self.new | self.before.keys():
                storage = tensor.untyped_storage()
                self.before[_place(tensor)] = (storage, storage.clone())

    def undo(self):
        for storage, before in self.before.values():
            storage.copy_(before)
        self.before.clear()

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, out, known in self.operations:
            found = func(*args, **kwargs)
            for place, value in zip(tree_iter(out), tree_iter(found), strict=True):
                if isinstance(place, torch.Tensor) and _place(place) not in known:
                    place.copy_(value)


def _masked(indices):
    """Whether an index is a mask: the number of its elements decides the size of what comes out."""
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _written(func, args, kwargs):
    """The tensors that an operation writes into."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (tensor for tensor in tree_iter(given) if isinstance(tensor, torch.Tensor))


class Graphs:
    """What a simulated device has captured and replayed."""

    def __init__(self):
        self.pool, self.captures, self.replays, self.overwritten = Pool(), 0, 0, 0
        self.capturing = None


def simulate(monkeypatch) -> Graphs:
    """Put simulated graphs in the place of CUDA's, for tensors on the CPU."""
    graphs = Graphs()

    class Stream:
        device = torch.device("cpu")

        def __init__(self, device=0):
            pass

        def wait_stream(self, other):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

    class Graph:
        def capture_begin(self, pool=None, capture_error_mode="global"):
            self.recorder = graphs.capturing = Recorder(graphs.pool)
            self.recorder.__enter__()

        def capture_end(self):
            self.recorder.__exit__(None, None, None)
            graphs.capturing = None
            self.recorder.undo()
            gc.collect()  # once is enough: what a capture leaves in a cycle is then gone
            graphs.captures += 1
            graphs.overwritten += graphs.pool.overwrite()

        def replay(self):
            assert graphs.capturing is None
            self.recorder.replay()
            graphs.replays += 1
            graphs.overwritten += graphs.pool.overwrite()

    def synchronize(device=None):
        if graphs.capturing is not None:
            raise RuntimeError("operation not permitted when stream is capturing: synchronize")

    fakes = {
        "Stream": Stream,
        "CUDAGraph": Graph,
        "stream": lambda side: nullcontext(),
        "current_stream": lambda device=None: Stream(),
        "current_device": lambda: 0,
        "synchronize": synchronize,
        "empty_cache": lambda: None,
        "mem_get_info": lambda: (100, 141),
        "is_current_stream_capturing": lambda: graphs.capturing is not None,
    }
    for name, part in fakes.items():
        monkeypatch.setattr(torch.cuda, name, part)
    monkeypatch.setattr(cuda_graphs, "_side", lambda device: Stream())
    for module in MODULES:
        monkeypatch.setattr(f"sparring.{module}.pool_for", lambda device: "pool")
    return graphs
