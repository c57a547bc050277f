from __future__ import annotations

import pickle

from sparring.errors import UserError, did_you_mean, unknown


def test_did_you_mean():
    assert did_you_mean("trian", ["train", "data"]) == " Did you mean 'train'?"
    assert did_you_mean("xyz", ["train"]) == ""


def test_a_message_is_one_line():
    assert str(UserError("got [[1]\n [2]], in  a b.\n Give one.")) == "got [[1] [2]], in  a b. Give one."
    assert str(pickle.loads(pickle.dumps(UserError("a\nb")))) == "a b"


def test_unknown_names_all():
    error = unknown("recipe", "fatt", ["fat", "madry"])
    assert isinstance(error, UserError)
    assert str(error) == "unknown recipe 'fatt'. Did you mean 'fat'? Known: fat, madry."
