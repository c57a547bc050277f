from __future__ import annotations

from sparring.errors import UserError, did_you_mean, unknown


def test_did_you_mean():
    assert did_you_mean("trian", ["train", "data"]) == " Did you mean 'train'?"
    assert did_you_mean("xyz", ["train"]) == ""


def test_unknown_names_all():
    error = unknown("recipe", "fatt", ["fat", "madry"])
    assert isinstance(error, UserError)
    assert str(error) == "unknown recipe 'fatt'. Did you mean 'fat'? Known: fat, madry."
