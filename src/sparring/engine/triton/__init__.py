"""Triton kernels, one file per family, and the numbers tuned for a device."""
