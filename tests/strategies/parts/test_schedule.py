"""Schedules: by hand, from configuration, and their faults."""

from typing import Annotated

import pytest
from pydantic import ValidationError

from fedcross.core.settings import parse
from fedcross.strategies.parts.pooled import PooledParams
from fedcross.strategies.parts.schedule import Schedule, Share, checked, values_of

Mode = Annotated[Schedule, checked(lambda value: value in ("cross", "propellers"), "cross or propellers")]


class Params(PooledParams):
    number: Schedule = 0
    alpha: Share = 0.99
    mode: Mode = "cross"


def number(value, rounds):
    params = Params.model_validate({"number": value})
    return [params.at("number", r) for r in rounds]


def test_a_plain_value_is_constant():
    assert number(3, [1, 2, 1000]) == [3, 3, 3]
    assert number({"schedule": "constant", "value": 0.5}, [1, 7]) == [0.5, 0.5]


def test_linear_by_hand():
    """From 0 to 10 in 5 rounds: 4 steps of 2.5."""
    ramp = {"schedule": "linear", "start": 0, "end": 10, "rounds": 5}
    assert number(ramp, range(1, 8)) == [0, 2.5, 5, 7.5, 10, 10, 10]
    assert number(ramp | {"rounds": 1}, [1, 2]) == [10, 10]


def test_cosine_by_hand():
    """t = 0, 1/4, 1/2, 3/4, 1: (1 - cos(pi t))/2 = 0, (1 - sqrt(.5))/2 = 0.14645, 0.5, 0.85355, 1."""
    values = number({"schedule": "cosine", "start": 0, "end": 10, "rounds": 5}, range(1, 7))
    assert values == pytest.approx([0, 1.4644660940672622, 5, 8.535533905932738, 10, 10])


def test_a_ramp_in_the_first_stage_begins_in_round_1():
    stages = [{"until": 3, "value": {"schedule": "linear", "start": 0, "end": 2, "rounds": 3}}, {"value": 9}]
    assert number({"schedule": "staged", "stages": stages}, range(5)) == [0, 0, 1, 2, 9]  # before it, as in round 1


def test_what_a_choice_is_written_as():
    """One word for all rounds is that word."""
    ends = {"schedule": "staged", "stages": ({"until": 3, "value": "cross"},)}
    two = {"schedule": "staged", "stages": ({"until": 3, "value": "cross"}, {"until": None, "value": "propellers"})}
    for mode, written in (("cross", "cross"), (ends, ends), (two, two)):
        assert Params.model_validate({"mode": mode}).model_dump()["mode"] == written


def test_the_bounds_of_a_share_belong_to_it():
    for value in (0, 1):
        assert Params.model_validate({"alpha": value}).alpha == value


def test_stages_count_their_own_rounds():
    """Rounds 1-2 are 7; rounds 3-5 are rounds 1-3 of a ramp from 0 to 2; from round 6 on it is 9."""
    stages = [
        {"until": 2, "value": 7},
        {"until": 5, "value": {"schedule": "linear", "start": 0, "end": 2, "rounds": 3}},
        {"value": 9},
    ]
    assert number({"schedule": "staged", "stages": stages}, range(1, 8)) == [7, 7, 0, 1, 2, 9, 9]
    # without an open last stage the last one goes on: its ramp has reached its end
    assert number({"schedule": "staged", "stages": stages[:2]}, [5, 6, 99]) == [2, 2, 2]


def test_pm_da_for_alpha_and_mode():
    """Propellers for 50 rounds, then dynamic alpha for 50: half way (round 75 of steps 51..100) is 24/49 of 0.49."""
    ramp = {"schedule": "linear", "start": 0.5, "end": 0.99, "rounds": 50}
    params = Params.model_validate(
        {
            "alpha": {"schedule": "staged", "stages": [{"until": 50, "value": 0.5}, {"value": ramp}]},
            "mode": {"schedule": "staged", "stages": [{"until": 50, "value": "propellers"}, {"value": "cross"}]},
        }
    )
    assert [params.at("mode", r) for r in (1, 50, 51, 100)] == ["propellers", "propellers", "cross", "cross"]
    shares = [params.at("alpha", r) for r in (1, 50, 51, 75, 100, 200)]
    assert shares == [0.5, 0.5, 0.5, pytest.approx(0.74), 0.99, 0.99]
    assert values_of(params.mode) == ["propellers", "cross"]


def test_defaults_and_round_trip():
    assert (Params().at("alpha", 1), Params().at("mode", 5)) == (0.99, "cross")
    ramp = {
        "schedule": "staged",
        "stages": [{"until": 3, "value": {"schedule": "cosine", "start": 0, "end": 1, "rounds": 3}}],
    }
    params = Params.model_validate({"number": ramp, "mode": "propellers"})
    assert Params.model_validate_json(params.model_dump_json()) == params


@pytest.mark.parametrize(
    "values",
    [
        {"alpha": 1.5},
        {"alpha": {"schedule": "linear", "start": -0.1, "end": 1, "rounds": 3}},
        {"alpha": {"schedule": "staged", "stages": [{"until": 3, "value": 0.5}, {"value": 2}]}},
        {"number": {"schedule": "liner", "start": 0, "end": 1, "rounds": 3}},
        {"number": {"schedule": "linear", "start": 0, "end": 1, "rounds": 0}},
        {"number": {"schedule": "linear", "start": 0, "end": 1, "rounds": 3, "until": 4}},
        {"number": {"schedule": "staged", "stages": []}},
        {"number": {"schedule": "staged", "stages": [{"value": 1}, {"value": 2}]}},
        {"number": {"schedule": "staged", "stages": [{"until": 5, "value": 1}, {"until": 5, "value": 2}]}},
        {"number": {"schedule": "staged", "stages": [{"until": 0, "value": 1}, {"value": 2}]}},
        {"number": True},
        {"number": float("nan")},
        {"mode": "mean"},
        {"mode": {"schedule": "linear", "start": 0, "end": 1, "rounds": 3}},
    ],
)
def test_faults_are_found_before_the_run(values):
    with pytest.raises(ValidationError):
        Params.model_validate(values)
    faults = []
    assert parse(Params, values, "method", faults) is None
    assert faults
