"""The average of global models by hand, resume, and who refuses it."""

import json

import numpy as np
import pytest

from fedcross.core.errors import ConfigError
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round.packing import Average, averaged
from fedcross.strategies.round.settings import AverageSettings
from fedcross.strategies.solo import Solo
from tests.support.federation import run, same, session
from tests.support.slots import federation


def curve(values, **settings):
    """Return the averages after each round whose global model has this value."""
    average, found = None, []
    for number, value in enumerate(values, start=1):
        model = {"w": np.float32([value]), "n": np.array(number)}
        average = averaged(AverageSettings(**settings), average, model, number, len(values))
        found.append(float(average.model["w"][0]))
        assert average.model["n"] == number  # integers are the newest
        assert average.model["w"].dtype == np.float32
    return found


def test_a_moving_average_by_hand():
    """.75 x 8 + .25 x 4 = 7, .75 x 7 + .25 x 3 = 6."""
    assert curve([8, 4, 3], average="ema", average_decay=0.75) == [8, 7, 6]


def test_the_mean_of_the_tail_by_hand():
    """The last two of four rounds count: 4, then (4 + 2) / 2."""
    assert curve([9, 7, 4, 2], average="tail", average_from=0.5) == [9, 7, 4, 3]
    assert curve([9, 7, 5], average="tail", average_from=0) == [9, 8, 7]
    found = curve(range(1, 101), average="tail", average_from=0.29)  # as a float, .29 of 100 is a little below 29
    assert found[28:32] == [29, 30, 30.5, 31]


def test_a_longer_run_begins_the_mean_anew_if_it_began_too_early():
    """Planned for four rounds it began in round 3, of ten rounds it begins in round 6 or later."""
    before = Average({"w": np.float32([4])}, 2)  # of rounds 3 and 4
    tail = AverageSettings(average="tail", average_from=0.5)
    assert averaged(tail, before, {"w": np.float32([2])}, 5, 10).model["w"] == [2]
    assert averaged(tail, before, {"w": np.float32([1])}, 5, 5).model["w"] == [3]  # (4 + 4 + 1) / 3


def test_it_is_evaluated_and_never_sent(clock):
    """Clients add 1: the model goes 1, 2, 3; its average with decay 1/2 is 1, 1.5, 2.25."""
    driver, grid = federation(clock, kind=FedAvg, average="ema", average_decay=0.5, rounds=3)
    for number, expected in ((1, 1), (2, 1.5), (3, 2.25)):
        driver.run_round(number, grid)
        assert driver.global_model()["w"].tolist() == [expected] * 3
        assert driver.evaluation().models[0] is driver.global_model()
        assert driver.evaluation().rounds[0]["w"].tolist() == [number] * 3
        assert driver.state.model["w"].tolist() == [number] * 3


@pytest.mark.slow
@pytest.mark.parametrize(("method", "average"), [("fedcross", "ema"), ("fedcross_async", "tail")])
def test_a_run_resumes_exactly_and_trains_as_without(tmp_path, method, average):
    given = (f"method={method}", "rounds=4", f"average={average}", "average_from=0.2")
    whole = run(tmp_path / "whole", *given).driver
    run(tmp_path / "cut", *given, "stop_at=2")
    again = session(tmp_path / "cut", *given, f"resume={tmp_path / 'cut'}")
    again.execute()
    assert same(again.driver.global_model(), whole.global_model())
    plain = run(tmp_path / "plain", *given[:2]).driver
    assert (plain.state.pool.rows == whole.state.pool.rows).all()
    assert not same(plain.global_model(), whole.global_model())
    texts = [(tmp_path / folder / "metrics.jsonl").read_text() for folder in ("whole", "plain")]
    averaged, alone = (json.loads(text.splitlines()[-1]) for text in texts)
    assert averaged["round_accuracy"] == alone["test_accuracy"]


def test_a_method_without_a_global_model_refuses(clock):
    with pytest.raises(ConfigError, match="average"):
        federation(clock, kind=Solo, average="ema")
