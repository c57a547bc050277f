"""The FastAT Benchmark's protocol: friendly training and its baselines beside its methods, on two data sets.

Theirs (arXiv 2604.22853): ResNet-18, 100 epochs, batch 128, SGD with one cycle to 0.1, weight decay 5e-4, crop and
flip, 1,000 images held out, an average of the weights (0.9995) and label smoothing where a method has them, three
seeds. Ours is the same but for a peak learning rate of 0.2, and label smoothing in one row alone. `fast` is the recipe
as it is, which shares nothing of the protocol but the network and the evaluation. On Tiny ImageNet (64x64, 200 classes)
the network is PreActResNet-18. `lite` is 15 epochs on CIFAR-10 and 30 on Tiny ImageNet.
"""

from __future__ import annotations

from dataclasses import replace

from sparring.paper.specs.fastat_published import CIFAR10, TINY_IMAGENET
from sparring.paper.specs.item import Item, Robustness, Row
from sparring.recipes import cifar10
from sparring.schedules import parse
from sparring.training.config import Config, with_objective

EPOCHS, LITE_EPOCHS, TINY_LITE_EPOCHS = 100, 15, 30
COLUMNS = {"Natural": "natural", "PGD-10": "pgd10", "PGD-20": "pgd20", "PGD-50": "pgd50", "AutoAttack": "autoattack"}
TINY = "tiny-imagenet"
_MEASURE = Robustness("fastat", autoattack=10_000)


def protocol(config: Config) -> Config:
    """The same method trained by the benchmark's protocol; schedules of the method (tau) keep their fractions."""
    return replace(
        config,
        epochs=EPOCHS,
        batch_size=128,
        lr=parse("one-cycle:0.2"),  # theirs: 0.1
        weight_decay=5e-4,
        ema=0.9995,
    )


def _short(config: Config, ema: float, epochs: int = LITE_EPOCHS) -> Config:
    """The lite version. The average remembers the same share of the training."""
    return replace(config, epochs=epochs, ema=ema)


def _row(name: str, label: str, config: Config, against: str = "") -> Row:
    full = protocol(config)
    lite = _short(full, 0.998, TINY_LITE_EPOCHS) if config.data == TINY else _short(full, 0.997)
    return Row(name, label, _MEASURE, {"full": full, "lite": lite}, against=against)


def _tiny(config: Config) -> Config:
    return replace(config, data=TINY, model="preact_resnet18")


# tau up to 3, as 100 epochs with an average of the weights allow: earlier and further than Table 1's.
FAT = with_objective(cifar10.FAT, tau="0,1@30%,2@50%,3@70%")

SMOOTHED = replace(cifar10.MADRY, label_smoothing=0.4)  # as their most robust row, PGD-AT-WA, has it

FASTAT = Item(
    name="fastat",
    where="FastAT Benchmark (arXiv 2604.22853)",
    title="Friendly training by the protocol of a public benchmark (ResNet-18, CIFAR-10)",
    claim="Where does friendly training stand among the methods of a public benchmark, in natural accuracy, under "
    "AutoAttack and in seconds? None of its 21 methods is friendly training.",
    kind="benchmark",
    rows=(
        _row("madry", "Madry", cifar10.MADRY),
        _row("madry-smoothing", "Madry, smoothing 0.4", SMOOTHED, against="madry"),
        _row("fat", "FAT", FAT, against="madry"),
        _row("trades", "TRADES", cifar10.TRADES),
        _row("fat-trades", "FAT for TRADES", cifar10.FAT_FOR_TRADES, against="trades"),
        _row("mart", "MART", cifar10.MART),
        _row("fat-mart", "FAT for MART", cifar10.FAT_FOR_MART, against="mart"),
        Row("fast", "fast recipe", _MEASURE, {"full": cifar10.FAST, "lite": _short(cifar10.FAST, 0.99)}),
    ),
    lite=f"{LITE_EPOCHS} epochs, the average of the weights shortened in proportion (0.997; fast recipe 0.99)",
    columns=COLUMNS,
    others=CIFAR10,
    note="Ours: peak learning rate 0.2 (theirs 0.1), label smoothing where the row says so, bf16. The fast recipe has "
    "its own schedule: 45 epochs, batch 256, K 5.",
)

FASTAT_TINY = Item(
    name="fastat-tiny",
    where="FastAT Benchmark (arXiv 2604.22853), Tiny ImageNet",
    title="Friendly training by the protocol of a public benchmark (PreActResNet-18, Tiny ImageNet)",
    claim="Where does friendly training stand among the methods of a public benchmark on 64x64 images of 200 classes, "
    "in natural accuracy, under AutoAttack and in seconds? None of its 20 methods is friendly training.",
    kind="benchmark",
    rows=(
        _row("madry", "Madry", _tiny(cifar10.MADRY)),
        _row("fat", "FAT", _tiny(FAT), against="madry"),
    ),
    lite=f"{TINY_LITE_EPOCHS} epochs, the average of the weights shortened in proportion (0.998)",
    columns=COLUMNS,
    others=TINY_IMAGENET,
    note="Ours: peak learning rate 0.2 (theirs 0.1), no label smoothing, bf16; the 10,000 validation images serve as "
    "test images, as the test labels are not public.",
)

BENCHMARKS = (FASTAT, FASTAT_TINY)
