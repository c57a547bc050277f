"""From results to what is shown: which files count, which scale speaks for a group, what a line of a table says."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparring.errors import UserError
from sparring.paper import cost, results
from sparring.paper.plan import home
from sparring.paper.results import Result
from sparring.paper.specs import Course, Item, Row, Scale
from sparring.report.comparison import Line, Ours

NETWORKS = {"small_cnn": "Small CNN", "resnet18": "ResNet-18", "tiny_cnn": "Tiny CNN"}
_SCALES: tuple[Scale, Scale] = ("full", "lite")
_BRIEF = ("natural", "pgd20", "pgd10")  # what a note tells of an epoch


@dataclass(frozen=True)
class Collected:
    """An item and its results."""

    item: Item
    home: Path  # the folder of its results
    found: Mapping[tuple[str, Scale], Sequence[Result]]  # (row, scale) -> one a seed, in order
    begun: Sequence[Result]  # trainings that have not come to their end, or to a bad one
    other: int  # files made by another declaration than today's: not shown
    wanted: Scale | None = None  # the scale to show where there is something to show at it
    limit: int | None = None  # test images, where not all
    unread: Sequence[str] = ()  # why a file could not be read

    def scale(self, group: str) -> Scale:
        """The scale that was asked for, else the one at which most of a group's rows are measured, the full one of two.

        Rows of one group are compared with one another, so they are never shown at different scales.
        """
        rows = [row for row in self.item.rows if row.group == group]
        counts = {scale: sum((row.name, scale) in self.found for row in rows) for scale in _SCALES}
        if self.wanted and counts[self.wanted]:
            return self.wanted
        if not any(counts.values()):
            return "lite" if any("lite" in row.configs for row in rows) else "full"
        return max(_SCALES, key=lambda scale: counts[scale])

    def of(self, row: Row) -> Sequence[Result]:
        """The results of a row at the scale that its group is shown at; empty where there are none."""
        return self.found.get((row.name, self.scale(row.group)), ())

    def groups(self) -> dict[str, list[Row]]:
        """The rows that have results, by group."""
        groups: dict[str, list[Row]] = {}
        for row in self.item.rows:
            if self.of(row):
                groups.setdefault(row.group, []).append(row)
        return groups

    def measured(self, scale: Scale, seeds: Sequence[int]) -> int:
        """How many results of these seeds there are at a scale."""
        several = [self.found.get((row.name, scale), ()) for row in self.item.rows]
        return sum(result["seed"] in seeds for each in several for result in each)


def collect(item: Item, folder: Path, limit: int | None = None, wanted: Scale | None = None) -> Collected:
    """The results of an item in a results folder; of tries on fewer images with `limit`."""
    rows = {row.name: row for row in item.rows}
    found: dict[tuple[str, Scale], list[Result]] = {}
    begun, unread, other = [], list[str](), 0
    for path in sorted(home(folder, item, limit).glob("*-seed*.json")):
        try:
            result = results.read(path)
        except UserError as error:
            unread.append(str(error))
            continue
        if result is None:  # a folder
            continue
        row, scale = rows.get(result["row"]), result["scale"]
        own = path.name == results.file_name(result["row"], scale, result["seed"])  # a copy is no other seed
        if not own or row is None or scale not in row.configs or not _declared(row, scale, result, limit):
            other += 1
        elif results.finished(result):
            found.setdefault((row.name, scale), []).append(result)
        else:
            begun.append(result)
    for name, scale, result in _lent(item, folder):
        several = found.setdefault((name, scale), [])
        if result["seed"] not in [own["seed"] for own in several]:
            several.append(result)
    for several in found.values():
        several.sort(key=lambda result: int(result["seed"]))
    return Collected(item, home(folder, item, limit), found, begun, other, wanted, limit, unread)


def _lent(item: Item, folder: Path) -> Iterator[tuple[str, Scale, Result]]:
    """What other items' results have for rows that ask for the course of a run and nothing else."""
    asking = [row for row in item.rows if isinstance(row.measure, Course)]
    for theirs, result in results.courses(folder) if asking else ():
        for row in asking:
            for scale, config in row.configs.items():
                if config is not None and theirs == replace(config, seed=theirs.seed):
                    yield row.name, scale, {**result, "row": row.name, "scale": scale, "found": {}}


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
    )


