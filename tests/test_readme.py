"""The commands, code, links and figures of README and docs work.

Every fenced block names its language. In every .md file: a `sparring` line must parse, with names that exist; a `make`
line must name a target; a Python block must compile; a link must lead to a file. The commands of README run from top to
bottom in an empty folder, shortened, and so do its Python blocks; the guides likewise. A kind of block or line that is
unknown here fails.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from sparring import data, models, recipes
from sparring.cli import COMMANDS, arguments, main
from sparring.data.registry import SOURCES
from sparring.evaluation.protocols import find
from sparring.evaluation.sanity.explain import page
from sparring.paper import specs
from sparring.paper.headline import headline
from sparring.paper.plan import chosen
from sparring.paper.specs.fastat_published import CIFAR10
from sparring.paper.specs.scales import one_cycle
from sparring.report.comparison import rounded
from sparring.training import run_folder
from sparring.training.config import Config, from_json, same, to_json
from sparring.weights import shipped
from tests.cli.conftest import QUICK, write_images

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith((".", "_")) or part in ("build", "runs") for part in path.relative_to(ROOT).parts)
)
GUIDES = sorted([ROOT / "docs" / "start.md", *(ROOT / "docs" / "guides").glob("*.md")])
SHELL, PYTHON = ("bash", "sh", "shell", "console"), ("python", "py")
SHOWN = ("text", "json", "html", "make", "toml")  # not run
# Lines of a shell block that are neither `sparring` nor `make`. Anything else is refused.
ELSEWHERE = (
    r"git clone \S+",
    r"git lfs pull",
    r"cd \S+",
    r"(python3? -m )?pip install .+",
    r"python3? -m venv \S+",
    r"(source|\.) \S+/activate",
    r"(\.venv/bin/)?tensorboard --logdir \S+",
    r"(\.venv/bin/)?(python -m )?(pytest|ruff|mypy)( .*)?",
    r"(OMP_NUM_THREADS=\d+ )?(\.venv/bin/)?python3? benchmarks/\w+\.py( .*)?",
    r"(head|less|tee)( .*)?",
)
# Commands of the README that are parsed and not run, by what they need.
NEEDS_MORE = {
    "CIFAR-10 or SVHN": r"^(?!.*--data folder:).*(cifar10|svhn)",
    "an hour": r"autoattack",
    "a published checkpoint": r"\.(pth\.tar|pth|pt)\b",
    "a GPU": r"reproduce table|runs/fast",
    "a cluster": r"--launcher slurm",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    kind: str
    text: str
    line: int

    def commands(self) -> list[list[str]]:
        """The words of every command in it; output in a session with prompts is left out."""
        joined = self.text.replace("\\\n", " ")
        lines = joined.splitlines()
        if any(line.startswith("$ ") for line in lines):  # a session: the other lines are output
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = [shlex.split(line, comments=True) for line in lines]
        return [part for words in found for part in _split(words) if part]


def _split(words: list[str]) -> list[list[str]]:
    """The commands between && and |."""
    parts: list[list[str]] = [[]]
    for word in words:
        if word in ("&&", "|", ";"):
            parts.append([])
        else:
            parts[-1].append(word)
    return parts


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a document."""
    found, kind, inside, began = [], None, [], 0
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"\s*```+\s*([\w-]*)", line)
        if fence and kind is None:
            kind, inside, began = fence[1], [], number
        elif fence:
            found.append(Block(str(kind), "\n".join(inside), began))
            kind = None
        elif kind is not None:
            inside.append(line)
    assert kind is None, f"the block that opens in line {began} does not close"
    return found


class Parsed(Exception):
    """Raised in place of the work, with the parsed options."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of `sparring WORDS`, every name in them checked; nothing is run."""
    original = arguments.parse

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Parsed(original(*args, **kwargs))

    assert words[0] in COMMANDS or words[0] in ("--help", "--version"), f"no command {words[0]!r}"
    if words[0] not in COMMANDS or words[-1] in ("--help", "-h"):
        return None
    modules = {name: importlib.import_module(path) for name, (path, _) in COMMANDS.items()}
    with monkeypatch.context() as patched:
        for module in (*modules.values(), arguments):
            patched.setattr(module, "parse", stop, raising=False)
        patched.setattr(run_folder, "open_run", lambda folder: SimpleNamespace(recipe="fat-digits", config=Config()))
        command = modules[words[0]]
        with pytest.raises(Parsed) as caught:
            command.run(words[1:])
    options = caught.value.args[0]
    if words[0] == "train":
        models.describe(options.config.model)
        assert options.config.data.partition(":")[0] in SOURCES, options.config.data
    elif words[:2] == ["evaluate", "--explain"]:
        page(options.explain)
    elif words[0] == "evaluate":
        find(options.protocol)
        assert options.data is None or options.data.partition(":")[0] in SOURCES, options.data
        assert options.model is None or models.describe(options.model)
    elif words[0] == "recipes" and options.name is not None:
        assert options.name in recipes.groups() or recipes.find(options.name)
    elif words[0] == "reproduce" and options.item is not None:
        assert chosen(specs.find(options.item), options.scale, options.rows)
    elif words[0] == "data" and options.action == "fetch":
        assert options.name in data.FETCHABLE
    return options


