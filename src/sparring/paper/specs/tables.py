"""Tables 1 to 4: the paper's rows with its numbers, and what is trained at each scale.

`full` is the paper's setting: wide ResNets, its epochs, its number of seeds. `lite` (`scales`) is 30 epochs of one
cycle in batches of 256, with ResNet-18 for WRN-32/34-10 and WRN-34-10 for WRN-58-10: it keeps every comparison within a
table, but not the level of accuracy. Both hold out 1,000 training images (the paper none) and report the last epoch,
like the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from sparring.paper.specs.item import Item, Measure, Robustness, Row, Scale, published
from sparring.paper.specs.scales import CYCLE, TABLE_EPOCHS, one_cycle
from sparring.recipes import cifar10
from sparring.schedules import constant
from sparring.training.config import Config, with_objective

AUTOATTACK = 1000  # images
WIDE = constant(16 / 255)  # the authors' code has 0.062
LITE = (
    f"ResNet-18 for WRN-32/34-10, WRN-34-10 for WRN-58-10; {TABLE_EPOCHS} epochs of {CYCLE}; tau at the paper's "
    "fractions of training"
)

FIVE = {"Natural": "natural", "FGSM": "fgsm", "PGD-20": "pgd20", "C&W": "cw30", "PGD-100": "pgd100"}
FOUR = {name: FIVE[name] for name in ("Natural", "FGSM", "PGD-20", "C&W")}
WITH_AUTOATTACK = {"AutoAttack": "autoattack"}

# CAT adds a PGD step after `patience` epochs without progress; in 30 epochs it adds enough of them only at 1.
CAT_LITE = with_objective(cifar10.CAT, patience=1)
TRADES_1 = with_objective(cifar10.TRADES, beta=1.0)
FAT_FOR_TRADES_1 = with_objective(cifar10.FAT_FOR_TRADES, beta=1.0)


def wide(config: Config) -> Config:
    """The same at eps 16/255; the step size stays 0.007."""
    return with_objective(config, eps=WIDE)


def scales(config: Config, model: str, short: Config | None = None) -> dict[Scale, Config | None]:
    """A row's configurations: the paper's network and epochs, and the lite version."""
    smaller = "wrn-34-10" if model == "wrn-58-10" else "resnet18"
    return {
        "full": replace(config, model=model),
        "lite": one_cycle(replace(short or config, model=smaller), TABLE_EPOCHS),
    }


def _row(name: str, label: str, config: Config, model: str, measure: Measure, line: str) -> Row:
    columns = FIVE if len(line.split()) == 5 else FOUR
    return Row(name, label, measure, scales(config, model), published(line, columns), group=model)


def _larger(model: str, method: str, label: str, config: Config, measure: Measure, line: str) -> Row:
    """A row of a table with two networks; the name says if it is the larger one."""
    if model == "wrn-58-10":
        return _row(f"{method}-larger", f"{label}, larger", config, model, measure, line)
    return _row(method, label, config, model, measure, line)


def _against(baselines: Mapping[str, str], rows: Iterable[Row]) -> tuple[Row, ...]:
    """The rows, each with its baseline."""
    return tuple(replace(row, against=baselines.get(row.name, "")) for row in rows)


_DAT, _TRADES = Robustness("dat", AUTOATTACK), Robustness("trades", AUTOATTACK)
_RANDOM, _MART = Robustness("trades-random", AUTOATTACK), Robustness("mart", AUTOATTACK)

TABLE1 = Item(
    name="table1",
    where="Table 1",
    title="FAT against Madry, CAT and DAT (WRN-32-10, CIFAR-10)",
    claim="FAT has the highest natural accuracy; trained at 16/255 it is also the most robust.",
    kind="table",
    rows=_against(
        {"fat-8": "madry", "fat-16": "madry"},
        (
            _row("madry", "Madry", cifar10.MADRY, "wrn-32-10", _DAT, "87.30 56.10 45.80 46.80 -"),
            Row(
                "cat",
                "CAT",
                _DAT,
                scales(cifar10.CAT, "wrn-32-10", CAT_LITE),
                published("77.43 57.17 46.06 42.28 -", FIVE),
                group="wrn-32-10",
            ),
            _row("dat", "DAT", cifar10.DAT, "wrn-32-10", _DAT, "85.03 63.53 48.70 47.27 -"),
            _row(
                "fat-8",
                "FAT 8/255",
                cifar10.FAT,
                "wrn-32-10",
                _DAT,
                "89.34±0.221 65.52±0.355 46.13±0.409 46.82±0.517 45.31±0.531",
            ),
            _row(
                "fat-16",
                "FAT 16/255",
                wide(cifar10.FAT),
                "wrn-32-10",
                _DAT,
                "87.00±0.203 65.94±0.244 49.86±0.328 48.65±0.176 49.56±0.255",
            ),
        ),
    ),
    lite=f"{LITE}; CAT with a patience of 1",
    columns=FIVE | WITH_AUTOATTACK,
    trials=5,
    note="The paper takes Madry, CAT and DAT from DAT's paper. Others, on ResNet-18 with longer schedules: adversarial "
    "training 82.57 natural, 51.28 PGD-20, 49.66 C&W, 48.67 AutoAttack; on WRN-34-10 52.68 AutoAttack. GAIRAT's "
    "authors retrained FAT on WRN-32-10: 89.16 natural and 51.24 PGD-20 at its best epoch, 88.18 and 46.79 at its "
    "last.",
)

TABLE2 = Item(
    name="table2",
    where="Table 2",
    title="FAT for TRADES against TRADES (WRN-34-10, CIFAR-10)",
    claim="At the same beta (6 unless noted) FAT for TRADES at 8/255 is more accurate than TRADES and about as robust; "
    "at 16/255 it is about as accurate and more robust.",
    kind="table",
    rows=_against(
        {"fat-trades-1": "trades-1", "fat-trades-8": "trades", "fat-trades-16": "trades"},
        (
            _row("trades-1", "TRADES (beta 1)", TRADES_1, "wrn-34-10", _TRADES, "88.64 56.38 49.14 - -"),
            _row(
                "fat-trades-1",
                "FAT for TRADES (beta 1)",
                FAT_FOR_TRADES_1,
                "wrn-34-10",
                _TRADES,
                "89.94±0.303 61.00±0.418 49.70±0.653 49.35±0.363 48.35±0.240",
            ),
            _row("trades", "TRADES", cifar10.TRADES, "wrn-34-10", _TRADES, "84.92 61.06 56.61 54.47 55.47"),
            _row(
                "fat-trades-8",
                "FAT for TRADES 8/255",
                cifar10.FAT_FOR_TRADES,
                "wrn-34-10",
                _TRADES,
                "86.60±0.548 61.97±0.570 55.98±0.209 54.29±0.173 55.34±0.291",
            ),
            _row(
                "fat-trades-16",
                "FAT for TRADES 16/255",
                wide(cifar10.FAT_FOR_TRADES),
                "wrn-34-10",
                _TRADES,
                "84.39±0.030 61.73±0.131 57.12±0.233 54.36±0.177 56.07±0.155",
            ),
        ),
    ),
    lite=LITE,
    columns=FIVE | WITH_AUTOATTACK,
    trials=3,
    note="The paper takes TRADES from its own paper. Others, on ResNet-18 with longer schedules: TRADES 80.86 natural, "
    "51.23 PGD-20, 48.18 C&W, 49.45 AutoAttack; on WRN-34-10 53.08 AutoAttack. RobustBench lists the released FAT for "
    "TRADES (WRN-34-10, 16/255) at 84.52 natural, 53.51 AutoAttack.",
)

_TABLE3_ROWS = {
    ("wrn-34-10", "trades"): "84.92 67.00 57.18 54.72",
    ("wrn-34-10", "fat-trades-8"): "86.38±0.548 67.64±0.572 56.65±0.262 54.51±0.299",
    ("wrn-34-10", "fat-trades-16"): "84.39±0.030 67.38±0.370 57.67±0.198 54.62±0.140",
    ("wrn-58-10", "fat-trades-8"): "87.09 68.7 57.17 55.43",
    ("wrn-58-10", "fat-trades-16"): "85.28 68.08 58.39 55.89",
}
_TRADES_METHODS = {
    "trades": ("TRADES", cifar10.TRADES),
    "fat-trades-8": ("FAT for TRADES 8/255", cifar10.FAT_FOR_TRADES),
    "fat-trades-16": ("FAT for TRADES 16/255", wide(cifar10.FAT_FOR_TRADES)),
}
TABLE3 = Item(
    name="table3",
    where="Table 3 (App. H.2)",
    title="The models of Table 2 attacked from a random start, and a larger network (WRN-58-10)",
    claim="As in Table 2; the larger network gains in both accuracies.",
    kind="table",
    rows=_against(
        {"fat-trades-8": "trades", "fat-trades-16": "trades"},
        (
            _larger(model, method, *_TRADES_METHODS[method], _RANDOM, line)
            for (model, method), line in _TABLE3_ROWS.items()
        ),
    ),
    lite=LITE,
    columns=FOUR | WITH_AUTOATTACK,
    trials=3,
    note="The paper evaluates the released model of TRADES. Here the runs are those of Table 2.",
)

_TABLE4_ROWS = {
    ("wrn-34-10", "mart"): "83.62 67.38 58.24 53.67",
    ("wrn-34-10", "fat-mart-8"): "86.40±0.071 68.94±0.195 57.89±0.144 52.28±0.110",
    ("wrn-34-10", "fat-mart-16"): "84.39±0.390 68.52±0.297 59.13±0.180 52.85±0.459",
    ("wrn-58-10", "fat-mart-8"): "87.10 69.52 58.57 52.73",
    ("wrn-58-10", "fat-mart-16"): "85.19 69.00 59.82 53.01",
}
_MART_METHODS = {
    "mart": ("MART", cifar10.MART),
    "fat-mart-8": ("FAT for MART 8/255", cifar10.FAT_FOR_MART),
    "fat-mart-16": ("FAT for MART 16/255", wide(cifar10.FAT_FOR_MART)),
}
TABLE4 = Item(
    name="table4",
    where="Table 4 (App. H.3)",
    title="FAT for MART against MART (WRN-34-10, WRN-58-10, CIFAR-10)",
    claim="FAT for MART is more accurate; at 16/255 it is also more robust under PGD-20, but not under C&W.",
    kind="table",
    rows=_against(
        {"fat-mart-8": "mart", "fat-mart-16": "mart"},
        (_larger(model, method, *_MART_METHODS[method], _MART, line) for (model, method), line in _TABLE4_ROWS.items()),
    ),
    lite=LITE,
    columns=FOUR | WITH_AUTOATTACK,
    trials=3,
    note="The paper evaluates the released model of MART. Others, on ResNet-18 with longer schedules: MART 78.59 "
    "natural, 54.87 PGD-20, 49.14 C&W, 47.51 AutoAttack; on WRN-34-10 51.89 AutoAttack.",
)

TABLES = (TABLE1, TABLE2, TABLE3, TABLE4)
