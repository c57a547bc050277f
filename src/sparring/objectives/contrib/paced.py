"""Friendly adversarial training that finds its own tau (the paper's further research a): two rules, no schedule.

Both are FAT; tau is a function of the recorded epochs, so there is no state to save and a resumed run finds the same.

fat-paced, by the BP average:  tau_t = floor(share * BP_{t-1}),  tau_1 = 0.  The more steps an attack needs, the farther
the run has pushed its boundary away (paper Sections 5.2, 5.3), and the farther the next one goes beyond it: tau is a
share of all steps taken, tau's own and those of examples that were never fooled included. At K = 10 and share 1/4 it is
0 below 4 BPs, 1 from 4, 2 from 8: it cannot pass 2, the end of the paper's schedule. It counts no epochs, so it needs
no other number for a longer run, and no held-out data.

fat-patient, by the validation robust accuracy:  tau grows by one, up to K, once PGD-10 accuracy has not improved for
`attack.patience` epochs; then the watch begins anew, for accuracy may fall before harder data pay. So the data stay as
friendly as they can while they still teach robustness. The rule is CAT's, which watches its own attack instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from sparring.objectives.base import Record, Setting
from sparring.objectives.cat import mastered_steps
from sparring.objectives.fat import FAT


def paced(setting: Setting, records: Sequence[Record]) -> Setting:
    """tau = floor(share * BPs of the last epoch)."""
    backprops = records[-1]["backprops"] if records else 0.0
    return replace(setting, tau=math.floor(setting.share * backprops))


def patient(setting: Setting, records: Sequence[Record]) -> Setting:
    """tau = how often the robust accuracy has stalled."""
    accuracies = [record["pgd10"] for record in records]
    return replace(setting, tau=mastered_steps(accuracies, setting.patience, setting.steps + 1) - 1)


FAT_PACED = replace(FAT, name="fat-paced", adapt=paced, reads=("attack.share",))
FAT_PATIENT = replace(FAT, name="fat-patient", adapt=patient, reads=("attack.patience",))
