"""The house: a module imports only from the rooms above its own."""

from __future__ import annotations

import ast
from pathlib import Path

import sparring

# From the bottom up. A package is one room; inside it modules may import one another.
HOUSE = [
    "_version",
    "errors",
    "seeds",
    "threat",
    "losses",
    "schedules",
    "models",
    "data",
    "attacks",
    "engine",
    "objectives",
    "config",
    "checkpoint",
    "recognise",
    "published",
    "weights",
    "runs",
    "state",
    "board",
    "train",
    "together",
    "evaluation",
    "bound",
    "recipes",
    "bench",
    "report",
    "reproduce",
    "cli",
]
ROOT = Path(sparring.__file__).parent


def room(module: str) -> str:
    return module.split(".")[1]


def imports(path: Path) -> set[str]:
    """The sparring modules a file imports, wherever in the file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {f"{module}.{alias.name}" for alias in node.names} if module == "sparring" else {module}
    return {name for name in found if name.startswith("sparring.")}


def test_every_room_has_its_place():
    rooms = {path.stem if path.is_file() else path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    rooms -= {"__init__", "__main__", "py"}
    assert rooms == set(HOUSE)


def test_modules_import_only_from_below():
    for path in ROOT.rglob("*.py"):
        relative = path.relative_to(ROOT)
        if relative.name in ("__init__.py", "__main__.py") and len(relative.parts) == 1:
            continue
        own = relative.parts[0].removesuffix(".py")
        for module in imports(path):
            above = room(module)
            if above in ("UserError", "RunFailed"):
                continue
            assert HOUSE.index(above) <= HOUSE.index(own), f"{relative} imports {module}, which lies above it"


def test_no_rooms_for_odds_and_ends():
    for path in ROOT.rglob("*.py"):
        assert path.stem not in ("utils", "common", "helpers", "misc", "base")


def test_tests_mirror_the_source():
    tests = Path(__file__).parent
    for path in ROOT.iterdir():
        name = path.stem
        if path.suffix == ".py" and not name.startswith("_"):
            assert (tests / f"test_{name}.py").exists(), f"no tests/test_{name}.py"
        elif path.is_dir() and name != "__pycache__":
            assert list((tests / name).glob("test_*.py")), f"no tests in tests/{name}"
