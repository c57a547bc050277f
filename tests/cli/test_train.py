"""`sparring train`: recipes and overrides, run folders, own images, a clean stop."""

from __future__ import annotations

import errno
import json
import os
import shlex
import shutil
import signal
from pathlib import Path

import pytest
import torch

import sparring as library
from sparring import evaluation
from sparring.cli import train as command
from sparring.cli.recipes import PROTOCOLS
from sparring.errors import UserError
from sparring.recipes import RECIPES, find
from sparring.schedules import constant
from sparring.training import run_folder
from sparring.training.distributed import pick_device
from tests.training.test_loop import same_run

from .conftest import QUICK, start, write_images

# Seven short epochs: long enough to be stopped in the middle.
LONG = [*QUICK, "--epochs", "7", "--batch-size", "64"]


def test_recipe_with_overrides(sparring, tmp_path):
    given = ["--attack.eps", "8/255", "--attack.tau", "0,1@50%", "--lr", "one-cycle:0.05", "--seed", "3"]
    result = sparring("train", *QUICK, *given, "--track", "csv")
    assert result.code == 0 and result.err == ""
    overrides = "eps8_255-steps2-tau0,1@50%-epochs2-batch_size256-lr-one-cycle-0.05@40%"
    folder = Path(f"runs/fat-digits-{overrides}-seed3")  # the default of --out
    assert (folder / "metrics.csv").read_text().startswith("epoch,")
    assert f"-> {folder}" in result.out and "epoch   2 " in result.out
    assert result.out.endswith(f"Now measure it on test data: sparring evaluate {folder} --protocol mart\n")
    run = run_folder.open_run(folder)
    assert run.recipe == "fat-digits" and run.config.seed == 3 and run.config.epochs == 2
    assert run.config.objective.eps == constant(8 / 255)
    assert run.config.validation_eps == find("fat-digits").config.validation_eps
    records = run_folder.read_metrics(folder)
    assert [record["tau"] for record in records] == [0, 1]
    last = records[-1]
    measured = f"natural {last['natural']:.1%}, PGD-10 {last['pgd10']:.1%}"
    assert f"last: epoch 2, on 120 validation images {measured}" in result.out


