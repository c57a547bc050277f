"""Sanity checks: signs that a robustness number misleads, and a page on each."""
