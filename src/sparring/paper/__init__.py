"""The paper, reproduced: plan what is missing, carry it out, keep the results as data, draw from the data.

Stands above training, evaluation, recipes and report; nothing below knows of it.
"""

from sparring.paper.plan import Job, plan, state, wanting
from sparring.paper.run import Bench, Stopped, carry_out

__all__ = ["Bench", "Job", "Stopped", "carry_out", "plan", "state", "wanting"]
