"""Training: the loop, the run folder, exact resume."""
