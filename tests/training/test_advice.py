"""Notes on settings that are probably not intended, for the command and for `sparring.train`."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

import sparring
from sparring.data import Dataset, Passing, Split, as_dataset, load
from sparring.recipes import RECIPES, find
from sparring.training.advice import notes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def black(count: int, *shape: int) -> Dataset:
    """A data set of so many black training images."""
    x = torch.zeros(1, *shape, dtype=torch.uint8).expand(count, *shape)
    return replace(load("digits"), train=Split(x, torch.zeros(count, dtype=torch.int64)))


@pytest.fixture(scope="module")
def cifar10() -> Dataset:
    return black(50_000, 3, 32, 32)


def test_recipes_have_no_notes(cifar10):
    for name, recipe in RECIPES.items():
        data = load("digits") if recipe.config.data == "digits" else cifar10
        assert not list(notes(recipe.config, data, CUDA)), name


def test_days_on_a_cpu(cifar10):
    (note,) = notes(find("fat-cifar10-resnet18").config, cifar10, CPU)
    assert re.fullmatch(r"on a CPU this takes about \d+ days\. Use a GPU, fewer epochs \(--epochs\), or .*\.", note)


def test_a_curriculum_that_cannot_finish(cifar10):
    (note,) = notes(replace(find("cat-cifar10-resnet18").config, epochs=30), cifar10, CUDA)
    assert note.startswith(
        "k grows at most every 11 epochs and cannot pass 3 of 10 in 30; use less patience (--attack.patience)"
    )


@pytest.mark.parametrize(
    ("total", "changes", "note"),
    [
        (
            1400,
            {"validation": 1000},
            "1,000 of 1,400 training images are held out for validation, 400 are trained on; fewer: validation=100 "
            "(--validation 100).",
        ),
        (50, {"validation": 11}, "11 of 50 .*, 39 are trained on; fewer: validation=5 "),
        (50, {"validation": 10}, None),
        (50, {"validation": 50}, None),  # refused later
        (9, {"validation": 2}, "fewer: validation=1 "),
        (1400, {"optimizer": "adamw"}, "a learning rate of 0.1 is SGD's: AdamW usually takes about 0.001 (lr, --lr)."),
        (1400, {"optimizer": "adam", "lr": "one-cycle:0.03"}, "a learning rate of 0.03 is SGD's: Adam usually"),
        (1400, {"optimizer": "adamw", "lr": 0.02}, None),
        (1400, {"objective": sparring.FAT(norm="l2", eps=15, step_size="eps/4"), "validation_eps": "eps"}, None),
        (
            1400,
            {"objective": sparring.FAT(norm="l2", eps=17, step_size="eps/4"), "validation_eps": "eps"},
            "eps 17 is longer than the diagonal of an image in L2 (16, the root of its 256 values), so ",
        ),
        (1400, {"augment": "crop-flip"}, None),
        (1400, {"augment": "crop:7"}, None),
        (
            1400,
            {"augment": "crop:8+flip"},
            "a crop after a padding of 8 pixels can leave a quarter or less of an image of 16x16; less padding: crop:2 "
            "in augment (--augment).",
        ),
    ],
)
def test_what_does_not_fit_the_images_or_the_optimiser(total, changes, note):
    config = replace(find("fat-digits").config, **{"lr": 0.1, "validation": min(120, total // 5), **changes})
    found = list(notes(config, black(total, 1, 16, 16), CUDA))
    if note is None:
        assert found == []
    else:
        (only,) = found
        assert all(part in only for part in note.split(".*")), only


def test_a_loader_holds_nothing_out():
    pairs = torch.utils.data.TensorDataset(torch.zeros(60, 1, 16, 16), torch.arange(60) % 10)
    often = torch.utils.data.WeightedRandomSampler(torch.ones(60), 60)
    data, name = as_dataset(torch.utils.data.DataLoader(pairs, batch_size=20, sampler=often))
    assert isinstance(data.train, Passing)
    assert not list(notes(replace(find("fat-digits").config, validation=50, data=name), data, CUDA))


def test_train_prints_the_notes_unless_told_not_to(tmp_path, capsys):
    fat = sparring.FAT(eps=0.1, step_size=0.2, steps=1)
    given = {"objective": fat, "epochs": 1, "batch_size": 256, "device": "cpu", "lr": "0.1,0.01@6"}
    sparring.train("fat-digits", tmp_path / "a", **given)
    said = capsys.readouterr().err.splitlines()
    assert said[:2] == [
        "note: a step of 0.2 is longer than the ball (0.1): lower step_size (--attack.step-size).",
        "note: lr 0.1,0.01@6 (--lr): @6 lies after the last epoch (1).",
    ]
    assert not said[2].startswith("note:")
    sparring.train(out=tmp_path / "a", resume=True, device="cpu")
    assert "note:" not in capsys.readouterr().err  # finished
    sparring.train("fat-digits", tmp_path / "b", progress=False, **given)
    assert capsys.readouterr() == ("", "")


def test_the_learning_rate_of_ones_own_optimiser_replaces_the_recipes(tmp_path, capsys):
    late = replace(find("fat-digits").config, objective=sparring.Standard(), validation_eps=0.3, batch_size=256)
    late = replace(late, epochs=1, lr="0.1,0.01@6", optimizer="adamw")
    assert len(list(notes(late, load("digits"), CPU))) == 2
    recipe = replace(late, lr=sparring.Config().lr)
    sparring.train(recipe, tmp_path / "run", optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), device="cpu")
    assert "note:" not in capsys.readouterr().err
