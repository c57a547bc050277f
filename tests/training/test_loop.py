"""The loop: exact resume, clean stops, intact checkpoints."""

from __future__ import annotations

import errno
import multiprocessing
import os
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparring.data import load
from sparring.errors import RunFailed, UserError
from sparring.objectives import OBJECTIVES
from sparring.objectives.dat import FOSCPGD
from sparring.schedules import constant, parse
from sparring.training import checkpoint, loop, run_folder, start, state
from sparring.training.config import model_facts as config_facts
from sparring.training.config import with_objective
from sparring.training.loop import Interrupted
from sparring.weights import load_model
from tests.doctored import doctor, replaced

TIMES = {"seconds", "images_per_second"}  # all that may differ between two runs of one configuration


def same_run(one: Path, other: Path) -> None:
    """Bitwise the same weights, momentum and metrics."""
    strip = [[{k: v for k, v in r.items() if k not in TIMES} for r in run_folder.read_metrics(f)] for f in (one, other)]
    assert strip[0] == strip[1]
    for name in (run_folder.LAST, run_folder.BEST):
        a, b = checkpoint.load(one / name), checkpoint.load(other / name)
        assert a.tensors.keys() == b.tensors.keys()
        assert all(torch.equal(a.tensors[key], b.tensors[key]) for key in a.tensors)
        assert a.facts["epoch"] == b.facts["epoch"]