def cells(several: Sequence[Result], columns: Mapping[str, str]) -> dict[str, Ours]:
    """Our accuracies by column, over the seeds that have them."""
    found = {}
    for column, attack in columns.items():
        facts = [result["found"]["attacks"].get(attack) for result in several]
        known = [fact for fact in facts if fact is not None]
        if known:
            right = tuple(results.unpack(fact["right"], fact["n"]) for fact in known if "right" in fact)
            found[column] = Ours(
                tuple(fact["accuracy"] for fact in known),
                min(fact["n"] for fact in known),
                right if len(right) == len(known) else (),
            )
    return found


def about(several: Sequence[Result]) -> str:
    """'ResNet-18, 30 epochs, 3 seeds'; the seeds alone where no run was trained."""
    config = several[0]["config"]
    seeds = "1 seed" if len(several) == 1 else f"{len(several)} seeds"
    if config is None:
        return seeds
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
        told.append(f"{images(shown)}{_seeds(shown)} {hardware(shown)}")
    told += _undrawn(collected)
    told += _other_scale(collected)
    told += _best_epochs(shown, item.columns)
    told += [doubt for row in item.rows for doubt in _doubts(row, collected.of(row))]
    told += [dead for result in shown if (dead := _dead(result))]
    told += [_course(result) for result in collected.begun]
    if collected.other:
        were = "result here was" if collected.other == 1 else "results here were"
        told.append(f"{collected.other} {were} made by another declaration than today's, or copied: not shown.")
    told += collected.unread
    return [*told, *([item.note] if item.note else [])]


def pictured(collected: Collected) -> dict[str, list[Row]]:
    """The rows of each picture of lines, by group ('' where all share one); those of a single x are told in words."""
    groups = collected.groups()
    if collected.item.together and groups:
        groups = {"": [row for rows in groups.values() for row in rows]}
    return {group: rows for group, rows in groups.items() if len({row.x for row in rows}) > 1}


def _undrawn(collected: Collected) -> list[str]:
    """The points that no picture shows, because a line needs two."""
    item = collected.item
    drawn = [row for rows in pictured(collected).values() for row in rows]
    told = []
    for row in (row for row in item.rows if item.kind == "lines" and collected.of(row) and row not in drawn):
        numbers = ", ".join(f"{cell.text} {name}" for name, cell in cells(collected.of(row), item.columns).items())
        told.append(f"No picture of one point: {row.group}, {row.label}, {item.xlabel} {row.x:g}: {numbers}.")
    return told


def images(shown: Sequence[Result]) -> str:
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
    """'Seeds: 0, 1, 2.' Rows that were trained with others than most are named: 'Seed: 0; small_cnn-tau7: 1.'"""
    by_row: dict[str, set[int]] = {}
    for result in shown:
        by_row.setdefault(result["row"], set()).add(int(result["seed"]))
    every = [tuple(sorted(seeds)) for seeds in by_row.values()]
    usual = max(sorted(set(every)), key=every.count)
    others: dict[tuple[int, ...], list[str]] = {}
    for row, seeds in zip(by_row, every, strict=True):
        if seeds != usual:
            others.setdefault(seeds, []).append(row)
    told = [f"{', '.join(rows)}: {', '.join(map(str, seeds))}" for seeds, rows in sorted(others.items())]
    return "; ".join([f"Seed{'s' if len(usual) > 1 else ''}: {', '.join(map(str, usual))}", *told]) + "."


def hardware(shown: Sequence[Result]) -> str:
    """Where it was trained, with how much company, and where it was measured if that was elsewhere."""
    sessions = [session for result in shown for session in results.trained_on(result)]
    trained, measured = _places(sessions), _places(result["environment"] for result in shown)
    if trained.keys() != measured.keys():
        return f"Trained on {_spelt(trained)}; measured on {'; '.join(measured)}."
    return f"Hardware: {_spelt(trained)}."


