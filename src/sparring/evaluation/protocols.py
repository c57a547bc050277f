"""The evaluation protocols, one declaration each: the paper's (Tables 1-4, Sec. 5.1, 6.1), fastat, quick, AutoAttack.

All are white-box, and accuracy is taken at the final iterate. A step size is either absolute, in [0, 1] pixels, or a
fraction of eps (`Part(4)` is eps/4): with another eps the fractions scale and the absolute ones stay. The radii and the
absolute steps are the paper's, in L-infinity. In L2 the caller gives the radius, and every step is the same fraction of
it that it is of the paper's. Nothing here runs an attack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from sparring.attacks.ball import Start
from sparring.attacks.threat import Norm, check_norm, check_radius
from sparring.errors import UserError, unknown


@dataclass(frozen=True)
class Part:
    """eps divided by `by`."""

    by: float


@dataclass(frozen=True)
class PGDAttack:
    """A PGD attack as a protocol declares it. FGSM is one step of eps, C&W_inf is 30 steps on the margin loss."""

    name: str
    steps: int
    step_size: float | Part
    loss: str = "ce"
    start: Start = "uniform"
    times_eps: float = 1.0  # the radius, in units of the protocol's eps
    restarts: int = 1


@dataclass(frozen=True)
class AutoAttackSuite:
    """AutoAttack by its authors; its version depends on the model (rand where the model is stochastic)."""

    name: str = "autoattack"


@dataclass(frozen=True)
class Protocol:
    """The attacks to run on a model, in addition to its natural accuracy."""

    name: str
    about: str
    eps: float
    attacks: tuple[PGDAttack | AutoAttackSuite, ...]
    limit: int | None = None  # images evaluated unless the caller gives a limit


@dataclass(frozen=True)
class Settings:
    """One attack with every parameter resolved. Two attacks with equal settings are the same attack."""

    eps: float
    steps: int = 0  # 0 with eps 0: the natural images; 0 with eps above 0: AutoAttack, which chooses its own
    step_size: float = 0.0
    loss: str = "ce"
    start: Start = None
    restarts: int = 1
    norm: Norm = "linf"

    @property
    def random(self) -> bool:
        """Whether another seed gives another attack."""
        return self.start is not None


def _fgsm(start: Start = "uniform") -> PGDAttack:
    return PGDAttack("fgsm", 1, Part(1), start=start)


def _pgd(steps: int, step_size: float | Part, start: Start = "uniform") -> PGDAttack:
    return PGDAttack(f"pgd{steps}", steps, step_size, start=start)


def _cw(step_size: float | Part, start: Start = "uniform") -> PGDAttack:
    return PGDAttack("cw30", 30, step_size, loss="cw", start=start)


dat = Protocol(
    "dat",
    "Table 1 of the paper",
    0.031,
    (_fgsm(), _pgd(20, Part(4)), _pgd(100, Part(4)), _cw(Part(4))),
)
trades = Protocol(
    "trades",
    "Table 2: every attack starts at the image",
    0.031,
    (_fgsm(None), _pgd(20, 0.003, None), _pgd(100, 0.003, None), _cw(0.003, None)),
)
trades_random = Protocol(
    "trades-random",
    "Table 3: as trades, from a random start",
    0.031,
    (_fgsm(), _pgd(20, 0.003), _pgd(100, 0.003), _cw(0.003)),
)
mart = Protocol(
    "mart",
    "Table 4",
    8 / 255,
    (_fgsm(), _pgd(20, Part(10)), _cw(Part(10))),
)
figure = Protocol(
    "figure",
    "the figures of Sec. 6.1 on CIFAR-10, with PGD-20 at twice eps",
    8 / 255,
    (
        _fgsm(),
        _pgd(20, 2 / 255),
        _pgd(100, 2 / 255),
        _cw(2 / 255),
        replace(_pgd(20, 2 / 255), name="pgd20-2eps", times_eps=2.0),
    ),
)
figure_svhn = replace(figure, name="figure-svhn", about="the figures of Sec. 6.1 on SVHN", eps=4 / 255)
figure_twice = Protocol(
    "figure-twice",
    "networks trained at larger radii: PGD-20, C&W and AutoAttack at twice the radius",
    16 / 255,
    (_pgd(20, 2 / 255), _cw(2 / 255), AutoAttackSuite()),
    limit=1000,
)
tau = Protocol(
    "tau",
    "the figure of Sec. 5.1",
    8 / 255,
    (_fgsm(), _pgd(10, 0.003), _pgd(20, 0.003), _pgd(100, 0.003), _cw(0.003)),
)
fastat = Protocol(
    "fastat",
    "the FastAT Benchmark (arXiv 2604.22853); it adds AutoAttack",
    8 / 255,
    (_pgd(10, 2 / 255), _pgd(20, 2 / 255), _pgd(50, 2 / 255)),
)
quick = Protocol(
    "quick",
    "PGD-10 on 500 images: seconds on a laptop, only an upper bound",
    8 / 255,
    (_pgd(10, Part(4)),),
    limit=500,
)
autoattack = Protocol(
    "autoattack",
    "AutoAttack by its authors: APGD-CE, targeted APGD, targeted FAB, Square",
    8 / 255,
    (AutoAttackSuite(),),
)

PROTOCOLS = {
    protocol.name: protocol
    for protocol in (
        dat,
        trades,
        trades_random,
        mart,
        figure,
        figure_svhn,
        figure_twice,
        tau,
        fastat,
        quick,
        autoattack,
    )
}


def find(names: str | Protocol | Sequence[str | Protocol]) -> tuple[Protocol, ...]:
    """The protocols with these names, each once, in the order given."""
    if isinstance(names, str | Protocol):
        names = [names]
    if not isinstance(names, Sequence) or not all(isinstance(name, str | Protocol) for name in names):
        raise UserError(f"protocol must be a name, or several, got {names!r}. Write for example ('dat', 'autoattack').")
    found: dict[str, Protocol] = {}
    for name in names:
        if isinstance(name, str) and name not in PROTOCOLS:
            raise unknown("protocol", name, PROTOCOLS)
        protocol = PROTOCOLS[name] if isinstance(name, str) else name
        if found.setdefault(protocol.name, protocol) != protocol:
            raise UserError(f"two different protocols are called {protocol.name}. Rename one of them.")
    if not found:
        raise UserError(f"name at least one protocol. Known: {', '.join(sorted(PROTOCOLS))}.")
    return tuple(found.values())


def settle(
    attack: PGDAttack | AutoAttackSuite,
    *,
    eps: float,
    restarts: int | None = None,
    norm: Norm = "linf",
    of_eps: float | None = None,
) -> Settings:
    """An attack at a protocol's eps, with every parameter resolved. `restarts` applies to random starts only.

    Args:
        of_eps: the radius that absolute step sizes were declared for: in L2 they keep their ratio to it.
    """
    check_norm(norm)
    check_radius("eps", eps, norm)
    if isinstance(attack, AutoAttackSuite):
        return Settings(eps=eps, loss="autoattack", norm=norm)
    radius = eps * attack.times_eps
    check_radius(f"the radius of {attack.name}", radius, norm)
    if isinstance(attack.step_size, Part):
        step_size = radius / attack.step_size.by
    else:
        step_size = attack.step_size * (eps / of_eps if norm != "linf" and of_eps else 1.0)
    times = restarts if restarts is not None and attack.start is not None else attack.restarts
    return Settings(radius, attack.steps, step_size, attack.loss, attack.start, times, norm)


def radius_of(protocol: Protocol, *, eps: float | None, norm: Norm) -> float:
    """The radius a protocol is run at: the caller's, or its own, which is one in L-infinity."""
    if eps is None and norm != "linf":
        raise UserError(
            f"the radius {protocol.eps:.4g} of the protocol {protocol.name} is one in linf. Give one for {norm}: "
            "eps=0.5 (--eps 0.5)."
        )
    return protocol.eps if eps is None else eps


