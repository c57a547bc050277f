"""Several processes as one run: the run of one process up to rounding, the same weights everywhere, one end for all."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, Sampler, TensorDataset

import sparring
from sparring.cli import main
from sparring.data import Dataset, load
from sparring.data.stream import rows_of
from sparring.objectives import CAT, DAT, FAT, MART, TRADES, FATForTRADES
from sparring.training import distributed, loop, peers, run_folder, state, torchrun
from sparring.training.checkpoint import checksum
from sparring.training.config import Config
from sparring.training.distributed import joined
from tests.training import group
from tests.training.test_loop import same_run

SHORT = {"eps": 0.2, "step_size": 0.05, "steps": 3}
BASE = Config(
    objective=FAT(**SHORT, tau=1, noise=0.001),
    data="digits",
    model="tiny_cnn",
    epochs=2,
    batch_size=30,
    validation=20,
    lr=0.1,
    augment="crop-flip",
)
# Of 83 images the last batch has 23, and of 63 it has 3: with three processes two of them get none.
CASES = {
    "fat": (BASE, 83),
    "short last batch": (BASE, 63),
    "trades, average, clipping": (replace(BASE, objective=TRADES(**SHORT), ema=0.9, clip=1.0), 83),
    "fat for trades in L2": (replace(BASE, objective=FATForTRADES(eps=1.0, step_size=0.3, steps=3, norm="l2")), 83),
    "mart, perturbed weights": (replace(BASE, objective=MART(**SHORT), awp=0.01), 63),
    "cat": (replace(BASE, objective=CAT(**SHORT, patience=1)), 83),
    "dat, streamed": (replace(BASE, objective=DAT(**SHORT)), 83),
    "cutmix, smoothing, adamw": (
        replace(BASE, augment="crop-flip+cutmix:1.0", label_smoothing=0.1, optimizer="adamw", lr=0.001),
        63,
    ),
}


class Exact(nn.Module):
    """A small network in float64, with or without batch-norm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        layers = [nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4) if norm else nn.Identity(), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x.double())


def network(norm: bool = False) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Exact(norm)


def digits(count: int, *, streamed: bool = False) -> Dataset:
    whole = load("digits")
    train = whole.train.head(count + BASE.validation)
    return replace(whole, train=rows_of(train) if streamed else train, test=whole.test.head(10))


def trained(config: Config, count: int, folder: str, norm: bool, engine: str, streamed: bool = False):
    """(weights, checksums after every epoch) of this process."""
    sums = []
    record = loop._record

    def recording(state, *rest):
        sums.append(checksum(state.model.state_dict()))
        return record(state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_record", recording)
        patch.setattr(loop.models, "check_network", lambda *_, **__: None)  # it refuses float64
        with joined(torch.device("cpu")) as world:
            given = {"data": digits(count, streamed=streamed), "tensorboard": False, "engine": engine, "world": world}
            net = network(norm) if engine == "plain" else None
            model = loop.train(config, folder, model=net, **given)
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}, sums


