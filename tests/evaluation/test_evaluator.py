from __future__ import annotations

import copy
import io
import json
import re
from dataclasses import replace

import pytest
import torch
from rich.console import Console
from torch import nn

from sparring.attacks import ball, pgd
from sparring.errors import RunFailed, UserError
from sparring.evaluation import PROTOCOLS, Part, PGDAttack, Protocol, Result, evaluate
from sparring.evaluation import evaluator as measuring
from sparring.evaluation.sanity import measure

pytestmark = pytest.mark.usefixtures("untouched")
EPS = 0.15
SMALL = Protocol(
    "small",
    "a few steps",
    EPS,
    (PGDAttack("fgsm", 1, Part(1)), PGDAttack("pgd5", 5, Part(4)), PGDAttack("cw5", 5, Part(4), loss="cw"),
     PGDAttack("pgd5-2eps", 5, Part(4), times_eps=2.0)),
)  # fmt: skip
FIXED = Protocol("fixed", "no randomness", EPS, (PGDAttack("pgd5", 5, Part(4), start=None),))


def run(trained, protocol=SMALL, **more) -> Result:
    return evaluate(trained.model, trained.x, trained.y, protocol, **{"doubts": False, **more})


def same(one: Result, other: Result) -> bool:
    return list(one.records) == list(other.records) and all(
        torch.equal(a.correct, b.correct) for a, b in zip(one, other, strict=True)
    )


def test_accuracy_is_taken_at_the_final_iterate(trained):
    result = run(trained, FIXED)
    x_adv = pgd(trained.model, trained.x, trained.y, eps=EPS, step_size=EPS / 4, steps=5, start=None)
    with torch.no_grad():
        natural, attacked = (trained.model(x).argmax(1) == trained.y for x in (trained.x, x_adv))
    assert torch.equal(result["natural"].correct, natural)
    assert torch.equal(result["pgd5"].correct, attacked)
    assert result["pgd5"].accuracy == attacked.double().mean()
    assert 0.1 < result["pgd5"].accuracy < result["natural"].accuracy


class Ledge(nn.Module):
    """One pixel, two classes. Class 0 wins below 0.1 only, and from 0.4 the margin loss increases downwards."""

    def forward(self, x):
        value = x.flatten(1)[:, 0]
        return torch.stack([torch.where(value < 0.1, 1.0 + 0 * value, value), 0.5 + 0 * value], dim=1)


def test_an_example_corrected_by_an_attack_is_still_wrong_in_the_worst_case():
    """Wrong without attack, correct at the final iterate: correct for the attack, as in the authors' code."""
    jump = Protocol("jump", "", 0.5, (PGDAttack("down", 1, 0.5, loss="cw", start=None),))
    result = evaluate(Ledge(), torch.full((1, 1, 1, 1), 0.4), torch.tensor([0]), jump, doubts=False)
    assert not result["natural"].correct.item()
    assert result["down"].correct.item()
    assert not result["worst"].correct.item()


def test_the_worst_case_is_per_example_and_inside_the_ball(trained):
    result = run(trained, seeds=2)
    inside = ["natural", "fgsm", "pgd5", "cw5"]
    runs = [one.correct for name in inside for one in result[name].repeats]
    assert torch.equal(result.worst_case.correct, torch.stack(runs).all(0))
    assert result["worst"] is result.worst_case and result["worst"].detail["over"] == inside
    assert result["worst"].accuracy <= min(result[name].worst for name in inside)
    assert result["pgd5-2eps"].accuracy < result["worst"].accuracy  # a larger ball, not part of this worst case


def test_protocols_of_different_radius_have_their_own_worst_case(trained):
    wide = replace(SMALL, name="wide", eps=0.2)
    result = run(trained, [SMALL, wide])
    assert {"worst", "worst@0.15", "pgd5@small", "pgd5@wide"} <= set(result.records)
    assert result["worst"].eps == 0.2 and "pgd5@small" in result["worst"].detail["over"]
    assert result["worst"].accuracy <= result["worst@0.15"].accuracy


