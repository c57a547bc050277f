"""The figures of a table of methods: curves by epoch, the trade-off of both accuracies, by class, by what was swept."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from markupsafe import Markup

from sparring.report import charts
from sparring.report.content import Drawing, Method

_CLASSES = 20  # the most classes that a drawing has room for
_LINES = 24  # the most methods whose names fit beside a drawing
_GROUPS = 6  # the most drawings of one kind: by data, radius, or way of measuring


def drawings(methods: Sequence[Method]) -> list[Drawing]:
    """The figures that the methods have numbers for: accuracies, cost, loss and learning rate, the trade-off."""
    methods, note = _few(methods)
    backprops = _series(methods, "backprops", 1.0)
    found = []
    names = [method.name for method in methods]
    trained = [method for method in methods if method.history]
    for number, (of, group) in enumerate(_comparable(trained, lambda method: method.images).items()):
        if natural := _series(group, "natural", 100.0):
            caption = (
                f"{of}Images as they are{_held_out(group)}: how fast each method learns, and where it ends. "
                f"Last epoch: {_last(natural, '{:.1f} %')}."
            )
            title = "Natural accuracy on validation images (%)"
            found.append(
                _curves(
                    natural, f"natural{number or ''}", title, caption, names, of, bands=_bands(group, "natural", 100)
                )
            )
    every = _comparable(trained, lambda method: ", ".join(filter(None, [method.images, method.validated_at])))
    for number, (of, group) in enumerate(every.items()):
        if robust := _series(group, "pgd10", 100.0):
            at = f", {group[0].validated_at}" if group[0].validated_at and not of else ""
            caption = (
                f"{of}The same images under attack{at}. A line near zero is a model "
                f"without a defence. Last epoch: {_last(robust, '{:.1f} %')}."
            )
            title = "Accuracy under PGD-10 on validation images (%)"
            found.append(
                _curves(robust, f"pgd10{number or ''}", title, caption, names, of, bands=_bands(group, "pgd10", 100))
            )
    if backprops:
        title = "Backward passes per training image"
        last = _last(backprops, "{:.1f}")
        caption = (
            "What the attack costs. A flat line takes all its steps on every image. A lower one stops early, and it "
            f"rises as the model becomes harder to fool. Last epoch: {last}."
        )
        bands = _bands(methods, "backprops", 1.0)
        found.append(_curves(backprops, "backprops", title, caption, names, most=None, bands=bands))
    found += [*_loss_and_lr(methods, names), *_tradeoffs(methods)]
    return [replace(drawing, caption=drawing.caption + note) for drawing in found]


def _few(methods: Sequence[Method]) -> tuple[Sequence[Method], str]:
    """The methods that a drawing has room for, the most robust ones, and a sentence on the others."""
    level: dict[str, float] = {}
    for method in methods:
        robust = method.history[-1].get("pgd10") if method.history else min(method.accuracies.values(), default=0.0)
        level[method.name] = max(level.get(method.name, 0.0), float(robust or 0.0))
    if len(level) <= _LINES:
        return methods, ""
    kept = set(sorted(level, key=lambda name: -level[name])[:_LINES])
    said = f" Drawn are the {_LINES} of {len(level):,} that are most robust, on validation images where there are any."
    return [method for method in methods if method.name in kept], said


def _tradeoffs(methods: Sequence[Method]) -> list[Drawing]:
    """Natural against robust accuracy: under AutoAttack where two methods have it, and under PGD-20."""
    found = []
    for robust in ("AutoAttack", "PGD-20"):
        how, points = _tradeoff_points(methods, robust)
        if len(points) < 2:
            continue
        title = f"Accuracy under {robust} on test images (%)"
        each = "; ".join(f"{name} {x:.1f} and {y:.1f}" for name, (x, y) in points.items())
        svg = charts.tradeoff(
            points,
            name="tradeoff" if robust == "PGD-20" else "tradeoff-autoattack",
            xlabel="natural accuracy (%)",
            ylabel=title,
            alt=f"{title} against natural: {each}.",
        )
        caption = "The trade-off: further right is better on images as they are, further up is better under attack."
        caption += f" Measured with {how}." if how else ""
        found.append(Drawing(Markup(svg), caption))
    return found


def _loss_and_lr(methods: Sequence[Method], names: Sequence[str]) -> list[Drawing]:
    """The training loss, and the learning rate where it is not one number for all."""
    found = []
    if loss := _series(methods, "loss", 1.0):
        caption = (
            "The training loss, on the data that the attack made. Compare its course, and its height only between "
            f"runs of one objective and one attack. Last epoch: {_last(loss, '{:.3f}')}."
        )
        bands = _bands(methods, "loss", 1.0)
        found.append(_curves(loss, "loss", "Training loss", caption, names, most=None, bands=bands, form="{:.3f}"))
    rates = _series(methods, "lr", 1.0)
    if len({rate for _, values in rates.values() for rate in values}) > 1:
        if len(rates) > 1 and len({(tuple(x), tuple(y)) for x, y in rates.values()}) == 1:
            rates = {"all": next(iter(rates.values()))}
        caption = f"The learning rate at the beginning of every epoch. Last epoch: {_last(rates, '{:.3g}')}."
        found.append(_curves(rates, "lr", "Learning rate", caption, names, most=None, form="{:.3g}"))
    return found


def class_drawings(methods: Sequence[Method]) -> list[Drawing]:
    """Natural accuracy and the worst case by class, one pair of drawings per way of measuring."""
    methods, few = _few(methods)
    alike: dict[str, list[Method]] = {}
    for method in methods:
        if method.by_class:
            alike.setdefault(method.measured, []).append(method)
    names, found = [method.name for method in methods], []
    for number, (how, group) in enumerate(_largest(alike).items()):
        columns = list(dict.fromkeys(column for method in group for column in method.by_class))
        classes, rest = _hardest(group)
        note = f" The {len(classes)} classes with the lowest worst case, of {len(classes) + rest}." if rest else ""
        if len(group) == 1:
            shown = {"": {column: group[0].by_class[column] for column in columns}}
        else:
            shown = {
                column: {one.name: one.by_class[column] for one in group if column in one.by_class}
                for column in columns
            }
        for column, each in shown.items():
            series = {
                label: (
                    [float(i) for i, name in enumerate(classes) if name in values],
                    [100 * values[name] for name in classes if name in values],
                )
                for label, values in each.items()
            }
            title = f"{column or 'Accuracy'} by class (%)"
            lowest = "; ".join(
                f"{label} {min(values.values()):.1%} ({min(values, key=lambda name: values[name])})"
                for label, values in each.items()
            ).replace("%", " %")
            who = f" of {group[0].name}" if len(group) == 1 else ""
            caption = f"{column or 'Natural accuracy and worst case'}{who} by class. Lowest: {lowest}.{note}"
            caption += (f" Measured with {how}." if how else "") + few
            svg = charts.curves(
                series,
                name=f"class{number}-{column.split(' ')[0].lower() or 'all'}",
                title=title,
                alt=f"{title}. Lowest: {lowest}.",
                most=100.0,
                xlabel="class",
                all_names=names if len(group) > 1 else (),
                ticks=classes,
            )
            found.append(Drawing(Markup(svg), caption))
    return found


def _hardest(methods: Sequence[Method]) -> tuple[list[str], int]:
    """The classes to draw in their own order, and how many are left out: those with the highest worst case."""
    last = [list(method.by_class.values())[-1] for method in methods]
    every = list(dict.fromkeys(name for values in last for name in values))
    level = {name: sum(values.get(name, 1.0) for values in last) for name in every}
    kept = set(sorted(every, key=lambda name: level[name])[:_CLASSES])
    return [name for name in every if name in kept], len(every) - len(kept)


def sweep_drawings(methods: Sequence[Method], setting: str, values: Mapping[str, float]) -> list[Drawing]:
    """Accuracies against the one setting that was swept, of the largest set of methods measured in the same way.

    Args:
        values: the setting's value by the method's name.
    """
    alike: dict[str, list[Method]] = {}
    for method in methods:
        if method.name in values:
            alike.setdefault(method.measured, []).append(method)
    how, group = max(alike.items(), key=lambda one: len(one[1]), default=("", []))
    group = sorted(group, key=lambda method: values[method.name])
    if len(group) < 3:  # two points are no curve
        return []
    columns = [name for name in group[0].accuracies if all(name in method.accuracies for method in group)]
    x = [values[method.name] for method in group]
    series = {name: (x, [100 * method.accuracies[name] for method in group]) for name in columns}
    spread = {
        name: [100 * method.spread.get(name, 0.0) for method in group]
        for name in columns
        if any(name in method.spread for method in group)
    }
    title = f"Accuracy by {setting} (%)"
    each = "; ".join(f"{name} {', '.join(f'{value:.1f}' for value in y)}" for name, (_, y) in series.items())
    alt = f"{title} at {', '.join(f'{value:g}' for value in x)}: {each}."
    svg = charts.curves(series, name="sweep", title=title, alt=alt, most=100.0, xlabel=setting, spread=spread)
    caption = f"What {setting} does to accuracy{'; bands: standard deviation over seeds' if spread else ''}."
    return [Drawing(Markup(svg), f"{caption} Measured with {how}." if how else caption)]


def _comparable(methods: Sequence[Method], key: Callable[[Method], str]) -> dict[str, list[Method]]:
    """The methods whose curves may share a drawing, by what they have in common: 'digits: '; '' where all have it."""
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(key(method), []).append(method)
    if len(groups) < 2:
        return {"": list(methods)}
    return {f"{what}: " if what else "": group for what, group in _largest(groups).items()}


def _largest(groups: Mapping[str, list[Method]]) -> dict[str, list[Method]]:
    """The largest groups, in their own order: as many as a page has room for."""
    kept = set(sorted(groups, key=lambda name: -len(groups[name]))[:_GROUPS])
    return {name: group for name, group in groups.items() if name in kept}


def _held_out(methods: Sequence[Method]) -> str:
    """' (n = 120)', with every number where the methods' numbers differ."""
    counts = sorted({method.held_out for method in methods if method.held_out})
    return f" (n = {' or '.join(f'{count:,}' for count in counts)})" if counts else ""


