"""`sparring bench`: every measurement runs, counts add up, and the compared paths do the same work."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from sparring import cli, recipes
from sparring.bench import Benchmark, Options
from sparring.bench.timing import timed
from sparring.data import load

CPU = torch.device("cpu")
FEW = Options(taus=(0, 2), images=200, plain_batches=2, together=(2,), repeats=2, rounds=2)


def made(**changes):
    return Benchmark(recipes.find("fat-digits").config, load("digits"), CPU, replace(FEW, **changes))


def test_timed_returns_median_and_spread():
    calls = []
    found = timed(lambda: calls.append(1), CPU, repeats=5, warm_up=2, inner=3)
    assert len(calls) == 2 + 5 * 3
    assert found.n == 5 and 0 <= found.low <= found.median <= found.high


def test_every_measurement_runs_on_a_cpu():
    bench = made()
    parts = dict(bench.parts())
    assert list(parts) == list(bench.every) and all(parts.values())
    assert parts["start-up"][0][1].startswith("engine: plain, fp32 (captured graphs and bf16 need CUDA)")
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


def test_epoch_time_is_the_sum_of_its_launches(monkeypatch):
    """With the fast engine (uncaptured on a CPU) every launch is counted, and the counts agree in fp32."""
    bench = made(before=0, engine="fast")
    sizes, update = [], bench.engine.update
    monkeypatch.setattr(bench.engine, "update", lambda x, *given: sizes.append(len(x)) or update(x, *given))
    dict(bench.parts(["correct", "steps", "epochs"]))
    epochs = FEW.rounds * (1 + len(FEW.taus))
    assert sizes.count(FEW.images % bench.config.batch_size) == epochs + 2  # warm-up of the last batch's size
    for row in bench.found["correct"]:
        assert row["same_backprops"] == row["n"]
    madry, friendly, _ = bench.found["epochs"]
    batches, steps = -(-FEW.images // bench.config.batch_size), bench.training.objective.steps
    assert sum(madry["launched"].values()) == batches * steps >= sum(friendly["launched"].values())
    assert madry["over_its_steps"] == pytest.approx(madry["seconds"] / madry["own_steps_s"])  # medians of equal sums
    assert madry["own_steps_s"] == pytest.approx(
        sum(n * bench.step_times[size].median for size, n in madry["launched"].items()) + batches * bench.update.median
    )


@pytest.mark.parametrize("kind", ["plain", "fast"])
def test_all_paths_do_the_same_work(kind):
    """From the same weights and statistics, all paths take the same number of back-propagations."""
    bench = made(images=600, before=2, engine=kind)
    before = {name: tensor.clone() for name, tensor in bench.state.model.state_dict().items()}
    rows = dict(bench.parts(["plain"]))["plain"]
    if kind == "plain":
        assert rows.pop(0)[1] == "the engine is off here: it is the plain path"
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


def test_every_batch_is_warmed_up_before_timing(monkeypatch):
    bench = made(before=0, plain_batches=3)
    seen, real, clock = [], bench.training.batch, []
    monkeypatch.setattr(bench.training, "batch", lambda index: seen.append(index) or real(index))
    monkeypatch.setattr("sparring.bench.timing.wait", lambda device: clock.append(len(seen)))
    bench._batches("plain", bench.engine, bench.state.model, 0)
    assert seen == 3 * [0, 1, 2] and clock == [3, 6, 6, 9]  # the clock is read after all batches of a round


@pytest.mark.parametrize(("device", "share", "name"), [("cuda", 50, "4 at once, 50 % each"), ("cpu", 100, "4 at once")])
def test_side_by_side_runs_get_the_reported_share(device, share, name, monkeypatch):
    """On a GPU; a CPU is not divided."""
    calls = []

    def speeds(config, count, *, share, **given):
        calls.append((count, share))
        return [1.0, 2.0]

    monkeypatch.setattr("sparring.bench.measure.images_per_second", speeds)
    bench = made(together=(1, 4))
    bench.device = torch.device(device)
    ((_, rows),) = bench.parts(["together"])
    assert calls == [(1, 100), (4, share)] == [(row["runs"], row["share"]) for row in bench.found["together"]]
    assert [title for title, _ in rows] == ["1 at once", name]


def test_update_is_timed_with_its_weight_perturbation(monkeypatch):
    """AWP doubles the passes, in the timed update as in the epoch that it is compared with."""
    calls = []
    for name in ("fat-digits", "fat-awp-digits"):
        bench = Benchmark(recipes.find(name).config, load("digits"), CPU, FEW)
        real, seen = bench.engine.update, []
        monkeypatch.setattr(
            bench.engine, "update", lambda *given, real=real, seen=seen: seen.append(given[4]) or real(*given)
        )
        bench.steps()
        calls.append(set(seen))
    assert calls == [{0.0}, {0.005}]


def test_command_writes_table_and_json(tmp_path, capsys):
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
def test_invalid_options_are_refused(words, why, capsys):
    assert cli.main(["bench", "--device", "cpu", *words]) == 2
    text = capsys.readouterr().err
    assert why in text and len(text.strip().splitlines()) == 1


def test_cold_start_is_measured_with_empty_and_full_cache(tmp_path):
    out = tmp_path / "b.json"
    words = ["bench", "fat-digits", "--only", "memory", "--cold-start", "--device", "cpu", "--json", str(out)]
    assert cli.main(words) == 0
    found = json.loads(out.read_text())["cold_start"]
    assert set(found) == {"empty", "full"} and all(start["first_step_s"] > 0 for start in found.values())
