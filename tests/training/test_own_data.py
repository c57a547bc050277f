"""The loop on data of the caller's own: the same run from every kind, exact resume, clear refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import sparring
from sparring.data import as_dataset, load, stream
from sparring.errors import UserError
from sparring.training import checkpoint, loop, run_folder
from sparring.training.config import with_objective
from sparring.training.loop import Interrupted
from tests.data.test_own import Noisy
from tests.training.test_loop import TIMES, same_run


@pytest.fixture(scope="module")
def digits():
    train = load("digits").train
    return train.x[:200], train.y[:200]


@pytest.fixture(scope="module")
def tiny(small):
    """Two epochs of four steps."""
    return with_objective(replace(small, epochs=2, batch_size=50, validation=30), steps=1)


class Flow(IterableDataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __iter__(self):
        return iter(zip(self.x.float() / 255, self.y.tolist(), strict=True))


def in_two_parts(run, moment):
    """Call `run` until step `moment`, then resume it."""
    steps = iter(range(1000))
    with pytest.raises(Interrupted) as stopped:
        run(stop=lambda: next(steps) == moment - 1)
    run(resume=True)
    return str(stopped.value)


def metrics(folder):
    return [{k: v for k, v in record.items() if k not in TIMES} for record in run_folder.read_metrics(folder)]


def test_every_kind_and_place_is_the_same_run(tmp_path, tiny, digits, monkeypatch, capsys):
    x, y = digits
    floats = x.float() / 255
    train = partial(sparring.train, tiny, device="cpu")
    train(tmp_path / "tensors", data=(x, y))
    assert "note: images handed in as tensors; no test part" in capsys.readouterr().err
    train(tmp_path / "loader", data=DataLoader(TensorDataset(floats, y), batch_size=7, shuffle=True))
    same_run(tmp_path / "tensors", tmp_path / "loader")
    assert run_folder.open_run(tmp_path / "loader").config.data == "own:loader"
    monkeypatch.setattr("sparring.data.own.host_room", lambda: 100)
    train(tmp_path / "dataset", data=TensorDataset(floats, y))
    same_run(tmp_path / "tensors", tmp_path / "dataset")
    monkeypatch.setattr(loop, "images_of", partial(loop.images_of, room=0))
    train(tmp_path / "host", data=((x.numpy(), y.numpy()), (x, y)))
    same_run(tmp_path / "tensors", tmp_path / "host")


@pytest.mark.parametrize("kind", ["host", "random", "extra", "cutmix"])
def test_exact_resume_within_an_epoch(tmp_path, tiny, digits, kind, monkeypatch):
    x, y = digits
    config, data = replace(tiny, augment="crop-flip+cutout:2"), as_dataset((x, y))[0]
    if kind == "host":
        monkeypatch.setattr(loop, "images_of", partial(loop.images_of, room=0))
    elif kind == "random":
        data, _ = as_dataset(Noisy_of(x, y))
        assert isinstance(data.train, stream.Rows)
    elif kind == "extra":
        np.savez(tmp_path / "more.npz", x_train=x[:90].numpy(), y_train=y[:90].numpy())
        config = replace(config, extra=f"npz:{tmp_path / 'more.npz'}", extra_fraction=0.4)
    else:
        config = replace(config, augment="crop-flip+cutmix:1.0")
    run = partial(loop.train, config, data=data, tensorboard=False)
    run(tmp_path / "whole")
    said = in_two_parts(partial(run, tmp_path / "parts"), 2)
    assert said.endswith("in epoch 1 after step 2; saved")
    same_run(tmp_path / "whole", tmp_path / "parts")
    if kind == "extra":
        assert run_folder.open_run(tmp_path / "whole").images == run_folder.open_run(tmp_path / "parts").images
        assert len(run_folder.open_run(tmp_path / "whole").images.split("+")) == 2
        assert len(run_folder.read_metrics(tmp_path / "whole")) == 2
        np.savez(tmp_path / "more.npz", x_train=x[90:180].numpy(), y_train=y[90:180].numpy())
        with pytest.raises(UserError, match="the training images of digits differ"):
            run(tmp_path / "whole", resume=True)


def Noisy_of(x, y):
    noisy = Noisy(x)
    noisy.count, noisy.y = len(x), y
    return noisy


def test_batches_that_pass_by_train_and_resume_at_epochs(tmp_path, tiny, digits, capsys):
    x, y = digits
    loader, test = DataLoader(Flow(x, y), batch_size=50), (x[:80], y[:80])
    config = tiny
    train = partial(loop.train, config, data=as_dataset((loader, test))[0], tensorboard=False)
    train(tmp_path / "whole")
    said = in_two_parts(partial(train, tmp_path / "parts"), 6)
    assert said.endswith("in epoch 2 after step 2; the last checkpoint is that of epoch 1")
    same_run(tmp_path / "whole", tmp_path / "parts")
    assert metrics(tmp_path / "whole")[0]["natural"] >= 0
    # A checkpoint from within an epoch, as map-style data leave it, cannot be continued.
    last = checkpoint.load(tmp_path / "parts" / run_folder.LAST)
    facts = last.facts | {"step": 2, "epoch": 1}
    run_folder.open_run(tmp_path / "parts").save(run_folder.LAST, last.tensors, facts)
    with pytest.raises(UserError, match="cannot start there"):
        train(tmp_path / "parts", resume=True)
    sparring.train(tiny, tmp_path / "python", data=loader, device="cpu")
    assert run_folder.open_run(tmp_path / "python").config.batch_size == 50
    assert "because of its IterableDataset" in capsys.readouterr().err
    with pytest.raises(UserError, match="Leave out batch_size"):
        sparring.train(tiny, tmp_path / "other", data=loader, batch_size=60)


class Dwindling(Flow):
    """100 images when it is counted and in epoch 1, then 51: in batches of 50 the last one holds one image."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        count = 100 if self.passes < 4 else 51
        return iter(list(super().__iter__())[:count])


