import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from sparring.data import AUGMENTS, Split, as_pixels, batches, batching, count_batches, training_batches
from sparring.data.batching import Mixture
from sparring.data.loader import passing
from sparring.data.stream import rows_of
from sparring.errors import UserError
from sparring.shares import Share


@pytest.fixture
def split():
    generator = torch.Generator().manual_seed(0)
    return Split(torch.randint(0, 256, (53, 3, 6, 6), dtype=torch.uint8, generator=generator), torch.arange(53))


def test_without_a_seed_in_order_and_exact(split):
    got = list(batches(split, 10))
    assert [len(y) for _, y in got] == [10, 10, 10, 10, 10, 3]
    assert torch.equal(torch.cat([y for _, y in got]), split.y)
    x = torch.cat([x for x, _ in got])
    assert x.dtype == torch.float32 and torch.equal(x, split.x.float() / 255)
    assert split.x.dtype == torch.uint8


def test_drop_last(split):
    assert [len(y) for _, y in batches(split, 10, seed=0, drop_last=True)] == [10] * 5
    assert count_batches(53, 10) == 6 and count_batches(53, 10, drop_last=True) == 5 and count_batches(50, 10) == 5


def test_an_epoch_sees_every_image_once(split):
    got = list(batches(split, 8, seed=4, epoch=2))
    y = torch.cat([y for _, y in got])
    assert not torch.equal(y, split.y) and torch.equal(y.sort().values, split.y)
    assert torch.equal(torch.cat([x for x, _ in got]), split.x[y].float() / 255)


@pytest.mark.parametrize(("seed", "augment"), [(None, "none"), *((5, augment) for augment in AUGMENTS)])
def test_batch_k_is_the_same_wherever_the_epoch_starts(split, augment, seed):
    whole = list(batches(split, 8, seed=seed, epoch=3, augment=augment))
    for start in range(len(whole) + 1):
        rest = list(batches(split, 8, seed=seed, epoch=3, augment=augment, start=start))
        assert len(rest) == len(whole) - start
        for (x, y), (want_x, want_y) in zip(rest, whole[start:], strict=True):
            assert torch.equal(x, want_x) and torch.equal(y, want_y)


@pytest.mark.parametrize("augment", AUGMENTS)
@pytest.mark.parametrize("at_once", [2, 3, 100])
def test_batches_augmented_together_are_the_same(split, augment, at_once, monkeypatch):
    """As on a GPU."""
    alone = list(batches(split, 8, seed=5, epoch=3, augment=augment))
    monkeypatch.setattr(batching, "_batches_at_once", lambda size, device: at_once)
    for start in (0, 1, len(alone) - 1, len(alone)):
        together = list(batches(split, 8, seed=5, epoch=3, augment=augment, start=start))
        assert len(together) == len(alone) - start
        for (x, y), (want_x, want_y) in zip(together, alone[start:], strict=True):
            assert torch.equal(x, want_x) and torch.equal(y, want_y)


def test_a_gpu_augments_as_many_batches_together_as_fit_in_8_mb():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert batching._batches_at_once(128 * 3072, cpu) == 1
    assert batching._batches_at_once(128 * 3072, cuda) == 2**23 // (128 * 3072)
    assert batching._batches_at_once(512 * 3 * 512 * 512, cuda) == 1


def test_seed_and_epoch_both_matter(split):
    def order(seed, epoch):
        return torch.cat([y for _, y in batches(split, 8, seed=seed, epoch=epoch)])

    assert torch.equal(order(1, 1), order(1, 1))
    assert not torch.equal(order(1, 1), order(1, 2)) and not torch.equal(order(1, 1), order(2, 1))


def test_global_random_state_is_untouched(split):
    before = torch.get_rng_state()
    list(batches(split, 8, seed=1, augment="crop-flip"))
    assert torch.equal(before, torch.get_rng_state())


def test_an_empty_split_has_no_batches(split):
    assert list(batches(split.head(0), 8)) == [] and list(batches(split.head(0), 8, seed=1, augment="crop")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 8, "start": 8}, "7 batches"),
        ({"batch_size": 8, "start": -1}, "start must"),
        ({"batch_size": 8, "augment": "flip"}, "needs a seed"),
        ({"batch_size": 8, "seed": 1, "augment": "flop"}, "Did you mean 'flip'"),
        ({"batch_size": 8, "seed": 1, "augment": "crop", "pad": -2}, "pad must"),
    ],
)
def test_bad_arguments_are_refused_at_the_call(split, arguments, message):
    with pytest.raises(UserError, match=message):
        batches(split, **arguments)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run on a machine with one")
def test_cuda_gives_what_the_cpu_gives(split):
    here = list(batches(split, 8, seed=1, augment="crop-flip"))
    there = list(batches(split.to("cuda"), 8, seed=1, augment="crop-flip"))
    for (x, y), (cuda_x, cuda_y) in zip(here, there, strict=True):
        assert cuda_x.is_cuda and torch.allclose(x, cuda_x.cpu(), atol=1e-7, rtol=0) and torch.equal(y, cuda_y.cpu())


AUGMENTED = ("none", "crop-flip", "crop-flip+cutmix:1.0", "resized-crop:0.5+jitter:0.4+cutout:3+erase:0.5")


@pytest.mark.parametrize("augment", AUGMENTED)
@pytest.mark.parametrize("kind", ["held", "streamed", "with extra images", "as they come"])
def test_the_parts_of_all_processes_are_the_batch(kind, augment):
    """Images, labels and what is mixed in; of 43 images in tens the last batch leaves some of five without."""
    drawn = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 256, (43, 3, 8, 8), dtype=torch.uint8, generator=drawn), torch.arange(43) % 7
    split, start = Split(x, y), 1
    images = {"held": split, "streamed": rows_of(split), "with extra images": Mixture(split, 33, 0.3)}.get(kind)
    if images is None:
        images, start = passing(DataLoader(TensorDataset(as_pixels(x), y), batch_size=10)), 0
    given = {"seed": 1, "epoch": 2, "augment": augment, "start": start}
    whole = list(training_batches(images, 10, **given))
    for processes in (2, 3, 5):
        parts = [
            list(training_batches(images, 10, process=Share(rank, processes), **given)) for rank in range(processes)
        ]
        for every, batch in zip(zip(*parts, strict=True), whole, strict=True):
            for name in ("x", "y", "other", "share"):
                expected = getattr(batch, name)
                found = [getattr(part, name) for part in every]
                assert torch.equal(torch.cat(found), expected) if expected is not None else found == [None] * processes
            assert {part.of for part in every} == {len(batch.x)} == {batch.of}
            assert [part.part for part in every] == [Share(r, processes).cut(batch.of) for r in range(processes)]
