"""From results to what is shown: which files count, which scale speaks for a group, what a line of a table says."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparring.recipes.paper import Item, Row, Scale
from sparring.report.beside import Line, Ours
from sparring.reproduce import cost, results
from sparring.reproduce.plan import home
from sparring.reproduce.results import Result

NETWORKS = {"small_cnn": "Small CNN", "resnet18": "ResNet-18", "tiny_cnn": "Tiny CNN"}
_SCALES: tuple[Scale, Scale] = ("full", "lite")


@dataclass(frozen=True)
class Collected:
    """An item and its results."""

    item: Item
    home: Path  # the folder of its results
    found: Mapping[tuple[str, Scale], Sequence[Result]]  # (row, scale) -> one a seed, in order
    begun: Sequence[Result]  # trainings that have not come to their end
    other: int  # files made by another declaration than today's: not shown

    def scale(self, group: str) -> Scale:
        """The scale at which most of a group's rows are measured, the full one where both have as many.

        Rows of one group are compared with one another, so they are never shown at different scales.
        """
        names = [row.name for row in self.item.rows if row.group == group]
        return max(_SCALES, key=lambda scale: sum((name, scale) in self.found for name in names))

    def of(self, row: Row) -> Sequence[Result]:
        """The results of a row at the scale that its group is shown at; empty where there are none."""
        return self.found.get((row.name, self.scale(row.group)), ())

    def measured(self, scale: Scale) -> int:
        """How many rows have a result at a scale."""
        return sum((row.name, scale) in self.found for row in self.item.rows)


def collect(item: Item, folder: Path, limit: int | None = None) -> Collected:
    """The results of an item in a results folder; of tries on fewer images with `limit`."""
    rows = {row.name: row for row in item.rows}
    found: dict[tuple[str, Scale], list[Result]] = {}
    begun, other = [], 0
    for path in sorted(home(folder, item, limit).glob("*-seed*.json")):
        result = results.read(path)
        assert result is not None
        row, scale = rows.get(result["row"]), result["scale"]
        if row is None or scale not in row.configs or not _declared(row, scale, result, limit):
            other += 1
        elif results.finished(result):
            found.setdefault((row.name, scale), []).append(result)
        else:
            begun.append(result)
    for several in found.values():
        several.sort(key=lambda result: int(result["seed"]))
    return Collected(item, home(folder, item, limit), found, begun, other)


def _declared(row: Row, scale: Scale, result: Mapping[str, Any], limit: int | None) -> bool:
    config = row.configs[scale]
    if config is not None:
        config = replace(config, seed=result["seed"])
    return results.matches(result, config, row.measure, limit)


def lines(collected: Collected) -> list[Line]:
    """A table: every row of the item, measured or not."""
    return [_line(row, collected.of(row), collected.item.columns) for row in collected.item.rows]


def _line(row: Row, several: Sequence[Result], columns: Mapping[str, str]) -> Line:
    if not several:
        return Line(row.label, "", {}, row.paper, network(row.group))
    backprops = [statistics.fmean(result["history"]["backprops"]) for result in several]
    return Line(
        row.label,
        about(several),
        cells(several, columns),
        row.paper,
        network(row.group),
        statistics.fmean(backprops),
        statistics.fmean(result["training_seconds"] for result in several),
    )


def cells(several: Sequence[Result], columns: Mapping[str, str]) -> dict[str, Ours]:
    """Our accuracies by column, over the seeds that have them."""
    found = {}
    for column, attack in columns.items():
        facts = [result["found"]["attacks"].get(attack) for result in several]
        known = [fact for fact in facts if fact is not None]
        if known:
            found[column] = Ours(tuple(fact["accuracy"] for fact in known), min(fact["n"] for fact in known))
    return found


def about(several: Sequence[Result]) -> str:
    """'ResNet-18, 30 epochs, 3 seeds'."""
    config = several[0]["config"]
    seeds = "1 seed" if len(several) == 1 else f"{len(several)} seeds"
    epochs = "1 epoch" if config["epochs"] == 1 else f"{config['epochs']} epochs"
    return f"{network(config['model'])}, {epochs}, {seeds}"


def network(name: str) -> str:
    """A network as people write it."""
    return NETWORKS.get(name, name.upper())


def notes(collected: Collected) -> list[str]:
    """What a reader of the numbers must know: images, scale, hardware, doubts; and how far the rest is."""
    item, told = collected.item, []
    shown = [result for row in item.rows for result in collected.of(row)]
    scales = sorted({result["scale"] for result in shown})
    if "lite" in scales:
        told.append(f"Lite scale: {item.lite}.")
    if shown:
        told.append(f"{_images(shown)}{_seeds(shown)} Hardware: {_hardware(shown)}.")
    told += _best_epochs(shown, item.columns)
    told += _doubts(shown)
    told += [_course(result) for result in collected.begun]
    if collected.other:
        were = "result here was" if collected.other == 1 else "results here were"
        told.append(f"{collected.other} {were} made by another declaration than today's: not shown.")
    return [*told, *([item.note] if item.note else [])]


def _images(shown: Sequence[Result]) -> str:
    """The number of test images behind each kind of attack."""
    counts: dict[str, set[int]] = {}
    for result in shown:
        for name, fact in (result["found"].get("attacks") or {}).items():
            counts.setdefault("AutoAttack (eps 8/255)" if name == "autoattack" else "attacks", set()).add(fact["n"])
    parts = [
        f"{kind}: n = {' or '.join(f'{n:,}' for n in sorted(ns))} test image{'' if ns == {1} else 's'}"
        for kind, ns in counts.items()
    ]
    return "; ".join(parts)[:1].upper() + "; ".join(parts)[1:] + ". " if parts else ""


def _seeds(shown: Sequence[Result]) -> str:
    """'Seeds: 0, 1, 2.'"""
    seeds = sorted({int(result["seed"]) for result in shown})
    return f"Seed{'s' if len(seeds) > 1 else ''}: {', '.join(map(str, seeds))}."


def _hardware(shown: Sequence[Result]) -> str:
    places = {(r["environment"]["device"], r["environment"]["torch"]) for r in shown}
    return "; ".join(f"{device}, torch {version}" for device, version in sorted(places))


def _best_epochs(shown: Sequence[Result], columns: Mapping[str, str]) -> list[str]:
    """What the epoch that was best on held-out images does, where that was not the last."""
    told = []
    for result in shown:
        best = result["found"].get("best")
        if best is not None:
            parts = [
                f"{100 * best['attacks'][attack]['accuracy']:.2f} {column}"
                for column, attack in columns.items()
                if attack in best["attacks"]
            ]
            who = f"{result['row']} (seed {result['seed']})"
            told.append(f"Best epoch of {who} on held-out images: {best['epoch']}, with {', '.join(parts)}.")
    return told


def _doubts(shown: Sequence[Result]) -> list[str]:
    return [
        f"Doubt about {result['row']} (seed {result['seed']}): {doubt['why']}"
        for result in shown
        for doubt in result["found"].get("doubts", ())
    ]


def _course(result: Result) -> str:
    """How far a training is, what an epoch takes, and what the whole will."""
    done, all_of_it = len(result["history"].get("epoch", ())), result["config"]["epochs"]
    text = f"{result['row']} ({result['scale']}, seed {result['seed']}): {done} of {all_of_it} epochs"
    if not done:
        return f"{text}."
    each = result["training_seconds"] / done
    memory = result.get("peak_memory_gib")
    held = f", {memory:.1f} GiB at most" if memory else ""
    return (
        f"{text}, {each:.1f} s an epoch on {result['environment']['device']}{held}, sessions: {result['sessions']}. "
        f"The whole row takes about {cost.spell(each * all_of_it)}."
    )
