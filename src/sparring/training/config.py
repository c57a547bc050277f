"""The configuration of a run: everything that decides what it computes, and nothing that does not.

A recipe is one `Config`; the command line replaces fields of it; the run folder keeps it as JSON. Where a run happens
(device, folder, progress) is not part of it.
"""

from __future__ import annotations

import dataclasses
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from sparring.attacks.threat import check_radius, is_number, step_length
from sparring.data import EXTRA_FRACTION, Dataset, check_extra, moments, parse_augment
from sparring.errors import UserError, unknown
from sparring.files.regular import shown
from sparring.models.own import Recorded
from sparring.objectives import FAT, OBJECTIVES, Objective
from sparring.objectives.base import plain_numbers
from sparring.schedules import Schedule, Scheduled, pixels
from sparring.seeds import check_seed
from sparring.training.optimisers import OWN, check_name

Precision = Literal["fp32", "bf16", "fp8"]
_NO_MOMENTUM = ("adam", "adamw")  # but betas, which are torch's


@dataclass(frozen=True)
class Config:
    """Every setting of one training run: what it computes, and nothing about where."""

    objective: Objective = field(default_factory=FAT)
    """What is minimised: FAT(...), Madry(...), TRADES(...), or another objective, with its own parameters."""
    data: str = "digits"
    """digits, cifar10, svhn (or some classes, cifar10:bird+deer), npz:FILE, folder:PATH (one subfolder per class);
    folder:PATH?size=32 scales and crops its images. All: sparring data."""
    model: str = "tiny_cnn"
    """tiny_cnn, small_cnn, resnet18, preact_resnet18, a wide ResNet such as wrn-34-10 or wrn-28-10-silu; your own:
    package.module:make (a function that makes it), a registered name, timm:NAME or timm:NAME?pretrained."""
    init: str = ""
    """A run folder, .safetensors or published file whose weights training begins from; a head for another number of
    classes is replaced. Empty: weights drawn from the seed."""
    normalize: bool = False
    """Subtract the training data's mean and divide by its deviation, in a layer of the model."""
    epochs: int = 30
    """Passes over the training images."""
    batch_size: int = 128
    """Images of an update, of all processes together."""
    lr: Scheduled = Scheduled(0.1)
    """Learning rate: 0.1, or 0.1,0.01@60, or one-cycle:0.2, or warmup:5%+cosine:0.1."""
    optimizer: str = "sgd"
    """sgd, adamw, adam or rmsprop. One of your own is handed to `sparring.train`, and kept here as own:ClassName."""
    momentum: float = 0.9
    """Of sgd and rmsprop; the betas of Adam are torch's, 0.9 and 0.999."""
    nesterov: bool = False
    """Nesterov's momentum, in sgd."""
    weight_decay: float = 2e-4
    no_decay: bool = False
    """Leave biases and the parameters of normalisation without weight decay."""
    clip: float = 0.0
    """The largest global norm of a gradient: a longer one is scaled down to it. 0: none."""
    label_smoothing: float = 0.0
    """Part of a label's probability that is spread over all classes, in the loss of the update alone, e.g. 0.1."""
    ema: float = 0.0
    """Decay of an average of the weights, per step, e.g. 0.995. The average is what is judged and kept; in a run that
    is not much longer than 1 / (1 - ema) steps it still remembers the beginning. 0: none."""
    awp: Scheduled = Scheduled(0.0)
    """Adversarial weight perturbation: its size relative to the weights, e.g. 0.005, or 0,0.005@10%. 0: none."""
    augment: str = "none"
    """none, flip, crop, crop-flip, and by + more: resized-crop:0.25, jitter:0.4, cutout:8, erase:0.5, cutmix:1.0."""
    extra: str = ""
    """Extra images with labels, e.g. generated ones, in every batch: npz:FILE. An epoch stays as long as without."""
    extra_fraction: float = EXTRA_FRACTION
    """The share of every batch that are extra images, where there are any."""
    validation: int = 1000
    """Training images held out to choose the best epoch by."""
    validation_eps: float | Literal["eps"] = 8 / 255
    """Radius of the PGD-10 (step eps/4) that measures robust accuracy on them, in the norm of training; "eps" is the
    largest radius of training."""
    precision: Precision = "fp32"
    """Of gradients and activations in the fast engine; weights and verdicts are fp32, and so is the plain engine. With
    fp8, attacks on ResNets and wide ResNets run in eight bits on GPUs that have them; everything else is bf16."""
    sync_bn: bool = False
    """Of several processes: take batch-norm's statistics over all of them, on the plain engine; else over each's own
    images."""
    seed: int = 0

    def __post_init__(self) -> None:
        plain_numbers(self)
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
            found = self.objective.__name__ if isinstance(self.objective, type) else type(self.objective).__name__
            given = f"the class {found}" if isinstance(self.objective, type) else found
            raise UserError(f"objective must be an objective, got {given}. Write for example FAT(eps=8/255).")
        if type(self.normalize) is not bool:
            raise UserError(f"normalize must be True or False, got {self.normalize!r}.")
        if not isinstance(self.precision, str) or self.precision not in get_args(Precision):
            raise unknown("precision", str(self.precision), get_args(Precision))
        for name in ("momentum", "weight_decay", "clip", "label_smoothing", "ema"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UserError(f"{name} must be a number, got {value!r}.")
        for name in ("nesterov", "no_decay", "sync_bn"):
            if type(getattr(self, name)) is not bool:
                raise UserError(f"{name} must be True or False, got {getattr(self, name)!r}.")
        check_name(self.optimizer)
        if self.nesterov and (self.optimizer != "sgd" or not self.momentum):
            raise UserError("nesterov is of sgd with momentum. Write --optimizer sgd --momentum 0.9, or leave it out.")
        if self.momentum != Config.momentum and self.optimizer in _NO_MOMENTUM:
            raise UserError(
                f"{self.optimizer} has no momentum, got {self.momentum}. Leave --momentum out, or write "
                "--optimizer sgd or rmsprop."
            )
        if not 0 <= self.clip < float("inf"):
            raise UserError(f"clip must be finite and at least 0, got {self.clip}. Write for example 1; 0 is none.")
        for name in ("model", "data"):
            if not isinstance(getattr(self, name), str):
                raise UserError(
                    f"{name} must be a name, got {type(getattr(self, name)).__name__}. Hand your own to train: "
                    f"sparring.train(config, out=..., {name}=...)."
                )
        if not isinstance(self.init, str):
            raise UserError(f"init must be a text, the path of a run or a file, got {type(self.init).__name__}.")
        parse_augment(self.augment)
        check_extra(self.extra, self.extra_fraction)
        check_seed(self.seed)
        for name in ("weight_decay", "momentum", "ema"):
            if not isinstance(getattr(self, name), int | float):
                raise UserError(f"{name} must be a number, got {getattr(self, name)!r}.")
        if not 0 <= self.weight_decay < float("inf"):
            raise UserError(f"weight_decay must be finite and at least 0, got {self.weight_decay}.")
        if not 0 <= self.momentum < 1:
            raise UserError(f"momentum must lie in [0, 1), got {self.momentum}.")
        if not 0 <= self.label_smoothing < 1:
            raise UserError(f"label_smoothing must lie in [0, 1), got {self.label_smoothing}. Write for example 0.1.")
        if not 0 <= self.ema < 1:
            raise UserError(f"ema must lie in [0, 1), got {self.ema}. Write for example 0.995; 0 is no average.")
        if not all(0 <= size < 1 for size in self.awp.values()):
            raise UserError(f"awp must lie in [0, 1), got {self.awp}. Its authors use 0.005; 0 is no perturbation.")
        if min(self.lr.values()) < 0 or not 0 < max(self.lr.values()) < float("inf"):
            raise UserError(f"lr must be finite and positive, got {self.lr}.")
        if isinstance(self.validation_eps, str) and self.validation_eps == "eps":
            if not self.objective.radius:
                raise UserError(
                    f"validation_eps 'eps' is the radius of training, and {self.objective.name} has none. Give a "
                    "number (--validation-eps 8/255)."
                )
        elif isinstance(self.validation_eps, str):
            raise UserError(f"validation_eps must be a number or 'eps', got {self.validation_eps!r}.")
        elif not is_number(self.validation_eps):
            raise UserError(f"validation_eps must be a number or 'eps', got {type(self.validation_eps).__name__}.")
        else:
            check_radius("validation_eps", self.validation_eps, self.objective.norm)

    @property
    def validation_radius(self) -> float:
        """`validation_eps` as a number."""
        return self.objective.radius if isinstance(self.validation_eps, str) else self.validation_eps


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
    whole = dict(given)
    name, attack = whole.pop("objective", FAT.name), whole.pop("attack", {})
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise unknown("objective", str(name), OBJECTIVES)
    if not isinstance(attack, dict):
        raise UserError(f"the attack of a configuration holds its parameters by name, got {type(attack).__name__}.")
    attack = dict(attack)
    if "beta" in whole:
        attack["beta"] = whole.pop("beta")
    known = {item.name for kind in OBJECTIVES.values() for item in dataclasses.fields(kind)}
    for other in sorted((attack.keys() - known) | (whole.keys() - {item.name for item in dataclasses.fields(Config)})):
        raise UserError(f"this configuration was not written by this version of Sparring: it has a {other!r}.")
    if whole.get("optimizer") in _NO_MOMENTUM:
        whole.pop("momentum", None)  # a file may hold one that was never used
    if isinstance(whole.get("model"), str):
        whole["model"] = Recorded(whole["model"])
    own = {item.name: attack[item.name] for item in dataclasses.fields(OBJECTIVES[name]) if item.name in attack}
    try:
        return Config(objective=OBJECTIVES[name](**own), **whole)
    except UserError:
        raise
    except (TypeError, ValueError, AttributeError, KeyError, OverflowError) as error:  # a value of another kind
        reason = shown(str(error).rstrip("."), 120)
        raise UserError(f"this configuration was not written by this version of Sparring: {reason}.") from None


def with_objective(config: Config, name: str | None = None, **parameters: Any) -> Config:
    """The same run with another objective, which keeps the parameters that both have, or with other parameters."""
    given, kind = config.objective, OBJECTIVES[name or config.objective.name]
    own = {item.name for item in dataclasses.fields(kind)}
    kept = {key: value for key, value in vars(given).items() if key in own}
    made = kind(**kept | parameters)
    radius = config.validation_eps if made.radius else config.validation_radius  # "eps" means nothing without an attack
    return dataclasses.replace(config, objective=made, validation_eps=radius)


def differences(one: Config, other: Config) -> list[str]:
    """The fields in which two configurations differ, in words; of two objectives, those that both have.

    What counts is what is used: a step of "eps/4" does not differ from the same number.
    """
    before, after = flat_used(one), flat_used(other)
    shared = [name for name in before if name in after]
    return [f"{name} {before[name]} -> {after[name]}" for name in shared if before[name] != after[name]]


def flat_json(config: Config) -> dict[str, Any]:
    """As `flat_written`, without what the optimiser does not use: a page or a tracker states what was in force."""
    idle = unused(config.optimizer)
    return {name: value for name, value in flat_written(config).items() if name not in idle}


def flat_written(config: Config) -> dict[str, Any]:
    """As `to_json` in one level, with the names of the command line: attack.eps."""
    return _flat(to_json(config))


def unused(optimizer: str) -> tuple[str, ...]:
    """The fields that mean nothing to an optimiser: one of the caller's own has numbers of its own."""
    if optimizer.startswith(OWN):
        return "momentum", "nesterov", "weight_decay", "no_decay"
    return {"sgd": (), "rmsprop": ("nesterov",)}.get(optimizer, ("momentum", "nesterov"))


def flat_used(config: Config) -> dict[str, Any]:
    """As `used` in one level."""
    return _flat(used(config))


def same(one: Config, other: Config) -> bool:
    """Whether two configurations are the same run, however their parts of eps are written."""
    return type(one.objective) is type(other.objective) and not differences(one, other)


def used(config: Config) -> dict[str, Any]:
    """`to_json` with parts of eps as numbers; a step that moves with a schedule of eps stays as it is written."""
    plain = to_json(config)
    attack, eps = plain["attack"], getattr(config.objective, "eps", None)
    if isinstance(attack.get("step_size"), str) and eps is not None and len(set(eps.values())) == 1:
        attack["step_size"] = step_length(attack["step_size"], config.objective.radius)
    return plain | {"attack": attack, "validation_eps": config.validation_radius}


def _flat(nested: dict[str, Any]) -> dict[str, Any]:
    flat = {name: value for name, value in nested.items() if name != "attack"}
    return flat | {f"attack.{name}": value for name, value in nested["attack"].items()}


def spelled(value: object) -> str:
    """A value of `flat_json` for people to read: 8/255 for that float, six digits of any other."""
    with suppress(ValueError):  # a schedule may be one number, or not
        if isinstance(value, float | str):
            return pixels(float(value))
    return str(value)


def _scale(deviation: float) -> float:
    """What a channel is divided by: nothing where it is constant, as an opaque alpha."""
    return deviation if deviation > 1e-6 else 1.0


def model_facts(config: Config, data: Dataset) -> dict[str, Any]:
    """What it takes to build the model again: kept in every checkpoint."""
    normalize = None
    if config.normalize:
        mean, deviation = moments(data.train)
        normalize = [mean, [_scale(each) for each in deviation]]
    return {
        "name": config.model,
        "num_classes": data.num_classes,
        "classes": list(data.classes),
        "channels": data.channels,
        "size": list(data.size),
        "normalize": normalize,
    }
