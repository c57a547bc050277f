"""PGD-K-tau at the speed of a GPU: the same call as `attacks.friendly_pgd`, with steps captured as CUDA graphs.

One graph per bucket of batch sizes. A step reports how many examples go on before it computes their gradient, so the
host picks the next bucket while the gradient is still being computed, and the GPU never waits for the host, but once:
the first step in which examples may stop is two graphs, so that nobody computes a gradient for those that do. tau, eps
and the step size are numbers in memory: a schedule recaptures nothing. Without CUDA the same steps run uncaptured.
"""

from __future__ import annotations

import itertools
import os
import time
from types import ModuleType

import torch
from torch import Tensor, nn

from sparring.attacks import Found, ball
from sparring.engine.attack.active_set import ActiveSet
from sparring.engine.attack.buckets import bucket_sizes, fitting
from sparring.engine.attack.split_batch import Network
from sparring.engine.cuda_graphs import Captured
from sparring.errors import UserError

# sleep(0) takes some 50 us on Linux, where it waits for a timer: as long as half a step of a small network.
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


class FastWalk:
    """Attacks batches of up to `batch` images with one network. What it returns is valid until the next call."""

    def __init__(
        self,
        network: Network,
        batch: int,
        shape: tuple[int, ...],
        classes: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        every: int = 16,
        kernels: ModuleType | None = None,
    ) -> None:
        """`kernels` stands in for those of the device."""
        self.network, self.batch, self.shape, self.classes = network, batch, shape, classes
        self.device, self.dtype, self.kernels = device, dtype, kernels
        self.sizes = bucket_sizes(batch, every=every)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self.made: dict[tuple[int, str, bool, bool], _Bench] = {}
        self.launched = dict.fromkeys(self.sizes, 0)  # steps by bucket, over all calls

    def __call__(
        self,
        model: nn.Module,
        x: Tensor,
        y: Tensor,
        *,
        eps: float,
        step_size: float,
        steps: int,
        tau: int,
        loss: str,
        start: ball.Start,
        noise: float,
        project: bool,
        generator: torch.Generator,
    ) -> Found:
        """As `friendly_pgd`, for images that are known to be good. `model` is not called: the network stands for it."""
        if loss not in ("ce", "kl"):
            raise UserError(f"the engine climbs 'ce' or 'kl', got {loss!r}. Use --engine plain.")
        key = (steps, loss, noise > 0, project)
        if key not in self.made:
            self.made[key] = _Bench(self, *key)
        bench = self.made[key]
        if tau < steps:
            bench.halve()
        active, count = bench.active, len(x)
        active.begin_at_random(
            x, y, start=start, generator=generator, tau=tau, eps=eps, step_size=step_size, noise=noise
        )
        if active.natural is not None:
            bench.natural()
        going = count
        for step in range(steps):
            # Nobody can stop before step tau, and in it many do: so many that it pays to wait and see who goes on.
            look = bench.look if step == tau and fitting(self.sizes, going) == self.batch else None
            if look is not None:
                going = bench.wait_for(look)
            if going == 0:
                break
            size = fitting(self.sizes, going)
            self.launched[size] += 1
            if look is not None:
                bench.go[size]()
            elif tau <= step < steps - 1:
                going = bench.wait_for(bench.steps[size])
            else:
                bench.steps[size]()
                bench.taken += 1
        active.end()
        return Found(active.x_adv[:count], active.backprops[:count])


class _Bench:
    """One attack's buffers and captured steps."""

    def __init__(self, walk: FastWalk, steps: int, inner: str, noise: bool, project: bool) -> None:
        self.walk = walk
        self.active = active = ActiveSet(
            walk.batch,
            walk.shape,
            walk.classes,
            steps=steps,
            inner=inner,
            noise=noise,
            project=project,
            device=walk.device,
            dtype=walk.dtype,
            kernels=walk.kernels,
        )
        active.rows.fill_(walk.batch)

        def natural() -> None:
            assert active.natural is not None
            with torch.no_grad():
                active.natural[: walk.batch].copy_(walk.network(active.x[: walk.batch]))

        self.natural = Captured(natural, walk.pool) if inner == "kl" else natural
        # Largest first: the pool that the graphs share is then large enough for all.
        self.steps = {
            size: Captured(lambda size=size: active.step(walk.network, size), walk.pool)  # type: ignore[misc]
            for size in reversed(walk.sizes)
        }
        self.look: Captured | None = None
        self.go: dict[int, Captured] = {}
        self._count()

    def halve(self) -> None:
        """Have a step in two halves too, where the network is run by hand. Not amid an attack: warm-ups move images."""
        walk, active = self.walk, self.active
        passes = active.passes(walk.network)
        if passes is None or self.look is not None:
            return
        look = Captured(lambda: active.look(passes), walk.pool)
        self.go = {
            size: Captured(lambda size=size: active.go(passes, size), walk.pool)  # type: ignore[misc]
            for size in reversed(walk.sizes)
        }
        self.look = look
        self._count()

    def _count(self) -> None:
        """Take over the number of steps ever taken: the captures' own warm-ups count too."""
        if self.walk.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.taken = int(self.active.serial.item())

    def wait_for(self, work: Captured) -> int:
        """Launch a step, or the first half of one: the number of examples that go on from it."""
        work()
        self.taken += 1
        for poll in itertools.count(1):
            serial, count = self.active.read()
            if serial >= self.taken:
                return count
            _let_others_run()
            if poll % 100_000 == 0:  # a device that has failed never reports; asking it raises
                torch.cuda.current_stream().query()
        raise AssertionError("unreachable")
