import random

import numpy as np
import torch

from sparring.seeds import derive_seed, generator, seeded


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
