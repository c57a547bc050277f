"""How a batch is divided among processes."""

from __future__ import annotations

import pytest

from sparring.shares import WHOLE, Share


@pytest.mark.parametrize("of", [1, 2, 3, 7])
def test_parts_follow_each_other_and_make_up_the_batch(of):
    for images in range(40):
        parts = [Share(rank, of).cut(images) for rank in range(of)]
        assert [place for part in parts for place in range(part.start, part.stop)] == list(range(images))
        sizes = [Share(rank, of).size(images) for rank in range(of)]
        taken = [size for size in sizes if size]
        assert sizes == sorted(sizes, reverse=True) and (not taken or max(taken) - min(taken) <= 1)
        assert all(size >= 2 for size in taken) or images < 2


def test_one_process_takes_all():
    assert WHOLE.cut(5) == slice(0, 5) and WHOLE.size(1) == 1