def check(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a command of a document would be refused."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # CUDA_VISIBLE_DEVICES=1 sparring ...
        words = words[1:]
    if words[0] == "torchrun":  # torchrun --nproc-per-node 8 -m sparring train ...
        words = words[words.index("-m") + 1 :]
    name = Path(words[0]).name
    if name == "sparring":
        parse(words[1:], monkeypatch)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"make {words[1:]}: the targets are {targets}"
    else:
        known = any(re.fullmatch(pattern, " ".join(words)) for pattern in ELSEWHERE)
        assert known, f"an unknown kind of line: {shlex.join(words)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_parse_and_python_compiles(path, monkeypatch):
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{path.relative_to(ROOT)}:{block.line}"
        assert block.kind in (*SHELL, *PYTHON, *SHOWN), f"{where}: a block of kind {block.kind!r}; name its language"
        if block.kind in SHELL:
            for words in block.commands():
                check(words, monkeypatch)
        elif block.kind in PYTHON:
            ast.parse(textwrap.dedent(block.text), filename=where)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}, which does not exist"


def shortened(words: list[str]) -> list[str]:
    """The same command, shortened to about a second; later flags win."""
    if words[0] == "train":
        if words[1].startswith("-"):  # a resumed run has its own settings
            return [*words, "--epochs", "3"] if "--epochs" in words else words
        # Two sections of a document may train the same run.
        small = ["--model", "tiny_cnn"] if "?size=" in " ".join(words) else []  # ResNet-18 at 32x32 takes a minute
        return [*words, *QUICK[1:], "--validation", "30", *small, *([] if "--resume" in words else ["--overwrite"])]
    more = {"demo": ["--epochs", "1"], "evaluate": ["--limit", "10", "--no-doubts"]}
    more["bound"] = ["--limit", "10", "--strongest", "pgd"]
    few = {"images": 192, "before": 0, "rounds": 1, "repeats": 2, "taus": 0, "together": 1, "plain-batches": 1}
    more["bench"] = [word for flag, number in few.items() for word in (f"--{flag}", str(number))]
    return [*words, *more.get(words[0], [])]


def prepare(words: list[str], spare: Path) -> None:
    """Create what a command needs: own images, a shortened sweep, a trained run where no other command made it."""
    for path in re.findall(r"folder:([^?\s]+)", " ".join(words)):
        if not Path(path).exists():
            write_images(Path(path))
    if words[0] == "sweep":
        path, example = Path(words[1]), ROOT / words[1]
        path.parent.mkdir(parents=True, exist_ok=True)
        text = path.read_text(encoding="utf-8") if path.exists() else example.read_text(encoding="utf-8")
        path.write_text(
            re.sub(r"epochs = \d+", "epochs = 1", re.sub(r"seeds = .*", "seeds = [0]", text)), encoding="utf-8"
        )
    takes_a_model = words[0] in ("bound", "evaluate", "export", "predict")
    if takes_a_model and not Path(words[1]).exists() and words[1] not in shipped.names():
        place_run(words[1], spare)
    for path in re.findall(r"\S+\.(?:png|jpg)\b", " ".join(words[2:])) if words[0] == "predict" else []:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(data.load("digits").test.x[0, 0].numpy()).save(path)
    if words[0] == "train" and "--resume" in words and words[1].startswith("-"):
        folder = words[words.index("--out") + 1]
        if not Path(folder).exists():
            place_run(folder, spare)


def place_run(path: str, spare: Path) -> None:
    """Copy a trained model to a path that a document names."""
    assert not Path(path).is_absolute(), f"{path}: paths in documents are relative"
    if path.endswith(".safetensors"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spare / run_folder.BEST, path)
    else:
        shutil.copytree(spare, path)