@pytest.mark.parametrize("recipe", ["no-projection-digits", "fat-by-loss-digits", "fat-paced-digits"])
def test_other_attacks_train_with_the_same_command(sparring, recipe):
    result = sparring("train", recipe, *QUICK[1:], "--out", "run")
    assert result.code == 0 and result.err == ""
    run = run_folder.open_run(Path("run"))
    assert getattr(run.config.objective, "project", True) != (recipe == "no-projection-digits")
    tau = run_folder.read_metrics(run.folder)[-1]["tau"]
    assert (tau is None) == (recipe == "fat-by-loss-digits")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], ["which recipe?", "sparring train fat-digits", "sparring recipes"]),
        (["--epochs", "3", "fat-digits"], ["the recipe goes first", "sparring train fat-digits ..."]),
        (["fat-digit"], ["unknown recipe 'fat-digit'", "Did you mean 'fat-digits'?"]),
        (["no-projection"], ["a group of 40 recipes", "sparring recipes no-projection"]),
        (["fat-by-loss-digits", "--attack.rho", "0"], ["attack.rho must be finite and above 0"]),
        (["fat-by-probability-digits", "--attack.rho", "1"], ["attack.rho must stay below 1"]),
        (
            ["fat-by-loss-digits", "--attack.no-project"],
            ["fat-by-loss does not read --attack.no-project (it belongs to madry, fat,"],
        ),
        (["standard-digits", "--attack.eps", "0.1"], ["standard makes no adversarial data", "--attack.eps"]),
        (["fat-paced-digits", "--attack.share", "2"], ["attack.share must lie in [0, 1], got 2"]),
        (
            ["madry-digits", "--attack.tau", "2"],
            ["madry does not read --attack.tau (it belongs to fat, fat-trades, fat-mart)."],
        ),
        (["fat-paced-digits", "--attack.tau", "3"], ["fat-paced does not read --attack.tau"]),
        (
            ["fat-digits", "--objective", "dat", "--attack.margin", "0.5"],
            ["dat does not read --attack.margin (it belongs to ates)"],
        ),
        (
            ["fat-digits", "--beta", "3"],
            ["fat does not read --beta (it belongs to trades, fat-trades, mart, fat-mart)."],
        ),
        (["trades-digits", "--attack.start", "None"], ["flat at the image itself", "--attack.start normal"]),
        (["fat-digits", "--epoch", "3"], ["--epoch, 3", "Did you mean --epochs?"]),
        (["fat-digits", "--epochs", "0"], ["epochs must be at least 1, got 0"]),
        (["fat-digits", "--epochs", "many"], ["--epochs: 'many' is not a whole number"]),
        (["fat-digits", "--seed", "-1"], ["seed must be at least 0, got -1"]),
        (["fat-digits", "--batch-size", "0"], ["batch_size must be at least 1"]),
        (["fat-digits", "--momentum", "1"], ["momentum must lie in [0, 1)"]),
        (["fat-digits", "--lr", "-1"], ["lr must be finite and positive"]),
        (["fat-digits", "--lr", "0.1,0.01"], ["write for example 0.1,0.01@60"]),
        (["fat-digits", "--attack.eps", "8"], ["attack.eps must lie in (0, 1], got 8.0", "write 8/255"]),
        (["fat-digits", "--attack.eps", "nan"], ["'nan' is not a number"]),
        (["fat-digits", "--attack.steps", "0"], ["steps must be a whole number of at least 1"]),
        (["fat-digits", "--objective", "fatt"], ["unknown objective 'fatt'", "Did you mean 'fat'?"]),
        (["fat-digits", "--model", "resnet"], ["unknown model 'resnet'", "Did you mean 'resnet18'?"]),
        (["fat-digits", "--model", "wrn-33-10"], ["got 33", "32 or 34"]),
        (["fat-digits", "--data", "digit"], ["unknown data source 'digit'", "Did you mean 'digits'?"]),
        (["fat-digits", "--data", "folder:none"], ["no such folder: none"]),
        (["fat-digits", "--data", "npz:none.npz"], ["no such file: none.npz"]),
        (["fat-digits", "--validation", "5000"], ["cannot hold out 5000 of 1347", "--validation"]),
        (["fat-digits", "--device", "gpu"], ["unknown device 'gpu'", "auto, cpu, cuda or cuda:N"]),
        (["fat-digits", "--device", "cuda:99"], ["'cuda:99' does not exist", "--device cpu"]),
        (["fat-digits", "--resume", "--overwrite"], ["Give one of them"]),
        (["--resume"], ["which run?", "--out"]),
        (["--resume", "--out", "nothing"], ["nothing holds no run", "Check the path"]),
        (["--resume", "--out=nothing"], ["nothing holds no run"]),
    ],
)
def test_user_errors(sparring, tmp_path, words, expected):
    sparring("train", *words).user_error(*expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        ("file", "cannot make the folder file: File exists. Choose another with --out."),
        ("file/run", "cannot make the folder file/run: Not a directory."),
        ("/proc/none/run", "cannot make the folder /proc/none/run"),  # not writable, not even for root
        ("thesis", "thesis exists and is not a run folder. Choose another with --out."),
    ],
)
def test_unusable_folders_are_refused(sparring, tmp_path, out, expected):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "draft.tex").write_text("mine")
    for more in ([], ["--overwrite"]):
        sparring("train", *QUICK, "--out", out, *more).user_error(expected)
    assert (tmp_path / "file").read_text() == (tmp_path / "thesis" / "draft.tex").read_text() == "mine"


def test_existing_run_is_kept_without_overwrite(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    before = (folder / run_folder.LAST).read_bytes()
    sparring("train", *QUICK, "--out", folder).user_error("already holds a run", "--resume", "--out", "--overwrite")
    sparring("train", *QUICK, "--out", folder, "--resume", "--epochs", "3").user_error("--lr one-cycle:0.1@40%")
    sparring("train", "--out", folder, "--resume", "--seed", "4").user_error("another configuration (seed 0 -> 4)")
    sparring("train", "madry-digits", "--out", folder, "--resume").user_error("objective fat -> madry")
    assert (folder / run_folder.LAST).read_bytes() == before
    assert sparring("train", *QUICK, "--out", folder, "--overwrite", "--seed", "4").code == 0
    assert run_folder.open_run(folder).config.seed == 4


def test_resuming_with_fewer_epochs_is_refused(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    result = sparring("train", "--out", folder, "--resume", "--epochs", "1")
    result.user_error("has trained 2 epochs, --epochs 1 is fewer")
    assert "finished already" not in result.out


def test_resuming_a_finished_run_changes_nothing(sparring, finished, tmp_path):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    result = sparring("train", "--out", folder, "--resume")
    assert result.code == 0 and "already finished: 2 of 2" in result.out and "last: epoch 2," in result.out
    same_run(finished, folder)


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        (run_folder.CONFIG, b"{", "is damaged"),
        (run_folder.CONFIG, b"[]", "is damaged"),
        (run_folder.CONFIG, b'{"config": 3}', "is damaged"),
        (run_folder.CONFIG, b'{"config": {"attack": 3}}', "is damaged"),
        (run_folder.CONFIG, b'{"config": {"colour": 3}}', "is damaged"),
        (run_folder.CONFIG, b"\xff\xfe", "is damaged"),
        (run_folder.ENVIRONMENT, b"{", "is damaged. Delete it"),
        (run_folder.ENVIRONMENT, b"3", "is damaged. Delete it"),
        (run_folder.LAST, b"", "not a whole safetensors file"),
        (run_folder.LAST, b"half", "not a whole safetensors file"),
    ],
)
def test_damaged_run_is_a_user_error(sparring, finished, tmp_path, name, content, expected):
    folder = Path(shutil.copytree(finished, tmp_path / "run"))
    (folder / name).write_bytes(content)
    sparring("train", "--out", folder, "--resume").user_error(expected)


