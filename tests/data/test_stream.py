"""Images that are streamed: the same batches as in memory, bit for bit; prefetching; extra images."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from sparring.data import Mixture, Split, divide, hold_out, join, load_extra, moments, place, training_batches
from sparring.data.image_folder import load_folder
from sparring.data.npz import load_npz
from sparring.data.prefetch import Filled, ahead, gathered, on_device, one_ahead
from sparring.data.stream import Rows, rows_of
from sparring.errors import UserError
from tests.cli.conftest import write_images

CPU = torch.device("cpu")


@pytest.fixture
def split():
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (53, 3, 6, 6), dtype=torch.uint8, generator=generator)
    return Split(x, torch.arange(53) % 4)


def same(one, other):
    for a, b in zip(one, other, strict=True):
        for x, y in zip(a, b, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize("augment", ["none", "crop-flip", "crop-flip+cutmix:1.0"])
def test_streamed_batches_are_those_in_memory(split, augment):
    here, held = divide(split, 8, seed=1)
    there, also_held = divide(Split(split.x, split.y, mapped=True), 8, seed=1)
    streamed = place(here, CPU, room=0)
    assert isinstance(here, Split) and isinstance(there, Rows) and isinstance(streamed, Rows)
    assert torch.equal(held.x, also_held.x) and torch.equal(held.y, also_held.y)
    how = {"seed": 3, "epoch": 2, "augment": augment}
    expected = list(training_batches(here, 10, **how))
    for rows in (there, streamed, place(there, CPU)):
        same(training_batches(rows, 10, **how), expected)
        same(training_batches(rows, 10, **how, start=3), expected[3:])
    back = place(there, CPU, room=10**9)
    assert isinstance(back, Split)
    same(training_batches(back, 10, **how), expected)


def test_size_decides(split):
    need = split.x.numel()
    assert isinstance(place(split, CPU), Split)
    assert isinstance(place(split, CPU, room=need), Split) and isinstance(place(split, CPU, room=need - 1), Rows)


def test_rows_are_images_too(split):
    rows = rows_of(split).take(torch.tensor([5, 2, 9]))
    assert torch.equal(rows.read().x, split.x[[5, 2, 9]]) and rows.shape == (3, 6, 6) and len(rows) == 3
    assert torch.equal(rows.head(2).y, split.y[[5, 2]])
    mean, deviation = moments(rows_of(split))
    expected = moments(split)
    assert mean == pytest.approx(expected[0]) and deviation == pytest.approx(expected[1])


def test_work_is_done_ahead_and_in_order():
    made = []

    def items():
        for number in range(6):
            made.append((number, threading.current_thread().name))
            yield number

    found = ahead(items(), depth=2)
    assert next(found) == 0
    deadline = time.monotonic() + 5
    while len(made) < 4 and time.monotonic() < deadline:  # 1 and 2 are ready, 3 waits for room
        time.sleep(0.005)
    assert [number for number, _ in made] == [0, 1, 2, 3] and {name for _, name in made} == {"prefetch"}
    assert list(found) == [1, 2, 3, 4, 5]


def test_an_error_of_the_thread_is_the_callers():
    def items():
        yield 1
        raise UserError("no such image")

    found = ahead(items())
    assert next(found) == 1
    with pytest.raises(UserError, match="no such image"):
        next(found)


def test_a_stream_that_is_left_ends_its_thread(split):
    before = threading.active_count()
    found = gathered(split.x, list(torch.arange(53).split(5)), pin=False)
    next(found)
    found.close()
    assert threading.active_count() == before


def test_buffers_are_used_again_once_they_are_released(split):
    """As on a GPU, but not in pinned memory."""
    rows = [torch.arange(first, min(first + 4, 53)) for first in range(0, 53, 4)]
    kept, places, seen = [], set(), []
    for filled in gathered(split.x, rows, pin=False, again=True):
        places.add(filled.x.untyped_storage().data_ptr())
        kept.append((filled, filled.x.clone()))
        if len(kept) == 2:  # two are on their way; what they hold is intact
            old, before = kept.pop(0)
            assert torch.equal(old.x, before)
            seen.append(before)
            old.release()
    assert torch.equal(torch.cat([*seen, kept[0][1]]), split.x) and len(places) == 5


def test_a_stream_of_buffers_that_is_left_ends_its_thread(split):
    before = threading.active_count()
    found = gathered(split.x, [torch.arange(4)] * 20, pin=False, again=True)
    first = [next(found) for _ in range(3)]  # never released: the thread waits for a buffer
    found.close()
    assert threading.active_count() == before and len(first) == 3


def test_each_copy_starts_before_the_one_before_is_used():
    did = []
    out = one_ahead(iter("abc"), lambda x: did.append(f"start {x}") or x, lambda x: did.append(f"finish {x}") or x)
    assert list(out) == ["a", "b", "c"]
    assert did == ["start a", "start b", "finish a", "start c", "finish b", "finish c"]
    assert list(one_ahead(iter(""), str, str)) == []


def test_buffers_are_given_back():
    released = []
    chunks = (Filled(torch.full((2,), n), lambda n=n: released.append(n)) for n in range(3))
    assert [int(x[0]) for x in on_device(chunks, CPU)] == [0, 1, 2] and released == [0, 1, 2]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one")
@pytest.mark.parametrize("augment", ["none", "crop-flip+cutmix:1.0"])
def test_cuda_streams_what_it_holds(split, augment):
    cuda = torch.device("cuda")
    how = {"seed": 3, "epoch": 2, "augment": augment}
    held = list(training_batches(place(split, cuda), 10, **how))
    same(training_batches(place(split, cuda, room=0), 10, **how), held)


def save(path, split, *, test=True, packed=False, layout="NHWC"):
    x = split.x.numpy() if layout == "NCHW" else split.x.permute(0, 2, 3, 1).numpy()
    arrays = {"x_train": x[:40], "y_train": split.y[:40].numpy()}
    arrays |= {"x_test": x[40:], "y_test": split.y[40:].numpy()} if test else {}
    (np.savez_compressed if packed else np.savez)(path, **arrays)
    return path


@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
@pytest.mark.parametrize(("packed", "test"), [(False, True), (True, True), (False, False), (True, False)])
def test_large_npz_is_mapped_and_the_same(split, tmp_path, monkeypatch, packed, test, layout):
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path / "kept"))
    path = save(tmp_path / "a.npz", split, test=test, packed=packed, layout=layout)
    here, there = load_npz(path), load_npz(path, room=100)
    assert there.train.mapped and there.test.mapped and not here.train.mapped
    assert here.fingerprint == there.fingerprint and here.classes == there.classes
    assert torch.equal(here.test.x, there.test.x) and torch.equal(here.test.y, there.test.y)
    assert here.carved == there.carved
    assert (tmp_path / "kept" / "cache").exists() == (packed or not test)
    again = load_npz(path, room=100)
    assert torch.equal(again.train.x, here.train.x)


def test_large_npz_of_floats_or_damaged_is_refused(split, tmp_path):
    np.savez(tmp_path / "f.npz", x_train=np.zeros((40, 8, 8, 3)), y_train=np.arange(40) % 2)
    with pytest.raises(UserError, match="must hold uint8 images"):
        load_npz(tmp_path / "f.npz", room=100)
    path = save(tmp_path / "a.npz", split, packed=True)
    damaged = bytearray(path.read_bytes())
    damaged[2000:2100] = bytes(100)
    path.write_bytes(damaged)
    with pytest.raises(UserError, match=r"cannot be read as \.npz"):
        load_npz(path, room=100)


def test_large_folder_is_cached_and_the_same(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARRING_DATA", str(tmp_path / "kept"))
    write_images(tmp_path / "images")
    here, there = load_folder(tmp_path / "images"), load_folder(tmp_path / "images", room=100)
    assert there.train.mapped and here.fingerprint == there.fingerprint and torch.equal(here.test.x, there.test.x)
    kept = list((tmp_path / "kept" / "cache").iterdir())
    assert len(kept) == 1
    load_folder(tmp_path / "images", room=100)
    first = next((tmp_path / "images").rglob("*.png"))
    first.write_bytes(first.read_bytes() + b"\0")  # another size: another entry
    load_folder(tmp_path / "images", room=100)
    assert len(list((tmp_path / "kept" / "cache").iterdir())) == 2


@pytest.fixture
def extra(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (30, 6, 6, 3), dtype=np.uint8)
    np.savez(tmp_path / "more.npz", image=x, label=np.arange(30) % 4)
    return load_extra(f"npz:{tmp_path / 'more.npz'}", classes=4)[0]


def test_extra_images_are_a_share_of_every_batch(split, extra):
    mixture = Mixture(join(split, extra, CPU), len(split), 0.7)
    got = list(training_batches(mixture, 10, seed=1, epoch=1))
    assert [len(batch.y) for batch in got] == [10, 10, 10, 10, 10, 3]  # as without extra images
    pool = {image.numpy().tobytes(): number for number, image in enumerate(torch.cat([split.x, extra.x]))}
    rows = [[pool[(image * 255).round().byte().numpy().tobytes()] for image in batch.x] for batch in got]
    assert [sum(row >= 53 for row in batch) for batch in rows] == [7, 7, 7, 7, 7, 2]
    own = [row for batch in rows for row in batch if row < 53]
    more = [row for batch in rows for row in batch if row >= 53]
    assert len(set(own)) == len(own) == 16 and set(more) == set(range(53, 83))  # 37 of 30: some come again
    labels = torch.cat([split.y, extra.y])
    assert all(torch.equal(labels[batch], found.y) for batch, found in zip(rows, got, strict=True))
    for start in (1, 4):
        same(training_batches(mixture, 10, seed=1, epoch=1, start=start), got[start:])
    other = list(training_batches(mixture, 10, seed=1, epoch=2))
    assert not torch.equal(other[0].x, got[0].x)


def test_extra_images_stream_alike(split, extra):
    here = Mixture(join(split, extra, CPU), 53, 0.5)
    mapped = Split(split.x, split.y, mapped=True)
    for images in (join(split, extra, CPU, room=0), join(mapped, extra, CPU), join(rows_of(split), extra, CPU)):
        assert isinstance(images, Rows)
        how = {"seed": 1, "epoch": 1, "augment": "crop-flip"}
        same(training_batches(Mixture(images, 53, 0.5), 10, **how), list(training_batches(here, 10, **how)))


def test_held_out_rows_keep_their_place_beside_extra_images(split, extra):
    """Rows that were held out are not among the joined ones, although the source still has them."""
    rest, _ = divide(Split(split.x, split.y, mapped=True), 8, seed=1)
    plain, _ = hold_out(split, 8, seed=1)
    how = {"seed": 1, "epoch": 1}
    expected = list(training_batches(Mixture(join(plain, extra, CPU), 45, 0.5), 10, **how))
    same(training_batches(Mixture(join(rest, extra, CPU), 45, 0.5), 10, **how), expected)


def test_unfit_extra_images_are_refused(split, extra, tmp_path):
    path = tmp_path / "more.npz"
    with pytest.raises(UserError, match="label 3, the training data only 0 to 2"):
        load_extra(f"npz:{path}", classes=3)
    with pytest.raises(UserError, match="no such file"):
        load_extra("npz:none.npz", classes=3)
    np.savez(path, a=np.zeros(3))
    with pytest.raises(UserError, match="lacks x_train and y_train"):
        load_extra(f"npz:{path}", classes=3)
    with pytest.raises(UserError, match=r"3x6x6.*1x6x6"):
        join(Split(split.x[:, :1], split.y), extra, CPU)
