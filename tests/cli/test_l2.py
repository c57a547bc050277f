"""L2 from the command line: train, evaluate, report, bound."""

from __future__ import annotations

import json

import pytest

from sparring.training import run_folder
from sparring.training.config import flat_used
from tests.cli.conftest import QUICK


@pytest.fixture(scope="module")
def run_in_l2(tmp_path_factory):
    from sparring.cli import main

    folder = tmp_path_factory.mktemp("l2") / "run"
    words = [*QUICK, "--attack.norm", "l2", "--attack.eps", "1.5", "--out", str(folder)]
    assert main(["train", *words]) == 0
    return folder


def test_one_flag_moves_steps_and_validation(run_in_l2):
    config = run_folder.open_run(run_in_l2).config
    assert config.objective.norm == "l2" and config.validation_radius == 1.5
    assert config.objective.step_size == "eps/4" and config.validation_eps == "eps"


def test_a_run_is_measured_as_it_was_trained(run_in_l2, sparring):
    done = sparring("evaluate", str(run_in_l2), "--protocol", "quick", "--limit", "20", "--no-doubts")
    assert done.code == 0 and "in the ball of radius 1.5 in l2" in done.out and "1.5 (L2)" in done.out
    written = json.loads((run_in_l2 / "evaluation" / "quick-l2-eps1.5-limit20.json").read_text())
    assert {record["norm"] for record in written["records"]} == {"l2"}
    other = sparring(
        "evaluate", str(run_in_l2), "--protocol", "quick", "--limit", "20", "--no-doubts", "--norm", "linf"
    )
    assert "note: trained in l2, measured in linf." in other.out and "8/255" in other.out


def test_the_page_names_the_norm(run_in_l2, sparring, tmp_path):
    sparring("evaluate", str(run_in_l2), "--protocol", "quick", "--limit", "20", "--no-doubts", "--eps", "0.75")
    done = sparring("report", str(run_in_l2), "--out", str(tmp_path / "page.html"))
    assert done.code == 0 and "0.75 (L2)" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_what_l2_lacks_is_said_in_one_line(run_in_l2, sparring):
    sparring("bound", str(run_in_l2)).user_error("was trained in l2, and the bound is measured in linf only")
    file = str(run_in_l2 / "last.safetensors")
    sparring("evaluate", file, "--norm", "l3").user_error("'l3'")


def test_another_norm_needs_a_radius_of_its_own(sparring, tmp_path):
    done = sparring("train", *QUICK, "--attack.norm", "l2", "--out", tmp_path / "run")
    done.user_error("the radius 0.3 of fat-digits is one in linf. Give one for l2: --attack.eps 0.5.")
    assert not (tmp_path / "run").exists()
    sparring("train", *QUICK, "--attack.norm", "l2", "--attack.eps=3/10", "--epochs", "0").user_error("epochs must be")


def test_eps_alone_moves_the_step_and_the_validation(sparring, tmp_path):
    done = sparring("train", *QUICK, "--epochs", "1", "--attack.eps", "0.2", "--out", tmp_path / "run")
    assert done.code == 0 and "under PGD-10 at eps 0.2" in done.out + done.err
    used = flat_used(run_folder.open_run(tmp_path / "run").config)
    assert (used["attack.step_size"], used["validation_eps"]) == (0.05, 0.2)


def test_step_sizes_and_radii_are_checked(sparring):
    sparring("train", "fat-digits", "--attack.step-size", "eps/x").user_error("a part of eps such as 'eps/4'")
    sparring("train", "fat-digits", "--validation-eps", "epsilon").user_error(
        "validation_eps must be a number or 'eps'"
    )
    sparring("train", "fat-digits", "--attack.eps", "3").user_error("Only an L2 radius may exceed 1")
