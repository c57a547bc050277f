"""The illustrations: the motivation (Fig. 1), the two objectives (Fig. 2), the mixture (Fig. 3, App. C)."""

from __future__ import annotations

from dataclasses import replace

from sparring.paper.specs.figures import TAU, at_tau
from sparring.paper.specs.item import Item, Losses, Mixture, Motivation, Row
from sparring.paper.specs.scales import one_cycle
from sparring.recipes import cifar10, digits
from sparring.schedules import OneCycle

FIG_MOTIVATION = Item(
    name="fig-motivation",
    where="Figure 1 (Sec. 1)",
    title="Why stop early: PGD and early-stopped PGD on points in the plane, step by step",
    claim="PGD moves the points across the boundary and into the other class; early-stopped PGD leaves them just "
    "beyond the boundary.",
    kind="motivation",
    rows=(Row("plane", "two bands", Motivation(), {"lite": None, "full": None}),),
    lite="one seed; five at full. Seconds on a CPU",
    trials=5,
)

ON_CIFAR10 = at_tau(replace(TAU, model="small_cnn"), 0)  # a run of fig-tau

FIG_LOSS = Item(
    name="fig-loss",
    where="Figure 2 (Sec. 3)",
    title="The training loss: min-max against min-min",
    claim="PGD raises the loss as far as the ball allows; early-stopped PGD leaves a point just past the boundary, "
    "where the loss is little more than it takes to be misclassified.",
    kind="loss",
    rows=(
        Row(
            "losses",
            "test images",
            Losses(images=450, eps=digits.EPS, step_size=digits.EPS / 10),
            {"lite": replace(digits.FAT, epochs=5)},
            group="digits",
        ),
        Row(
            "losses-cifar10",
            "test images",
            Losses(images=1000, eps=8 / 255, step_size=2 / 255),
            {"full": ON_CIFAR10, "lite": one_cycle(ON_CIFAR10, 5)},
            group="CIFAR-10, Small CNN",
        ),
    ),
    lite="networks trained for five epochs; seconds on a CPU for digits, about an hour for CIFAR-10",
)

# "Warm-up on natural data"; the authors' file names say 80 epochs. The learning rate is not published: it is ours.
WARM_UP = replace(cifar10.STANDARD, lr=OneCycle(0.05), epochs=80)
BIRD_DEER = replace(WARM_UP, data="cifar10:bird+deer", model="small_cnn", augment="none")
WRN_40_4 = replace(WARM_UP, model="wrn-40-4", lr=OneCycle(0.1))

FIG_MIXTURE = Item(
    name="fig-mixture",
    where="Figure 3 (Sec. 4.2) and App. C",
    title="Layer outputs on natural, PGD-20 and PGD-20-0 data",
    claim="PGD-20 moves the outputs of one class amid those of another; PGD-20-0 does so much less.",
    kind="mixture",
    rows=(
        Row(
            "small_cnn",
            "Small CNN, bird and deer",
            Mixture(classes=("bird", "deer"), layers=(6, 7, 8), images=150),
            {"full": BIRD_DEER, "lite": replace(BIRD_DEER, epochs=20)},
            group="small_cnn",
        ),
        Row(
            "wrn-40-4",
            "WRN-40-4, deer, horse and truck",
            Mixture(classes=("deer", "horse", "truck"), layers=(38, 40, 41), images=150),
            {"full": WRN_40_4, "lite": replace(WRN_40_4, epochs=10)},
            group="wrn-40-4",
        ),
    ),
    lite="20 epochs of warm-up for Small CNN, 10 for WRN-40-4",
)

PICTURES = (FIG_MOTIVATION, FIG_LOSS, FIG_MIXTURE)
