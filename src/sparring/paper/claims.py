"""The claims of the paper's line figures, checked against our results: the effect of tau, and of a larger radius.

A change counts only beyond the noise: two standard errors over images, and over seeds if several (`noise_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from sparring.report.comparison import Ours, noise_of, rounded

Point = Mapping[str, Ours]  # attack -> accuracy
Line = Mapping[float, Point]  # by tau, or by the radius in training
_ATTACKS = {"pgd20": "PGD-20", "cw30": "C&W"}  # robustness must show under both
_COLUMNS = {"natural": "natural", **_ATTACKS, "pgd20-2eps": "PGD-20 at 2 eps"}
_STRONG = {**_ATTACKS, "autoattack": "AutoAttack"}


def by_tau(name: str, line: Line, knee: float) -> str:
    """Check: natural accuracy falls with tau; robust accuracy rises up to the knee, then stays. '' if undecidable."""
    first, last = min(line), max(line)
    if knee not in line or not first < knee < last or not all({"natural", *_ATTACKS} <= set(p) for p in line.values()):
        return ""
    steps = list(pairwise(line[tau] for tau in sorted(line)))
    rising = [after["natural"].median >= before["natural"].median for before, after in steps]
    surely_rising = any(_surely(before, after, "natural") > 0 for before, after in steps)
    falls = not surely_rising and _surely(line[first], line[last], "natural") < 0
    rises = all(_surely(line[first], line[knee], attack) > 0 for attack in _ATTACKS)
    stays = all(_surely(line[knee], line[last], attack) == 0 for attack in _ATTACKS)
    finding = "confirmed" if falls and rises and stays else "confirmed in part" if falls or rises else "not confirmed"
    trend = "not falling throughout" if surely_rising else "falling throughout"
    if any(rising) and not surely_rising:
        trend += f" except for {sum(rising)} of {len(rising)} steps, within the noise"
    natural = f"natural {_change(line[first], line[last], 'natural')} in all, {trend}"
    robust = [
        f"{spelled} {_change(line[first], line[knee], attack)} up to tau {knee:g} and "
        f"{_change(line[knee], line[last], attack)} from there to {last:g}"
        for attack, spelled in _ATTACKS.items()
    ]
    return f"{name}: {finding}. In points, {'; '.join([natural, *robust])}."


def by_radius(name: str, lines: Mapping[str, Line]) -> list[str]:
    """Check: worst-case training breaks down at large radii; friendly training does not, and gains at larger eps."""
    friendly = {label: line for label, line in lines.items() if label.startswith("tau ")}
    original, worst = next(((label, line) for label, line in lines.items() if label not in friendly), ("", {}))
    holds, noise = 0, 0.0
    compared: list[str] = []
    alone: list[str] = []
    for label, line in friendly.items():
        radii = sorted(set(line) & set(worst))
        ends = [points[radius] for points in (line, worst) for radius in (radii[:1] + radii[-1:])]
        if len(radii) < 2 or not all(set(_COLUMNS) <= set(point) for point in ends):
            alone.append(label)
            continue
        holds += _stands(*ends)
        first, last, worst_first, worst_last = ends
        change = ", ".join(
            f"{spelled} {_from_to(first, last, attack)} ({_from_to(worst_first, worst_last, attack)})"
            for attack, spelled in _COLUMNS.items()
        )
        compared.append(f"{label}, radius {radii[0]:g} → {radii[-1]:g}: {change}.")
        noise = max(noise, *(noise_of(worst_last[attack], last[attack]) for attack in _COLUMNS))
    if not compared:
        return []
    finding = "confirmed" if holds == len(compared) else "confirmed in part" if holds else "not confirmed"
    of = "line" if len(compared) == 1 else "lines"
    counted = (
        f"{holds} of {len(compared)} {of}: {original} loses natural and PGD-20 accuracy; the line loses less natural "
        f"accuracy, gains at 2 eps, and ends ahead of {original} at eps"
    )
    how = f"{original} in brackets; differences at the last radius are ± {rounded(noise)}."
    rest = [f"Too few radii to compare with {original}: {', '.join(alone)}."] if alone else []
    return [f"{name}: {finding} ({counted}). {how}", *compared, *rest]


def by_best(name: str, lines: Mapping[str, Line]) -> list[str]:
    """Check: under every attack, the best radius of a friendly line beats the best radius of worst-case training."""
    friendly = {label: line for label, line in lines.items() if label.startswith("tau ")}
    original, worst = next(((label, line) for label, line in lines.items() if label not in friendly), ("", {}))
    attacks = {
        attack: spelled for attack, spelled in _STRONG.items() if all(attack in point for point in worst.values())
    }
    compared: list[str] = []
    gains: list[set[str]] = []
    for label, line in friendly.items():
        if set(line) != set(worst) or len(line) < 2 or not all(set(attacks) <= set(point) for point in line.values()):
            continue
        each = [(attack, _best(worst, attack), _best(line, attack)) for attack in attacks]
        gains.append({attack for attack, old, new in each if _surely(worst[old], line[new], attack) > 0})
        spelled = ", ".join(
            f"{attacks[attack]} {rounded(line[new][attack].median)} at {new:g} against "
            f"{rounded(worst[old][attack].median)} at {old:g} ({_change(worst[old], line[new], attack)})"
            for attack, old, new in each
        )
        compared.append(f"{label}: {spelled}.")
    if not compared or not attacks:
        return []
    all_of = [attacks.keys() <= gained for gained in gains]
    finding = "confirmed" if all(all_of) else "confirmed in part" if any(all_of) else "not confirmed"
    if finding == "not confirmed" and any("pgd20" in gained for gained in gains):
        finding = "not confirmed beyond PGD-20"
    return [
        f"{name}: {finding} ({sum(all_of)} of {len(compared)} line{'s' * (len(compared) > 1)} ahead of {original} "
        f"under {', '.join(attacks.values())} alike). The best radius of each is chosen on these images.",
        *compared,
    ]


def _best(line: Line, attack: str) -> float:
    """The radius with the highest accuracy under an attack."""
    return max(line, key=lambda radius: line[radius][attack].median)


def _stands(first: Point, last: Point, worst_first: Point, worst_last: Point) -> bool:
    """Whether a friendly line holds up where worst-case training does not, from the first radius to the last.

    Worst-case training loses natural and PGD-20 accuracy. The friendly line loses less natural accuracy, gains under
    the attack at 2 eps, and at the last radius is ahead under everything except that attack.
    """
    lost, lost_by_worst = (
        b["natural"].median - a["natural"].median for a, b in ((first, last), (worst_first, worst_last))
    )
    gains = [_surely(worst_last, last, attack) for attack in ("natural", *_ATTACKS)]
    gains += [_surely(worst_last, worst_first, attack) for attack in ("natural", "pgd20")]
    return lost > lost_by_worst and min(*gains, _surely(first, last, "pgd20-2eps")) > 0


def _surely(before: Point, after: Point, attack: str) -> float:
    """A change in percentage points; 0 if it is within the noise."""
    change = after[attack].median - before[attack].median
    return change if abs(change) > noise_of(before[attack], after[attack]) else 0.0


def _change(before: Point, after: Point, attack: str) -> str:
    """'+5.5 ± 0.7'."""
    noise = noise_of(before[attack], after[attack])
    return f"{rounded(after[attack].median - before[attack].median, sign=True)} ± {rounded(noise)}"


def _from_to(before: Point, after: Point, attack: str) -> str:
    """'86.0 → 70.1'."""
    return f"{rounded(before[attack].median)} → {rounded(after[attack].median)}"
