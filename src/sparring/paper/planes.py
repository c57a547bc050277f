"""The illustrations, from their results: mixture, motivation, losses. One seed is drawn; captions cover all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from sparring.paper.collect import Collected
from sparring.paper.notes import hardware
from sparring.paper.results import JobResult
from sparring.paper.specs import Mixture, Motivation, Row
from sparring.report import panels
from sparring.report.content import Picture
from sparring.report.panels import Plane

_FAINT = "Natural points are drawn faintly."


def _every(collected: Collected) -> Iterator[tuple[Row, Sequence[JobResult]]]:
    """Every row that has results, with those of all its seeds."""
    for row in collected.item.rows:
        if collected.of(row):
            yield row, collected.of(row)


def _drawn(several: Sequence[JobResult]) -> str:
    """Which seed is drawn, and what the brackets in the caption mean."""
    seeds = [str(result["seed"]) for result in several]
    if len(seeds) == 1:
        return f"Seed {seeds[0]}, the only one measured."
    return f"Seed {seeds[0]} is drawn; in brackets, the range over seeds {', '.join(seeds[:-1])} and {seeds[-1]}."


def _over(several: Sequence[JobResult], value: Callable[[Mapping[str, Any]], float], form: str) -> str:
    """The drawn seed's number, and the range over the seeds in brackets: '93% (76% to 93%)'."""
    numbers = [value(result["found"]) for result in several]
    drawn, low, high = (form.format(number) for number in (numbers[0], min(numbers), max(numbers)))
    if len(numbers) == 1:
        return drawn
    return f"{drawn} (every seed)" if low == high else f"{drawn} ({low} to {high})"


def mixtures(collected: Collected) -> dict[str, Picture]:
    """Two pictures per network: its layers by PCA and by t-SNE."""
    drawn = {}
    for row, several in _every(collected):
        what = row.measure
        assert isinstance(what, Mixture)
        caption = f"{row.label}: {_mixture_caption(what, several)}"
        for method, name in (("pca", "PCA"), ("tsne", "t-SNE")):
            rows = [_layer(what, str(layer), method, several[0]["found"]) for layer in what.layers]
            title = f"{row.label}: outputs of layers by {name}"
            names = [f"layer {layer}" for layer in what.layers]
            png, narrow = (
                panels.planes(rows, what.classes, title=title, row_names=names, size=size) for size in (2.2, 1.3)
            )
            drawn[f"{row.name}-{method}"] = Picture(png, title, f"{caption}{_outliers(rows)}", narrow)
            caption = f"{row.label}: the same outputs by t-SNE (seed {several[0]['seed']}). {_FAINT}"
    return drawn


def _outliers(rows: Sequence[Sequence[Plane]]) -> str:
    """The sentence about points beyond the axes; '' if there are none."""
    count, total = panels.outside(rows), sum(len(plane.points) for row in rows for plane in row)
    if not count:
        return ""
    return f" Of the {total} points, {count} outlier{' is' if count == 1 else 's are'} drawn at the edge."


def _layer(what: Mixture, layer: str, method: str, data: Mapping[str, Any]) -> list[Plane]:
    """The planes of one layer: natural, worst-case and friendly data."""
    names = {"natural": "natural", "pgd": f"PGD-{what.steps}", "friendly": f"PGD-{what.steps}-0"}
    points, mixing = data["points"][layer][method], data["mixing"][layer]
    return [
        Plane(
            f"{name}\n{mixing[kind]['foreign']:.0%} foreign",
            points[kind],
            data["labels"],
            behind=points["natural"] if kind != "natural" else None,
        )
        for kind, name in names.items()
    ]


