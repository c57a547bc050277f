"""Valid JSON made wrong: field by field, as a whole, and at random from a seed. For tests of whatever reads it."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

Steps = tuple[str | int, ...]
DEEP = "[" * 100_000 + "]" * 100_000
# What a field may hold instead. `json.dumps` writes NaN and Infinity; text that JSON cannot have stands for itself.
WRONG: tuple[Any, ...] = (None, [], {}, "x", True, -1, 10**400, 1e308, float("nan"))
MORE: tuple[Any, ...] = (*WRONG, "", 0, 2**70, float("-inf"), [[]], "\ud800")
_HOLE = "the hole of a text"


def places(value: Any, at: Steps = ()) -> Iterator[Steps]:
    """Every field inside a value; of a list its first and last entries."""
    inside: list[tuple[str | int, Any]] = []
    if isinstance(value, dict):
        inside = list(value.items())
    elif isinstance(value, list) and value:
        inside = [(0, value[0]), *([(len(value) - 1, value[-1])] if len(value) > 1 else [])]
    for name, inner in inside:
        yield (*at, name)
        yield from places(inner, (*at, name))


@contextmanager
def changed(value: Any, at: Steps, *new: Any) -> Iterator[None]:
    """Another value at a place, or none, for the time of the block."""
    holder = value
    for step in at[:-1]:
        holder = holder[step]
    kept = dict(holder) if isinstance(holder, dict) else list(holder)
    if new:
        holder[at[-1]] = new[0]
    else:
        del holder[at[-1]]
    yield
    holder.clear()
    holder.update(kept) if isinstance(holder, dict) else holder.extend(kept)


def field_by_field(value: Any, *, skip: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """(what was done, the text): each field deleted and replaced by what it must not be; some nested 100,000 times.

    Args:
        skip: fields of the whole that are left as they are, since another test is about them.
    """
    everywhere = [at for at in places(value) if at[0] not in skip or len(at) == 1]
    for at in everywhere:
        name = ".".join(map(str, at))
        with changed(value, at):
            yield f"{name} deleted", json.dumps(value)
        for wrong in WRONG:
            with changed(value, at, wrong):
                yield f"{name} = {str(wrong)[:12]!r}", json.dumps(value)
    for at in everywhere[:: max(1, len(everywhere) // 4)]:
        with changed(value, at, _HOLE):
            yield f"{'.'.join(map(str, at))} nested", json.dumps(value).replace(f'"{_HOLE}"', DEEP)


def as_a_whole(value: Any) -> Iterator[tuple[str, bytes]]:
    """(what was done, the content): truncated, empty, binary, nested, and valid JSON of something else."""
    text = json.dumps(value).encode()
    for share in (0.0, 0.1, 0.5, 0.9, 0.999):
        yield f"cut at {share:.1%}", text[: int(share * len(text))]
    yield "zeros", bytes(len(text))
    yield "binary", bytes(range(256)) * 4
    yield "nested", DEEP.encode()
    for other in ("null", "[]", "{}", "3", '"x"', "NaN", "[{}]", '{"records": []}', '{"records": 3}'):
        yield f"other: {other}", other.encode()


def at_random(value: Any, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(what was done, the text): up to three fields changed at once, or letters of the text."""
    draw = random.Random(seed)
    everywhere = list(places(value))
    for number in range(count):
        if draw.random() < 0.3:
            letters = list(json.dumps(value))
            for _ in range(draw.randint(1, 4)):
                letters[draw.randrange(len(letters))] = draw.choice('0123456789-.eE"[]{},: atrufalsen\\')
            yield f"random letters {number}", "".join(letters)
            continue
        with ExitStack() as stack:
            for at in draw.sample(everywhere, min(len(everywhere), draw.randint(1, 3))):
                new = () if draw.random() < 0.2 else (draw.choice(MORE),)
                with suppress(KeyError, IndexError, TypeError):  # an earlier change has removed the place
                    stack.enter_context(changed(value, at, *new))
            yield f"random fields {number}", json.dumps(value)
