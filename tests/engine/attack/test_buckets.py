from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparring.engine.attack.buckets import bucket_sizes, fitting


@given(batch=st.integers(1, 600), every=st.integers(1, 64), data=st.data())
def test_smallest_fitting_bucket_is_chosen(batch, every, data):
    sizes = bucket_sizes(batch, every=every)
    assert sizes[-1] == batch
    assert list(sizes) == sorted(set(sizes))
    count = data.draw(st.integers(1, batch))
    size = fitting(sizes, count)
    assert size >= count
    assert size - count < every or size == sizes[0]


def test_small_sets_have_finer_buckets():
    assert bucket_sizes(128) == (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128)
