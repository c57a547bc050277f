"""What the files of a run must look like, each declared once: its door checks it, and nothing behind the door does.

The configuration inside config.json is checked by `Config` itself. Knows no path.
"""

from __future__ import annotations

from sparring.files.schema import anything, either, fields, flag, items, nothing_or, number, table, text, whole

EPOCHS = 10**7  # more than any run has
SIDE = 10**5  # pixels

_DIGEST = text(64)
_PLAIN = either(nothing_or(flag), text(), number(finite=False))  # what a cell of a table can show

RECORD = fields(  # one epoch in metrics.jsonl; a loss may be NaN, accuracies are fractions
    epoch=whole(1, EPOCHS),
    natural=number(0, 1),
    pgd10=number(0, 1),
    loss=number(finite=False),
    lr=number(finite=False),
    backprops=number(0),
    seconds=number(0),
    optional=("natural", "pgd10", "loss", "lr", "backprops", "seconds"),
    others=_PLAIN,
)

_MOMENTS = items(items(number(), least=1, most=4096), least=2, most=2)

MODEL = fields(  # what it takes to build the network again
    name=text(1000),
    num_classes=nothing_or(whole(1, 10**6)),
    classes=nothing_or(items(text(1000), most=10**6)),
    channels=nothing_or(whole(1, 4096)),
    size=nothing_or(items(whole(1, SIDE), least=2, most=2)),
    normalize=nothing_or(_MOMENTS),
    optional=("num_classes", "classes", "channels", "size", "normalize"),
    others=anything,
)

_OPTIMIZER = fields(
    made=nothing_or(items(table(anything), most=10**4)),
    groups=items(table(anything), most=10**4),
    values=table(table(_PLAIN)),
)

LAST = fields(  # the facts of last.safetensors: the place in training
    recipe=text(),
    data=text(),
    config=_DIGEST,
    model=MODEL,
    epoch=whole(0, EPOCHS),
    step=whole(),
    images=whole(),
    seconds=number(0),
    best=nothing_or(RECORD),
    history=_DIGEST,
    optimizer=_OPTIMIZER,
)

BEST = fields(recipe=text(), data=text(), config=_DIGEST, model=MODEL, epoch=whole(1, EPOCHS), metrics=RECORD)

CONFIG = fields(  # config.json, around the configuration itself
    recipe=text(),
    sparring=text(100),
    images=text(),
    init=text(),
    earlier=items(table(anything), most=10**4),
    before=items(_DIGEST, most=10**4),
    config=table(anything, most=1000),
    sha256=_DIGEST,
    optional=("images", "init", "earlier", "before"),
)

ENVIRONMENT = items(table(anything), most=10**6)  # environment.json: one entry per start
