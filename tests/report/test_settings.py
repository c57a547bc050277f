"""What differs between runs, which runs differ in their seed alone, and their means."""

from __future__ import annotations

import pytest

from sparring.report.averages import averaged
from sparring.report.content import Method
from sparring.report.settings import by_seed, cell, common, differing, headings, mean

FAT = {"objective": "fat", "epochs": 3, "attack.eps": str(8 / 255), "attack.tau": "0", "seed": 0}
MADRY = {"objective": "madry", "epochs": 3, "attack.eps": str(8 / 255), "seed": 1}


def test_what_differs_and_what_is_common():
    other = {**FAT, "attack.tau": "0,1@40%", "crop": [1, 2], "seed": 5}
    assert differing([FAT, other]) == ["attack.tau"]  # one run alone has a crop: nothing to compare it with
    assert differing([FAT, MADRY]) == ["objective"] and differing([FAT]) == differing([]) == []
    assert differing([other, {**other, "crop": [1, 3]}]) == ["crop"]
    assert common([FAT, MADRY]) == {"epochs": "3", "attack.eps": "8/255", "attack.tau": "0"}
    assert cell(FAT, "attack.eps") == "8/255" and cell(MADRY, "attack.tau") == ""


def test_headings_are_short_where_they_are_clear():
    assert headings(["attack.step_size", "lr"]) == {"attack.step_size": "step size", "lr": "lr"}
    assert headings(["attack.noise", "noise"]) == {"attack.noise": "attack.noise", "noise": "noise"}


def test_runs_that_differ_in_the_seed_alone_are_together():
    runs = [(FAT, "a"), (MADRY, "b"), ({**FAT, "seed": 1}, "c"), ({**FAT, "epochs": 4}, "d"), (FAT, "again")]
    assert by_seed(runs) == [["a", "c"], ["b"], ["d"], ["again"]]  # the same seed twice is not two seeds
    assert by_seed([({}, "one result"), ({}, "another")]) == [["one result"], ["another"]]


def test_means_and_deviations():
    assert mean([0.5]) == (0.5, None)
    assert mean([0.25, 0.75]) == (0.5, pytest.approx(0.35355, abs=1e-4))


def test_a_method_under_several_seeds():
    def method(seed, level, *, aside=(), doubts=()):
        history = [{"epoch": e, "natural": level, "tau": None, "one_class": True} for e in (1, 2)]
        accuracies = {"Natural": level, **dict.fromkeys(aside, 0.1)}
        by_class = {"Natural": {"cat": level, "dog": 1.0}}
        return Method("m", f"fat, seed {seed}", accuracies, 2 * level, 10.0, history, doubts=doubts, by_class=by_class)

    found = averaged([method(3, 0.25, aside=["FGSM"]), method(4, 0.75, doubts=["odd"])], [3, 4])
    assert found.about == "fat, mean ± standard deviation of seeds 3, 4"
    assert found.accuracies == {"Natural": 0.5} and found.spread["Natural"] == pytest.approx(0.35355, abs=1e-4)
    assert found.backprops == 1.0 and found.history[1] == {"epoch": 2, "natural": 0.5}
    assert found.bands[0]["natural"] == pytest.approx(0.35355, abs=1e-4)
    assert found.doubts == ["odd (seed 4)"] and found.by_class == {"Natural": {"cat": 0.5, "dog": 1.0}}
    alone = method(3, 0.25)
    assert averaged([alone], [3]) is alone
