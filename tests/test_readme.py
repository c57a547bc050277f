"""What the documents tell people to type works.

Every fenced block says what it is. Of every .md file: a `sparring` line must parse, with names that exist; a `make`
line must name a target; a Python block must compile; a link must lead somewhere. README.md moreover is followed from
top to bottom in an empty folder, shortened, and its Python blocks are run. A kind of block or line that is not known
here fails.
"""

from __future__ import annotations

import ast
import importlib
import json
import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparring import data, models, recipes
from sparring.cli import COMMANDS, arguments, main
from sparring.data.registry import SOURCES
from sparring.evaluation.protocols import find
from sparring.evaluation.sanity.explain import page
from sparring.paper import specs
from sparring.paper.headline import headline
from sparring.paper.plan import chosen
from sparring.paper.specs.scales import one_cycle
from sparring.training import run_folder
from sparring.training.config import Config, to_json
from tests.cli.conftest import QUICK, write_images

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path
    for path in ROOT.rglob("*.md")
    if not any(part.startswith(".") or part in ("build", "runs") for part in path.relative_to(ROOT).parts)
)
SHELL, PYTHON = ("bash", "sh", "shell", "console"), ("python", "py")
SHOWN = ("text", "json", "html", "make", "toml")  # blocks to be read, not run
# Lines of a shell block that are neither `sparring` nor `make`: setting up a machine. Anything else is refused.
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
# Why a command of the README is parsed and not run: what it needs is not in a test.
NEEDS_MORE = {
    "CIFAR-10 or SVHN": r"^(?!.*--data folder:).*(cifar10|svhn)",
    "an hour": r"autoattack",
    "a checkpoint of somebody else": r"\.(pth\.tar|pth|pt)\b",
}


@dataclass(frozen=True)
class Block:
    """A fenced block of a document."""

    kind: str
    text: str
    line: int

    def commands(self) -> list[list[str]]:
        """The words of every command in it; lines that show output (after a prompt) are left out."""
        joined = self.text.replace("\\\n", " ")
        lines = joined.splitlines()
        if any(line.startswith("$ ") for line in lines):  # a session: what has no prompt was printed
            lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
        found = [shlex.split(line, comments=True) for line in lines]
        return [part for words in found for part in _split(words) if part]


def _split(words: list[str]) -> list[list[str]]:
    """At && and |, so that each command stands alone."""
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
    assert kind is None, f"the block that opens in line {began} never closes"
    return found


class Parsed(Exception):
    """Raised in place of the work, with the options that were read."""


