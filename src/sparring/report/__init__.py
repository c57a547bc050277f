"""Reports: attacks shown step by step, figures, and one self-contained HTML page.

Everything here shows what was measured elsewhere: nothing trains, and no number is computed twice.
"""

from sparring.report.attack_path import AttackPath, Frame, attack_path, choose
from sparring.report.content import Method
from sparring.report.page import write_page

__all__ = ["AttackPath", "Frame", "Method", "attack_path", "choose", "write_page"]
