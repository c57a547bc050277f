"""What an update of several processes exchanges: the mean over the images of all of them, in one all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sparring.engine.update.exchange import statistics
from sparring.training.distributed import World


class Mean:
    """The exchange of an update: one all-reduce of one bucket, weighted by the images of every process.

    The bucket holds the loss, the gradients, the running statistics of batch-norm, which the attack of the next step
    depends on, and the counts of the step. Weights lie in memory: a captured graph reads them.
    """

    def __init__(self, world: World, device: torch.device, model: nn.Module) -> None:
        """Made once for a run, by all processes together. Gradients in bf16 are added up in the weights' precision."""
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        self.world, self.device, self.dtype = world, device, weights[0].dtype
        most = sum(tensor.numel() for tensor in (*weights, *statistics(model))) + 3  # loss, backprops, stop
        self.bucket = torch.zeros(most, device=device, dtype=self.dtype)
        self._reduce(self.bucket)  # NCCL connects by size, and must not inside a capture
        dtype = self.dtype
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

    def spoil(self) -> None:
        """After `begin`: let the coming update fail on all processes, because this one's attack has failed."""
        self.weight.fill_(torch.nan)

    def __call__(self, tensors: list[Tensor]) -> None:
        """Make each tensor the mean over the images of all processes, and add up the counts."""
        self._exchange(tensors, self.own)

    def mean(self, tensors: list[Tensor]) -> None:
        """Make each tensor the mean, and nothing else."""
        self._exchange(tensors, self.own[:0])

    def _exchange(self, tensors: list[Tensor], counts: Tensor) -> None:
        if self.rehearsing and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        place = sum(tensor.numel() for tensor in tensors)
        used = self.bucket[: place + len(counts)]
        pieces = torch.split(used[:place], [tensor.numel() for tensor in tensors])
        pairs = [_pair(tensor, piece) for tensor, piece in zip(tensors, pieces, strict=True)]
        for dtype in {tensor.dtype for tensor, _ in pairs}:  # one launch for all tensors of a dtype
            torch._foreach_copy_(*_of(dtype, pairs)[::-1])
        used[:place].mul_(self.weight)
        used[place:].copy_(counts)
        self._reduce(used)
        for dtype in {tensor.dtype for tensor, _ in pairs}:
            torch._foreach_copy_(*_of(dtype, pairs))
        self.sums[: len(counts)].copy_(used[place:])

    def _reduce(self, values: Tensor) -> None:
        try:
            dist.all_reduce(values, group=self.world.group)
        except RuntimeError as error:
            if "captur" in str(error):
                raise
            raise self.world.lost() from None

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


def _pair(tensor: Tensor, piece: Tensor) -> tuple[Tensor, Tensor]:
    """A tensor and its place in the bucket, shaped alike; both flat where the tensor's memory has the bucket's order.

    Filters are channels last in the bucket whatever they are in the tensor: processes may differ in that. Flat tensors
    are copied by one launch; 62 gradients one by one take 0.2 ms.
    """
    if tensor.dim() == 4:
        tensor = tensor.permute(0, 2, 3, 1)
    if tensor.is_contiguous():
        return tensor.view(-1), piece
    return tensor, piece.view(tensor.shape)


def _of(dtype: torch.dtype, pairs: list[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a dtype, and their places."""
    some = [pair for pair in pairs if pair[0].dtype == dtype]
    return [tensor for tensor, _ in some], [piece for _, piece in some]