def test_shared_attacks_are_computed_once(trained, monkeypatch):
    count = []
    real = measuring.pgd_from
    monkeypatch.setattr(measuring, "pgd_from", lambda *a, **k: count.append(1) or real(*a, **k))
    result = run(trained, [SMALL, replace(SMALL, name="again")])
    assert len(count) == len(SMALL.attacks)
    assert result["pgd5"] is result["pgd5@small"] is result["pgd5@again"]


@pytest.mark.parametrize("batch", [7, 64])
def test_verdicts_do_not_depend_on_batch_size_or_limit(trained, batch):
    model = copy.deepcopy(trained.model).double()
    given = {"x": trained.x[:80].double(), "y": trained.y[:80], "protocol": SMALL, "restarts": 2, "doubts": False}
    whole = evaluate(model, **given)
    assert whole["pgd5"].precision == "fp64"
    assert same(whole, evaluate(model, **given, batch_size=batch))
    first = evaluate(model, **given, limit=20)
    assert all(torch.equal(record.correct, whole[record.name].correct[:20]) for record in first)


def test_seeds_give_mean_and_spread(trained):
    result = run(trained, [SMALL, FIXED], seeds=3, seed=5)
    record = result["pgd5@small"]
    assert record.seeds == (5, 6, 7) and record.seed == 5
    accuracies = torch.tensor([one.accuracy for one in record.repeats], dtype=torch.float64)
    assert record.accuracy == pytest.approx(accuracies.mean().item())
    assert record.spread == pytest.approx(accuracies.std().item())
    assert record.worst <= accuracies.min()
    assert not all(torch.equal(record.repeats[0].correct, one.correct) for one in record.repeats)
    assert result["pgd5@fixed"].seeds == (5,) and result["pgd5@fixed"].spread is None
    again = run(trained, SMALL, seed=6)
    assert torch.equal(again["pgd5"].correct, record.repeats[1].correct)


def test_restarts_can_only_break_more(trained):
    one, four = run(trained), run(trained, restarts=4)
    assert (four["pgd5"].correct <= one["pgd5"].correct).all()
    assert four["pgd5"].accuracy < one["pgd5"].accuracy
    assert four["pgd5"].restarts == 4


def test_bf16_gradients_and_fp32_verdicts(trained, monkeypatch):
    judged = []
    real = measuring.is_correct
    monkeypatch.setattr(
        measuring, "is_correct", lambda model, x, y: judged.append((model, x.dtype)) or real(model, x, y)
    )
    fp32, bf16 = run(trained), run(trained, precision="bf16")
    assert all(model is trained.model and dtype == torch.float32 for model, dtype in judged)
    assert torch.equal(fp32["natural"].correct, bf16["natural"].correct)
    assert bf16["pgd5"].precision == "bf16" and bf16["natural"].precision == "fp32"
    assert abs(fp32["pgd5"].accuracy - bf16["pgd5"].accuracy) <= 0.02
    assert abs(fp32["worst"].accuracy - bf16["worst"].accuracy) <= 0.02


def test_uint8_images_are_the_same_images(trained):
    pixels = (trained.x * 255).round().to(torch.uint8)
    assert same(
        evaluate(trained.model, pixels, trained.y, SMALL, doubts=False),
        evaluate(trained.model, pixels.float() / 255, trained.y, SMALL, doubts=False),
    )


def test_a_model_in_train_mode_is_judged_in_eval_mode_and_left_as_it_was(trained):
    model = copy.deepcopy(trained.model).train()
    model.fc.eval()
    model.fc.weight.requires_grad_(False)
    result = evaluate(model, trained.x, trained.y, SMALL, doubts=False)
    assert same(result, run(trained))
    assert model.training and not model.fc.training
    assert not model.fc.weight.requires_grad and model.fc.bias.requires_grad
    for name, value in trained.model.state_dict().items():
        assert torch.equal(value, model.state_dict()[name])


def test_works_under_no_grad_and_inference_mode(trained):
    plain = run(trained)
    with torch.no_grad():
        assert same(plain, run(trained))
    with torch.inference_mode():
        assert same(plain, run(trained))