def parse(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The options of `sparring WORDS`, every name in them checked, without the work."""
    really = arguments.parse

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise Parsed(really(*args, **kwargs))

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
    """A command of a document could be typed."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):  # CUDA_VISIBLE_DEVICES=1 sparring ...
        words = words[1:]
    name = Path(words[0]).name
    if name == "sparring":
        parse(words[1:], monkeypatch)
    elif name == "make":
        targets = re.findall(r"^([\w-]+):(?!=)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert set(words[1:]) <= set(targets), f"make {words[1:]}: the targets are {targets}"
    else:
        known = any(re.fullmatch(pattern, " ".join(words)) for pattern in ELSEWHERE)
        assert known, f"a kind of line not known to this test: {shlex.join(words)}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_is_told_can_be_typed(path, monkeypatch):
    for block in blocks(path.read_text(encoding="utf-8")):
        where = f"{path.relative_to(ROOT)}:{block.line}"
        assert block.kind in (*SHELL, *PYTHON, *SHOWN), f"{where}: a block of kind {block.kind!r}; say what it is"
        if block.kind in SHELL:
            for words in block.commands():
                check(words, monkeypatch)
        elif block.kind in PYTHON:
            ast.parse(block.text, filename=where)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}, which is not there"


def shortened(words: list[str]) -> list[str]:
    """The same command in about a second; later flags win."""
    if words[0] == "train":
        if words[1].startswith("-"):  # a run to resume knows its own settings
            return words
        # A document may train the same run in two of its sections.
        return [*words, *QUICK[1:], "--validation", "30", *([] if "--resume" in words else ["--overwrite"])]
    more = {"demo": ["--epochs", "1"], "evaluate": ["--limit", "10", "--no-doubts"]}
    more["bound"] = ["--limit", "10", "--strongest", "pgd"]
    few = {"images": 192, "before": 0, "rounds": 1, "repeats": 2, "taus": 0, "together": 1, "plain-batches": 1}
    more["bench"] = [word for flag, number in few.items() for word in (f"--{flag}", str(number))]
    return [*words, *more.get(words[0], [])]


def prepare(words: list[str], spare: Path) -> None:
    """What a reader has before this command: own images; and a run, where the document trained it elsewhere."""
    for path in re.findall(r"folder:([^?\s]+)", " ".join(words)):
        if not Path(path).exists():
            write_images(Path(path))
    if words[0] in ("bound", "evaluate", "export") and not Path(words[1]).exists():
        lend(words[1], spare)
    if words[0] == "train" and "--resume" in words and words[1].startswith("-"):
        folder = words[words.index("--out") + 1]
        if not Path(folder).exists():
            lend(folder, spare)


def lend(path: str, spare: Path) -> None:
    """A trained model at a path that a document speaks of."""
    assert not Path(path).is_absolute(), f"{path}: documents speak of relative paths"
    if path.endswith(".safetensors"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(spare / run_folder.BEST, path)
    else:
        shutil.copytree(spare, path)


def test_the_readme_can_be_followed(tmp_path, monkeypatch):
    follow((ROOT / "README.md").read_text(encoding="utf-8"), tmp_path, monkeypatch)


def follow(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`x` and `y` are a batch of digits, and `model` a network for them, where a block does not make its own."""
    found = blocks(text)
    monkeypatch.chdir(tmp_path)
    spare = tmp_path / ".spare"
    assert main(["train", *QUICK, "--out", str(spare)]) == 0
    told: list[list[str]] = []
    for block in found:
        if block.kind in SHELL:
            told += [words[1:] for words in block.commands() if Path(words[0]).name == "sparring"]
    for words in told:
        line = " ".join(words)
        if any(re.search(pattern, line) for pattern in NEEDS_MORE.values()) or words[:2] == ["data", "fetch"]:
            continue  # parsed by the test above
        prepare(words, spare)
        try:
            code = main(shortened(words))
        except SystemExit as leaving:  # --help
            code = int(leaving.code or 0)
        assert code == 0, f"sparring {line}"
    images = data.load("digits").test
    space = {
        "x": images.x[:16].float() / 255,
        "y": images.y[:16],
        "model": models.build("tiny_cnn", num_classes=10, channels=1, size=(8, 8)),
    }
    state = torch.get_rng_state()
    for block in found:
        if block.kind in PYTHON:
            for path in re.findall(r"""load_model\(\s*["']([^"']+)["']""", block.text):
                if not Path(path).exists():
                    lend(path, spare)
            exec(compile(block.text, f"README.md:{block.line}", "exec"), space)
    torch.set_rng_state(state)


def test_this_test_reads_documents_right(monkeypatch):
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
        "sparring data fetch mnist",
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
def test_the_examples_in_help_can_be_typed(name, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    examples = re.findall(r"^(?:  |Example: )(sparring .+)$", capsys.readouterr().out, re.MULTILINE)
    assert examples
    for line in examples:
        check(shlex.split(line, comments=True), monkeypatch)


def test_the_examples_of_the_command_itself_can_be_typed(monkeypatch, capsys):
    main([])
    examples = re.findall(r"^  (sparring .+)$", capsys.readouterr().out, re.MULTILINE)
    assert len(examples) >= 4
    for line in examples:
        if "COMMAND" not in line:
            check(shlex.split(line, comments=True), monkeypatch)


def test_the_table_of_methods_is_what_was_measured():
    """Every line of README's table, and what the recipes promise, from the one file of results."""
    measured = json.loads((ROOT / "results/methods/h200.json").read_text())["runs"]
    lines = re.findall(
        r"^\| `([a-z-]+)-…` \| .+? \| ((?:[^|]+ )?\|.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE
    )
    assert len(lines) == 17
    for name, told in lines:
        row = measured[name]
        accuracies = [row["dat"]["natural"], row["dat"]["pgd20"], row["dat"]["cw30"], row["autoattack"]["accuracy"]]
        assert told == " | ".join([*(f"{100 * each:.1f}" for each in accuracies), f"{row['backprops']:.1f}"]), name
        if recipe := recipes.RECIPES.get(f"{name}-cifar10-resnet18"):
            expected = f"{100 * accuracies[0]:.1f} natural / {100 * accuracies[1]:.1f} PGD-20"
            assert expected in recipe.expect or "15 epochs" not in recipe.expect, name


METHODS = ("standard", "madry", "fat", "trades", "fat-trades", "mart", "fat-mart", "cat", "dat", "ates", "fat-by-loss")
METHODS += ("fat-by-probability", "fat-paced", "fat-patient", "fat-ema", "fat-awp")  # no-projection is no recipe
SAID = {"cat": {"attack": {"patience": 1}}, "fat-patient": {"attack": {"patience": 2}}, "fat-ema": {"ema": 0.99}}


@pytest.mark.parametrize("name", METHODS)
def test_what_was_measured_is_the_recipe_of_that_name(name):
    """Under the one schedule, with the changes that README tells."""
    measured = json.loads((ROOT / "results/methods/h200.json").read_text())["runs"][name]["config"]
    declared = to_json(one_cycle(recipes.find(f"{name}-cifar10-resnet18").config, 15))
    said = SAID.get(name, {})
    declared["attack"] |= said.get("attack", {})
    assert measured == declared | {key: value for key, value in said.items() if key != "attack"}


def test_the_first_screen_has_the_headline_of_the_results():
    """`sparring reproduce --draw` writes it from the results; README has it word for word, once there is one."""
    drawn = headline(ROOT / "results")
    path = ROOT / "results" / "headline.md"
    assert path.exists() == bool(drawn)
    if drawn:
        assert path.read_text() == drawn
        assert drawn.strip() in (ROOT / "README.md").read_text()[:6000]
