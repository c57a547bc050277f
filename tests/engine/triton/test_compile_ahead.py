"""Kernels are compiled side by side before they run: all that will be launched, and nothing is run for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")

import triton

from sparring.engine.attack.folded import fold
from sparring.engine.manual import fused_ops, read_chain, wide_resnet
from sparring.engine.triton import batch_norm, conv, first_layer, pointwise, pooling
from sparring.engine.triton.compile_ahead import compiling, launch
from sparring.engine.update import fuse_bn
from sparring.models import build


class Kernel:
    """Stands for a kernel: notes how it was called, and computes nothing."""

    def __init__(self):
        self.ran, self.compiled = set(), set()

    def __getitem__(self, grid):
        return lambda *args, **named: self.ran.add(self.kind(args, named))

    def warmup(self, *args, grid, **named):
        self.compiled.add(self.kind(args, named))

    @staticmethod
    def kind(args, named):
        """What a kernel is compiled for: types, and what is a number in the code. Here also the sizes, to be strict."""
        return (*(arg.dtype if isinstance(arg, torch.Tensor) else arg for arg in args), *sorted(named.items()))


@pytest.mark.parametrize("old", [False, True])
def test_a_kernel_runs_unless_it_is_only_to_be_compiled(old, monkeypatch):
    if old:
        monkeypatch.delattr(triton, "AsyncCompileMode")
    kernel = Kernel()
    launch(kernel, (1,), 1)
    with compiling():
        launch(kernel, (1,), 2, warps=4)
    with pytest.raises(ValueError, match="stop"), compiling():
        raise ValueError("stop")
    launch(kernel, (1,), 3)
    assert kernel.ran == {(1,), (3,)} and kernel.compiled == {(2, ("warps", 4))}


@pytest.mark.parametrize("name", ["wrn-16-2", "wrn-10-1"])
def test_what_lies_between_convolutions_was_compiled_before(name, monkeypatch):
    for found in ("kernels_for", "pointwise_for"):
        monkeypatch.setattr(wide_resnet, found, lambda device: pointwise)
    kernels = {"_norm_relu": Kernel(), "_norm_relu_back": Kernel()}
    for kernel in kernels:
        monkeypatch.setattr(pointwise, kernel, kernels[kernel])
    monkeypatch.setattr(pointwise, "_relu_back", Kernel())
    manual = fold(build(name, num_classes=10).eval(), dtype=torch.float32, fused=True).manual
    manual.compile_for((8,), (3, 8, 8))
    logits, values = manual.forward(torch.rand(4, 3, 8, 8), torch.arange(4))
    for among in (None, torch.zeros(2, dtype=torch.int32)):
        manual.back(torch.zeros_like(logits), values, among)
    for kernel, flags in ((kernels["_norm_relu"], 4), (kernels["_norm_relu_back"], 5)):  # behind the number of pixels
        assert {given[-flags:] for given in kernel.compiled} == {given[-flags:] for given in kernel.ran} != set()


LAUNCHED = (
    (conv, "_conv"),
    (first_layer, "_stem"),
    (first_layer, "_taps"),
    (first_layer, "_to_pixels"),
    (pooling, "_max_pool"),
)


@pytest.mark.parametrize("name", ["resnet18", "small_cnn"])
def test_what_a_step_launches_was_compiled_before(name, monkeypatch):
    monkeypatch.setattr(read_chain, "convolutions_for", lambda device: (conv, first_layer, pooling))
    kernels = {}
    for module, kernel in LAUNCHED:
        kernels[kernel] = Kernel()
        monkeypatch.setattr(module, kernel, kernels[kernel])
    manual = fold(build(name, num_classes=10).eval(), dtype=torch.bfloat16, fused=True).manual
    cudnn = []
    monkeypatch.setattr(fused_ops.F, "conv2d", lambda *args, **kwargs: cudnn.append("forward"))
    monkeypatch.setattr(fused_ops, "input_gradient", lambda *args: cudnn.append("back"))
    manual.compile_for((8, 32, 8), (3, 32, 32))
    assert not cudnn and not any(kernel.ran for kernel in kernels.values())
    monkeypatch.undo()
    for module, kernel in LAUNCHED:
        monkeypatch.setattr(module, kernel, kernels[kernel])
    x = torch.zeros(40, 3, 32, 32)
    for size in (8, 32):
        logits, values = manual.forward(x, torch.arange(size))
        output_gradient = torch.zeros_like(logits)
        manual.back(output_gradient, values, among=torch.arange(size, dtype=torch.int32))
        first_layer.to_pixels(manual.back(output_gradient, values), manual.stem.weight, 3)
    for kernel in kernels.values():
        assert kernel.compiled == kernel.ran
    assert kernels["_conv"].ran and kernels["_stem"].ran and kernels["_to_pixels"].ran


@pytest.mark.parametrize("name", ["resnet18", "small_cnn"])
def test_what_an_update_launches_was_compiled_before(name, monkeypatch):
    kernels = {}
    names = [(batch_norm, kernel) for kernel in ("_statistics", "_apply", "_back_sums", "_back_apply")]
    for module, kernel in (*names, (pooling, "_max_pool")):
        kernels[kernel] = Kernel()
        monkeypatch.setattr(module, kernel, kernels[kernel])
    model = build(name, num_classes=10).to(memory_format=torch.channels_last).train()
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    x = torch.rand(2, 3, 32, 32)
    fuse_bn.compile_for(graph, x)
    assert not any(kernel.ran for kernel in kernels.values())
    torch.autograd.grad(graph(x).sum(), list(model.parameters()))
    for kernel in kernels.values():
        assert kernel.compiled == kernel.ran and (kernel.ran or name == "resnet18")


FOR_A_GPU = """
from types import SimpleNamespace
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0,
    get_current_stream=lambda device=None: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
))
from sparring.engine.attack.folded import fold
from sparring.engine.manual import read_chain, wide_resnet
from sparring.engine.triton import batch_norm, conv, first_layer, pointwise, pooling
from sparring.engine.update import fuse_bn
from sparring.models import build
from tests.engine.networks import Chain, Residual
read_chain.convolutions_for = lambda device: (conv, first_layer, pooling)
fold(Residual().eval(), dtype=torch.bfloat16, fused=True).manual.compile_for((128,), (3, 32, 32))
wide_resnet.kernels_for = wide_resnet.pointwise_for = lambda device: pointwise
fold(build("wrn-10-1", num_classes=10).eval(), dtype=torch.bfloat16, fused=True).manual.compile_for((8,), (3, 32, 32))
x, among = torch.empty(2, 64, 4, 4, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.int32)
for more, chosen in ((True, False), (False, True)):
    pointwise._relu_back.warmup(x, x, x, among if chosen else x, x, 1024, more, chosen, 1024, grid=(2,))
