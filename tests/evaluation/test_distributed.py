"""An evaluation by several processes: the verdicts of one."""

from __future__ import annotations

import shutil
from functools import partial

import pytest
import torch

from sparring.data import load
from sparring.evaluation import autoattack, evaluate
from sparring.evaluation.cache import Ledger
from sparring.evaluation.subject import Subject
from sparring.shares import Share
from sparring.training.distributed import joined
from sparring.weights import load_model
from tests.evaluation.test_autoattack import Corner, corner_images, fake_part
from tests.training import group

PROTOCOLS = ["trades", "mart", "autoattack"]  # without and with a random start


def judged(store: str | None, protocols: list[str] = PROTOCOLS):
    """Verdicts of every attack, on this process's view of the whole."""
    test = load("digits").test
    with joined(torch.device("cpu")) as world:
        how = {"eps": 0.4, "limit": 14, "batch_size": 4, "store": store, "restarts": 2, "world": world}
        result = evaluate(load_model("fat-digits"), test.x, test.y, protocols, doubts=False, **how)
    return {record.name: record.correct.tolist() for record in result}


@pytest.fixture(scope="module")
def alone():
    return judged(None)


@pytest.mark.parametrize("size", [2, 3])
def test_verdicts_of_several_processes_are_those_of_one(tmp_path, alone, size):
    assert 0 < sum(alone["fgsm@trades"]) < len(alone["fgsm@trades"])  # some verdicts of each kind
    for member in group.run(size, judged, str(tmp_path / "store")):
        assert member == alone
    left = sorted(path.name for path in (tmp_path / "store").rglob("*.npz"))
    assert left and not [name for name in left if ".process" in name]
    # One process finds all verdicts of the group, and judges nothing again.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "enter", lambda *_: pytest.fail("judged again"))
        assert judged(str(tmp_path / "store")) == alone


def test_verdicts_that_a_stopped_group_left_are_taken_over(tmp_path):
    """A process that was killed leaves a file of its own, which the next start reads and removes."""
    found = judged(str(tmp_path), ["mart"])
    (pgd, *_) = [path for path in tmp_path.rglob("*.npz") if path.name.startswith("pgd20")]
    pgd.rename(pgd.with_suffix(".process1.npz"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "enter", lambda *_: pytest.fail("judged again"))
        assert judged(str(tmp_path), ["mart"]) == found
    assert pgd.exists() and not list(tmp_path.rglob("*.process1.npz"))


def in_bf16(store: str | None, *, stops: bool = False, breaks: frozenset[int] = frozenset({8})):
    """Verdicts of a fake AutoAttack with doubtful examples, and the calls of its first part in this process."""
    calls: list[tuple[str, bool, list[int]]] = []
    part = fake_part(calls, {"apgd-ce": {False: {1, 2, 8}, True: set(breaks)}})

    def stopped(name, model, *args, **more):
        if isinstance(model, torch.nn.Module):  # exact
            raise KeyboardInterrupt
        return part(name, model, *args, **more)

    with pytest.MonkeyPatch.context() as patch, joined(torch.device("cpu")) as world:
        patch.setattr(autoattack, "attack_part", stopped if stops else part)
        how = {"eps": 0.1, "precision": "bf16", "batch_size": 5, "store": store, "world": world}
        found = evaluate(Corner(), *corner_images(), "autoattack", doubts=False, **how)["autoattack"]
    first = [(numbers, exact) for name, exact, numbers in calls if name == "apgd-ce"]
    return found.correct.tolist(), found.detail["retried_in_fp32"], first


def test_what_a_stopped_group_found_doubtful_is_attacked_in_fp32_only(tmp_path):
    group.run(2, partial(in_bf16, stops=True), str(tmp_path / "one"))
    assert len(list((tmp_path / "one").rglob("*-apgd-ce*.npz"))) == 2  # one of each process
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    right, retried, whole = in_bf16(None)
    assert right == [number != 8 for number in range(10)] and retried == 3
    assert in_bf16(str(tmp_path / "one")) == (right, retried, [([1, 2], True), ([8], True)]) and len(whole) == 4
    members = group.run(2, in_bf16, str(tmp_path / "two"))
    assert members == [(right, retried, [([1, 2], True)]), (right, retried, [([8], True)])]


@pytest.mark.parametrize("size", [2, 3])
def test_what_any_process_finds_doubtful_is_attacked_in_fp32(size):
    """Also the examples of a process that gets none of the batches in fp32."""
    everything = partial(in_bf16, breaks=frozenset({1, 2, 8}))
    right, retried, _ = everything(None)
    assert right == [number not in (1, 2, 8) for number in range(10)] and retried == 3
    members = group.run(size, everything, None)
    assert [member[:2] for member in members] == [(right, retried)] * size
    assert sorted(batch for _, _, first in members for batch in first if batch[1]) == [([1, 2], True), ([8], True)]


def test_other_models_are_refused(tmp_path):
    found = group.run(2, judged_otherwise)
    assert all(kind == "UserError" and "another model or images than process 0" in text for kind, text, _ in found)


def judged_otherwise():
    test = load("digits").test
    with joined(torch.device("cpu")) as world:
        x = test.x[world.rank :]
        evaluate(load_model("fat-digits"), x, test.y[world.rank :], "quick", limit=20, world=world, doubts=False)


def test_a_process_out_of_memory_keeps_its_part_of_the_rows():
    x, y = torch.rand(20, 1, 2, 2), torch.zeros(20, dtype=torch.int64)
    seen = []
    for rank in range(3):
        subject = Subject(None, None, None, x, y, torch.device("cpu"), torch.float32, 1, "fp32", 4, Share(rank, 3), 4)
        fails = rank == 1

        def work(x, y, rows):
            nonlocal fails
            if fails:
                fails = False
                raise torch.OutOfMemoryError
            return rows

        for _ in range(2):  # the second attack begins with the smaller batch
            seen += [rows.tolist() for rows, _ in subject.each(torch.arange(20), work)]
            assert subject.count(torch.arange(20)) == 8 if rank < 2 else 4
    assert sorted(row for rows in seen for row in rows) == sorted([*range(20)] * 2)
