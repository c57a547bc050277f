"""Reports: attacks walked step by step, figures, and one self-contained HTML page of them.

Everything here shows what was measured elsewhere; nothing here trains, and no number is computed twice.
"""

from sparring.report.attack_path import AttackPath, Frame, attack_path, choose
from sparring.report.page import Method, write_page

__all__ = ["AttackPath", "Frame", "Method", "attack_path", "choose", "write_page"]
