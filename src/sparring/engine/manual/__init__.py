"""Folded networks run by a hand-written forward and backward pass, without autograd."""