pointwise._scale.warmup(torch.zeros(1, 7, dtype=torch.int64), torch.zeros(1), True, 256, grid=(1,))
trained = Chain().to(torch.bfloat16, memory_format=torch.channels_last).train()
for layer in trained.modules():
    if isinstance(layer, torch.nn.BatchNorm2d):
        layer.float()
fuse_bn.compile_for(fuse_bn.fuse(trained, batch_norm, pooling), torch.rand(8, 3, 14, 14).bfloat16())
in_norm = (batch_norm._statistics, batch_norm._apply, batch_norm._back_sums, batch_norm._back_apply)
between = (pointwise._relu_back, pointwise._norm_relu, pointwise._norm_relu_back, pointwise._scale)
ends = (first_layer._stem, first_layer._taps, first_layer._to_pixels)
for kernel in (conv._conv, *ends, *in_norm, pooling._max_pool, *between):
    assert kernel.device_caches[0][0], kernel
    for made in kernel.device_caches[0][0].values():
        assert made.asm["cubin"], kernel
        if kernel in (batch_norm._statistics, batch_norm._back_sums):  # the last program sees what all have written
            code = made.asm["ptx"]
            assert code.index("bar.sync") < code.index("atom.global.gpu.acq_rel") < code.index("ld.global.cg"), code
        print(kernel.__name__, made.metadata.shared)
"""


def test_the_kernels_compile_for_the_gpu_they_are_made_for(tmp_path):
    """For an H200, without one; and they fit into a processor's shared memory (227 KiB)."""
    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton compiles for no NVIDIA GPU; that of pip install -e '.[dev]' does")
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", FOR_A_GPU]
    root = Path(__file__).parents[3]
    made = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=root)
    assert made.returncode == 0, made.stderr[-2000:]
    lines = [line.split() for line in made.stdout.splitlines()]
    assert sum(name == "_conv" for name, _ in lines) > 3
    assert all(int(shared) <= 227 * 1024 for _, shared in lines)
