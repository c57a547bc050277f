"""How the images of a batch are divided among the processes of a run.

Every process computes one contiguous part of the same batch, so that what a batch is does not depend on how many
processes there are. Knows no process group: a number and a count.
"""

from __future__ import annotations

from dataclasses import dataclass

_LEAST = 2  # images of a part: batch-norm has no statistics of one value


@dataclass(frozen=True)
class Share:
    """One of `of` equal parts, number `rank` from 0."""

    rank: int = 0
    of: int = 1

    def cut(self, images: int, *, least: int = _LEAST) -> slice:
        """The places of `images` images that this part holds, in order; equal parts, the first ones one image larger.

        A part has `least` images or none, so that of a short last batch the last processes may get none.
        """
        parts = min(self.of, max(1, images // least))
        if self.rank >= parts:
            return slice(images, images)
        each, more = divmod(images, parts)
        first = self.rank * each + min(self.rank, more)
        return slice(first, first + each + (self.rank < more))

    def size(self, images: int) -> int:
        """The number of places in the part."""
        part = self.cut(images)
        return int(part.stop - part.start)


WHOLE = Share()
