"""A GPU is woken by a thread; a CPU is awake."""

from __future__ import annotations

import threading

import torch

from sparring.cli.train import pick_device
from sparring.engine import waking


def test_only_a_gpu_is_woken(monkeypatch):
    woken, done = [], threading.Event()

    def first_use(device):
        woken.append((device, threading.current_thread()))
        done.set()

    monkeypatch.setattr(waking, "first_use", first_use)
    waking.wake(torch.device("cpu"))
    assert not woken
    waking.wake(torch.device("cuda:1"))
    assert done.wait(10)
    assert woken[0][0] == torch.device("cuda:1") and woken[0][1] is not threading.main_thread()


def test_it_leaves_no_trace_and_no_error(monkeypatch):
    before = torch.get_rng_state()
    waking.first_use(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), before)

    def broken(*args, **kwargs):
        raise RuntimeError("CUDA driver initialization failed")

    monkeypatch.setattr(torch, "zeros", broken)
    waking.first_use(torch.device("cpu"))  # the caller's own use says it


def test_a_command_that_takes_a_gpu_wakes_it(monkeypatch):
    woken = []
    monkeypatch.setattr("sparring.cli.train.wake", woken.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [pick_device(name).type for name in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda", "cpu"]
    assert woken == [torch.device("cuda"), torch.device("cuda:1"), torch.device("cpu")]
