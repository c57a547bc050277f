"""The paper, reproduced: plan the jobs, run what is missing, keep the results as data, draw from the data.

Built on training, evaluation, recipes and report; no module below it imports it.
"""

from sparring.paper.plan import Job, plan, remaining, state
from sparring.paper.run import Stopped, Workspace, carry_out

__all__ = ["Job", "Stopped", "Workspace", "carry_out", "plan", "remaining", "state"]