def _mixture_caption(what: Mixture, several: Sequence[JobResult]) -> str:
    layer = str(what.layers[len(what.layers) // 2])

    def share(kind: str, name: str) -> str:
        return _over(several, lambda found: float(found["mixing"][layer][kind][name]), "{:.1%}")

    worst, friendly = f"PGD-{what.steps}", f"PGD-{what.steps}-0"
    return (
        f"{several[0]['found']['n']} test images; warm-up on natural data for {several[0]['config']['epochs']} epochs. "
        f"{_drawn(several)} Foreign: the share of another class among a point's {what.neighbours} nearest natural "
        f"points, in the layer's own space. In layer {layer}: natural {share('natural', 'foreign')}, {worst} "
        f"{share('pgd', 'foreign')}, {friendly} {share('friendly', 'foreign')}. Points without a natural neighbour "
        f"of their own class: {worst} {share('pgd', 'amidst')}, {friendly} {share('friendly', 'amidst')}. Neighbours "
        f"of the same class within each set: natural {share('natural', 'purity')}, {worst} {share('pgd', 'purity')}, "
        f"{friendly} {share('friendly', 'purity')}. {hardware(several)} {_FAINT}"
    )


def motivations(collected: Collected) -> dict[str, Picture]:
    """The attack step by step, without and with early stopping: one row per attack, or one column on a phone."""
    drawn = {}
    for row, several in _every(collected):
        what, data = row.measure, several[0]["found"]
        assert isinstance(what, Motivation)
        names = {"pgd": f"PGD-{what.steps}", "friendly": f"PGD-{what.steps}-0"}
        title = "Two classes, a decision boundary, and an attack step by step"
        classes = ("lower class", "upper class")
        steps = [f"step {step}" for step in what.shown]
        wide = [[_step(kind, step, data, f"step {step}") for step in what.shown] for kind in names]
        tall = [[_step(kind, step, data, name) for kind, name in names.items()] for step in what.shown]
        png = panels.planes(wide, classes, title=title, row_names=list(names.values()), size=1.75)
        narrow = panels.planes(tall, classes, title=title, row_names=steps, size=1.75)

        def share(kind: str, name: str, several: Sequence[JobResult] = several) -> str:
            return _over(several, lambda found: float(found["mixing"][kind][-1][name]), "{:.0%}")

        caption = (
            f"{data['n']} points; eps {what.eps:g}, steps of {what.step_size:g}. {_drawn(several)} After step "
            f"{what.steps} PGD fools the network on {share('pgd', 'wrong')} of the points, early-stopped PGD on "
            f"{share('friendly', 'wrong')}. Amid the other class, with all {what.neighbours} nearest natural points of "
            f"that class, are {share('pgd', 'amidst')} of the points with PGD and {share('friendly', 'amidst')} with "
            f"early-stopped PGD. {_FAINT}"
        )
        drawn[collected.item.name] = Picture(png, title, caption, narrow)
    return drawn


def _step(kind: str, step: int, data: Mapping[str, Any], name: str) -> Plane:
    return Plane(
        f"{name}\n{data['mixing'][kind][step]['amidst']:.0%} amid the other class",
        data["paths"][kind][step],
        data["labels"],
        behind=data["paths"][kind][0] if step else None,
        probability=data["probability"],
    )


def losses(collected: Collected) -> dict[str, Picture]:
    """Loss against margin: natural, friendly and worst-case data."""
    names = {
        "natural": "natural",
        "friendly": "friendly: stops when wrong (min-min)",
        "pgd": "worst case: all steps (min-max)",
    }
    drawn = {}
    for row, several in _every(collected):
        data = several[0]["found"]
        title = f"Loss against margin of the training data ({row.group})"
        sets = {name: data["points"][name] for name in names}
        png, narrow = (panels.losses(sets, title=title, names=names, stacked=stacked) for stacked in (False, True))

        def number(part: str, name: str, several: Sequence[JobResult] = several) -> str:
            return _over(several, lambda found: float(found[part][name]), "{:.2f}")

        fooled = "mean_loss_bits_where_fooled"
        caption = (
            f"{data['n']} {row.label}, cross-entropy in bits; the step is the 0/1 loss that it bounds, the dotted line "
            f"its mean. {_drawn(several)} Where the attack succeeds, the mean loss is {number(fooled, 'pgd')} bits for "
            f"the worst case and {number(fooled, 'friendly')} for friendly data. Theorem 1 bounds the risk under "
            f"attack, {number('bound', 'risk')}, by {number('bound', 'min_min')} with friendly data and by "
            f"{number('bound', 'min_max')} with the worst case."
        )
        drawn[row.name] = Picture(png, title, caption, narrow)
    return drawn
