import torch

from sparring.seeds import derive_seed, generator


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
