"""Every network: its size, cost, keys and shapes, and what an attack relies on."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from sparring.models import Normalize, build, count_parameters, forward_flops, list_models

# Published parameters and forward GMAC at 3x32x32, 10 classes
PUBLISHED = {
    "small_cnn": (1_639_282, 0.1335),
    "resnet18": (11_173_962, 0.5554),
    "preact_resnet18": (11_172_170, 0.5554),
    "wrn-28-10-silu": (36_479_194, 5.2433),
    "wrn-32-10": (46_160_474, 6.6589),
    "wrn-34-10": (46_160_474, 6.6589),
    "wrn-58-10": (84_885_594, 12.3212),
    "wrn-40-4": (8_949_210, 1.2986),
}
LIGHT = [
    "tiny_cnn",
    "small_cnn",
    "resnet18",
    "preact_resnet18",
    "wrn-10-1",
    "wrn-16-2",
    "wrn-10-1-silu",
]  # one of each kind, fast on a CPU


def meta(name: str, num_classes: int = 10, channels: int = 3, size: tuple[int, int] = (32, 32)) -> nn.Module:
    with torch.device("meta"):
        return build(name, num_classes=num_classes, channels=channels, size=size)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_and_cost_are_the_published_ones(name: str) -> None:
    parameters, gmac = PUBLISHED[name]
    model = meta(name)
    assert count_parameters(model) == parameters
    assert forward_flops(model, (1, 3, 32, 32)) / 2e9 == pytest.approx(gmac, abs=5e-5)


def test_every_listed_network_has_its_numbers_tested() -> None:
    assert set(list_models()) == {*PUBLISHED, "tiny_cnn"}


def test_tiny_cnn_is_tiny() -> None:
    assert count_parameters(build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))) == 48_058


def test_flops_grow_with_the_batch_and_leave_the_model_unchanged() -> None:
    model = build("resnet18", num_classes=10, size=(8, 8))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert model.training
    assert forward_flops(model, (7, 3, 8, 8)) == 7 * forward_flops(model, (1, 3, 8, 8))
    assert model.training
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_flops_of_any_module() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Flatten(), nn.Linear(3 * 5 * 5, 4)).double()
    assert forward_flops(model, (1, 2, 5, 5)) == 2 * (2 * 3 * 9 * 25 + 75 * 4)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize(
    ("channels", "size", "num_classes"), [(1, (8, 8), 10), (3, (9, 13), 2), (4, (17, 8), 7), (3, (33, 64), 101)]
)
def test_any_size_channels_and_classes(name: str, channels: int, size: tuple[int, int], num_classes: int) -> None:
    model = meta(name, num_classes, channels, size).eval()
    assert model(torch.empty(2, channels, *size, device="meta")).shape == (2, num_classes)


@pytest.mark.parametrize(
    ("name", "smallest"), [("tiny_cnn", 4), ("small_cnn", 8), ("resnet18", 8), ("wrn-16-2", 4), ("wrn-10-1", 4)]
)
def test_the_smallest_size_runs(name: str, smallest: int) -> None:
    model = build(name, num_classes=3, channels=2, size=(smallest, smallest)).eval()
    assert model(torch.rand(2, 2, smallest, smallest)).isfinite().all()


def test_small_cnn_equals_a_hand_written_forward() -> None:
    torch.manual_seed(0)
    model = build("small_cnn", num_classes=10).eval()
    x = torch.rand(2, 3, 32, 32)
    state = model.state_dict()
    h = x
    for block in (1, 2, 3):
        for conv in (1, 2):
            weight, bias = state[f"block{block}_conv{conv}.weight"], state[f"block{block}_conv{conv}.bias"]
            norm = f"batchnorm{block}_{conv}"
            h = F.conv2d(h, weight, bias, padding=1)
            h = F.batch_norm(
                h,
                state[f"{norm}.running_mean"],
                state[f"{norm}.running_var"],
                state[f"{norm}.weight"],
                state[f"{norm}.bias"],
            ).relu()
        h = F.max_pool2d(h, 2)
    h = F.linear(h.flatten(1), state["fc1.weight"], state["fc1.bias"]).relu()
    torch.testing.assert_close(model(x), F.linear(h, state["fc2.weight"], state["fc2.bias"]))


def test_pooling_equals_the_published_one_at_32x32() -> None:
    """Published code average-pools 4x4 (ResNet-18) and 8x8 (WRN) windows; at 32x32 each is the whole map."""
    x = torch.rand(2, 3, 32, 32)
    for name, last, window, relu in (("resnet18", "layer4", 4, False), ("wrn-10-2", "bn1", 8, True)):
        model = build(name, num_classes=10).eval()
        seen: list[torch.Tensor] = []
        model.get_submodule(last).register_forward_hook(lambda _m, _in, out, seen=seen: seen.append(out))
        logits = model(x)
        features = F.avg_pool2d(seen[0].relu() if relu else seen[0], window).flatten(1)
        head = model.get_submodule("linear" if name == "resnet18" else "fc")
        torch.testing.assert_close(logits, head(features))


def test_wrn_32_and_34_are_the_same_network() -> None:
    one, other = meta("wrn-32-10").state_dict(), meta("wrn-34-10").state_dict()
    assert [(key, value.shape) for key, value in one.items()] == [(key, value.shape) for key, value in other.items()]


def test_wrn_keys_are_the_published_ones() -> None:
    keys = list(meta("wrn-34-10").state_dict())
    weights = [key for key in keys if "running" not in key and "tracked" not in key]
    assert weights[:6] == [
        "conv1.weight",
        "block1.layer.0.bn1.weight",
        "block1.layer.0.bn1.bias",
        "block1.layer.0.conv1.weight",
        "block1.layer.0.bn2.weight",
        "block1.layer.0.bn2.bias",
    ]
    assert weights[-4:] == ["bn1.weight", "bn1.bias", "fc.weight", "fc.bias"]
    assert [key for key in keys if "Shortcut" in key] == [f"block{k}.layer.0.convShortcut.weight" for k in (1, 2, 3)]
    assert {key.split(".")[0] for key in keys} == {"conv1", "block1", "block2", "block3", "bn1", "fc"}
    assert not any("Shortcut" in key for key in meta("wrn-10-1").state_dict() if key.startswith("block1"))


def test_resnet_keys_are_the_published_ones() -> None:
    keys = list(meta("resnet18").state_dict())
    assert {key.split(".")[0] for key in keys} == {"conv1", "bn1", "layer1", "layer2", "layer3", "layer4", "linear"}
    block = [key for key in keys if key.startswith("layer2.0.") and key.endswith("weight")]
    names = ["conv1", "bn1", "conv2", "bn2", "shortcut.0", "shortcut.1"]
    assert block == [f"layer2.0.{name}.weight" for name in names]
    assert not any("shortcut" in key for key in keys if key.startswith(("layer1.", "layer2.1")))


def test_small_cnn_keys_are_those_of_the_authors() -> None:
    modules = {key.rsplit(".", 1)[0] for key in meta("small_cnn").state_dict()}
    pairs = [(block, index) for block in (1, 2, 3) for index in (1, 2)]
    expected = {f"block{b}_conv{i}" for b, i in pairs} | {f"batchnorm{b}_{i}" for b, i in pairs} | {"fc1", "fc2"}
    assert modules == expected


def test_wrn_block_shares_the_activation_only_where_the_width_changes() -> None:
    torch.manual_seed(0)
    model = build("wrn-16-2", num_classes=4).eval()
    widening, plain = model.get_submodule("block1.layer.0"), model.get_submodule("block1.layer.1")

    def branch(block: nn.Module, h: torch.Tensor) -> torch.Tensor:
        conv1, bn2, conv2 = (block.get_submodule(name) for name in ("conv1", "bn2", "conv2"))
        return conv2(bn2(conv1(h)).relu())

    x = torch.randn(2, 16, 8, 8)
    h = widening.get_submodule("bn1")(x).relu()
    expected = branch(widening, h) + widening.get_submodule("convShortcut")(h)
    torch.testing.assert_close(widening(x), expected)
    x = torch.randn(2, 32, 8, 8)
    torch.testing.assert_close(plain(x), branch(plain, plain.get_submodule("bn1")(x).relu()) + x)


def test_wrn_initialisation_is_the_published_one() -> None:
    torch.manual_seed(0)
    model = build("wrn-16-4", num_classes=10)
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels
            assert module.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.03)
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
            assert (module.bias == 0).all()
        if isinstance(module, nn.Linear):
            assert (module.bias == 0).all()


@pytest.mark.parametrize("name", LIGHT)
def test_same_seed_same_network(name: str) -> None:
    def make(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        return build(name, num_classes=5, size=(8, 8)).state_dict()

    one, again, other = make(1), make(1), make(2)
    assert all(torch.equal(one[key], again[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", LIGHT)
def test_in_eval_mode_examples_are_independent(name: str) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=5, size=(12, 12), normalize=([0.5] * 3, [0.25] * 3)).double()
    x = torch.rand(4, 3, 12, 12, dtype=torch.float64)
    with torch.no_grad():
        model.train()
        model(x)  # batch-norm statistics other than 0 and 1
        model.eval()
        torch.testing.assert_close(torch.cat([model(one[None]) for one in x]), model(x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", LIGHT)
@pytest.mark.parametrize("normalize", [None, ([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])])
def test_gradients_reach_the_pixels_and_every_parameter(
    name: str, normalize: tuple[list[float], list[float]] | None
) -> None:
    torch.manual_seed(0)
    model = build(name, num_classes=5, size=(16, 16), normalize=normalize)
    x = torch.rand(4, 3, 16, 16, requires_grad=True)
    F.cross_entropy(model(x), torch.arange(4)).backward()
    assert x.grad is not None
    assert (x.grad != 0).any()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", LIGHT)
def test_normalisation_is_the_first_layer_and_keeps_the_keys(name: str) -> None:
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    plain = build(name, num_classes=5, size=(16, 16)).eval()
    normal = build(name, num_classes=5, size=(16, 16), normalize=(mean, std)).eval()
    assert set(normal.state_dict()) - set(plain.state_dict()) == {"normalize.mean", "normalize.std"}
    assert count_parameters(normal) == count_parameters(plain)
    normal.load_state_dict(plain.state_dict(), strict=False)
    x = torch.rand(2, 3, 16, 16)
    by_hand = torch.stack([(x[:, c] - mean[c]) / std[c] for c in range(3)], dim=1)
    torch.testing.assert_close(normal(x), plain(by_hand))


def test_eps_in_pixels_is_eps_over_std_after_normalisation() -> None:
    layer = Normalize([0.4, 0.5], [0.2, 0.5])
    x, eps = torch.full((1, 2, 4, 4), 0.5), 8 / 255
    moved = layer(x + eps) - layer(x)
    torch.testing.assert_close(moved[0, 0], torch.full((4, 4), eps / 0.2))
    torch.testing.assert_close(moved[0, 1], torch.full((4, 4), eps / 0.5))
    assert "channels=2" in repr(layer)
