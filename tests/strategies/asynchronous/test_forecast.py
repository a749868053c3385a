"""The forecast of lost visits is what the run itself loses."""

import json

import pytest

from fedcross.server.launch import launch
from fedcross.strategies.asynchronous.forecast import Forecast
from fedcross.strategies.round.clock import Devices, VirtualClock

CLIENTS, SLOTS, ROUNDS, LIMIT = 6, 3, 8, 150.0
#: A third of the clients needs longer than the limit, a third does now and then.
MIX = [[100, 5], [150, 20], [300, 5]]


def test_the_same_visits_are_lost_as_in_the_run(tmp_path):
    own = ["method=fedasync", "clock=virtual", f"clock.deadline_s={LIMIT}", "logger=none", "engine.workers=1"]
    mix = ["devices.shares=[0.34,0.33,0.33]", f"devices.training={MIX}".replace(" ", ""), "devices.communication=null"]
    small = ["task.limit=60", "partition=iid", f"partition.clients={CLIENTS}", f"clients_per_round={SLOTS}"]
    launch([*own, *mix, *small, "train.epochs=1", f"rounds={ROUNDS}", "evaluate_every=100"], tmp_path / "run")
    visits = [json.loads(line) for line in (tmp_path / "run" / "visits.jsonl").read_text().splitlines()]
    devices = Devices(shares=(0.34, 0.33, 0.33), training=tuple(map(tuple, MIX)))
    forecast = Forecast(VirtualClock(devices, 1, CLIENTS, deadline_s=LIMIT), SLOTS, CLIENTS, 0, 3.0)
    share = forecast.play(ROUNDS * SLOTS)
    assert forecast.ended == len(visits)
    assert forecast.trained == sum(visit["accepted"] for visit in visits)
    assert share == forecast.trained / forecast.ended
    assert 0.2 < share < 0.8


@pytest.mark.parametrize(("limit", "share"), [(None, 1.0), (1000.0, 1.0), (1.0, 0.0)])
def test_all_or_nothing_is_trained(limit, share):
    clock = VirtualClock(Devices(training=((100, 5),)), 1, 4, deadline_s=limit)
    assert Forecast(clock, 3, 4, 0, 3.0).play(30) == share
