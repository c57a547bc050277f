"""The weight update: loss, gradient, SGD and the finite check in one captured graph."""
