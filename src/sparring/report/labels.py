"""How runs are named on a page: by what differs between them, short enough for a drawing, and uniquely.

`sparring reproduce` names a run's folder after its data, network, objective, epochs and seed, followed by a digest of
the whole configuration. A page shows the settings that differ instead of the digest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from sparring.report.settings import cell, differing, headings
from sparring.training.config import Config, flat_json, flat_used

_LETTERS = 25  # the longest name that a drawing has room for


def labels(found: Mapping[Path, Config]) -> dict[Path, str]:
    """A unique name for every run folder.

    Names leave out the digest and what all of them share. Runs that differ in their digests alone are named by the
    settings that differ, and names that are still equal get their parent folders.
    """
    # A page is UTF-8; a folder's name may not be.
    whole = {folder: folder.resolve().name.encode("utf-8", "replace").decode() for folder in found}
    plain = {folder: re.sub(r"(-seed\d+)-[0-9a-f]{10}$", r"\1", name) for folder, name in whole.items()}
    kinds = list(dict.fromkeys(plain.values()))
    brief = dict(zip(kinds, _brief(kinds), strict=True))
    names: dict[Path, str] = {}
    by_kind: dict[str, list[Path]] = {kind: [] for kind in kinds}
    for folder in found:
        by_kind[plain[folder]].append(folder)
    for kind, alike in by_kind.items():
        digests = all(whole[folder] != kind for folder in alike)
        settings = _settings([found[folder] for folder in alike]) if digests else [[] for _ in alike]
        start = "" if len(kinds) == 1 and any(settings) else brief[kind]
        names |= {folder: ", ".join(filter(None, [start, *own])) for folder, own in zip(alike, settings, strict=True)}
    count = Counter(names.values())
    clash = [folder for folder, name in names.items() if count[name] > 1]
    return {folder: names[folder] for folder in found} | _paths(clash)


def without_seed(name: str) -> str:
    """The name of a run for all its seeds: 'fat-digits' for 'fat-digits-seed0'; itself where nothing would be left."""
    return re.sub(r"(^|[-_ ])seed\d+$", "", name) or name


def resumed(starts: int) -> str:
    """'resumed once', 'resumed 3 times': a run by how often its training was started; '' for a single start."""
    if starts < 2:
        return ""
    return "resumed once" if starts == 2 else f"resumed {starts - 1} times"


def several(names: Sequence[str], most: int = 20) -> str:
    """'a, b, c', and of more than `most` names the first ones and how many follow: 'a, b and 1,998 more'."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[:most])} and {len(names) - most:,} more"


def shorten(names: Sequence[str]) -> dict[str, str]:
    """Every name cut to fit a drawing, as near to its middle as keeps different names different."""
    heads = sorted(range(1, _LETTERS - 1), key=lambda head: abs(head - _LETTERS // 2))
    for head in heads:
        cut = {name: _cut(name, head, _LETTERS) for name in names}
        if len(set(cut.values())) == len(cut):
            return cut
    # They differ only in the part that is cut: number them.
    return {name: f"{number} {_cut(name, _LETTERS // 2, _LETTERS - 4)}" for number, name in enumerate(cut, 1)}


def _cut(name: str, head: int, most: int) -> str:
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most :]}"


def _brief(names: Sequence[str]) -> list[str]:
    """Names without the parts that all share at either end, if the rest still starts with a word (fat-5, not 5)."""
    parts = [name.split("-") for name in names]
    head, tail = _shared(parts), _shared([each[::-1] for each in parts])
    tries = [(start, end) for end in (tail, 0) for start in range(head, -1, -1)] if len(names) > 1 else []
    for start, end in tries:
        rest = ["-".join(each[start : len(each) - end]) for each in parts]
        if all(re.match("[A-Za-z]{2}", name) for name in rest):
            return rest
    return list(names)


def _shared(parts: Sequence[Sequence[str]]) -> int:
    """How many leading parts are the same in all."""
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))


def _settings(configs: Sequence[Config]) -> list[list[str]]:
    """For each configuration, the settings that differ between them: ['tau 3', 'eps 16/255']."""
    # A step of eps/4 in every run is no difference of its own: it moves with eps. The same number is none either.
    flat, written = [flat_used(config) for config in configs], differing([flat_json(config) for config in configs])
    words = headings([name for name in differing(flat) if name in written])
    return [[f"{word} {cell(each, name)}" for name, word in words.items() if name in each] for each in flat]


def _paths(folders: Sequence[Path]) -> dict[Path, str]:
    """Folders named by as few trailing parts of their paths as make them unique."""
    parts = {folder: folder.resolve().parts for folder in folders}
    for count in range(2, max(map(len, parts.values()), default=0) + 1):
        names = {folder: "/".join(each[-count:]) for folder, each in parts.items()}
        if len(set(names.values())) == len(names):
            return names
    return {folder: str(folder) for folder in folders}
