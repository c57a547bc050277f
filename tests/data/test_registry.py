import numpy as np
import pytest
import torch

from sparring.data import SOURCES, describe, load
from sparring.errors import UserError


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digit", "Did you mean 'digits'"),
        ("CIFAR-10", "Did you mean 'cifar10'"),
        ("cifar1000", "Did you mean 'cifar100'"),
        ("", "unknown data source ''"),
        ("fodler:/x", "Did you mean 'folder'"),
        ("npz", "Write npz:PATH"),
        ("folder:", "Write folder:PATH"),
        ("cifar10:/data", "takes no path"),
        ("digits:", "takes no path"),
        ("digits:3+x", "unknown class of digits 'x'"),
        ("digits:3", "at least two different classes"),
        ("digits:3+3", "at least two different classes"),
        ("own.npz", "write npz:own.npz"),
        ("folder:x?scale=32", "no option 'scale', only size"),
        ("folder:x?size=big", "number of pixels"),
        ("folder:x?size=0", "number of pixels"),
        ("folder:x?size=-3", "number of pixels"),
        ("folder:x?size=32", "no such folder: x"),
    ],
)
def test_an_unknown_name_suggests_the_nearest(spec, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load(spec, root=tmp_path)
    assert message in str(caught.value)


def test_a_path_without_its_prefix(tmp_path):
    with pytest.raises(UserError, match=f"write folder:{tmp_path}"):
        load(str(tmp_path))


def test_a_tilde_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    x, y = np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 0, 1])
    np.savez(tmp_path / "own.npz", x_train=x, y_train=y)
    assert len(load("npz:~/own.npz").train) == 2


def test_a_subset_of_the_classes():
    whole, two = load("digits"), load("digits:8+3")
    assert two.classes == ("8", "3") and two.num_classes == 2
    for part, all_of_it in ((two.train, whole.train), (two.test, whole.test)):
        for label, name in enumerate((8, 3)):
            assert torch.equal(part.x[part.y == label], all_of_it.x[all_of_it.y == name])
        assert len(part) == ((all_of_it.y == 8) | (all_of_it.y == 3)).sum()


def test_a_folder_name_may_contain_a_question_mark(tmp_path):
    (tmp_path / "what?size=3").mkdir()
    with pytest.raises(UserError, match="0 class folders"):
        load(f"folder:{tmp_path / 'what?size=3'}")


def test_describe_reports_what_is_present(tmp_path):
    rows = {row.name: row for row in describe(root=tmp_path)}
    assert {name.partition(":")[0] for name in rows} == set(SOURCES)
    assert rows["digits"].present and not rows["cifar10"].present
    assert rows["cifar10"].how == "sparring data fetch cifar10"
    (tmp_path / "cifar10").mkdir()
    (tmp_path / "cifar10" / "cifar10.npz").write_bytes(b"")
    assert {row.name: row for row in describe(root=tmp_path)}["cifar10"].present