def _tradeoff_points(methods: Sequence[Method], robust: str) -> tuple[str, dict[str, tuple[float, float]]]:
    """The largest set of methods measured in the same way: that way, and natural and robust accuracy in per cent."""
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    for method in methods:
        if {"Natural", robust} <= method.accuracies.keys():
            point = (100 * method.accuracies["Natural"], 100 * method.accuracies[robust])
            alike.setdefault(method.measured, {})[method.name] = point
    return max(alike.items(), key=lambda one: len(one[1])) if alike else ("", {})


def _series(methods: Sequence[Method], key: str, times: float) -> dict[str, tuple[list[float], list[float]]]:
    """(epochs, values) of every method that recorded any. A loss that is not finite has no place in a drawing."""
    series = {}
    for method in methods:
        kept = [(record["epoch"], times * record[key]) for record in method.history if _drawn(record.get(key))]
        if kept:
            series[method.name] = ([epoch for epoch, _ in kept], [value for _, value in kept])
    return series


def _drawn(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _bands(methods: Sequence[Method], key: str, times: float) -> dict[str, list[float]]:
    """The standard deviation over seeds at every epoch of `_series`, of methods that have several."""
    return {
        method.name: [
            times * band.get(key, 0.0)
            for record, band in zip(method.history, method.bands, strict=True)
            if _drawn(record.get(key))
        ]
        for method in methods
        if method.bands
    }


def _curves(
    series: charts.Series,
    name: str,
    title: str,
    caption: str,
    all_names: Sequence[str],
    of: str = "",
    most: float | None = 100.0,
    bands: Mapping[str, Sequence[float]] | None = None,
    form: str = "{:.1f}",
) -> Drawing:
    """Lines of some methods, each in the style that it has in every drawing of `all_names`."""
    alt = f"{of}{title}, by epoch. Last epoch: {_last(series, form)}."
    svg = charts.curves(series, name=name, title=title, alt=alt, most=most, all_names=all_names, spread=bands)
    return Drawing(Markup(svg), caption)


def _last(series: charts.Series, form: str) -> str:
    """'FAT 98.2 %, Madry 95.8 %': the ends of the lines, highest first."""
    ends = sorted(series.items(), key=lambda item: -item[1][1][-1])
    return ", ".join(f"{name} {form.format(values[-1])}" for name, (_, values) in ends)
