"""Evaluation in L2: radii, steps, starts, AutoAttack, the cache and the records."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from sparring.errors import UserError
from sparring.evaluation import PGDAttack, Protocol, Result, evaluate
from sparring.evaluation.protocols import PROTOCOLS, find, unique_attacks
from sparring.evaluation.starts import Starts

TWO = Protocol("two", "", 0.1, (PGDAttack("pgd5", 5, 0.025), PGDAttack("cw5", 5, 0.025, loss="cw")))


def test_every_protocol_scales_its_steps_with_an_l2_radius():
    for name, protocol in PROTOCOLS.items():
        here = {attack.name: attack.settings for attack in unique_attacks(find(name), eps=0.5, norm="l2")}
        paper = {attack.name: attack.settings for attack in unique_attacks(find(name))}
        for attack, settings in here.items():
            assert settings.norm == "l2" and paper[attack].norm == "linf"
            assert settings.eps == pytest.approx(paper[attack].eps / protocol.eps * 0.5)
            if settings.steps:
                assert settings.step_size / 0.5 == pytest.approx(paper[attack].step_size / protocol.eps)


def test_a_radius_must_be_given_and_may_exceed_one(trained):
    given = (trained.model, trained.x[:20], trained.y[:20])
    with pytest.raises(
        UserError, match=r"the radius 0.031 of the protocol dat is one in linf. Give one for l2: eps=0.5"
    ):
        evaluate(*given, "dat", norm="l2")
    with pytest.raises(UserError, match="unknown norm 'l3'"):
        evaluate(*given, TWO, norm="l3")
    result = evaluate(*given, TWO, eps=2.0, norm="l2", doubts=False)
    assert result["pgd5"].eps == 2.0 and result["pgd5"].step_size == pytest.approx(0.5)


def test_records_hold_the_norm_and_old_files_are_linf(trained, tmp_path):
    given = (trained.model, trained.x[:40], trained.y[:40])
    result = evaluate(*given, TWO, eps=0.8, norm="l2", doubts=False, store=tmp_path)
    assert {record.norm for record in result} == {"l2"} and "0.8 (L2)" in repr(result["pgd5"])
    assert {record["norm"] for record in json.loads(result.to_json())["records"]} == {"l2"}
    assert {record.norm for record in Result.from_json(result.to_json())} == {"l2"}
    old = json.loads(result.to_json())
    for record in old["records"]:
        del record["norm"]
    assert {record.norm for record in Result.from_json(json.dumps(old))} == {"linf"}
    # The store keeps the norms apart.
    other = evaluate(*given, TWO, eps=0.8, doubts=False, store=tmp_path)
    assert {record.norm for record in other} == {"linf"} and other["pgd5"].accuracy < result["pgd5"].accuracy
    again = evaluate(*given, TWO, eps=0.8, norm="l2", doubts=False, store=tmp_path)
    assert torch.equal(again["pgd5"].correct, result["pgd5"].correct)
    assert again["pgd5"].seconds == result["pgd5"].seconds  # read, not run again


def test_starts_lie_in_the_ball_and_belong_to_the_example():
    x = torch.rand(300, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    begin = Starts("uniform", eps=0.7, seed=0, purpose="pgd", norm="l2")
    whole = begin(x, torch.arange(300))
    length = (whole - x).flatten(1).norm(dim=1)
    assert length.max() <= 0.7 + 1e-6 and length.mean() > 0.3
    rows = torch.tensor([3, 255, 256, 299])
    assert torch.equal(begin(x[rows], rows), whole[rows])


def test_autoattack_in_l2_is_the_packages():
    from pyautoattack import AutoAttack

    from sparring.attacks.autoattack import attack_part

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = (
            nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 10)).eval().requires_grad_(False)
        )
    x = torch.rand(12, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    y = model(x).argmax(dim=1)
    claims = {part: attack_part(part, model, x, y, eps=0.35, norm="l2") for part in ("apgd-ce", "fab-t")}
    for claim in claims.values():
        assert (claim.x_adv - x).flatten(1).norm(dim=1).max() <= 0.35 + 1e-5
        wrong = model(claim.x_adv).argmax(dim=1) != y
        assert torch.equal(wrong, claim.claimed) and 0 < wrong.sum() < 12
    package = AutoAttack(model, norm="L2", eps=0.35, device="cpu", seed=0)
    package.apgd.loss = "ce"
    with torch.random.fork_rng():
        theirs = package.apgd.perturb(x, y)
    assert torch.allclose(claims["apgd-ce"].x_adv, theirs, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"limit": "10"}, "limit must be a whole number, got '10'"),
        ({"seeds": "2"}, "seeds must be a whole number, got '2'"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, got 2.5"),
        ({"x": [[0.0]]}, "x must be a tensor or an array, got list."),
        ({"y": [0]}, "4 images and 1 labels. Give one label per image."),
        ({"eps": "0.3"}, "eps must"),
    ],
)
def test_wrong_types_are_named_in_one_line(trained, given, says):
    default = {"x": trained.x[:4], "y": trained.y[:4], "protocol": TWO, "doubts": False}
    with pytest.raises(UserError) as refused:
        evaluate(trained.model, **{**default, **given})
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_one_based_labels_are_named(trained):
    with pytest.raises(
        UserError, match="labels run from 1 to 10, the model has 10 classes numbered 0 to 9: subtract 1"
    ):
        evaluate(trained.model, trained.x, trained.y + 1, TWO)


def test_logits_that_are_not_finite_are_a_doubt_of_their_own(trained):
    def broken(x):
        return trained.model(x) * torch.nan

    result = evaluate(broken, trained.x[:50], trained.y[:50], TWO)
    assert [doubt["name"] for doubt in result.doubts] == ["logits-not-finite"]
    assert "logits are not finite for 50 of 50 images" in result.doubts[0]["evidence"]
    assert result.worst_case.accuracy == 0