FOLLOWED = pytest.mark.parametrize("path", [ROOT / "README.md", *GUIDES], ids=lambda path: str(path.relative_to(ROOT)))


@FOLLOWED
def test_commands_run(path, tmp_path, monkeypatch, spare):
    """In an empty folder from top to bottom; a block that begins with `# NAME.py` or `# NAME.toml` is that file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    for block in blocks(path.read_text(encoding="utf-8")):
        if name := re.match(r"# (\w+\.(?:py|toml))\n", block.text):
            (tmp_path / name[1]).write_text(block.text, encoding="utf-8")
    commands = [
        words[1:]
        for block in blocks(path.read_text(encoding="utf-8"))
        if block.kind in SHELL
        for words in block.commands()
        if Path(words[0]).name == "sparring"
    ]
    ran = 0
    for words in commands:
        line = " ".join(words)
        if any(re.search(pattern, line) for pattern in NEEDS_MORE.values()) or words[:2] == ["data", "fetch"]:
            continue  # parsed by the test above
        prepare(words, spare)
        assert main(shortened(words)) == 0, f"sparring {line}"
        ran += 1
    assert ran or not commands


@pytest.fixture(scope="module")
def spare(tmp_path_factory) -> Path:
    """A run folder with a trained model of digits."""
    folder = tmp_path_factory.mktemp("spare") / "run"
    assert main(["train", *QUICK, "--out", str(folder)]) == 0
    return folder


@FOLLOWED
def test_python_blocks_run(path, tmp_path, monkeypatch, spare):
    """In one namespace from top to bottom; what a block does not make itself is a small model and a batch of digits."""
    monkeypatch.chdir(tmp_path)
    images = data.load("digits").test
    x, y = images.x[:16].float() / 255, images.y[:16]
    model = models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
    space = {"x": x, "y": y, "model": model, "epochs": 2, "loader": [(x, y)]}
    space["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01)
    space |= {"torch": torch, "net": torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))}
    space["train_loader"], space["test_loader"] = (
        DataLoader(TensorDataset(split.x, split.y), batch_size=128)
        for split in (data.load("digits").train, images.head(16))
    )
    state = torch.get_rng_state()
    ran = 0
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.kind in PYTHON:
            for folder in re.findall(r"""load_model\(\s*["']([^"']+)["']""", block.text):
                if not (Path(folder).exists() or folder in shipped.names() or f'out="{folder}"' in block.text):
                    place_run(folder, spare)
            code = re.sub(r"epochs=\d\d+", "epochs=1", textwrap.dedent(block.text))
            exec(compile(code, f"{path.name}:{block.line}", "exec"), space)
            ran += 1
    torch.set_rng_state(state)
    assert ran, "no Python block"


def test_blocks_and_commands_are_found(monkeypatch):
    text = """
```bash
# a comment
make demo && make test
sparring train fat-digits --attack.eps 8/255 \\
    --out runs/x    # another
CUDA_VISIBLE_DEVICES=1 .venv/bin/sparring recipes | head -3
```
    ```console
    ```
```console
$ sparring evaluate runs/x --protocol quick
natural 99.0
```
"""
    first, _, third = blocks(text)
    assert first.kind == "bash" and first.line == 2
    assert first.commands() == [
        ["make", "demo"],
        ["make", "test"],
        ["sparring", "train", "fat-digits", "--attack.eps", "8/255", "--out", "runs/x"],
        ["CUDA_VISIBLE_DEVICES=1", ".venv/bin/sparring", "recipes"],
        ["head", "-3"],
    ]
    assert third.commands() == [["sparring", "evaluate", "runs/x", "--protocol", "quick"]]
    for line in (
        "sparring train fat-digit",
        "sparring train fat-digits --epoch 3",
        "sparring train fat-digits --model resnet19",
        "sparring train fat-digits --data digit",
        "sparring evaluate runs/x --protocol trade",
        "sparring recipes fat",
        "sparring data fetch mnits",
        "sparring reproduce table5",
        "sparring reproduce table1 --rows fat-9",
        "sparring tarin",
        "make demos",
        "rm -rf /",
        "pip uninstall torch",
    ):
        with pytest.raises((AssertionError, ValueError, pytest.fail.Exception)):
            check(line.split(), monkeypatch)
    for line in ("sparring train --out runs/x --resume", "sparring demo", "sparring data", "sparring export runs/x"):
        check(line.split(), monkeypatch)


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_in_help_parse(name, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    examples = re.findall(r"^(?:  |Example: )(sparring .+)$", capsys.readouterr().out, re.MULTILINE)
    assert examples
    for line in examples:
        check(shlex.split(line, comments=True), monkeypatch)


def test_examples_of_the_command_itself_parse(monkeypatch, capsys):
    main([])
    examples = re.findall(r"^  (sparring .+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 4
    for line in examples:
        if "COMMAND" not in line:
            check(shlex.split(line, comments=True), monkeypatch)


def test_readme_is_short():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 180
    assert max(map(len, lines)) <= 300
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 100


def test_readme_table_is_from_the_results():
    """Three rows: Madry and FAT by the protocol of a public benchmark, and the fast recipe."""
    expected, seconds = [], []
    for row in ("madry", "fat"):
        result = json.loads((ROOT / f"results/fastat/{row}-full-seed0.json").read_text())
        attacks, backprops = result["found"]["attacks"], result["history"]["backprops"]
        assert all(attacks[name]["n"] == 10_000 for name in attacks)
        cells = [rounded(100 * attacks[name]["accuracy"]) for name in ("natural", "pgd20", "autoattack")]
        expected.append([*cells, f"{sum(backprops) / len(backprops):.1f}"])
        seconds.append(result["wall_seconds"])
    seeds = json.loads((ROOT / "results/engine/fast-recipe-h200.json").read_text())["seeds"].values()
    columns = [[100 * seed["dat"][name] for seed in seeds] for name in ("natural", "pgd20")]
    columns += [[100 * seed["autoattack"] for seed in seeds], [seed["backprops"] for seed in seeds]]
    expected.append([f"{sum(numbers) / len(seeds):.1f}" for numbers in columns])
    seconds.append(min(seed["process_seconds"] for seed in seeds))
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results")[2]
    rows = [line.strip("| ").split(" | ") for line in text.split("\n\n")[1].splitlines()[2:]]
    assert [cells[1:] for cells in rows] == expected
    assert all(f"{took:.0f} s" in row[0] for row, took in zip(rows, seconds, strict=True))
    for row in rows[:2]:
        better = [each for each in CIFAR10 if each.natural > float(row[1]) and each.autoattack > float(row[3])]
        assert len(CIFAR10) == 21 and not better  # as the text below the table says


def test_table_of_methods_is_from_the_results():
    """Every row of the table in docs/methods.md, and the expectation of its recipe."""
    measured = json.loads((ROOT / "results/methods/h200.json").read_text())["runs"]
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| `([a-z-]+)-…` \| (.*) \|$", text, re.MULTILINE)
    assert len(lines) == 17
    for name, printed in lines:
        row = measured[name]
        accuracies = [row["dat"]["natural"], row["dat"]["pgd20"], row["dat"]["cw30"], row["autoattack"]["accuracy"]]
        assert printed == " | ".join([*(f"{100 * each:.1f}" for each in accuracies), f"{row['backprops']:.1f}"]), name
        if recipe := recipes.RECIPES.get(f"{name}-cifar10-resnet18"):
            expected = f"{100 * accuracies[0]:.1f} natural / {100 * accuracies[1]:.1f} PGD-20"
            assert expected in recipe.expect or "15 epochs" not in recipe.expect, name


RECIPES = ("standard", "madry", "fat", "trades", "fat-trades", "mart", "fat-mart", "cat", "dat", "ates", "fat-by-loss")
RECIPES += ("fat-by-probability", "fat-paced", "fat-patient", "fat-ema", "fat-awp")  # no-projection is not a recipe
CHANGED = {"cat": {"attack": {"patience": 1}}, "fat-patient": {"attack": {"patience": 2}}, "fat-ema": {"ema": 0.99}}


@pytest.mark.parametrize("name", RECIPES)
def test_measured_method_is_the_recipe_of_that_name(name):
    """Under the one schedule, with the changes that docs/methods.md names."""
    measured = json.loads((ROOT / "results/methods/h200.json").read_text())["runs"][name]["config"]
    declared = to_json(one_cycle(recipes.find(f"{name}-cifar10-resnet18").config, 15))
    changed = CHANGED.get(name, {})
    declared["attack"] |= changed.get("attack", {})
    declared |= {key: value for key, value in changed.items() if key != "attack"}
    assert same(from_json(measured), from_json(declared))


def test_headline_is_drawn_from_the_results():
    """`sparring reproduce --draw` writes results/headline.md."""
    drawn = headline(ROOT / "results")
    path = ROOT / "results" / "headline.md"
    assert path.exists() == bool(drawn)
    if drawn:
        assert path.read_text() == drawn
