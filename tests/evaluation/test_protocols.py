from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.errors import UserError
from sparring.evaluation.protocols import PROTOCOLS, Settings, find, settle, unique_attacks

E8 = 8 / 255
U = "uniform"
# name, eps, start, then (attack, radius, steps, step size, loss): the numbers of the paper, its code, the benchmark.
TABLE = [
    ("dat", 0.031, U, [("fgsm", 0.031, 1, 0.031, "ce"), ("pgd20", 0.031, 20, 0.00775, "ce"),
                       ("pgd100", 0.031, 100, 0.00775, "ce"), ("cw30", 0.031, 30, 0.00775, "cw")]),
    ("trades", 0.031, None, [("fgsm", 0.031, 1, 0.031, "ce"), ("pgd20", 0.031, 20, 0.003, "ce"),
                             ("pgd100", 0.031, 100, 0.003, "ce"), ("cw30", 0.031, 30, 0.003, "cw")]),
    ("trades-random", 0.031, U, [("fgsm", 0.031, 1, 0.031, "ce"), ("pgd20", 0.031, 20, 0.003, "ce"),
                                 ("pgd100", 0.031, 100, 0.003, "ce"), ("cw30", 0.031, 30, 0.003, "cw")]),
    ("mart", E8, U, [("fgsm", E8, 1, E8, "ce"), ("pgd20", E8, 20, E8 / 10, "ce"), ("cw30", E8, 30, E8 / 10, "cw")]),
    ("figure", E8, U, [("fgsm", E8, 1, E8, "ce"), ("pgd20", E8, 20, 2 / 255, "ce"), ("pgd100", E8, 100, 2 / 255, "ce"),
                       ("cw30", E8, 30, 2 / 255, "cw"), ("pgd20-2eps", 16 / 255, 20, 2 / 255, "ce")]),
    ("figure-svhn", 4 / 255, U, [("fgsm", 4 / 255, 1, 4 / 255, "ce"), ("pgd20", 4 / 255, 20, 2 / 255, "ce"),
                                 ("pgd100", 4 / 255, 100, 2 / 255, "ce"), ("cw30", 4 / 255, 30, 2 / 255, "cw"),
                                 ("pgd20-2eps", E8, 20, 2 / 255, "ce")]),
    ("figure-twice", 16 / 255, U, [("pgd20", 16 / 255, 20, 2 / 255, "ce"), ("cw30", 16 / 255, 30, 2 / 255, "cw"),
                                   ("autoattack", 16 / 255, 0, 0.0, "autoattack")]),
    ("tau", E8, U, [("fgsm", E8, 1, E8, "ce"), ("pgd10", E8, 10, 0.003, "ce"), ("pgd20", E8, 20, 0.003, "ce"),
                    ("pgd100", E8, 100, 0.003, "ce"), ("cw30", E8, 30, 0.003, "cw")]),
    ("fastat", E8, U, [("pgd10", E8, 10, 2 / 255, "ce"), ("pgd20", E8, 20, 2 / 255, "ce"),
                       ("pgd50", E8, 50, 2 / 255, "ce")]),
    ("quick", E8, U, [("pgd10", E8, 10, E8 / 4, "ce")]),
    ("autoattack", E8, None, [("autoattack", E8, 0, 0.0, "autoattack")]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "eps", "start", "attacks"), TABLE, ids=[row[0] for row in TABLE])
def test_settings_are_those_of_the_paper_and_its_code(name, eps, start, attacks):
    protocol = PROTOCOLS[name]
    assert protocol.eps == eps
    found = [(attack.name, settle(attack, eps=eps)) for attack in protocol.attacks]
    assert found == [
        (attack, Settings(radius, steps, step, loss, None if loss == "autoattack" else start))
        for attack, radius, steps, step, loss in attacks
    ]


def test_every_protocol_is_in_the_table():
    assert set(PROTOCOLS) == {row[0] for row in TABLE}


def test_another_eps_scales_relative_step_sizes_only():
    by_name = {one.name: one.settings for one in unique_attacks(find(["dat"]), eps=0.1)}
    assert by_name["fgsm"].step_size == 0.1 and by_name["pgd20"].step_size == 0.025
    by_name = {one.name: one.settings for one in unique_attacks(find("figure"), eps=0.1)}
    assert by_name["pgd20"].step_size == 2 / 255 and by_name["pgd20-2eps"].eps == 0.2


def test_shared_attacks_run_once_and_different_ones_get_different_names():
    planned = unique_attacks(find(["dat", "trades-random", "trades"]))
    assert [one.name for one in planned] == [
        "fgsm@dat", "pgd20@dat", "pgd100@dat", "cw30@dat",  # one step of eps from a random start: also Table 3's FGSM
        "pgd20@trades-random", "pgd100@trades-random", "cw30@trades-random",
        "fgsm@trades", "pgd20@trades", "pgd100@trades", "cw30@trades",
    ]  # fmt: skip
    assert planned[0].serves == (("fgsm", "dat"), ("fgsm", "trades-random"))
    assert [one.name for one in unique_attacks(find(["dat", "autoattack"]))][-1] == "autoattack"
    assert [one.name for one in unique_attacks(find("dat"))] == ["fgsm", "pgd20", "pgd100", "cw30"]


def test_restarts_apply_to_random_starts_only():
    assert {one.settings.restarts for one in unique_attacks(find("dat"), restarts=5)} == {5}
    assert {one.settings.restarts for one in unique_attacks(find("trades"), restarts=5)} == {1}


@pytest.mark.parametrize(
    ("names", "eps", "says"),
    [
        ("trade", None, "unknown protocol 'trade'. Did you mean 'trades'?"),
        ([], None, "name at least one protocol"),
        ("dat", 8.0, "eps must lie in (0, 1], got 8.0. For 8/255 write 8/255."),
        ("figure", 0.6, "radius of pgd20-2eps"),
    ],
)
def test_bad_arguments_are_refused(names, eps, says):
    with pytest.raises(UserError) as refused:
        unique_attacks(find(names), eps=eps)
    assert says in str(refused.value)


def test_a_variant_is_one_replace():
    mine = replace(PROTOCOLS["mart"], name="mine", eps=0.05)
    assert unique_attacks(find([mine]))[1].settings.step_size == 0.05 / 10


def test_duplicate_names_are_refused():
    dat = PROTOCOLS["dat"]
    assert find([dat, "dat"]) == (dat,)
    with pytest.raises(UserError, match="two different protocols are called dat"):
        find([dat, replace(dat, eps=0.1)])
    pgd20 = dat.attacks[1]
    twice = replace(dat, attacks=(pgd20, replace(pgd20, steps=5)))
    with pytest.raises(UserError, match="protocol dat calls two different attacks pgd20"):
        unique_attacks([twice])
    assert [one.name for one in unique_attacks([replace(dat, attacks=(pgd20, pgd20))])] == ["pgd20"]
