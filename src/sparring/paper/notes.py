"""What a reader of an item's numbers must know: images, scale, hardware, doubts, and how far unfinished runs are."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sparring.paper import cost, results
from sparring.paper.collect import SCALES, Collected, about, cells, pictured
from sparring.paper.results import JobResult
from sparring.paper.specs import Row
from sparring.report.labels import resumed

_BRIEF = ("natural", "pgd20", "pgd10")  # the attacks that the note on best epochs reports


def notes(collected: Collected) -> list[str]:
    """The notes below an item's table or figure, one sentence or two each."""
    item, found = collected.item, []
    shown = [result for row in item.rows for result in collected.of(row)]
    scales = sorted({result["scale"] for result in shown})
    if "lite" in scales:
        found.append(f"Lite scale: {item.lite}.")
    if shown:
        found.append(f"{images(shown)}{_seeds(shown)} {hardware(shown)}{_resumed(shown)}")
    found += _undrawn(collected)
    found += _other_scale(collected)
    found += _best_epochs(shown, item.columns)
    found += [doubt for row in item.rows for doubt in _doubts(row, collected.of(row))]
    found += [note for result in shown if (note := _untrained(result))]
    found += [_unfinished(result) for result in collected.begun]
    if collected.other:
        files = "1 file is a copy, or has" if collected.other == 1 else f"{collected.other} files are copies, or have"
        found.append(f"{files} another declaration than the current one: not shown.")
    found += collected.unread
    return [*found, *([item.note] if item.note else [])]


def images(shown: Sequence[JobResult]) -> str:
    """The number of test images behind each kind of attack."""
    counts: dict[str, set[int]] = {}
    for result in shown:
        for name, fact in (result["found"].get("attacks") or {}).items():
            kind = (
                f"AutoAttack (eps {round(255 * fact.get('eps', 8 / 255))}/255)" if name == "autoattack" else "attacks"
            )
            counts.setdefault(kind, set()).add(fact["n"])
    parts = [
        f"{kind}: n = {' or '.join(f'{n:,}' for n in sorted(ns))} test image{'' if ns == {1} else 's'}"
        for kind, ns in counts.items()
    ]
    return "; ".join(parts)[:1].upper() + "; ".join(parts)[1:] + ". " if parts else ""


def _seeds(shown: Sequence[JobResult]) -> str:
    """'Seeds: 0, 1, 2.' Rows that differ from the majority are named: 'Seed: 0; small_cnn-tau7: 1.'"""
    by_row: dict[str, set[int]] = {}
    for result in shown:
        by_row.setdefault(result["row"], set()).add(int(result["seed"]))
    every = [tuple(sorted(seeds)) for seeds in by_row.values()]
    usual = max(sorted(set(every)), key=every.count)
    others: dict[tuple[int, ...], list[str]] = {}
    for row, seeds in zip(by_row, every, strict=True):
        if seeds != usual:
            others.setdefault(seeds, []).append(row)
    differing = [f"{', '.join(rows)}: {', '.join(map(str, seeds))}" for seeds, rows in sorted(others.items())]
    return "; ".join([f"Seed{'s' if len(usual) > 1 else ''}: {', '.join(map(str, usual))}", *differing]) + "."


def hardware(shown: Sequence[JobResult]) -> str:
    """Where the runs were trained, how many shared the device, and where they were measured if that differs."""
    trained = _places(start for result in shown for start in results.trained_on(result))
    measured = _places(result["environment"] for result in shown)
    if trained.keys() != measured.keys():
        return f"Trained on {_spelled(trained)}; measured on {'; '.join(measured)}."
    return f"Hardware: {_spelled(trained)}."


