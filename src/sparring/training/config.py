"""The configuration of a run: everything that decides what it computes, and nothing that does not.

A recipe is one `Config`; the command line replaces fields of it; the run folder keeps it as JSON. Where a run happens
(device, folder, progress) is not part of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sparring import schedules
from sparring.attacks.checks import check_radius
from sparring.data import Dataset
from sparring.errors import UserError, unknown
from sparring.objectives import OBJECTIVES, Attack
from sparring.schedules import Schedule, constant
from sparring.seeds import check_seed

Precision = Literal["fp32", "bf16"]
ObjectiveName = Literal[
    "standard",
    "madry",
    "fat",
    "trades",
    "fat-trades",
    "mart",
    "fat-mart",
    "cat",
    "dat",
    "ates",
    "fat-by-loss",
    "fat-by-probability",
    "fat-paced",
    "fat-patient",
]


@dataclass(frozen=True)
class Config:
    """One training run."""

    objective: ObjectiveName = "fat"
    """What is minimised."""
    data: str = "digits"
    """digits, cifar10, svhn (or some classes, cifar10:bird+deer), npz:FILE, folder:PATH (one subfolder per class);
    folder:PATH?size=32 scales and crops its images."""
    model: str = "tiny_cnn"
    """tiny_cnn, small_cnn, resnet18, or a wide ResNet such as wrn-34-10."""
    normalize: bool = False
    """Subtract the training data's mean and divide by its deviation, in a layer of the model."""
    attack: Attack = field(default_factory=Attack)
    beta: float = 6.0
    """Weight of the regulariser in TRADES and MART."""
    epochs: int = 30
    batch_size: int = 128
    lr: Schedule = constant(0.1)  # noqa: RUF009 (a frozen value)
    """Learning rate: 0.1, or 0.1,0.01@60, or one-cycle:0.2."""
    momentum: float = 0.9
    weight_decay: float = 2e-4
    ema: float = 0.0
    """Decay of an average of the weights, per step, e.g. 0.995. The average is what is judged and kept; in a run that
    is not much longer than 1 / (1 - ema) steps it still remembers the beginning. 0: none."""
    awp: Schedule = constant(0.0)  # noqa: RUF009
    """Adversarial weight perturbation: its size relative to the weights, e.g. 0.005, or 0,0.005@10%. 0: none."""
    augment: Literal["none", "flip", "crop", "crop-flip"] = "none"
    validation: int = 1000
    """Training images held out to choose the best epoch by."""
    validation_eps: float = 8 / 255
    """Radius of the PGD-10 (step eps/4) that measures robust accuracy on them."""
    precision: Precision = "fp32"
    """Of gradients and activations in the fast engine; weights and verdicts are fp32, and so is the plain engine."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("lr", "awp"):  # in Python a number or a line will do
            object.__setattr__(self, name, schedules.of(getattr(self, name)))
        for name, least in (("epochs", 1), ("batch_size", 1), ("validation", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise UserError(f"{name} must be a whole number, got {value!r}.")
            if value < least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
        if not isinstance(self.attack, Attack):
            raise UserError(f"attack must be an Attack, e.g. Attack(eps=0.3), got {self.attack!r}.")
        for name, value in (
            ("normalize", self.normalize),
            ("attack.project", self.attack.project),
            ("attack.downhill", self.attack.downhill),
        ):
            if type(value) is not bool:
                raise UserError(f"{name} must be True or False, got {value!r}.")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        check_seed(self.seed)
        for name, value in (("beta", self.beta), ("weight_decay", self.weight_decay)):
            if not 0 <= value < float("inf"):
                raise UserError(f"{name} must be finite and at least 0, got {value}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {self.momentum}.")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema must lie in [0, 1), got {self.ema}. Write for example 0.995; 0 is no average.")
        if not all(0 <= size < 1 for size in self.awp.values()):
            raise UserError(f"awp must lie in [0, 1), got {self.awp}. Its authors use 0.005; 0 is no perturbation.")
        if min(self.lr.values()) < 0 or not 0 < max(self.lr.values()) < float("inf"):
            raise UserError(f"lr must be finite and positive, got {self.lr}.")
        check_radius("validation_eps", self.validation_eps)
        if self.objective not in OBJECTIVES:
            raise unknown("objective", self.objective, OBJECTIVES)
        objective = OBJECTIVES[self.objective]
        if max(self.attack.rho.values()) >= objective.rho_below:
            raise UserError(
                f"attack.rho must stay below {objective.rho_below:g} for {self.objective}, got {self.attack.rho}."
            )
        if objective.inner == "kl" and self.attack.start is None and not self.attack.noise:
            raise UserError(
                f"{self.objective} climbs the KL to the clean prediction, which is flat at the image itself. Begin "
                "beside it: --attack.start normal (or uniform)."
            )
        if not objective.walks and (self.attack.noise or not self.attack.project):
            given = [f"attack.noise is {self.attack.noise:g}: --attack.noise 0"] if self.attack.noise else []
            given += [] if self.attack.project else ["attack.project is off: --attack.project"]
            raise UserError(f"{self.objective} searches inside the ball and without noise; {'; '.join(given)}.")


def to_json(config: Config) -> dict[str, Any]:
    """Plain JSON, schedules in their one-line form."""
    return _plain(config)


def _plain(declared: Config | Attack) -> dict[str, Any]:
    values = {item.name: getattr(declared, item.name) for item in dataclasses.fields(declared)}
    return {
        name: _plain(value) if isinstance(value, Attack) else str(value) if isinstance(value, Schedule) else value
        for name, value in values.items()
    }


def from_json(given: dict[str, Any]) -> Config:
    """The configuration that `to_json` wrote."""
    attack = dict(given.get("attack", {}))
    for declared, there in ((Config, given), (Attack, attack)):
        for name in sorted(there.keys() - {item.name for item in dataclasses.fields(declared)}):
            raise UserError(f"this configuration was not written by this version of Sparring: it has a {name!r}.")
    for name in {"eps", "tau", "fosc", "margin", "rho"} & attack.keys():
        attack[name] = schedules.parse(str(attack[name]))
    try:
        whole = {**given, "attack": Attack(**attack)}
        for name in {"lr", "awp"} & whole.keys():
            whole[name] = schedules.parse(str(whole[name]))
        return Config(**whole)
    except TypeError as error:
        raise UserError(f"this configuration was not written by this version of Sparring: {error}.") from None


def differences(one: Config, other: Config) -> list[str]:
    """The fields in which two configurations differ, in words."""
    before, after = _flat(to_json(one)), _flat(to_json(other))
    return [f"{name} {before[name]} -> {after[name]}" for name in before if before[name] != after[name]]


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in nested.items() if name != "attack"}
    return flat | {f"attack.{name}": value for name, value in nested["attack"].items()}


def _scale(deviation: float) -> float:
    """What a channel is divided by: nothing where it is constant, as an opaque alpha."""
    return deviation if deviation > 1e-6 else 1.0


def model_facts(config: Config, data: Dataset) -> dict[str, Any]:
    """What it takes to build the model again: kept in every checkpoint."""
    normalize = None
    if config.normalize:
        pixels = data.train.x.transpose(0, 1).flatten(1)  # uint8, one row per channel
        rows = [row.double() / 255 for row in pixels]
        normalize = [[row.mean().item() for row in rows], [_scale(row.std().item()) for row in rows]]
    return {
        "name": config.model,
        "num_classes": data.num_classes,
        "classes": list(data.classes),
        "channels": data.channels,
        "size": list(data.size),
        "normalize": normalize,
    }
