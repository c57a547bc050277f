import random
from functools import partial

import numpy as np
import pytest
import torch

from sparring.seeds import PartGenerator, batch_generator, derive_seed, generator, per_image, seeded
from sparring.shares import Share


def test_seeds_depend_on_every_part_and_their_order():
    seen = {derive_seed(*parts) for parts in [(), (0,), (1,), (0, 1), (1, 0), (0, 0), (12,), (1, 2), (-1,), (2**70,)]}
    assert len(seen) == 10
    assert all(0 <= seed < 2**63 for seed in seen)


def test_seeds_never_change():
    assert derive_seed(1, 2, 3) == 1517167407554927345


def test_generator_leaves_the_global_state_unchanged():
    before = torch.get_rng_state()
    first = torch.rand(3, generator=generator("cpu", 7))
    assert torch.equal(first, torch.rand(3, generator=generator("cpu", 7)))
    assert torch.equal(before, torch.get_rng_state())


def test_seeded_blocks_repeat_and_leave_the_global_states_alone():
    def draw():
        return torch.rand(1).item(), float(np.random.rand()), random.random()

    before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
    drawn = []
    for parts in ((1, 2), (1, 2), (1, 3)):
        with seeded("cpu", *parts):
            drawn.append(draw())
    assert drawn[0] == drawn[1] and all(a != b for a, b in zip(drawn[0], drawn[2], strict=True))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tobytes(), random.getstate()) == before[1:]


@pytest.mark.parametrize("of", [10, 2500])  # in one block and in several
@pytest.mark.parametrize("processes", [2, 3, 5])
def test_parts_of_a_batch_draw_what_the_whole_draws(of, processes):
    whole = batch_generator("cpu", 3, 1, part=slice(0, of), of=of)
    kinds = [(torch.rand, (2,)), (torch.randn, (2, 2)), (partial(torch.randint, 0, 9), ())]  # one after the other
    expected = [per_image(draw, (of, *shape), whole) for draw, shape in kinds]
    for rank in range(processes):
        part = Share(rank, processes).cut(of)
        draws = batch_generator("cpu", 3, 1, part=part, of=of)
        for (draw, shape), all_of_them in zip(kinds, expected, strict=True):
            assert torch.equal(per_image(draw, (part.stop - part.start, *shape), draws), all_of_them[part])


def test_a_batch_of_one_block_is_drawn_as_by_a_plain_generator():
    part = batch_generator("cpu", 3, 1, part=slice(0, 4), of=8)
    assert isinstance(part, PartGenerator) and isinstance(part, torch.Generator)
    whole = torch.rand(8, 3, generator=generator("cpu", 3, 1))
    assert torch.equal(per_image(torch.rand, (4, 3), part), whole[:4])


def test_a_part_of_a_large_batch_draws_its_own_blocks_alone():
    drawn = []

    def draw(shape, **how):
        drawn.append(shape[0])
        return torch.zeros(shape)

    per_image(draw, (10, 2), batch_generator("cpu", 0, part=slice(5000, 5010), of=100_000))
    assert drawn == [1024]


def test_an_empty_part_draws_nothing():
    assert per_image(torch.rand, (0, 3), batch_generator("cpu", 0, part=slice(5, 5), of=5)).shape == (0, 3)
