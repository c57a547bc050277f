"""The pictures that explain, from their results: mixture, motivation, losses. One seed is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sparring.recipes.paper import Mixture, Motivation, Row
from sparring.report import panels
from sparring.report.page import Picture
from sparring.report.panels import Plane
from sparring.reproduce.collect import Collected
from sparring.reproduce.results import Result

_FAINT = "Natural points are drawn faintly."


def _first(collected: Collected) -> Iterator[tuple[Row, Result]]:
    """Every row that has results, with the first seed's."""
    for row in collected.item.rows:
        for result in collected.of(row)[:1]:
            yield row, result


def mixtures(collected: Collected) -> dict[str, Picture]:
    """Two pictures a network: its layers by PCA and by t-SNE."""
    found = {}
    for row, result in _first(collected):
        what = row.measure
        assert isinstance(what, Mixture)
        for method, name in (("pca", "PCA"), ("tsne", "t-SNE")):
            rows = [_layer(what, str(layer), method, result["found"]) for layer in what.layers]
            title = f"{row.label}: outputs of layers by {name}"
            png = panels.planes(rows, what.classes, title=title, rims=[f"layer {layer}" for layer in what.layers])
            found[f"{row.name}-{method}"] = Picture(png, title, _mixture_told(what, result))
    return found


def _layer(what: Mixture, layer: str, method: str, data: Mapping[str, Any]) -> list[Plane]:
    """One layer: natural, worst-case and friendly data in one plane."""
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


def _mixture_told(what: Mixture, result: Result) -> str:
    data = result["found"]
    layer = str(what.layers[len(what.layers) // 2])
    natural, worst, friendly = (data["mixing"][layer][kind] for kind in ("natural", "pgd", "friendly"))
    return (
        f"{data['n']} test images; warm-up on natural data for {result['config']['epochs']} epochs. Foreign: of a "
        f"point's {what.neighbours} nearest natural points, in the layer's own space, the share of another class. "
        f"In layer {layer}: natural {natural['foreign']:.1%}, PGD-{what.steps} {worst['foreign']:.1%}, "
        f"PGD-{what.steps}-0 {friendly['foreign']:.1%}. Points that have no natural neighbour of their own class: "
        f"PGD-{what.steps} {worst['amidst']:.1%}, PGD-{what.steps}-0 {friendly['amidst']:.1%}. Neighbours of the same "
        f"class within each set: natural {natural['purity']:.1%}, PGD-{what.steps} {worst['purity']:.1%}, "
        f"PGD-{what.steps}-0 {friendly['purity']:.1%}. {_FAINT}"
    )


def motivations(collected: Collected) -> dict[str, Picture]:
    """The attack step by step, without and with a stop."""
    found = {}
    for row, result in _first(collected):
        what, data = row.measure, result["found"]
        assert isinstance(what, Motivation)
        rows = [[_step(kind, step, data) for step in what.shown] for kind in ("pgd", "friendly")]
        names = [f"PGD-{what.steps}", f"PGD-{what.steps}-0"]
        title = "Two classes, a decision boundary, and an attack step by step"
        png = panels.planes(rows, ("lower class", "upper class"), title=title, rims=names, size=1.75)
        worst, friendly = (data["mixing"][kind][-1] for kind in ("pgd", "friendly"))
        caption = (
            f"{data['n']} points; eps {what.eps:g}, steps of {what.step_size:g}. After step {what.steps} PGD fools the "
            f"network on {worst['wrong']:.0%} of the points, early-stopped PGD on {friendly['wrong']:.0%}. Amidst the "
            f"others, with all {what.neighbours} nearest natural points of the other class, lie {worst['amidst']:.0%} "
            f"with PGD and {friendly['amidst']:.0%} with early-stopped PGD. {_FAINT}"
        )
        found[collected.item.name] = Picture(png, title, caption)
    return found


def _step(kind: str, step: int, data: Mapping[str, Any]) -> Plane:
    return Plane(
        f"step {step}\n{data['mixing'][kind][step]['amidst']:.0%} amidst the others",
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
    found = {}
    for row, result in _first(collected):
        data = result["found"]
        title = f"What is trained on: loss against margin ({row.group})"
        png = panels.losses({name: data["points"][name] for name in names}, title=title, names=names)
        bound, mean = data["bound"], data["mean_loss_bits_where_fooled"]
        caption = (
            f"{data['n']} {row.label}, cross-entropy in bits; the step is the 0/1 loss that it bounds, the dotted line "
            f"its mean. Where the attack succeeds the worst case has {mean['pgd']:.2f} bits, friendly data "
            f"{mean['friendly']:.2f}. Theorem 1 bounds the risk under attack ({bound['risk']:.2f}) by "
            f"{bound['min_min']:.2f} with friendly data and by {bound['min_max']:.2f} with the worst case."
        )
        found[row.name] = Picture(png, title, caption)
    return found
