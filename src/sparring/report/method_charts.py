"""The figures of a table of methods: accuracy and cost by epoch, and the trade-off of both accuracies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from markupsafe import Markup

from sparring.report import charts
from sparring.report.content import Drawing, Method


def drawings(methods: Sequence[Method]) -> list[Drawing]:
    """The figures that the methods have numbers for: natural and PGD-10 accuracy and BPs by epoch, the trade-off."""
    backprops = _series(methods, "backprops", 1.0)
    how, points = _tradeoff_points(methods)
    found = []
    names = [method.name for method in methods]
    for number, (of, group) in enumerate(_comparable(methods, lambda method: method.images).items()):
        if natural := _series(group, "natural", 100.0):
            caption = (
                f"{of}Images as they are{_held_out(group)}: how fast each method learns, and where it ends. "
                f"Last epoch: {_last(natural, '{:.1f} %')}."
            )
            title = "Natural accuracy on validation images (%)"
            found.append(_curves(natural, f"natural{number or ''}", title, caption, names, of))
    every = _comparable(methods, lambda method: ", ".join(filter(None, [method.images, method.validated_at])))
    for number, (of, group) in enumerate(every.items()):
        if robust := _series(group, "pgd10", 100.0):
            at = f", {group[0].validated_at}" if group[0].validated_at and not of else ""
            caption = (
                f"{of}The same images under attack{at}. A line near zero is a model "
                f"without a defence. Last epoch: {_last(robust, '{:.1f} %')}."
            )
            title = "Accuracy under PGD-10 on validation images (%)"
            found.append(_curves(robust, f"pgd10{number or ''}", title, caption, names, of))
    if backprops:
        title = "Backward passes per training image"
        last = _last(backprops, "{:.1f}")
        caption = (
            "What the attack costs. A flat line takes all its steps on every image. A lower one stops early, and it "
            f"rises as the model becomes harder to fool. Last epoch: {last}."
        )
        found.append(_curves(backprops, "backprops", title, caption, names, most=None))
    if len(points) > 1:
        title = "Accuracy under PGD-20 on test images (%)"
        each = "; ".join(f"{name} {x:.1f} and {y:.1f}" for name, (x, y) in points.items())
        svg = charts.tradeoff(
            points,
            name="tradeoff",
            xlabel="natural accuracy (%)",
            ylabel=title,
            alt=f"{title} against natural: {each}.",
        )
        caption = "The trade-off: further right is better on images as they are, further up is better under attack."
        caption += f" Measured with {how}." if how else ""
        found.append(Drawing(Markup(svg), caption))
    return found


def _comparable(methods: Sequence[Method], key: Callable[[Method], str]) -> dict[str, list[Method]]:
    """The methods whose curves may share a drawing, by what they have in common: 'digits: '; '' where all have it."""
    groups: dict[str, list[Method]] = {}
    for method in methods:
        groups.setdefault(key(method), []).append(method)
    if len(groups) < 2:
        return {"": list(methods)}
    return {f"{what}: " if what else "": group for what, group in groups.items()}


def _held_out(methods: Sequence[Method]) -> str:
    """' (n = 120)', with every number where the methods' numbers differ."""
    counts = sorted({method.held_out for method in methods if method.held_out})
    return f" (n = {' or '.join(f'{count:,}' for count in counts)})" if counts else ""


def _tradeoff_points(methods: Sequence[Method]) -> tuple[str, dict[str, tuple[float, float]]]:
    """The largest set of methods measured in the same way: that way, and natural and PGD-20 accuracy in per cent."""
    alike: dict[str, dict[str, tuple[float, float]]] = {}
    for method in methods:
        if {"Natural", "PGD-20"} <= method.accuracies.keys():
            point = (100 * method.accuracies["Natural"], 100 * method.accuracies["PGD-20"])
            alike.setdefault(method.measured, {})[method.name] = point
    return max(alike.items(), key=lambda one: len(one[1])) if alike else ("", {})


def _series(methods: Sequence[Method], key: str, times: float) -> dict[str, tuple[list[float], list[float]]]:
    """(epochs, values) of every method that recorded any."""
    series = {}
    for method in methods:
        kept = [(record["epoch"], times * record[key]) for record in method.history if record.get(key) is not None]
        if kept:
            series[method.name] = ([epoch for epoch, _ in kept], [value for _, value in kept])
    return series


def _curves(
    series: charts.Series,
    name: str,
    title: str,
    caption: str,
    all_names: Sequence[str],
    of: str = "",
    most: float | None = 100.0,
) -> Drawing:
    """Lines of some methods, each in the style that it has in every drawing of `all_names`."""
    alt = f"{of}{title}, by epoch. Last epoch: {_last(series, '{:.1f}')}."
    svg = charts.curves(series, name=name, title=title, alt=alt, most=most, all_names=all_names)
    return Drawing(Markup(svg), caption)


def _last(series: charts.Series, form: str) -> str:
    """'FAT 98.2 %, Madry 95.8 %': the ends of the lines, highest first."""
    ends = sorted(series.items(), key=lambda item: -item[1][1][-1])
    return ", ".join(f"{name} {form.format(values[-1])}" for name, (_, values) in ends)