def test_every_result_records_its_settings(trained):
    record = run(trained, restarts=2)["pgd5"]
    facts = (record.n, record.eps, record.steps, record.step_size, record.loss, record.start, record.restarts)
    assert facts == (200, EPS, 5, EPS / 4, "ce", "uniform", 2)
    assert record.precision == "fp32" and record.seconds > 0 and record.correct.device.type == "cpu"


def test_json_round_trip(trained):
    result = run(trained, seeds=2, about={"model": "tiny"})
    text = result.to_json()
    again = Result.from_json(text)
    assert again.to_json() == text and same(result, again)
    plain = json.loads(text)
    assert {"sparring", "torch", "python", "device", "pyautoattack"} <= set(plain["software"])
    keys = {"name", "accuracy", "n", "eps", "steps", "step_size", "loss", "start", "restarts", "precision", "seconds"}
    assert all(keys <= set(record) for record in plain["records"])
    assert plain["records"][1]["eps"] == EPS and len(plain["records"][1]["runs"][1]["correct"]) == 200


def test_the_table_fits_a_terminal(trained):
    console = Console(width=80, file=io.StringIO())
    console.print(run(trained, seeds=2, restarts=2).table())
    text = console.file.getvalue()
    assert "…" not in text and "pgd5-2eps" in text and "5 of 0.0375" in text and "± seeds" in text and "uniform" in text


def test_an_unknown_attack_suggests_the_nearest(trained):
    with pytest.raises(KeyError, match="Did you mean 'pgd5'"):
        run(trained)["pgd"]


def test_quick_is_limited_to_500_images(trained):
    x, y = trained.x.repeat(3, 1, 1, 1), trained.y.repeat(3)
    assert evaluate(trained.model, x, y, "quick", doubts=False).n == 500
    assert evaluate(trained.model, x, y, "quick", doubts=False, limit=550).n == 550
    assert evaluate(trained.model, x, y, ["quick", FIXED], doubts=False).n == 600


def test_a_batch_that_does_not_fit_is_halved(trained):
    class Tight(nn.Module):
        def __init__(self, most):
            super().__init__()
            self.inner, self.most = trained.model, most

        def forward(self, x):
            if len(x) > self.most:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return self.inner(x)

    assert same(run(trained), evaluate(Tight(30), trained.x, trained.y, SMALL, doubts=False))
    assert evaluate(Tight(30), trained.x, trained.y, SMALL).n == len(trained.x)  # the checks halve theirs, too
    with pytest.raises(RunFailed, match="do not fit into the memory"):
        evaluate(Tight(0), trained.x, trained.y, SMALL, doubts=False)


REFUSED = [
    ({"limit": 0}, "limit must be at least 1 image"),
    ({"seeds": 0}, "seeds must be at least 1"),
    ({"restarts": 0}, "restarts must be at least 1"),
    ({"batch_size": 0}, "batch_size must be at least 1"),
    ({"precision": "fp16"}, "unknown precision 'fp16'"),
    ({"precision": "fp8"}, "must be fp32 or bf16, got 'fp8': eight bits are for training"),
    ({"eps": torch.full((4,), 0.1)}, "eps must be one number here, got a tensor"),
    ({"eps": 8}, "For 8/255 write 8/255"),
    ({"protocol": "pgd"}, "unknown protocol 'pgd'"),
    ({"protocol": None}, "protocol must be a name, or several, got None"),
    ({"protocol": ("dat", 3)}, "protocol must be a name, or several"),
    ({"model": "fat-digits"}, "Load it first: sparring.load_model('fat-digits')"),
    ({"model": torch.nn.Linear}, "model is the class Linear"),
    ({"model": None}, "model must map images to logits"),
    ({"seed": 1.5}, "a seed must be a whole number"),
    ({"seed": "x"}, "a seed must be a whole number"),
    ({"store": 3}, "store must be the path of a folder, got int"),
    ({"about": 3}, "about must be a dict"),
    ({"about": {"model": object()}}, "about must hold what JSON can"),
    ({"about": {"classes": 10}}, "about cannot be kept: classes must be a list"),
    ({"about": {"facts": {"epoch": "last"}}}, "about cannot be kept: facts: epoch must be a whole number"),
    ({"x": "digits"}, "x must be a tensor or an array, got str"),
    ({"x": torch.rand(4, 3, 8, 8)}, "does not accept images of shape (3, 8, 8)"),
    ({"x": torch.rand(4, 1, 8, 8) * 255}, "Divide by 255"),
    ({"x": torch.rand(3, 1, 8, 8)}, "one label per image"),
    ({"x": torch.rand(1, 8, 8), "y": torch.tensor(3)}, "got shapes (1, 8, 8) and (). Of a single image give x[None]"),
    ({"y": torch.tensor([0, 1, 2, 10])}, "the model has 10 classes, labels 0 to 9; found labels 0 to 10"),
    ({"y": torch.tensor([0, 1, 2, -1])}, "found -1"),
    ({"y": torch.zeros(4)}, "Convert with y.long()"),
    ({"x": torch.zeros(0, 1, 8, 8), "y": torch.zeros(0).long()}, "no images"),
]


