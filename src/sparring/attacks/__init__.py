"""Attacks: adversarial examples in the L-infinity or L2 ball, by input gradients. The model is left as it was found."""

from sparring.attacks.boundary import friendliest_pgd
from sparring.attacks.checks import Model
from sparring.attacks.friendly import friendly_pgd
from sparring.attacks.pgd import Found, pgd
from sparring.attacks.stop_rules import fosc_pgd, margin_pgd, pgd_until

__all__ = ["Found", "Model", "fosc_pgd", "friendliest_pgd", "friendly_pgd", "margin_pgd", "pgd", "pgd_until"]
