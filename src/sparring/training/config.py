"""The configuration of a run: everything that decides what it computes, and nothing that does not.

A recipe is one `Config`; the command line replaces fields of it; the run folder keeps it as JSON. Where a run happens
(device, folder, progress) is not part of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sparring.attacks.checks import check_radius
from sparring.data import AUGMENTS, Dataset
from sparring.errors import UserError, unknown
from sparring.objectives import FAT, OBJECTIVES, Objective
from sparring.schedules import Schedule, Scheduled
from sparring.seeds import check_seed

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True)
class Config:
    """One training run."""

    objective: Objective = field(default_factory=FAT)
    """What is minimised: FAT(...), Madry(...), TRADES(...), or another objective, with its own parameters."""
    data: str = "digits"
    """digits, cifar10, svhn (or some classes, cifar10:bird+deer), npz:FILE, folder:PATH (one subfolder per class);
    folder:PATH?size=32 scales and crops its images."""
    model: str = "tiny_cnn"
    """tiny_cnn, small_cnn, resnet18, or a wide ResNet such as wrn-34-10."""
    normalize: bool = False
    """Subtract the training data's mean and divide by its deviation, in a layer of the model."""
    epochs: int = 30
    batch_size: int = 128
    lr: Scheduled = Scheduled(0.1)
    """Learning rate: 0.1, or 0.1,0.01@60, or one-cycle:0.2."""
    momentum: float = 0.9
    weight_decay: float = 2e-4
    ema: float = 0.0
    """Decay of an average of the weights, per step, e.g. 0.995. The average is what is judged and kept; in a run that
    is not much longer than 1 / (1 - ema) steps it still remembers the beginning. 0: none."""
    awp: Scheduled = Scheduled(0.0)
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
        for name, least in (("epochs", 1), ("batch_size", 1), ("validation", 1), ("seed", 0)):
            value = getattr(self, name)
            if type(value) is not int:
                raise UserError(f"{name} must be a whole number, got {value!r}.")
            if value < least:
                raise UserError(f"{name} must be at least {least}, got {value}.")
        if isinstance(self.objective, str):
            raise UserError(
                f"objective must be an objective, got the text {self.objective!r}. Write for example "
                f"{OBJECTIVES[self.objective].__name__ if self.objective in OBJECTIVES else 'FAT'}(eps=8/255)."
            )
        if isinstance(self.objective, type) or not hasattr(self.objective, "search"):
            raise UserError(f"objective must be an objective, e.g. FAT(eps=8/255), got {self.objective!r}.")
        if type(self.normalize) is not bool:
            raise UserError(f"normalize must be True or False, got {self.normalize!r}.")
        if self.precision not in get_args(Precision):
            raise unknown("precision", self.precision, get_args(Precision))
        for name in ("model", "data"):
            if not isinstance(getattr(self, name), str):
                raise UserError(
                    f"{name} must be a name, got {type(getattr(self, name)).__name__}. With a network or data of your "
                    "own, call an objective in your own loop: step = FAT(...)(model, x, y)."
                )
        if self.augment not in AUGMENTS:
            raise unknown("augmentation", str(self.augment), AUGMENTS)
        check_seed(self.seed)
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"weight_decay must be finite and at least 0, got {self.weight_decay}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {self.momentum}.")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema must lie in [0, 1), got {self.ema}. Write for example 0.995; 0 is no average.")
        if not all(0 <= size < 1 for size in self.awp.values()):
            raise UserError(f"awp must lie in [0, 1), got {self.awp}. Its authors use 0.005; 0 is no perturbation.")
        if min(self.lr.values()) < 0 or not 0 < max(self.lr.values()) < float("inf"):
            raise UserError(f"lr must be finite and positive, got {self.lr}.")
        check_radius("validation_eps", self.validation_eps)


def to_json(config: Config) -> dict[str, Any]:
    """Plain JSON, schedules in their one-line form: the objective's name, and its parameters under `attack`."""
    found: dict[str, Any] = {"objective": config.objective.name, "attack": _plain(config.objective)}
    return found | {name: value for name, value in _plain(config).items() if name != "objective"}


def _plain(declared: Any) -> dict[str, Any]:
    values = {item.name: getattr(declared, item.name) for item in dataclasses.fields(declared)}
    return {name: str(value) if isinstance(value, Schedule) else value for name, value in values.items()}


def from_json(given: dict[str, Any]) -> Config:
    """The configuration that `to_json` wrote.

    A file may hold the parameters of all objectives in one block, and `beta` beside it: those that mean nothing to the
    objective are left out.
    """
    whole, attack = dict(given), dict(given.get("attack", {}))
    name = whole.pop("objective", FAT.name)
    whole.pop("attack", None)
    if name not in OBJECTIVES:
        raise unknown("objective", str(name), OBJECTIVES)
    if "beta" in whole:
        attack["beta"] = whole.pop("beta")
    known = {item.name for kind in OBJECTIVES.values() for item in dataclasses.fields(kind)}
    for other in sorted((attack.keys() - known) | (whole.keys() - {item.name for item in dataclasses.fields(Config)})):
        raise UserError(f"this configuration was not written by this version of Sparring: it has a {other!r}.")
    own = {item.name: attack[item.name] for item in dataclasses.fields(OBJECTIVES[name]) if item.name in attack}
    try:
        return Config(objective=OBJECTIVES[name](**own), **whole)
    except TypeError as error:
        raise UserError(f"this configuration was not written by this version of Sparring: {error}.") from None


def with_objective(config: Config, name: str | None = None, **parameters: Any) -> Config:
    """The same run with another objective, which keeps the parameters that both have, or with other parameters."""
    given, kind = config.objective, OBJECTIVES[name or config.objective.name]
    own = {item.name for item in dataclasses.fields(kind)}
    kept = {key: value for key, value in vars(given).items() if key in own}
    return dataclasses.replace(config, objective=kind(**kept | parameters))


def differences(one: Config, other: Config) -> list[str]:
    """The fields in which two configurations differ, in words; of two objectives, those that both have."""
    before, after = _flat(to_json(one)), _flat(to_json(other))
    shared = [name for name in before if name in after]
    return [f"{name} {before[name]} -> {after[name]}" for name in shared if before[name] != after[name]]


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    """Names as the command line has them: attack.eps."""
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