def all_cases(folder: str):
    """Every case, one after the other, in one start of the processes."""
    return {
        name: trained(config, count, f"{folder}/{index}", False, "plain", "streamed" in name)
        for index, (name, (config, count)) in enumerate(CASES.items())
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return all_cases(str(tmp_path_factory.mktemp("alone")))


def close(one, other, within=1e-10):
    assert one.keys() == other.keys()
    for name, values in one.items():
        torch.testing.assert_close(torch.from_numpy(other[name]), torch.from_numpy(values), rtol=0, atol=within)


@pytest.mark.parametrize("size", [2, 3])
def test_several_processes_are_one_run_up_to_rounding(tmp_path, alone, size):
    members = group.run(size, all_cases, str(tmp_path))
    for name, (weights, _) in alone.items():
        for member in members:
            close(weights, member[name][0])
            assert member[name][1] == members[0][name][1] and len(member[name][1]) == 2, name


def both_norms(folder: str):
    """A network with batch-norm: synchronised in float64, and local on the fast engine of the CPU."""
    fast = replace(BASE, objective=FAT(**SHORT, tau=1), ema=0.9)
    return {
        "synchronised": trained(replace(BASE, sync_bn=True), 83, f"{folder}/synchronised", True, "plain"),
        "fast": trained(fast, 83, f"{folder}/fast", True, "fast"),
    }


def test_batch_norm_is_that_of_one_process_where_synchronised_and_the_same_everywhere_where_not(tmp_path):
    alone = both_norms(str(tmp_path / "alone"))
    members = group.run(2, both_norms, str(tmp_path / "group"))
    for member in members:
        close(alone["synchronised"][0], member["synchronised"][0])
        for name, (_, sums) in member.items():
            assert sums == members[0][name][1], name
    weights = members[0]["fast"][0]
    assert any(not (values == weights[name]).all() for name, values in alone["fast"][0].items())  # statistics differ
    start = run_folder.read_environment(tmp_path / "group" / "synchronised")[0]
    assert (start["processes"], start["backend"], start["batch_statistics"]) == (2, "gloo", "of all processes")
    assert run_folder.read_environment(tmp_path / "group" / "fast")[0]["batch_statistics"] == "of each process"
    assert "processes" not in run_folder.read_environment(tmp_path / "alone" / "fast")[0]


class Spoilt(nn.Module):
    """A network whose logits are not finite for images whose first pixel is 1."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inside, self.where = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), where

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bad = x[:, :1, 0, 0] == 1.0
        logits = self.inside(x)
        spoils = self.training if self.where == "update" else True
        return torch.where(bad & spoils, logits / 0, logits)


def spoilt(folder: str, where: str):
    data = digits(40)
    x = data.train.x.clone()
    x[:, :, 0, 0] = 0
    x[7, :, 0, 0] = 255
    data = replace(data, train=replace(data.train, x=x))
    config = replace(BASE, objective=FAT(eps=0.01, step_size=0.01, steps=1, start=None), augment="none", batch_size=40)
    with joined(torch.device("cpu")) as world:
        loop.train(replace(config, validation=5), folder, model=Spoilt(where), data=data, engine="plain", world=world)


@pytest.mark.parametrize("where", ["attack", "update"])
def test_logits_that_are_not_finite_on_one_process_stop_all(tmp_path, where):
    found = group.run(3, spoilt, str(tmp_path), where)
    assert [kind for kind, _, _ in found] == ["Diverged"] * 3
    assert {text for _, text, _ in found} == {found[0][1]} and "epoch 1, step" in found[0][1]
    assert [elsewhere for *_, elsewhere in found] == [False, True, True]
    assert not (tmp_path / run_folder.LAST).exists()


def other_than_the_first(folder: str, what: str):
    rank = torchrun.rank()
    config, data, rate = BASE, digits(83), 0.1
    if what == "configuration" and rank == 1:
        config = replace(BASE, lr=0.2)
    if what == "data" and rank == 1:
        data = digits(82)
    if what == "run folder" and rank == 1:
        folder = f"{folder}/other"
    if what == "optimiser" and rank == 1:
        rate = 0.01
    if what == "device":
        config = replace(BASE, batch_size=3)
    own = (lambda weights: torch.optim.SGD(weights, lr=rate)) if what == "optimiser" else None
    how = {"resume": (Path(folder) / run_folder.CONFIG).exists(), "optimizer": own, "own_lr": own is not None}
    with joined(torch.device("cpu")) as world:
        loop.train(config, folder, data=data, engine="plain", world=world, **how)


@pytest.mark.parametrize("what", ["configuration", "data", "run folder", "optimiser"])
def test_processes_that_differ_are_refused_by_name(tmp_path, what):
    found = group.run(2, other_than_the_first, str(tmp_path / "run"), what)
    expected = f"process 1 has another {what} than process 0. Start every process with the same command"
    for (kind, text, elsewhere), first in zip(found, (True, False), strict=True):
        assert kind == "UserError" and text.startswith(expected) and elsewhere is not first
    assert not (tmp_path / "run").exists()


def test_a_process_that_does_not_see_the_run_folder_is_refused(tmp_path):
    with joined(torch.device("cpu")) as world:
        loop.train(replace(BASE, epochs=1), tmp_path / "run", data=digits(83), engine="plain", world=world)
    found = group.run(2, other_than_the_first, str(tmp_path / "run"), "run folder")
    assert all(kind == "UserError" and "another run folder" in text for kind, text, _ in found)


def test_a_batch_too_small_for_the_processes_is_refused(tmp_path):
    found = group.run(2, other_than_the_first, str(tmp_path / "run"), "device")
    assert found[0][1] == (
        "a batch of 3 images leaves some of 2 processes without two images. Use --batch-size 4 or more, or fewer "
        "processes."
    )


LONG = replace(BASE, objective=FAT(**SHORT, tau=1, noise=0.001), epochs=12, ema=0.9, batch_size=20)


class Begun:
    """A tracker that leaves a file when training begins."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def begin(self, *args, **kwargs):
        self.file.touch()

    def step(self, *args): ...
    def epoch(self, *args, **kwargs): ...
    def end(self): ...


def keeps_on(folder: str):
    """Train or continue, saving all the time."""
    loop.SAVE_EVERY = 0.02
    given = {"data": digits(200), "tensorboard": False, "engine": "plain", "resume": True}
    with joined(torch.device("cpu")) as world:
        model = loop.train(LONG, f"{folder}/run", tracker=Begun(Path(folder) / "begun"), world=world, **given)
    return checksum(model.state_dict())


def test_ten_kills_of_any_process_end_the_others_and_the_run_resumes_bitwise(tmp_path):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    began = time.perf_counter()
    whole = group.run(2, keeps_on, str(tmp_path / "whole"))
    longest = (time.perf_counter() - began) / 25
    moments, begun = random.Random(0), tmp_path / "killed" / "begun"
    for _ in range(10):
        begun.unlink(missing_ok=True)
        (tmp_path / "out").unlink(missing_ok=True)
        with group.start(2, keeps_on, str(tmp_path / "killed"), out=tmp_path / "out") as members:
            members.wait_until(begun.exists)
            time.sleep(moments.uniform(0, longest))
            victim = moments.randrange(2)
            members.members[victim].kill()
            found = members.results(patience=60)
            assert found[victim] is None, "the run ended before it could be killed"
            assert members.members[1 - victim].exitcode == 1
            # A collective that breaks raises; the heartbeat, which may be faster, prints and ends the process.
            said = found[1 - victim][1] if found[1 - victim] else (tmp_path / "out").read_text()
            assert "another process of this run has ended" in said
    assert run_folder.open_run(tmp_path / "killed" / "run").last() is not None, "no kill came after a save"
    assert group.run(2, keeps_on, str(tmp_path / "killed")) == whole
    same_run(tmp_path / "whole" / "run", tmp_path / "killed" / "run")


def test_a_run_goes_on_with_another_number_of_processes(tmp_path):
    """Without batch-norm the numbers are the same up to rounding, whoever computes them."""
    (tmp_path / "one").mkdir()
    stop = {"data": digits(200), "tensorboard": False, "engine": "plain"}
    with pytest.raises(loop.Interrupted):
        loop.train(LONG, tmp_path / "one" / "run", stop=StopsAfter(25), **stop)
    sums = group.run(2, keeps_on, str(tmp_path / "one"))
    assert sums[0] == sums[1]
    assert [start.get("processes", 1) for start in run_folder.read_environment(tmp_path / "one" / "run")] == [1, 2]


class StopsAfter:
    """A stop that is asked for after some steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def stops_on_one(folder: str, rank: int):
    """A run that one process is asked to stop."""
    stop = StopsAfter(25 if torchrun.rank() == rank else 10**9)
    with joined(torch.device("cpu")) as world:
        loop.train(LONG, folder, data=digits(200), tensorboard=False, engine="plain", stop=stop, world=world)


def test_a_stop_of_one_process_stops_all_after_the_same_step(tmp_path):
    found = group.run(2, stops_on_one, str(tmp_path / "run"), 1)
    assert [kind for kind, *_ in found] == ["Interrupted"] * 2
    assert found[0][1] == found[1][1] == "stopped in epoch 3 after step 6; saved"
    assert run_folder.open_run(tmp_path / "run").last().facts["step"] == 6


class Terminates(Begun):
    """A tracker that ends its process by SIGTERM; only the first process calls it."""

    def step(self, *args):
        os.kill(os.getpid(), signal.SIGTERM)


def own_images(folder: str):
    """A run on images of the caller's own, of which the first process is asked to stop."""
    train = digits(83).train
    own, tracker = (train.x.float() / 255, train.y), Terminates(Path(folder).parent / "begun")
    how = {"model": Masked(), "batch_size": 20, "validation": 20, "tracker": tracker, "tensorboard": False}
    sparring.train(objective=BASE.objective, out=folder, data=(own, own), progress=False, device="cpu", **how)


def test_all_end_as_the_one_that_got_the_signal(tmp_path):
    found = group.run(2, own_images, str(tmp_path / "run"), out=tmp_path / "out")
    assert [kind for kind, *_ in found] == ["SystemExit"] * 2
    assert (tmp_path / "out").read_text().count("note: images handed in as") == 1


def random_loader(folder: str):
    """A loader whose order is beyond the run's reach."""
    data = digits(83)
    order = torch.Generator()
    order.seed()

    class Order(Sampler):
        def __len__(self):
            return len(data.train)

        def __iter__(self):
            return iter(torch.randperm(len(self), generator=order).tolist())

    images = TensorDataset(data.train.x.float() / 255, data.train.y)
    sparring.train(objective=BASE.objective, model=Masked(), data=DataLoader(images, 30, sampler=Order()), out=folder)


def test_a_loader_that_does_not_repeat_is_refused(tmp_path):
    for kind, text, _ in group.run(2, random_loader, str(tmp_path / "run")):
        assert kind == "UserError" and text.startswith("this loader gives other batches in every pass")


class Masked(nn.Module):
    """A network with a buffer that is not finite, and one that counts its batches."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Flatten(), nn.Linear(64, 11))
        mask = torch.zeros(11)
        mask[10] = -torch.inf
        self.register_buffer("mask", mask)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
        return (self.inside(x) + self.mask)[:, :10]


def masked(folder: str):
    with joined(torch.device("cpu")) as world:
        given = {
            "data": digits(63),
            "engine": "plain",
            "tensorboard": False,
            "world": world,
        }  # the last batch has three
        return loop.train(BASE, folder, model=Masked(), **given).seen.item()


def test_buffers_that_no_update_exchanges_are_the_first_ones(tmp_path):
    assert group.run(3, masked, str(tmp_path)) == [6.0] * 3  # three batches in each of two epochs


def stops_and_saves_slowly(folder: str):
    """A stop whose checkpoint takes longer than a process may be silent."""
    peers.EVERY, peers.SILENT = 0.05, 1.0
    write = state.Saver._write

    def slowly(self, files):
        time.sleep(2)
        write(self, files)

    state.Saver._write = slowly
    stops_on_one(folder, 1)


def test_a_stop_waits_for_a_slow_disk(tmp_path):
    found = group.run(2, stops_and_saves_slowly, str(tmp_path / "run"))
    assert [kind for kind, *_ in found] == ["Interrupted"] * 2
    assert [elsewhere for *_, elsewhere in found] == [False, True]
    assert run_folder.open_run(tmp_path / "run").last().facts["step"] == 6


def restarted(folder: str):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = "1"
    return main(["train", "fat-digits", "--epochs", "2", "--out", folder, "--no-tensorboard"])


def test_a_restart_continues_no_run_of_others(tmp_path):
    """Refused at first, the same command must not continue somebody's run only because torchrun repeats it."""
    sparring.train("fat-digits", tmp_path / "run", epochs=1, progress=False, device="cpu")
    assert group.run(2, restarted, str(tmp_path / "run"), out=tmp_path / "out") == [2, 2]
    (said,) = (line for line in (tmp_path / "out").read_text().splitlines() if line.startswith("sparring:"))
    assert "already holds a run" in said
    assert len(run_folder.read_metrics(tmp_path / "run")) == 1


def started_again(folder: str, port: int, counts: list[int], steps: int):
    """A run under torchrun's store; its machines count different numbers of restarts."""
    os.environ |= {"MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(counts[torchrun.rank()])
    distributed._JOIN = distributed.timedelta(seconds=20)
    with joined(torch.device("cpu")) as world:
        ours = world.began(Path(folder))
        given = {"data": digits(83), "tensorboard": False, "engine": "plain", "resume": ours, "world": world}
        with contextlib.suppress(loop.Interrupted):
            loop.train(BASE, folder, stop=StopsAfter(steps), **given)
        return ours, world.began(Path(folder))  # once more in the same process is no restart


def test_machines_that_count_other_restarts_meet_again(tmp_path):
    agent = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    run = str(tmp_path / "run")
    assert group.run(2, started_again, run, agent.port, [0, 0], 4) == [(False, False)] * 2
    assert group.run(2, started_again, run, agent.port, [1, 0], 99) == [(True, False)] * 2
    assert len(run_folder.read_metrics(tmp_path / "run")) == BASE.epochs
