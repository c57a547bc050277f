"""A module imports only from rooms below its own. The house, bottom-up, and inside each package its modules."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import sparring

# Bottom-up: a room lies below those that come later in the list.
HOUSE: dict[str, list[str]] = {
    "_version": [],
    "errors": [],
    "seeds": [],
    "shares": [],
    "schedules": [],
    "files": ["regular", "schema", "json_text", "digests", "result_json", "leftovers", "opcodes"],
    "attacks": [
        "threat",
        "failures",
        "checks",
        "ball",
        "eval_mode",
        "losses",
        "passes",
        "pgd",
        "friendly",
        "stop_rules",
        "boundary",
        "apgd",
        "hyperplane",
        "fab",
        "square",
        "autoattack",
    ],
    "models": [
        "keys",
        "normalize",
        "tiny_cnn",
        "small_cnn",
        "resnet",
        "preact_resnet",
        "wide_resnet",
        "own",
        "timm_networks",
        "registry",
        "probe",
        "features",
        "flops",
    ],
    "data": [
        "dataset",
        "download",
        "safe_pickle",
        "archives",
        "memory",
        "cache",
        "mapped_npz",
        "global_random",
        "pixels",
        "augment",
        "boxes",
        "warps",
        "policy",
        "prefetch",
        "stream",
        "items",
        "loader",
        "batching",
        "npz",
        "mat5",
        "extra",
        "stored",
        "digits",
        "cifar",
        "svhn",
        "cifar100",
        "idx",
        "tiny_imagenet",
        "image_folder",
        "fetch",
        "registry",
        "own",
    ],
    "objectives": [
        "base",
        "standard",
        "madry",
        "trades",
        "mart",
        "fat",
        "fat_for_trades",
        "fat_for_mart",
        "cat",
        "dat",
        "ates",
        "contrib",
    ],
    "engine": [
        "layout",
        "deterministic",
        "cuda_graphs",
        "ema",
        "fx_graph",
        "triton",
        "manual.fused_ops",
        "folded_layers",
        "manual",
        "attack",
        "attack_path",
        "cpu",
        "update",
        "plain",
        "training_engine",
        "select",
    ],
    "training": [
        "torchrun",
        "signals",
        "optimisers",
        "config",
        "advice",
        "images",
        "lengthen",
        "held_folder",
        "schemas",
        "checkpoint",
        "initial",
        "run_folder",
        "optimiser_state",
        "state",
        "tracking",
        "trackers",
        "progress",
        "peers",
        "distributed",
        "all_reduce",
        "sync_bn",
        "start",
        "validation",
        "gpu_sharing",
        "resume",
        "opening",
        "loop",
    ],
    "weights": [
        "shipped",
        "torch_file",
        "foreign",
        "identify",
        "load",
        "initial",
        "measured",
        "programs",
        "model_card",
        "hub",
        "export",
    ],
    "evaluation": [
        "progress",
        "verdicts",
        "starts",
        "protocols",
        "estimate",
        "sanity",
        "result",
        "cache",
        "gradient_model",
        "subject",
        "autoattack",
        "evaluator",
    ],
    "recipes": ["recipe", "digits", "cifar10", "no_projection", "train"],
    "report": [
        "settings",
        "identity",
        "labels",
        "board",
        "comparison",
        "attack_path",
        "charts",
        "panels",
        "scatter",
        "content",
        "method_charts",
        "page",
        "evaluations",
        "gather",
        "entries",
        "averages",
    ],
    "paper": [
        "extremes",
        "bound",
        "specs",
        "result_schema",
        "results",
        "plan",
        "cost",
        "measure",
        "run",
        "collect",
        "leaderboard",
        "notes",
        "claims",
        "findings",
        "planes",
        "render",
        "headline",
    ],
    "bench": ["timing", "start_up", "literal_loop", "training", "side_by_side", "parts", "measure", "scaling"],
    "launch": ["unit", "job", "local", "slurm"],
    "cli": [],
}
# Inside a package of a package, where the order matters as much.
INSIDE: dict[str, list[str]] = {
    "engine.triton": [
        "compile_ahead",
        "tuning",
        "attack_step",
        "conv",
        "fp8_kernels",
        "fp8_conv",
        "first_layer",
        "batch_norm",
        "pointwise",
        "pooling",
        "sgd",
        "available",
    ],
    "engine.manual": [
        "fp8_simulated",
        "fused_ops",
        "manual_network",
        "chain",
        "read_chain",
        "wide_resnet",
        "fp8_weights",
        "resnet_fp8",
        "wide_resnet_fp8",
        "fp8",
    ],
    "engine.attack": ["buckets", "split_batch", "folded", "cpu_passes", "unfolded", "replay", "active_set", "runner"],
    "engine.update": [
        "fused_layers",
        "fuse_bn",
        "norm",
        "sgd",
        "adam",
        "descent",
        "exchange",
        "amp_copy",
        "awp",
        "step",
    ],
    "evaluation.sanity": ["probes", "checks", "explain", "measure"],
}
ROOT = Path(sparring.__file__).parent
PATHS = [path for path in sorted(ROOT.rglob("*.py")) if path.name not in ("__init__.py", "__main__.py")]
ROOMS = list(HOUSE)


def imports(path: Path) -> set[str]:
    """The modules of the package that a file imports, wherever in the file, as dotted names without `sparring`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name.removeprefix("sparring.") for name in found if name.startswith("sparring.")}


def floor(order: list[str], module: str) -> int | None:
    """The place of a dotted name in an order of names, the longest match; None where it is not in it."""
    fitting = [name for name in order if module == name or module.startswith(f"{name}.")]
    return order.index(max(fitting, key=len)) if fitting else None


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


@pytest.mark.parametrize("path", PATHS, ids=name_of)
def test_a_module_imports_only_from_rooms_below_its_own(path: Path):
    own = name_of(path)
    room, _, inside = own.partition(".")
    for module in imports(path):
        other, _, within = module.partition(".")
        if other in sparring.__all__:
            continue
        assert ROOMS.index(other) <= ROOMS.index(room), f"{own} imports {module}, a room above its own"
        if other == room and HOUSE[room]:
            mine, theirs = floor(HOUSE[room], inside), floor(HOUSE[room], within)
            assert mine is not None, f"{own} has no place in the house"
            assert theirs is None or theirs <= mine, f"{own} imports {module}, which lies above it in {room}"
        for package, order in INSIDE.items():
            if own.startswith(f"{package}.") and module.startswith(f"{package}."):
                mine, theirs = (floor(order, name.removeprefix(f"{package}.")) for name in (own, module))
                assert mine is not None, f"{own} has no place in {package}"
                assert theirs is None or theirs <= mine, f"{own} imports {module}, which lies above it in {package}"


def test_every_room_has_its_place():
    rooms = {path.stem if path.is_file() else path.name for path in ROOT.iterdir() if path.name != "__pycache__"}
    assert rooms - {"__init__", "__main__", "py"} == set(HOUSE)


def test_a_room_has_one_idea():
    for path in PATHS:
        assert path.stem not in ("utils", "common", "helpers", "misc"), path


def test_tests_mirror_the_source():
    tests = Path(__file__).parent
    for folder in {path.parent.relative_to(ROOT) for path in PATHS} - {Path()}:
        assert list((tests / folder).rglob("test_*.py")), f"no tests in tests/{folder}"
    for path in ROOT.glob("[a-z]*.py"):
        assert (tests / f"test_{path.stem}.py").exists(), f"no tests/test_{path.stem}.py"
