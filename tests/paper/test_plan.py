"""Jobs and their states: what is missing, shared and chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sparring.data import load
from sparring.errors import UserError
from sparring.paper import results
from sparring.paper.plan import chosen, key, state
from sparring.training import loop as training
from tests.paper.tiny import COURSE, FAT, TABLE, planned


def test_a_run_is_named_by_its_configuration(tmp_path):
    table, course = planned(TABLE, tmp_path), planned(COURSE, tmp_path)
    assert table[1].folder == course[0].folder  # trained once for both items
    assert len({job.folder for job in table}) == 2
    assert key(FAT) != key(replace(FAT, seed=1)) != key(replace(FAT, weight_decay=1e-4))
    assert key(replace(FAT, data="cifar10:bird+deer")).startswith("cifar10-bird+deer-")


def test_full_scale_has_as_many_seeds_as_the_paper(tmp_path):
    assert [job.seed for job in planned(TABLE, tmp_path, scale="full")] == [0, 1, 2]
    assert [job.seed for job in planned(TABLE, tmp_path)] == [0, 0]
    asked = planned(TABLE, tmp_path, seeds=(5, 7), rows=("fat",))
    assert [(job.seed, job.config.seed) for job in asked] == [(5, 5), (7, 7)]
    assert len({job.path for job in asked}) == len({job.folder for job in asked}) == 2


def test_rows_are_chosen_by_pattern():
    names = lambda scale, *patterns: [row.name for row in chosen(TABLE, scale, patterns)]  # noqa: E731
    assert names("lite") == ["madry", "fat"]
    assert names("full") == ["fat"]
    assert names("lite", "f*") == ["fat"]
    assert names("lite", "fat", "m*") == ["madry", "fat"]
    with pytest.raises(UserError, match=r"no row 'mardy' at scale lite. Did you mean 'madry'\? Known: madry, fat"):
        names("lite", "fat", "mardy")
    with pytest.raises(UserError, match="no row 'madry' at scale full"):
        names("full", "madry")


def test_the_states_of_a_job(tmp_path, measured):
    (job,) = planned(COURSE, tmp_path)
    assert state(job) == "missing"
    steps = iter(range(100))
    with pytest.raises(training.Interrupted):
        training.train(job.config, job.folder, data=load("digits"), stop=lambda: next(steps) > 1, tensorboard=False)
    assert state(job) == "interrupted"
    training.train(job.config, job.folder, data=load("digits"), resume=True, tensorboard=False)
    assert state(job) == "trained"
    (done,) = planned(COURSE, measured)
    assert state(done) == "measured"


def test_a_result_on_fewer_images_never_replaces_a_full_one(measured):
    whole, less = planned(TABLE, measured)[0], planned(TABLE, measured, limit=12)[0]
    assert (state(whole), state(less)) == ("measured", "trained")
    assert whole.folder == less.folder and less.path.parent == whole.path.parent / "limit12"


def test_a_field_that_a_file_lacks_counts_as_its_default(measured, tmp_path):
    """So a new field leaves existing results valid."""
    (theirs,), (ours,) = planned(COURSE, measured), planned(COURSE, tmp_path)
    found = results.read(theirs.path)
    del found["config"]["weight_decay"]
    results.write(ours.path, found)
    default = replace(FAT, weight_decay=2e-4)  # the default; FAT has another
    assert results.trained_by(found, default) and not results.trained_by(found, FAT)
    assert state(ours) == "missing"
    found["config"]["no_such_field"] = 1
    assert not results.trained_by(found, default)


def test_a_result_with_another_declaration_does_not_count(tmp_path, measured):
    (theirs,) = planned(COURSE, measured)
    (ours,) = planned(COURSE, tmp_path)
    found = results.read(theirs.path)
    found["config"]["weight_decay"] = 1.0
    results.write(ours.path, found)
    assert state(ours) == "missing"
