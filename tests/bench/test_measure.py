"""What `sparring bench` measures: every part runs, counts add up, and the paths that are compared do the same work."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sparring import cli, recipes
from sparring.bench import Benchmark, BenchmarkOptions
from sparring.bench.timing import timed
from sparring.data import load

CPU = torch.device("cpu")
FEW = BenchmarkOptions(taus=(0, 2), images=200, plain_batches=2, together=(2,), repeats=2, rounds=2)


def made(**changes):
    return Benchmark(recipes.find("fat-digits").config, load("digits"), CPU, replace(FEW, **changes))


def test_a_median_with_its_spread():
    calls = []
    found = timed(lambda: calls.append(1), CPU, repeats=5, warm_up=2, inner=3)
    assert len(calls) == 2 + 5 * 3
    assert found.n == 5 and 0 <= found.low <= found.median <= found.high


def test_every_part_on_a_cpu():
    bench = made()
    parts = dict(bench.parts())
    assert list(parts) == list(bench.every) and all(parts.values())
    assert parts["start-up"][0][1].startswith("engine: plain, fp32 (captured graphs need CUDA)")
    madry, *friendly = bench.found["epochs"]
    assert madry["backprops"] == bench.training.objective.steps  # no example stops
    assert [row["name"] for row in friendly] == ["FAT, tau 0", "FAT, tau 2"]
    assert friendly[0]["backprops"] < friendly[1]["backprops"] < madry["backprops"]
    for row in (madry, *friendly):
        time = row["time"]
        assert time["n"] == 2 and time["low"] <= row["seconds"] == time["median"] <= time["high"]
        assert row["of_madry_low"] <= row["of_madry"] <= row["of_madry_high"]
        first, second = row["rounds"]
        assert row["of_madry_low"] == min(first["of_madry"], second["of_madry"])
        assert 2 * row["backprops"] == pytest.approx(first["backprops"] + second["backprops"])
    assert madry["of_madry_low"] == madry["of_madry_high"] == 1.0
    assert [(row["runs"], row["share"], row["n"]) for row in bench.found["together"]] == [(2, 100, 2)]
    start = bench.found["start_up"]
    parts = [start[f"{part}_s"] for part in ("imports", "data", "device", "attack", "update")]
    assert min(parts) >= 0 and sum(parts) == pytest.approx(start["process_s"])
    assert sum(parts[-2:]) == pytest.approx(start["first_step_s"])
    json.dumps(bench.found)


def test_an_epoch_is_the_sum_of_what_it_launched(monkeypatch):
    """With the fast engine (uncaptured on a CPU) every launch is counted, and the counts agree in fp32."""
    bench = made(before=0, engine="fast")
    sizes, update = [], bench.engine.update
    monkeypatch.setattr(bench.engine, "update", lambda x, *given: sizes.append(len(x)) or update(x, *given))
    dict(bench.parts(["correct", "steps", "epochs"]))
    epochs = FEW.rounds * (1 + len(FEW.taus))
    assert sizes.count(FEW.images % bench.config.batch_size) == epochs + 2  # the last batch's size is met before any
    for row in bench.found["correct"]:
        assert row["same_backprops"] == row["n"]
    madry, friendly, _ = bench.found["epochs"]
    batches, steps = -(-FEW.images // bench.config.batch_size), bench.training.objective.steps
    assert sum(madry["launched"].values()) == batches * steps >= sum(friendly["launched"].values())
    assert madry["over_its_steps"] == pytest.approx(madry["seconds"] / madry["own_steps_s"])  # medians of equal sums
    assert madry["own_steps_s"] == pytest.approx(
        sum(n * bench.step_times[size].median for size, n in madry["launched"].items()) + batches * bench.update.median
    )


def test_every_path_does_the_same_work():
    """On a model that has been warmed up: from the same weights and statistics as many back-propagations."""
    bench = made(images=600, before=1, taus=(0,), engine="fast")
    before = {name: tensor.clone() for name, tensor in bench.state.model.state_dict().items()}
    rows = dict(bench.parts(["plain"]))["plain"]
    for row, (what, text) in zip(bench.found["plain"], rows, strict=True):
        steps = [row[path]["backprops"] for path in ("engine", "plain", "literal")]
        assert steps == pytest.approx([steps[0]] * 3, rel=0.05) and f"{steps[0]:.2f} BPs" in what
        assert text.count("n=2") == 3  # a spread each
    assert bench.found["plain"][1]["engine"]["backprops"] > 0.5  # tau 0: not fooled at the first step
    after = {name: tensor.clone() for name, tensor in bench.state.model.state_dict().items()}
    assert any(not torch.equal(before[name], after[name]) for name in before)  # it was warmed up
    bench.plain()
    assert all(torch.equal(after[name], tensor) for name, tensor in bench.state.model.state_dict().items())
    x, _ = bench.training.batch(0)
    judged = bench.engine.judged()
    judged.model.eval()
    with torch.no_grad():
        torch.testing.assert_close(judged.gradients(x), judged.model(x), rtol=1e-3, atol=1e-4)  # it was refreshed


def test_every_batch_is_met_before_the_clock_runs(monkeypatch):
    bench = made(before=0, plain_batches=3)
    met, real, clock = [], bench.training.batch, []
    monkeypatch.setattr(bench.training, "batch", lambda index: met.append(index) or real(index))
    monkeypatch.setattr("sparring.bench.timing.wait", lambda device: clock.append(len(met)))
    bench._batches("plain", bench.engine, bench.state.model, 0)
    assert met == 3 * [0, 1, 2] and clock == [3, 6, 6, 9]  # the clock is read behind all batches of a round


@pytest.mark.parametrize(("device", "share", "name"), [("cuda", 50, "4 at once, 50 % each"), ("cpu", 100, "4 at once")])
def test_runs_side_by_side_have_the_share_that_is_reported(device, share, name, monkeypatch):
    """Of a GPU: a CPU is not shared out."""
    asked = []

    def speeds(config, count, *, share, **given):
        asked.append((count, share))
        return [1.0, 2.0]

    monkeypatch.setattr("sparring.bench.measure.images_per_second", speeds)
    bench = made(together=(1, 4))
    bench.device = torch.device(device)
    ((_, rows),) = bench.parts(["together"])
    assert asked == [(1, 100), (4, share)] == [(row["runs"], row["share"]) for row in bench.found["together"]]
    assert [title for title, _ in rows] == ["1 at once", name]


def test_an_update_is_timed_with_the_perturbation_it_has(monkeypatch):
    """A run with AWP takes twice the passes; so does the update that its epoch is compared with."""
    asked = []
    for name in ("fat-digits", "fat-awp-digits"):
        bench = Benchmark(recipes.find(name).config, load("digits"), CPU, FEW)
        real, seen = bench.engine.update, []
        monkeypatch.setattr(
            bench.engine, "update", lambda *given, real=real, seen=seen: seen.append(given[4]) or real(*given)
        )
        bench.steps()
        asked.append(set(seen))
    assert asked == [{0.0}, {0.005}]


def test_the_command(tmp_path, capsys):
    few = ["--images", "128", "--repeats", "2", "--rounds", "2", "--device", "cpu", "--taus", "0"]
    assert cli.main(["bench", "fat-digits", "--only", "steps", "epochs", "--json", str(tmp_path / "b.json"), *few]) == 0
    text = capsys.readouterr().out
    assert "Madry, 10.00 BPs" in text and "FAT, tau 0" in text and "update" in text
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["config"]["objective"] == "fat" and found["device"].endswith("CPU")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--only", "stepps"], "Did you mean"),
        (["madry-digits"], "bench times FAT"),
        (["fat-digts"], "fat-digits"),
        (["--json", "nowhere/b.json"], "cannot be written"),
        (["--repeats", "0"], "--repeats must be at least 1"),
        (["--images", "-1"], "--images must be at least 0"),
        (["--batch-size", "0"], "batch_size must be at least 1"),
        (["--taus", "-1"], "--taus needs numbers of at least 0"),
        (["--together"], "--together needs numbers of at least 1, got none"),
        (["--only", "parts", "--parts-of", "magic"], "--parts-of knows"),
    ],
)
def test_what_cannot_be_is_refused(words, why, capsys):
    assert cli.main(["bench", "--device", "cpu", *words]) == 2
    text = capsys.readouterr().err
    assert why in text and len(text.strip().splitlines()) == 1 and "what:" not in text


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sparring.cli.bench.os.access", lambda path, mode: False)
    assert cli.main(["bench", "fat-digits", "--device", "cpu", "--json", str(tmp_path / "b.json")]) == 2
    text = capsys.readouterr()
    assert "cannot be written" in text.err and not text.out


def test_start_up_with_an_empty_and_a_full_cache(tmp_path, monkeypatch):
    """Two processes with the same fresh cache, which measure their own start."""
    out, caches = tmp_path / "b.json", []

    def run(command, *, env, **how):
        caches.append(env["TRITON_CACHE_DIR"])
        shutil.copy(out, command[command.index("--json") + 1])
        assert command[command.index("--only") + 1] == "start-up" and command[-2:] != ["--cold-start"]
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr("sparring.cli.bench.subprocess.run", run)
    words = ["bench", "fat-digits", "--only", "memory", "--cold-start", "--device", "cpu", "--json", str(out)]
    assert cli.main(words) == 0
    found = json.loads(out.read_text())["cold_start"]
    assert set(found) == {"empty", "full"} and all(start["first_step_s"] > 0 for start in found.values())
    assert len(set(caches)) == 1 < len(caches)