def _places(sessions: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Where, and how many runs shared the place at most."""
    company: dict[str, int] = {}
    for session in sessions:
        place = f"{session['device']}, torch {session['torch']}"
        company[place] = max(company.get(place, 1), int(session.get("at_once") or 1))
    return dict(sorted(company.items()))


def _spelt(places: Mapping[str, int]) -> str:
    return "; ".join(f"{place}{f', up to {n} runs at once' if n > 1 else ''}" for place, n in places.items())


def _other_scale(collected: Collected) -> list[str]:
    """The rows that are measured at the scale that is not shown: no comparison, but not to be lost."""
    told = []
    for row in collected.item.rows:
        for scale in _SCALES:
            several = collected.found.get((row.name, scale), ())
            if several and scale != collected.scale(row.group):
                values = cells(several, collected.item.columns)
                numbers = ", ".join(f"{cell.text} {column}" for column, cell in values.items())
                told.append(f"{row.label} at {scale} scale ({about(several)}){f': {numbers}' if numbers else ''}.")
    return told


def _best_epochs(shown: Sequence[Result], columns: Mapping[str, str]) -> list[str]:
    """What the epoch that was best on held-out images does, where that was not the last: one line for all."""
    brief = {column: attack for column, attack in columns.items() if attack in _BRIEF}
    told = []
    for result in shown:
        best = result["found"].get("best")
        if best is not None:
            parts = [f"{100 * best['attacks'][attack]['accuracy']:.2f}" for attack in brief.values()]
            told.append(f"{result['row']} (seed {result['seed']}, epoch {best['epoch']}) {' / '.join(parts)}")
    return [f"At the epoch that was best on held-out images, {' / '.join(brief)}: {'; '.join(told)}."] if told else []


def _doubts(row: Row, several: Sequence[Result]) -> list[str]:
    named = row.label if row.paper else row.name  # a point of a figure has its label from its line
    return [
        f"Doubt about {named} (seed {result['seed']}): {doubt['why']}"
        for result in several
        for doubt in result["found"].get("doubts", ())
    ]


def _dead(result: Result) -> str:
    """A model that no attack moves has not been trained: it gives every image the same class."""
    accuracies = {name: attack["accuracy"] for name, attack in result["found"].get("attacks", {}).items()}
    if len(accuracies) < 2 or len(set(accuracies.values())) > 1 or accuracies.get("natural", 1.0) == 1.0:
        return ""
    always = all(result["history"].get("one_class", [False]))
    held = "; held-out images all got the same class, in every epoch" if always else ""
    who = f"{result['row']} (seed {result['seed']})"
    return f"{who} has {100 * accuracies['natural']:.1f} % natural and under every attack: it has not learned{held}."


def _course(result: Result) -> str:
    """How far a training is, what an epoch takes, and what the whole will."""
    done, all_of_it = len(result["history"].get("epoch", ())), result["config"]["epochs"]
    who = f"{result['row']} ({result['scale']}, seed {result['seed']})"
    if result["state"] == "diverged":
        return f"{who} diverged: its loss was not finite in epoch {result['diverged_in_epoch']} of {all_of_it}."
    text = f"{who}: {done} of {all_of_it} epochs"
    if not done:
        return f"{text}."
    each = statistics.median_low(result["history"]["seconds"])  # where a stretch began it has the start-up in it
    whole = result["training_seconds"] + each * (all_of_it - done)
    memory = result.get("peak_memory_gib")
    held = f", {memory:.1f} GiB at most" if memory else ""
    devices = ", ".join(sorted({session["device"] for session in results.trained_on(result)}))
    company = results.at_once(result)
    beside = f" ({company} runs at once)" if company > 1 else ""
    return (
        f"{text}, {each:.1f} s an epoch on {devices}{beside}{held}, sessions: {result['sessions']}. "
        f"The whole row takes about {cost.spell(whole)}{beside}."
    )
