"""Where independent runs happen: in this process, in several of this machine, or as jobs of a Slurm cluster.

A launcher gets commands of `sparring` and knows nothing of what they compute. What came out is read from the run
folders, wherever the commands ran. The room lies below `cli`, whose commands hand it their work, and above all that it
starts.
"""

from sparring.launch.unit import Unit

__all__ = ["Unit"]