def test_a_batch_of_one_image_is_refused_before_batch_norm(tmp_path, tiny, digits):
    x, y = digits
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    train = partial(sparring.train, tiny, device="cpu", progress=False)
    loader, test = DataLoader(Flow(x[:101], y[:101]), batch_size=50), (x[:80], y[:80])
    with pytest.raises(UserError, match=r"a batch of the loader holds one image, and batch-norm needs two\. Give"):
        train(tmp_path / "run", model=net, data=(loader, test))
    assert not (tmp_path / "run").exists()
    train(tmp_path / "plain", model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), data=(loader, test))
    later = DataLoader(Dwindling(x, y), batch_size=50)
    with pytest.raises(UserError, match="batch 2 of epoch 2 holds one image, and batch-norm needs two"):
        train(tmp_path / "later", model=net, data=(later, test))


def test_resume_with_other_data_is_refused(tmp_path, tiny, digits):
    x, y = digits
    one = replace(tiny, epochs=1)
    sparring.train(one, tmp_path / "run", data=(x, y), device="cpu")
    with pytest.raises(UserError, match="training images of own:tensors differ"):
        sparring.train(one, tmp_path / "run", data=(255 - x, y), device="cpu", resume=True)
    sparring.train(one, tmp_path / "run", data=TensorDataset(x, y), device="cpu", resume=True)  # the same images
    with pytest.raises(UserError, match="handed in from Python"):
        load(run_folder.open_run(tmp_path / "run").config.data)


def test_normalisation_of_streamed_images(tmp_path, tiny, digits):
    x, y = digits
    facts = [
        loop.model_facts(replace(tiny, normalize=True), as_dataset(given, room=room)[0])["normalize"]
        for given, room in (((x, y), None), (TensorDataset(x, y), 100))
    ]
    assert np.allclose(facts[0], facts[1])


def test_cutmix_is_learned_from_mixed_labels(tiny, digits):
    from sparring.data import training_batches

    config = replace(tiny, augment="cutmix:1.0", label_smoothing=0.1)
    batch = next(iter(training_batches(as_dataset(digits)[0].train, 50, seed=0, epoch=1, augment="cutmix:1.0")))
    target = loop.targets(config, 10)(batch)
    rows = torch.arange(50)
    mixed = batch.y != batch.other
    assert torch.allclose(target[rows, batch.y][mixed], 0.9 * batch.share[mixed] + 0.01)
    assert torch.allclose(target.sum(1), torch.ones(50)) and torch.equal(target[mixed].argmax(1), batch.y[mixed])
    plain = loop.targets(replace(config, augment="none", label_smoothing=0.0), 10)(batch)
    assert plain is batch.y


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"extra": "cifar10"}, "extra must be npz:FILE"),
        ({"extra": "npz:"}, "extra must be npz:FILE"),
        ({"extra": "npz:a.npz", "extra_fraction": 1.0}, "extra_fraction must lie in"),
        ({"extra_fraction": "0.7"}, "extra_fraction must lie in"),
        ({"extra_fraction": 0.5}, "extra_fraction 0.5 is a share of extra images. Give them"),
        ({"augment": "crop-flip+cutmx:1"}, "Did you mean 'cutmix'"),
    ],
)
def test_wrong_settings(tiny, changes, says):
    with pytest.raises(UserError, match=says):
        replace(tiny, **changes)


def test_old_configurations_still_open(tmp_path, tiny):
    from sparring.training.config import from_json, to_json

    written = json.loads(json.dumps(to_json(tiny)))
    for name in ("extra", "extra_fraction"):
        del written[name]
    assert from_json(written) == tiny


def test_streamed_and_mixed_images_train_alike_with_the_fast_engine(tmp_path, tiny, digits):
    """Captured steps run uncaptured on a CPU: the weights agree up to rounding."""
    config = replace(tiny, epochs=1, augment="cutmix:1.0")
    data, _ = as_dataset(TensorDataset(*digits), room=100)
    plain, fast = (
        loop.train(config, tmp_path / kind, data=data, tensorboard=False, engine=kind).state_dict()
        for kind in ("plain", "fast")
    )
    assert all(torch.allclose(plain[name], fast[name], rtol=1e-2, atol=1e-3) for name in plain)
