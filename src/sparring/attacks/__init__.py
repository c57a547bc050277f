"""Attacks: where in the eps-ball a model goes wrong. Input gradients only; the model is left as it was found."""

from sparring.attacks.friendly import Found, friendly_pgd
from sparring.attacks.pgd import pgd

__all__ = ["Found", "friendly_pgd", "pgd"]
