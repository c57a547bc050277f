"""`make bench` runs the benchmarks that need no GPU; every script says how to run it."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


def needs_a_gpu(script: Path) -> bool:
    """Whether its device is CUDA, whatever the machine has."""
    return (
        re.search(r'^DEVICE = torch\.device\("cuda"\)$', script.read_text(encoding="utf-8"), re.MULTILINE) is not None
    )


def test_make_bench_runs_all_that_need_no_gpu():
    if shutil.which("make") is None:
        pytest.skip("there is no make: apt-get install make")
    said = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run = set(re.findall(r"benchmarks/(bench_\w+\.py)", said))
    here = {script.name for script in SCRIPTS if script.name.startswith("bench_")}
    for_gpus = {script.name for script in SCRIPTS if needs_a_gpu(script)}
    assert {"bench_fp8_conv.py", "check_fp8.py"} <= for_gpus and "bench_attack.py" in run
    assert run == here - for_gpus - {"bench_load.py"}  # which takes a quarter of an hour


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_script_says_what_it_measures_and_how_to_run_it(script):
    said = ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or ""
    assert f"benchmarks/{script.name}" in said, f"{script.name}: the docstring shows no command"
