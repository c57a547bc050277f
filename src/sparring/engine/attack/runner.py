"""PGD-K-tau at the speed of a GPU: the numbers of a `KTauPGD`, with its steps captured as CUDA graphs.

One graph per bucket of batch sizes. A step reports how many examples go on before it computes their gradient, so the
host picks the next bucket while the gradient is still being computed, and the GPU does not wait for the host, but once:
the first step in which examples may stop is two graphs, so that no gradient is computed for those that do. tau, eps and
the step size are numbers in memory: a schedule recaptures nothing. Without CUDA the same steps run uncaptured.
"""

from __future__ import annotations

import itertools
import os
import time
from types import ModuleType

import torch
from torch import Tensor

from sparring.attacks import Found
from sparring.attacks.checks import Model
from sparring.attacks.threat import Norm
from sparring.engine.attack.active_set import ActiveSet
from sparring.engine.attack.buckets import bucket_sizes, fitting
from sparring.engine.attack.split_batch import SplitBatch
from sparring.engine.cuda_graphs import Captured, pool_for
from sparring.objectives.base import KTauPGD

# sleep(0) takes some 50 us on Linux, where it waits for a timer: as long as half a step of a small network.
_let_others_run = getattr(os, "sched_yield", lambda: time.sleep(0))


class CapturedAttack:
    """Attacks batches of up to `batch` images with one network. What it returns is valid until the next call."""

    def __init__(
        self,
        network: Model,
        batch: int,
        shape: tuple[int, ...],
        classes: int,
        *,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        every: int = 16,
        kernels: ModuleType | None = None,
        halves: bool = True,
        captured: bool = True,
    ) -> None:
        """Made once for a run.

        Args:
            every: width of the buckets.
            kernels: those of triton/attack_step.py, where they can run.
            halves: run the first step in which examples may stop as two graphs, where the network is hand-written.
            captured: whether the steps are captured, where there is CUDA.
        """
        self.network, self.batch, self.shape, self.classes = network, batch, shape, classes
        self.device, self.dtype, self.kernels = device, dtype, kernels
        self.halves = halves
        self.sizes = bucket_sizes(batch, every=every)
        self.pool = pool_for(device) if captured else None
        self.made: dict[tuple[int, str, bool, bool, Norm], _CapturedPGD] = {}
        self.launched = dict.fromkeys(self.sizes, 0)  # steps by bucket, over all calls

    def uncapture(self) -> None:
        """Run the steps uncaptured from here on, and undivided: parts on two streams are safe in captures alone."""
        self.pool = None
        if isinstance(self.network, SplitBatch):
            self.network = self.network.network
        self.made.clear()

    def capture(self, search: KTauPGD) -> _CapturedPGD:
        """Buffers and captured steps for this attack, made at its first call. Raises what the capture raises."""
        key = (search.steps, search.loss, search.noise > 0, search.project, search.norm)
        if key not in self.made:
            self.made[key] = _CapturedPGD(self, *key)
        if search.tau < search.steps and self.halves:
            self.made[key].halve()
        return self.made[key]

    def __call__(self, search: KTauPGD, x: Tensor, y: Tensor, generator: torch.Generator) -> Found:
        """As `search` does it with the network; x and y are known to be valid."""
        pgd = self.capture(search)
        tau, steps, active, count = search.tau, search.steps, pgd.active, len(x)
        numbers = {"tau": tau, "eps": search.eps, "step_size": search.step_size, "noise": search.noise}
        active.begin_at_random(x, y, start=search.start, generator=generator, **numbers)  # type: ignore[arg-type]
        if active.natural is not None:
            pgd.natural()
        going = count
        for step in range(steps):
            # No example can stop before step tau, and in it many do: enough to be worth waiting for the report.
            check = pgd.check if step == tau and fitting(self.sizes, going) == self.batch else None
            if check is not None:
                going = pgd.wait_for(check)
            if going == 0:
                break
            size = fitting(self.sizes, going)
            self.launched[size] += 1
            if check is not None:
                pgd.go[size]()
            elif tau <= step < steps - 1:
                going = pgd.wait_for(pgd.steps[size])
            else:
                pgd.steps[size]()
                pgd.taken += 1
        return Found(active.x_adv[:count], active.backprops[:count])


class _CapturedPGD:
    """The buffers and captured steps of one attack."""

    def __init__(self, attack: CapturedAttack, steps: int, inner: str, noise: bool, project: bool, norm: Norm) -> None:
        self.attack = attack
        self.active = active = ActiveSet(
            attack.batch,
            attack.shape,
            attack.classes,
            steps=steps,
            inner=inner,
            noise=noise,
            project=project,
            norm=norm,
            device=attack.device,
            dtype=attack.dtype,
            kernels=attack.kernels,
        )
        active.rows.fill_(attack.batch)

        def natural() -> None:
            assert active.natural is not None
            with torch.no_grad():
                active.natural[: attack.batch].copy_(attack.network(active.x[: attack.batch]))

        self.natural = Captured(natural, attack.pool) if inner == "kl" else natural
        # Largest first: the pool that the graphs share is then large enough for all.
        self.steps = {
            size: Captured(lambda size=size: active.step(attack.network, size), attack.pool)  # type: ignore[misc]
            for size in reversed(attack.sizes)
        }
        self.check: Captured | None = None
        self.go: dict[int, Captured] = {}
        self._count()

    def halve(self) -> None:
        """Capture a step in two halves too, for a hand-written network. Not amid an attack: warm-ups move images."""
        attack, active = self.attack, self.active
        manual = active.manual(attack.network)
        if manual is None or self.check is not None:
            return
        check = Captured(lambda: active.check(manual), attack.pool)
        self.go = {
            size: Captured(lambda size=size: active.go(manual, size), attack.pool)  # type: ignore[misc]
            for size in reversed(attack.sizes)
        }
        self.check = check
        self._count()

    def _count(self) -> None:
        """Read the number of steps ever taken: the captures' own warm-ups count too."""
        if self.attack.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        self.taken = int(self.active.serial.item())

    def wait_for(self, work: Captured) -> int:
        """Launch a step, or the first half of one, and return the number of examples that go on from it."""
        work()
        self.taken += 1
        for poll in itertools.count(1):
            serial, count = self.active.read()
            if serial >= self.taken:
                return count
            _let_others_run()
            if poll % 100_000 == 0:  # a device that has failed never reports; a query raises
                torch.cuda.current_stream().query()
        raise AssertionError("unreachable")
