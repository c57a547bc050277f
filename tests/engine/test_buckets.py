from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sparring.engine.buckets import bucket_sizes, fitting


@given(batch=st.integers(1, 600), every=st.integers(1, 64), data=st.data())
def test_the_smallest_bucket_that_fits(batch, every, data):
    sizes = bucket_sizes(batch, every=every)
    assert sizes[-1] == batch
    assert list(sizes) == sorted(set(sizes))
    count = data.draw(st.integers(1, batch))
    size = fitting(sizes, count)
    assert size >= count
    assert size - count < every or size == sizes[0]
