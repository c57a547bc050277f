from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparring import schedules
from sparring.errors import UserError
from sparring.objectives import FAT
from sparring.schedules import Cosine, OneCycle, PieceStart, Piecewise, Ramp, Warmup, constant, number, parse, pixels
from sparring.training.config import Config


def test_piecewise_follows_the_paper():
    """Table 1: 0.1; 0.01 @60; 0.001 @90; 0.0005 @110 and tau 0; 1 from 51; 2 from 91, epochs 1-based."""
    lr = parse("0.1,0.01@60,0.001@90,0.0005@110")
    epochs = (1, 59, 59.99, 60, 89, 90, 110, 120)
    assert [lr.at(epoch, 120) for epoch in epochs] == [0.1, 0.1, 0.1, 0.01, 0.01, 0.001, 0.0005, 0.0005]
    tau = parse("0,1@51,2@91")
    assert [tau.at(epoch, 120) for epoch in (1, 50, 51, 90, 91, 120)] == [0, 0, 1, 1, 2, 2]


def test_per_cent_starts_scale_with_the_run():
    tau = parse("0,1@40%,2@75%")
    assert [tau.at(epoch, 20) for epoch in (1, 8, 9, 15, 16, 20)] == [0, 0, 1, 1, 2, 2]
    assert [tau.at(epoch, 5) for epoch in (1, 2, 3, 4, 4.75, 5)] == [0, 0, 1, 1, 1, 2]


def test_one_cycle():
    lr = parse("one-cycle:0.2")
    assert lr.at(1, 10) == 0
    assert lr.at(5, 10) == pytest.approx(0.2)
    assert lr.at(3, 10) == pytest.approx(0.1)
    assert lr.at(11, 10) == pytest.approx(0)
    assert parse("one-cycle:0.2@25%").at(3.5, 10) == pytest.approx(0.2)


def test_ramp():
    eps = parse("ramp:0..8/255@50%")
    assert eps.at(1, 10) == 0
    assert eps.at(3.5, 10) == pytest.approx(4 / 255)
    assert eps.at(6, 10) == eps.at(10, 10) == pytest.approx(8 / 255)


def test_cosine():
    lr = parse("cosine:0.1")
    assert [lr.at(epoch, 10) for epoch in (1, 6, 11, 12)] == pytest.approx([0.1, 0.05, 0, 0], abs=1e-15)
    assert parse("cosine:0.1..0.01").at(11, 10) == pytest.approx(0.01)


def test_warm_up_scales_any_schedule():
    """Linear over its length, and the schedule itself from then on: its starts do not move."""
    lr = parse("warmup:5+0.1,0.01@60")
    assert [lr.at(epoch, 100) for epoch in (1, 2, 3.5, 6, 59.9, 60)] == pytest.approx([0, 0.02, 0.05, 0.1, 0.1, 0.01])
    assert parse("warmup:10%+0.2").at(2, 20) == pytest.approx(0.1)
    cosine = parse("warmup:10%+cosine:0.1")
    assert cosine.at(2, 20) == pytest.approx(parse("cosine:0.1").at(2, 20) / 2)
    assert cosine.at(7, 20) == parse("cosine:0.1").at(7, 20)
    assert schedules.absolute_start(parse("warmup:5%+0.1")) is None
    assert schedules.absolute_start(lr) == PieceStart(6) and schedules.start_after(lr, 50) == PieceStart(60)
    assert schedules.start_after(parse("warmup:9+0.1"), 5) == PieceStart(10)


def test_numbers_may_be_fractions():
    assert number("8/255") == 8 / 255
    assert number("2e-4") == 2e-4
    assert parse("8/255") == constant(8 / 255)


floats = st.floats(0, 10, allow_nan=False)
per_cents = st.lists(st.integers(1, 99), unique=True, max_size=4).map(sorted)


@given(
    st.one_of(
        st.builds(
            lambda first, starts, value: Piecewise(
                first, tuple((PieceStart(s / 100, True), value * s) for s in starts)
            ),
            floats,
            per_cents,
            floats,
        ),
        st.builds(lambda first, at: Piecewise(first, tuple((PieceStart(a + 1), a / 7) for a in at)), floats, per_cents),
        st.builds(OneCycle, floats, st.integers(1, 99).map(lambda n: n / 100)),
        st.builds(Ramp, floats, floats, st.integers(1, 100).map(lambda n: n / 100)),
        st.builds(Cosine, floats, floats),
        st.builds(Warmup, st.integers(1, 99), st.builds(Cosine, floats)),
        st.builds(lambda n, value: Warmup(n / 100, constant(value), True), st.integers(1, 100), floats),
    )
)
def test_round_trip_is_exact(schedule):
    assert parse(str(schedule)) == schedule


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fast", "'fast' is not a number"),
        ("one-cicle:0.2", "there is no schedule 'one-cicle'. Did you mean 'one-cycle'?"),
        ("8/0", "is not a number"),
        ("0.1,0.01", "needs its start"),
        ("0.1@3", "first value of a schedule has no start"),
        ("0.1,0.01@0", "epochs count from 1"),
        ("0.1,0.01@150%", "at most at 100%"),
        ("inf", "is not a number"),
        ("nan", "is not a number"),
        ("0.1,0.01@90,0.001@60", "must increase"),
        ("0.1,0.01@60,0.001@90%", "all epochs or all per cent"),
        ("one-cycle:0.2@100%", "percentage of the run"),
        ("one-cycle:0.2@0.4", "percentage of the run"),
        ("ramp:0.1", "ramp:FIRST..LAST"),
        ("warmup:5%", r"warmup:LENGTH\+SCHEDULE"),
        ("warmup:5%+warmup:5%+0.1", r"warmup:LENGTH\+SCHEDULE"),
        ("warmup:0+0.1", "above 0, got 0"),
        ("warmup:120%+0.1", "above 0, got 120%"),
        ("warmup:5%+fast", "'fast' is not a number"),
        ("cosin:0.1", "Did you mean 'cosine'"),
        ("", "is not a number"),
    ],
)
def test_bad_schedules_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("make", "examples"),
    [
        (lambda text: FAT(tau=text), ["0", "0,1@40%"]),
        (lambda text: FAT(eps=text), ["0.031", "8/255"]),
        (lambda text: Config(lr=text), ["0.1", "cosine:0.1"]),
        (lambda text: Config(awp=text), ["0.005", "0,0.005@10%"]),
    ],
)
def test_the_examples_of_an_error_are_valid(make, examples):
    with pytest.raises(UserError, match=rf": 'abc' is not a number. Write for example {' or '.join(examples)}\.$"):
        make("abc")
    for text in examples:
        make(text)


def test_spell_round_trips():
    assert schedules.spell(2.0) == "2"
    assert schedules.spell(8 / 255) == "0.03137254901960784"


def test_a_radius_is_printed_as_a_fraction_of_255_where_exact():
    assert [pixels(value) for value in (8 / 255, 0.031, 0.2, 0.0)] == ["8/255", "0.031", "0.2", "0"]
    assert [pixels(value) for value in (1e308, float("inf"), float("nan"))] == ["1e+308", "inf", "nan"]


@pytest.mark.parametrize("kind", ["one-cycle", "cosine", "warmup", "ramp"])
def test_a_kind_without_numbers_is_named(kind):
    with pytest.raises(UserError, match=f"'{kind}' is a schedule without its numbers. Write for example {kind}:"):
        parse(kind)
