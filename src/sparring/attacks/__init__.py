"""Attacks: where in the eps-ball a model goes wrong. Input gradients only; the model is left as it was found."""

from sparring.attacks.boundary import friendliest_pgd
from sparring.attacks.fosc import fosc_pgd
from sparring.attacks.friendly import Found, friendly_pgd
from sparring.attacks.margin import margin_pgd
from sparring.attacks.pgd import pgd
from sparring.attacks.stop_rules import pgd_until

__all__ = ["Found", "fosc_pgd", "friendliest_pgd", "friendly_pgd", "margin_pgd", "pgd", "pgd_until"]