def test_non_finite_loss_is_a_failed_run(sparring, tmp_path):
    result = sparring("train", *QUICK, "--lr", "1e30", "--out", "run")
    assert result.code == 1
    result.one_line("not finite", "lower --lr")


def test_own_images_from_folder_to_logits(sparring, tmp_path):
    write_images(tmp_path / "my images")
    given = ["--data", "folder:my images", "--validation", "60", "--out", "own run"]
    result = sparring("train", *QUICK, *given)
    assert (
        result.code == 0 and "fat on my images (240 training and 60 test images, 10 classes) -> own run" in result.out
    )
    assert result.out.endswith("sparring evaluate 'own run' --eps 0.3\n")  # quoted for the shell
    measured = sparring("evaluate", "own run", "--protocol", "quick", "--limit", "20", "--no-doubts")
    assert measured.code == 0 and "Accuracy on 20 images" in measured.out

    model = library.load_model("own run")
    assert model(torch.rand(2, 1, 8, 8)).shape == (2, 10)


def test_own_data_get_their_own_run_folder(sparring, tmp_path):
    write_images(tmp_path / "my images", count=100)
    assert sparring("train", *QUICK, "--data", "folder:my images", "--validation", "20").code == 0
    folder = "fat-digits-steps2-my images-epochs2-batch_size256-validation20-seed0"
    assert (tmp_path / "runs" / folder / "config.json").exists()


@pytest.mark.parametrize(
    ("words", "folder"),
    [
        ("", "fat-digits-seed0"),
        ("--attack.tau 3 --epochs 5", "fat-digits-tau3-epochs5-seed0"),
        ("--epochs 5 --attack.tau 3 --seed 7", "fat-digits-tau3-epochs5-seed7"),
        ("--objective trades --beta 1 --normalize", "fat-digits-trades-beta1-normalize-seed0"),
        ("--data folder:a/b.c/mine?size=8", "fat-digits-mine-seed0"),
        ("--attack.eps 8/255", "fat-digits-eps8_255-seed0"),
        ("--model small_cnn", "fat-digits-model-small_cnn-seed0"),
    ],
)
def test_a_default_folder_shows_the_overrides(words, folder):
    recipe, options = command.options_of(["fat-digits", *words.split()])
    assert command._folder(recipe, options.config) == Path("runs") / folder


def test_a_default_folder_has_a_bounded_name_that_differs():
    schedules = [",".join(["0", *(f"1@{epoch}" for epoch in range(2, last))]) for last in (60, 61)]
    names = set()
    for schedule in schedules:
        recipe, options = command.options_of(["fat-digits", "--attack.tau", schedule])
        names.add(command._folder(recipe, options.config).name)
    assert len(names) == 2 and max(map(len, names)) < 110


def test_notes_on_unusual_settings(sparring):
    words = ["--attack.eps", "8/255", "--attack.step-size", "0.075", "--validation-eps", "0.3"]
    words += ["--lr", "0.1,0.01@600", "--out", "run"]
    result = sparring("train", *QUICK, *words)
    assert result.code == 0
    assert "note: a step of 0.075 is longer than the ball (0.0314): lower step_size (--attack.step-size)." in result.out
    assert "note: validation and the best epoch are judged at eps 0.3, training is at 0.0314" in result.out
    assert "note: lr 0.1,0.01@600 (--lr): @600 lies after the last epoch (2)." in result.out
    assert "days" not in result.out
    assert (
        "note:" not in sparring("train", *QUICK, "--attack.eps", "0.2", "--out", "other").out
    )  # all parts of eps move


def test_overwriting_a_run_removes_its_evaluation(sparring):
    assert sparring("train", *QUICK, "--out", "run").code == 0
    assert sparring("evaluate", "run", "--protocol", "quick", "--limit", "8", "--no-doubts").code == 0
    assert Path("run/evaluation").is_dir()
    assert sparring("train", *QUICK, "--out", "run", "--overwrite", "--seed", "1").code == 0
    assert not Path("run/evaluation").exists()