def in_two_parts(config, folder: Path, moment: int) -> Path:
    """Train, stop after `moment` steps, and resume to the end."""
    steps = iter(range(1000))
    with pytest.raises(Interrupted):
        loop.train(config, folder, tensorboard=False, stop=lambda: next(steps) == moment - 1)
    loop.train(config, folder, resume=True, tensorboard=False)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory, small) -> Path:
    """`small`, uninterrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    loop.train(small, folder, tensorboard=False)
    return folder


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_learns(tmp_path, small, objective):
    config = replace(small, epochs=3, augment="none", lr=constant(0.02), batch_size=64)
    config = with_objective(config, objective, **{} if objective == "standard" else {"eps": 0.1, "step_size": 0.03})
    model = loop.train(config, tmp_path / "run", tensorboard=False)
    records = run_folder.read_metrics(tmp_path / "run")
    assert [record["epoch"] for record in records] == [1, 2, 3]
    assert records[-1]["loss"] < records[0]["loss"]
    assert records[-1]["natural"] > 0.5
    assert not model.training
    fixed = {"standard": 0.0, "madry": 3.0, "trades": 3.0, "mart": 3.0}  # the others stop early
    backprops = fixed.get(objective)
    assert records[0]["backprops"] == backprops if backprops is not None else 0 < records[0]["backprops"] < 3


@pytest.mark.parametrize("objective", ["cat", "dat", "ates", "fat-by-loss", "fat-by-probability"])
def test_uncaptured_searches_train_alike_with_the_fast_engine(tmp_path, small, objective):
    """The search takes its gradients from the folded network, in eager steps: the weights agree up to rounding."""
    config = with_objective(replace(small, epochs=1), objective)
    plain, fast = (
        loop.train(config, tmp_path / kind, tensorboard=False, engine=kind).state_dict() for kind in ("plain", "fast")
    )
    assert all(torch.allclose(plain[name], fast[name], rtol=1e-2, atol=1e-3) for name in plain)


def test_uncaptured_search_uses_the_folded_network(tmp_path, small, monkeypatch):
    seen = []
    real = FOSCPGD.__call__
    monkeypatch.setattr(FOSCPGD, "__call__", lambda self, model, *rest: seen.append(model) or real(self, model, *rest))
    loop.train(with_objective(replace(small, epochs=1), "dat"), tmp_path / "run", tensorboard=False, engine="fast")
    assert {type(model).__name__ for model in seen} == {"Folded"}


def test_folder_may_be_a_string(tmp_path, small):
    loop.train(replace(small, epochs=1), str(tmp_path / "run"), tensorboard=False)
    assert (tmp_path / "run" / "last.safetensors").is_file()


def test_run_folder_holds_all_files(tmp_path, small):
    loop.train(small, tmp_path / "run", recipe="some")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {run_folder.CONFIG, run_folder.ENVIRONMENT, run_folder.METRICS, run_folder.LAST, run_folder.BEST} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    record = run_folder.read_metrics(tmp_path / "run")[0]
    assert {"epoch", "lr", "eps", "tau", "loss", "natural", "pgd10", "backprops"} | TIMES == record.keys()
    best = checkpoint.load(tmp_path / "run" / run_folder.BEST)
    records = run_folder.read_metrics(tmp_path / "run")
    assert best.facts["metrics"] == max(records, key=lambda r: (r["pgd10"], r["natural"], -r["epoch"]))
    assert best.facts["recipe"] == "some"
    assert best.facts["model"]["name"] == "tiny_cnn"


def test_best_checkpoint_reproduces_its_metrics(tmp_path, small):
    from sparring.data import hold_out
    from sparring.models import build
    from sparring.seeds import Draw, derive_seed

    loop.train(small, tmp_path / "run", tensorboard=False)
    best = checkpoint.load(tmp_path / "run" / run_folder.BEST)
    model = build("tiny_cnn", num_classes=10, channels=1, size=(8, 8))
    model.load_state_dict(best.part("model"))
    _, held = hold_out(load("digits").train, small.validation, seed=derive_seed(small.seed, Draw.HOLD_OUT))
    natural, robust = loop.validate(model, held, eps=small.validation_radius, seed=small.seed)
    assert (natural, robust) == (best.facts["metrics"]["natural"], best.facts["metrics"]["pgd10"])


def test_seed_determines_the_run(tmp_path, small):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        loop.train(replace(small, seed=seed, epochs=1), tmp_path / name, tensorboard=False)
    same_run(tmp_path / "a", tmp_path / "b")
    with pytest.raises(AssertionError):
        same_run(tmp_path / "a", tmp_path / "c")


def test_training_leaves_the_global_random_state_unchanged(tmp_path, small):
    state = torch.get_rng_state()
    loop.train(replace(small, epochs=1), tmp_path / "run", tensorboard=False)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("moment", [4, 5, 6, 14])
def test_stopping_and_resuming_is_exact(tmp_path, small, whole, moment):
    """Five steps an epoch: stops before, at and after its end, and in a later epoch."""
    same_run(whole, in_two_parts(small, tmp_path / "parts", moment))


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_awp_follows_its_schedule(tmp_path, small, engine):
    """0 in the first epoch and 0.01 in the second: equal weights after one, different ones after two."""
    config = replace(small, epochs=2)
    perturbed = replace(config, awp=parse("0,0.01@2"))
    for name, each in (("without", config), ("with", perturbed)):
        loop.train(each, tmp_path / name, tensorboard=False, engine=engine)
    one, other = (run_folder.read_metrics(tmp_path / name) for name in ("without", "with"))
    assert one[0]["loss"] == other[0]["loss"] and one[0]["natural"] == other[0]["natural"]
    assert one[1]["loss"] != other[1]["loss"]
    weights = [load_model(tmp_path / name).state_dict() for name in ("without", "with")]
    assert any(not torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


@pytest.mark.parametrize(("objective", "name"), [("dat", "fosc"), ("ates", "margin"), ("fat-by-loss", "rho")])
def test_metrics_hold_the_schedule_of_the_objective(tmp_path, small, objective, name):
    schedule = parse("ramp:0.4..0.2")
    loop.train(with_objective(small, objective, **{name: schedule}), tmp_path / "run", tensorboard=False)
    records = run_folder.read_metrics(tmp_path / "run")
    assert [record[name] for record in records] == [schedule.at(epoch, 3) for epoch in (1, 2, 3)]
    assert records[0][name] == 0.4 > records[1][name] and not {"fosc", "margin", "rho"} - {name} & records[0].keys()


@pytest.mark.parametrize("engine", ["plain", "fast"])
def test_training_without_projection(tmp_path, small, engine):
    """Four steps of 0.1 leave a ball of 0.05: other adversarial data, other weights."""
    far = {"eps": 0.05, "step_size": 0.1, "start": None, "tau": 3}
    both = [with_objective(replace(small, epochs=1), project=project, **far) for project in (True, False)]
    held, free = (
        loop.train(config, tmp_path / str(i), tensorboard=False, engine=engine).state_dict()
        for i, config in enumerate(both)
    )
    assert any(not torch.equal(held[name], free[name]) for name in held)
    one, other = (run_folder.read_metrics(tmp_path / name)[0] for name in "01")
    assert one["loss"] < other["loss"]  # more distant data are harder
    assert run_folder.open_run(tmp_path / "1").config == both[1]


def test_resuming_a_missing_run_starts_it(tmp_path, small, whole):
    loop.train(small, tmp_path / "other", resume=True, tensorboard=False)
    same_run(whole, tmp_path / "other")


def test_resuming_a_finished_run_changes_nothing(tmp_path, small):
    loop.train(small, tmp_path / "run", tensorboard=False)
    before = (tmp_path / "run" / run_folder.METRICS).read_bytes(), (tmp_path / "run" / run_folder.LAST).read_bytes()
    loop.train(small, tmp_path / "run", resume=True, tensorboard=False)
    assert (
        (tmp_path / "run" / run_folder.METRICS).read_bytes(),
        (tmp_path / "run" / run_folder.LAST).read_bytes(),
    ) == before


def test_resuming_with_another_configuration_is_refused(tmp_path, small):
    loop.train(replace(small, epochs=1), tmp_path / "run", tensorboard=False)
    with pytest.raises(UserError, match=r"another configuration \(epochs 1 -> 3; seed 0 -> 2\)"):
        loop.train(replace(small, seed=2), tmp_path / "run", resume=True)
    with pytest.raises(
        UserError, match=r"--lr one-cycle:\S+ follows the length of the run: of 3 epochs, the first 1 would"
    ):
        loop.train(small, tmp_path / "run", resume=True)


class Begun:
    """A tracker that reports the start of training."""

    def __init__(self, pipe):
        self.pipe = pipe

    def begin(self, *args, **kwargs):
        self.pipe.send("begun")

    def step(self, *args): ...
    def epoch(self, *args, **kwargs): ...
    def end(self): ...


def train_in_a_process(config, folder: Path, pipe) -> None:
    loop.SAVE_EVERY = 0.02  # most kills fall between two saves within an epoch
    loop.train(config, folder, resume=True, tensorboard=False, tracker=Begun(pipe))


def test_run_killed_ten_times_resumes_bitwise(tmp_path, small):
    config = replace(small, epochs=5, batch_size=64, lr=parse("one-cycle:0.1"))
    began = time.perf_counter()
    loop.train(config, tmp_path / "whole", tensorboard=False)
    longest = (time.perf_counter() - began) / 20  # ten of these never reach the end
    processes = multiprocessing.get_context("forkserver")

    def start() -> multiprocessing.Process:
        here, there = processes.Pipe(duplex=False)
        child = processes.Process(target=train_in_a_process, args=(config, tmp_path / "killed", there))
        child.start()
        assert here.recv() == "begun"
        return child

    moments = random.Random(0)
    for _ in range(10):
        child = start()
        time.sleep(moments.uniform(0, longest))
        assert child.is_alive(), "the run ended before it could be killed"
        child.kill()
        child.join()
    assert run_folder.open_run(tmp_path / "killed").last() is not None, "no kill came after a save"
    child = start()
    child.join()
    assert child.exitcode == 0
    same_run(tmp_path / "whole", tmp_path / "killed")


def test_short_epochs_are_saved_rarely_and_resume_exactly(tmp_path, small, whole, monkeypatch):
    """The first epoch's end is saved, later ones only after a while; best and last are always saved at once."""
    saves = []
    original = state.Saver.save

    def save(self):
        saves.append(self.state.epoch - 1)
        return original(self)

    monkeypatch.setattr(state.Saver, "save", save)

    class Leave:
        def begin(self, *args, **kwargs): ...
        def step(self, *args): ...
        def end(self): ...
        def epoch(self, record, *, best):
            if record["epoch"] == 2:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # like a power cut: nothing is saved on exit
        loop.train(small, tmp_path / "run", tensorboard=False, tracker=Leave())
    assert saves == [1]
    best = checkpoint.load(tmp_path / "run" / run_folder.BEST)
    assert best.facts["epoch"] == 1
    loop.train(small, tmp_path / "run", resume=True, tensorboard=False)
    assert saves == [1, 2, 3]  # a resumed run saves its first epoch's end too
    same_run(whole, tmp_path / "run")