@pytest.mark.parametrize(("given", "says"), REFUSED, ids=[says[:20] for _, says in REFUSED])
def test_bad_arguments_are_refused_in_one_line(trained, given, says):
    default = {"x": trained.x[:4], "y": trained.y[:4], "protocol": FIXED, "doubts": False}
    with pytest.raises(UserError) as refused:
        evaluate(**{"model": trained.model, **default, **given})
    assert says in str(refused.value) and "\n" not in str(refused.value)


def test_half_precision_weights_are_refused(trained):
    with pytest.raises(UserError, match=r"Call model\.float\(\) first"):
        evaluate(copy.deepcopy(trained.model).bfloat16(), trained.x, trained.y, FIXED, doubts=False)


def test_the_final_point_is_in_the_ball(trained, monkeypatch):
    points = []
    real = measuring.is_correct
    monkeypatch.setattr(measuring, "is_correct", lambda model, x, y: points.append(x) or real(model, x, y))
    run(trained, replace(FIXED, attacks=PROTOCOLS["dat"].attacks[:2]))
    for x_adv in points[1:]:
        assert torch.equal(x_adv, ball.project(x_adv, trained.x, EPS))
        assert (x_adv - trained.x).abs().max() <= EPS + 1e-6


def test_doubts_are_part_of_the_result(trained):
    class Sure(nn.Module):
        """Probabilities where logits are expected."""

        def forward(self, x):
            return trained.model(x).softmax(dim=1)

    result = evaluate(Sure(), trained.x[:60], trained.y[:60], [FIXED, replace(SMALL, name="other")])
    assert "probabilities-not-logits" in {doubt["name"] for doubt in result.doubts}
    assert all(set(doubt) == {"name", "why", "evidence", "page"} for doubt in result.doubts)
    assert Result.from_json(result.to_json()).doubts == result.doubts
    console = Console(width=200, file=io.StringIO())
    console.print(result.table())
    assert "Doubt: probabilities-not-logits" in console.file.getvalue()
    assert "\n  sparring evaluate --explain probabilities-not-logits\n" in re.sub(" +\n", "\n", console.file.getvalue())
    assert result.doubts[0]["page"] == f"sparring evaluate --explain {result.doubts[0]['name']}"


def test_the_sanity_checks_get_the_worst_case_too(trained, monkeypatch):
    """Of two attacks with one name the checks compare the first, but images that the second broke count as broken."""
    given = []
    monkeypatch.setattr(measure, "doubts", lambda *args, correct, **more: given.append(correct) or [])
    result = evaluate(trained.model, trained.x[:50], trained.y[:50], ["dat", "mart"], eps=0.1)
    assert result["pgd20@dat"].name != result["pgd20@mart"].name
    assert torch.equal(given[0]["pgd20"], result["pgd20@dat"].correct)
    assert torch.equal(given[0]["worst"], result["worst"].correct)
