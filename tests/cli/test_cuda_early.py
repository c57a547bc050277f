"""The CUDA driver is initialised early for commands that use a GPU, and for no others."""

from __future__ import annotations

import pytest

from sparring.cli import cuda_early, main


class Driver:
    """A fake libcuda: records its calls, and fails at `broken`."""

    def __init__(self, broken: str = "") -> None:
        self.called: list[tuple[str, int]] = []
        self.broken = broken

    def cuInit(self, flags):
        return self._record("cuInit", flags)

    def cuDeviceGet(self, place, number):
        place._obj.value = 40 + number
        return self._record("cuDeviceGet", number)

    def cuDevicePrimaryCtxRetain(self, place, device):
        return self._record("cuDevicePrimaryCtxRetain", device.value)

    def _record(self, name, number):
        self.called.append((name, number))
        return 100 if name == self.broken else 0


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ("train fat-digits", 0),
        ("bench --device auto", 0),
        ("evaluate runs/a --device cuda", 0),
        ("train fat-digits --device cuda:3 --epochs 2", 3),
        ("train fat-digits --device=cuda:1", 1),
    ],
)
def test_the_context_of_the_chosen_gpu_is_created(words, number):
    driver = Driver()
    cuda_early.start(words.split(), lambda name: driver).join()
    assert driver.called == [("cuInit", 0), ("cuDeviceGet", number), ("cuDevicePrimaryCtxRetain", 40 + number)]


@pytest.mark.parametrize(
    "words",
    [
        "",
        "recipes",
        "reproduce table1 --at-once 4",
        "train --help",
        "bench -h",
        "train fat-digits --device cpu",
        "evaluate runs/a --device=cpu",
        "train fat-digits --device mps",
    ],
)
def test_other_commands_do_not_touch_the_driver(words):
    assert cuda_early.start(words.split(), pytest.fail) is None


def test_a_process_of_torchrun_leaves_the_choice_to_torch(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert cuda_early.start(["train", "fat-digits"], pytest.fail) is None


def test_a_missing_or_broken_driver_raises_nothing():
    def missing(name):
        raise OSError(name)

    cuda_early.context(0, missing)
    cuda_early.context(0, lambda name: object())  # a library that lacks the calls
    for broken, calls in (("cuInit", 1), ("cuDeviceGet", 2), ("cuDevicePrimaryCtxRetain", 3)):
        driver = Driver(broken)
        cuda_early.context(0, lambda name, driver=driver: driver)
        assert len(driver.called) == calls


def test_the_driver_starts_before_the_commands_module_is_imported(monkeypatch, capsys):
    order = []
    monkeypatch.setattr(cuda_early, "start", lambda words: order.append(("start", words)))
    monkeypatch.setattr("sparring.cli.importlib.import_module", lambda name: order.append(name) or Command)
    assert main(["train", "fat-digits"]) == 0
    assert order == [("start", ["train", "fat-digits"]), "sparring.cli.train"]


class Command:
    """A fake command module."""

    @staticmethod
    def run(words):
        return 0