def _places(environments: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Device and torch version -> the largest number of processes that shared the device."""
    sharing: dict[str, int] = {}
    for environment in environments:
        place = f"{environment['device']}, torch {environment['torch']}"
        sharing[place] = max(sharing.get(place, 1), int(environment.get("at_once") or 1))
    return dict(sorted(sharing.items()))


def _spelled(places: Mapping[str, int]) -> str:
    return "; ".join(f"{place}{f', up to {n} runs at once' if n > 1 else ''}" for place, n in places.items())


def _resumed(shown: Sequence[JobResult]) -> str:
    """' Interrupted: fat (seed 0), resumed once.': the runs whose training was started more than once."""
    runs = {
        f"{result['row']} (seed {result['seed']})": resumed(results.starts(result))
        for result in shown
        if results.starts(result) > 1
    }
    return f" Interrupted: {'; '.join(f'{run}, {times}' for run, times in runs.items())}." if runs else ""


def _undrawn(collected: Collected) -> list[str]:
    """The points that no picture shows, because a line needs two."""
    item = collected.item
    drawn = [row for rows in pictured(collected).values() for row in rows]
    found = []
    for row in (row for row in item.rows if item.kind == "lines" and collected.of(row) and row not in drawn):
        numbers = ", ".join(f"{cell.text} {name}" for name, cell in cells(collected.of(row), item.columns).items())
        found.append(f"A single point, not drawn: {row.group}, {row.label}, {item.xlabel} {row.x:g}: {numbers}.")
    return found


def _other_scale(collected: Collected) -> list[str]:
    """The rows measured at the scale that is not shown; they are not comparable with the others."""
    found = []
    for row in collected.item.rows:
        for scale in SCALES:
            several = collected.found.get((row.name, scale), ())
            if several and scale != collected.scale(row.group):
                values = cells(several, collected.item.columns)
                numbers = ", ".join(f"{cell.text} {column}" for column, cell in values.items())
                found.append(f"{row.label} at {scale} scale ({about(several)}){f': {numbers}' if numbers else ''}.")
    return found


def _best_epochs(shown: Sequence[JobResult], columns: Mapping[str, str]) -> list[str]:
    """One sentence with the accuracies of the best epochs on held-out images, where those are not the last."""
    brief = {column: attack for column, attack in columns.items() if attack in _BRIEF}
    runs = []
    for result in shown:
        best = result["found"].get("best")
        if best is not None:
            parts = [f"{100 * best['attacks'][attack]['accuracy']:.2f}" for attack in brief.values()]
            runs.append(f"{result['row']} (seed {result['seed']}, epoch {best['epoch']}) {' / '.join(parts)}")
    return [f"At the best epoch on held-out images, {' / '.join(brief)}: {'; '.join(runs)}."] if runs else []


def _doubts(row: Row, several: Sequence[JobResult]) -> list[str]:
    named = row.label if row.paper else row.name  # points of a figure share their line's label
    return [
        f"Doubt about {named} (seed {result['seed']}): {doubt['why']}"
        for result in several
        for doubt in result["found"].get("doubts", ())
    ]


def _untrained(result: JobResult) -> str:
    """A note on a model that no attack changes: it predicts one class for every image."""
    accuracies = {name: attack["accuracy"] for name, attack in result["found"].get("attacks", {}).items()}
    if len(accuracies) < 2 or len(set(accuracies.values())) > 1 or accuracies.get("natural", 1.0) == 1.0:
        return ""
    always = all(result["history"].get("one_class", [False]))
    constant = "; it predicted one class for all held-out images in every epoch" if always else ""
    run = f"{result['row']} (seed {result['seed']})"
    return (
        f"{run} has {100 * accuracies['natural']:.1f} % natural and under every attack: it has not learned{constant}."
    )


def _unfinished(result: JobResult) -> str:
    """How far a training is, the time per epoch, and an estimate for the whole."""
    done, epochs = len(result["history"].get("epoch", ())), result["config"]["epochs"]
    run = f"{result['row']} ({result['scale']}, seed {result['seed']})"
    if result["state"] == "diverged":
        return f"{run} diverged: its loss was not finite in epoch {result['diverged_in_epoch']} of {epochs}."
    text = f"{run}: {done} of {epochs} epochs"
    if not done:
        return f"{text}."
    each = statistics.median_low(result["history"]["seconds"])  # the first epoch after a start includes the start-up
    whole = result["training_seconds"] + each * (epochs - done)
    devices = ", ".join(sorted({start["device"] for start in results.trained_on(result)}))
    sharing = results.at_once(result)
    shared = f" ({sharing} runs at once)" if sharing > 1 else ""
    memory = result.get("peak_memory_gib")
    parts = [
        f"{text}, {each:.1f} s per epoch on {devices}{shared}",
        f"at most {memory:.1f} GiB" if memory else "",
        resumed(results.starts(result)),
    ]
    return f"{', '.join(filter(None, parts))}. The whole row takes about {cost.spell(whole)}{shared}."