def test_bad_images_are_named_before_any_folder_is_created(sparring, tmp_path):
    write_images(tmp_path / "images", count=60)
    (tmp_path / "images" / "digit 3" / "broken.png").write_text("not an image")
    result = sparring("train", *QUICK, "--data", "folder:images")
    result.user_error("1 file cannot be used: images/digit 3/broken.png (not an image)", "Fix or remove")
    (tmp_path / "images" / "digit 3" / "broken.png").unlink()
    sparring("train", *QUICK, "--data", "folder:images").user_error("cannot hold out 120 of 49", "--validation")
    sparring("train", *QUICK, "--data", "images").user_error("write folder:images")
    assert not (tmp_path / "runs").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """LONG, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert command.run([*LONG, "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_stopped_run_resumes_to_the_same_result(sparring, tmp_path, whole, number):
    child = start("train", *LONG, "--out", "a run", "--device", "cpu", cwd=tmp_path)
    assert child.stdout is not None
    while not child.stdout.readline().startswith("epoch   2"):
        assert child.poll() is None
    child.send_signal(number)
    _, err = child.communicate()
    assert child.returncode == (130 if number == signal.SIGINT else 1), err
    announced, ended = err.splitlines()
    assert announced == "sparring: stopping after this step" + (
        "; press Ctrl-C again to stop at once, without saving" if number == signal.SIGINT else ""
    )
    line, _, resume = ended.partition(" Continue with: ")
    assert line.startswith("sparring: stopped in epoch ") and line.endswith("; saved.")
    assert resume == "sparring train --out 'a run' --resume --device cpu --no-tensorboard"
    assert len(run_folder.read_metrics(tmp_path / "a run")) < 7
    assert sparring(*shlex.split(resume)[1:]).code == 0
    same_run(whole, tmp_path / "a run")


def test_second_ctrl_c_stops_at_once(sparring, tmp_path, monkeypatch):
    def stuck(*args, stop, **kwargs):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command, "train", stuck)
    result = sparring("train", *QUICK, "--out", "run")
    assert result.code == 130
    result.one_line("interrupted before the run was started.")
    assert not Path("run").exists()
    run_folder.create(Path("run"), find("fat-digits").config, "fat-digits")
    sparring("train", *QUICK, "--out", "run", "--overwrite").one_line("interrupted before the run was started.")
    result = sparring("train", "--out", "run", "--resume")
    result.one_line("since the last checkpoint are lost", "sparring train --out run --resume")


def test_closed_output_pipe_stops_training(tmp_path):
    """`sparring train ... | head -2`."""
    child = start("train", *LONG, "--out", "run", cwd=tmp_path)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.readline()
    child.stdout.close()
    err = child.stderr.read()
    child.stderr.close()
    assert child.wait() == 1
    assert err == (
        "sparring: stopped, because the output pipe was closed. "
        "Continue with: sparring train --out run --resume --no-tensorboard\n"
    )
    assert len(run_folder.read_metrics(tmp_path / "run")) < 7


def test_suggested_protocol_is_the_one_of_the_recipe(sparring, finished):
    result = sparring("train", "--out", finished, "--resume")
    assert result.out.endswith(f"sparring evaluate {finished} --protocol mart --eps 0.3\n")
    for name, recipe in RECIPES.items():
        assert PROTOCOLS[recipe.config.data] in evaluation.PROTOCOLS, name


def test_pick_device():
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "mps", "cpu:x", "cuda:99", ""):
        with pytest.raises(UserError, match="cpu"):
            pick_device(name)


def test_tensorboard_is_on_by_default(sparring, tmp_path):
    words = [word for word in QUICK if word != "--no-tensorboard"]
    assert sparring("train", *words, "--epochs", "1", "--out", "run").code == 0
    assert list((tmp_path / "run").glob("events.out.tfevents*"))
    (entry,) = json.loads((tmp_path / "run" / run_folder.ENVIRONMENT).read_text())
    assert {"sparring", "torch", "device", "command"} <= entry.keys()


def test_finished_run_without_metrics_is_a_user_error(sparring, finished, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    (run / run_folder.METRICS).unlink()
    sparring("train", "--out", run, "--resume").user_error("metrics.jsonl is damaged", "there are none.")


def test_non_utf8_folder_and_too_large_seed_are_refused(sparring, tmp_path):
    sparring("train", *QUICK, "--out", tmp_path / "l\udce4uf").user_error("is not UTF-8", "Choose another with --out")
    sparring("train", *QUICK, "--seed", 2**63).user_error("a seed must be a whole number from 0 to 2^63 - 1")


def test_permission_error_is_one_line(sparring, monkeypatch):
    def forbidden(*args, **kwargs):
        raise PermissionError(errno.EACCES, "Permission denied", "run/config.json")

    monkeypatch.setattr(command, "options_of", forbidden)
    sparring("train", "fat-digits").user_error("run/config.json cannot be read or written: permission denied.")