@dataclass(frozen=True)
class UniqueAttack:
    """An attack to run once: its name in the result, and every protocol it serves."""

    name: str
    settings: Settings
    serves: tuple[tuple[str, str], ...]  # (attack, protocol), by the names the protocols use


def unique_attacks(
    protocols: Sequence[Protocol], *, eps: float | None = None, restarts: int | None = None, norm: Norm = "linf"
) -> list[UniqueAttack]:
    """The attacks of these protocols without duplicates.

    An attack keeps its plain name (pgd20) unless the protocols use it for different attacks: then each is named after
    the first protocol that has it (pgd20@dat, pgd20@trades).
    """
    check_norm(norm)
    wanted: dict[Settings, list[tuple[str, str]]] = {}
    for protocol in protocols:
        radius = radius_of(protocol, eps=eps, norm=norm)
        for attack in protocol.attacks:
            settings = settle(attack, eps=radius, restarts=restarts, norm=norm, of_eps=protocol.eps)
            wanted.setdefault(settings, []).append((attack.name, protocol.name))
    meanings: dict[str, set[Settings]] = {}
    for settings, serves in wanted.items():
        for name, _ in serves:
            meanings.setdefault(name, set()).add(settings)
    attacks: list[UniqueAttack] = []
    for settings, serves in wanted.items():
        name, protocol_name = serves[0]
        full = name if len(meanings[name]) == 1 else f"{name}@{protocol_name}"
        if any(full == other.name for other in attacks):
            raise UserError(f"protocol {protocol_name} calls two different attacks {name}. Rename one of them.")
        attacks.append(UniqueAttack(full, settings, tuple(serves)))
    return attacks