def full_disk(monkeypatch, is_full):
    """Let writes of checkpoints for which `is_full` is true fail halfway."""
    monkeypatch.setattr(loop, "SAVE_AT_ENDS", 0.0)
    written = iter(range(1, 100))
    original = Path.write_bytes

    def write(self, data):
        if is_full(next(written)):
            original(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return original(self, data)

    monkeypatch.setattr(Path, "write_bytes", write)


@pytest.mark.parametrize("nth", [1, 2, 3, 4])
def test_full_disk_keeps_the_last_good_checkpoint(tmp_path, small, whole, monkeypatch, nth):
    """From the nth write of a checkpoint on all fail; with room again, the run resumes exactly."""
    full_disk(monkeypatch, lambda count: count >= nth)
    with pytest.raises(UserError, match="the disk is full"):
        loop.train(small, tmp_path / "run", tensorboard=False)
    monkeypatch.undo()
    last = run_folder.open_run(tmp_path / "run").last()
    assert (last is None) == (nth <= 2)  # the first epoch writes best, then last
    loop.train(small, tmp_path / "run", resume=True, tensorboard=False)
    same_run(whole, tmp_path / "run")


@pytest.mark.parametrize("nth", [1, 4])
def test_briefly_full_disk_costs_nothing(tmp_path, small, whole, monkeypatch, nth):
    full_disk(monkeypatch, lambda count: count == nth)
    loop.train(small, tmp_path / "run", tensorboard=False)
    same_run(whole, tmp_path / "run")


def test_non_finite_loss_stops_before_the_update(tmp_path, small):
    config = replace(small, lr=parse("0.05,1e30@2"), epochs=3)
    with pytest.raises(RunFailed, match=r"not finite by epoch 2, step \d .*lower --lr"):
        loop.train(config, tmp_path / "run", tensorboard=False)
    last = run_folder.open_run(tmp_path / "run").last()
    assert last is not None
    assert last.facts["epoch"] == 1
    assert all(torch.isfinite(tensor).all() for tensor in last.tensors.values())
    assert [record["epoch"] for record in run_folder.read_metrics(tmp_path / "run")] == [1]


def test_interruption_between_best_and_last_keeps_the_newer_best(tmp_path, small, monkeypatch):
    """On a GPU a repeated epoch may end slightly worse than the lost one."""
    loop.train(replace(small, epochs=1), tmp_path / "run", tensorboard=False)
    run = run_folder.open_run(tmp_path / "run")
    best = checkpoint.load(tmp_path / "run" / run_folder.BEST)
    lost = best.facts["metrics"] | {"epoch": 2, "pgd10": 1.0}
    run.save(run_folder.BEST, best.tensors, best.facts | {"epoch": 2, "metrics": lost})
    doctor(tmp_path / "run", replaced(epochs=2))
    loop.train(replace(small, epochs=2), tmp_path / "run", resume=True, tensorboard=False)
    last = run_folder.open_run(tmp_path / "run").last()
    assert last is not None and last.facts["best"] == lost
    assert checkpoint.load(tmp_path / "run" / run_folder.BEST).facts["metrics"] == lost


def test_last_batch_of_one_image_is_refused(tmp_path, small):
    images = len(load("digits").train) - small.validation
    config = replace(small, model="resnet18", batch_size=images - 1)
    with pytest.raises(UserError, match=r"one image, and batch-norm needs two. Use --batch-size \d+"):
        loop.train(config, tmp_path / "run", tensorboard=False)
    assert not (tmp_path / "run").exists()


def test_weights_are_initialised_without_cuda(tmp_path, small, monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    start.begin(small, config_facts(small, load("digits")), torch.device("cpu"))
    assert not seeded


def test_refused_configuration_creates_no_folder(tmp_path, small):
    for changes in ({"model": "resnet"}, {"validation": 5000}, {"data": "digit"}):
        with pytest.raises(UserError):
            loop.train(replace(small, **changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_normalisation_is_saved_with_the_model(tmp_path, small):
    loop.train(replace(small, epochs=1, normalize=True), tmp_path / "run", tensorboard=False)
    last = checkpoint.load(tmp_path / "run" / run_folder.LAST)
    assert last.facts["model"]["normalize"] is not None
    assert "normalize.mean" in last.part("model")
