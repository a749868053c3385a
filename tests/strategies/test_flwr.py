"""Flower's strategies as methods: numbers by hand, resume, what cannot be resumed."""

import copy

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.engines.grid import identify
from fedcross.strategies.flwr import Flwr
from fedcross.strategies.method import Round, Start, Task, Upload
from fedcross.strategies.round.packing import pack, unpack
from tests.support.federation import run, same, session

MODEL = {"w": np.zeros(2, np.float32), "norm.running_var": np.ones(1, np.float32), "n": np.array(0)}
START = Start(MODEL, ("w",), 2, 8, 1)


@pytest.fixture(autouse=True)
def _a_server():
    identify()


def rounds(method, state, *values):
    """Let two clients send models whose w are these pairs; return the global w."""
    for number, pair in enumerate(values, start=1):
        current = Round(number, 0, (0, 1), 1, 8, 2)
        tasks = method.dispatch(state, current)
        uploads = [
            Upload(i, i, {**MODEL, "w": np.full(2, w, np.float32), "n": np.array(number)}, {}, 10, {}, task)
            for i, (w, task) in enumerate(zip(pair, tasks))
        ]
        method.aggregate(state, current, uploads)
    return method.global_model(state)


def test_fedavg_by_hand():
    method = Flwr(name="FedAvg")
    model = rounds(method, method.init(START), (1, 3))
    assert model["w"].tolist() == [2, 2]
    assert model["n"].tolist() == 1
    assert [array.dtype for array in model.values()] == [array.dtype for array in MODEL.values()]


def test_adam_by_hand():
    """The pseudo-gradient is 2: m = .1 2 = .2, v = .01 4 = .04, w = eta m / (sqrt v + tau) with bias correction."""
    method = Flwr(name="FedAdam", arguments={"eta": 0.1, "beta_1": 0.0, "beta_2": 0.0, "tau": 1e-9})
    model = rounds(method, method.init(START), (1, 3))
    assert model["w"] == pytest.approx([0.1, 0.1], rel=1e-4)
    assert model["norm.running_var"].tolist() == [1]


def test_median_by_hand():
    method = Flwr(name="FedMedian")
    assert rounds(method, method.init(START), (1, 5))["w"].tolist() == [3, 3]


@pytest.mark.parametrize("name", ["FedAdam", "FedYogi", "FedAvgM"])
def test_momenta_are_in_the_state(name):
    method = Flwr(name=name)
    state = method.init(START)
    rounds(method, state, (1, 3))
    again = unpack(copy.deepcopy(pack(state)), method.init(START))
    for one in (state, again):
        rounds(method, one, (2, 4), (5, 1))
    assert same(method.global_model(again), method.global_model(state))


@pytest.mark.slow
def test_a_resumed_run_of_fedadam_is_exact(tmp_path):
    own = ("method=flwr", "method.name=FedAdam", "rounds=4")
    whole = run(tmp_path / "whole", *own)
    session(tmp_path / "cut", *own, "stop_at=2").execute()
    resumed = run(tmp_path / "cut", *own, f"resume={tmp_path / 'cut'}")
    assert same(whole.driver.global_model(), resumed.driver.global_model())


def test_a_strategy_with_other_state_says_that_it_cannot_be_resumed(tmp_path, monkeypatch, caplog):
    (tmp_path / "odd_strategy.py").write_text(
        "from flwr.serverapp.strategy import FedAvg\n"
        "class Odd(FedAvg):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.memory = {1, 2}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    method = Flwr(strategy="odd_strategy:Odd")
    packed = pack(method.init(START))
    assert "memory" in caplog.text
    with pytest.raises(StorageError, match="memory"):
        unpack(packed, method.init(START))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"name": "FedAdamm"}, "FedAdam"),
        ({"name": "FedXgbBagging"}, "FedXgbBagging"),
        ({"arguments": {"etaa": 1}}, "etaa"),
        ({"arguments": {"fraction_train": 0.5}}, "fraction_train"),
        ({"strategy": "no_such_module:X"}, "no_such_module"),
    ],
)
def test_wrong_settings_are_faults_of_the_configuration(values, word):
    with pytest.raises(ConfigError, match=word):
        Flwr(**values).init(START)


def test_a_strategy_that_declines_leaves_the_model():
    method = Flwr(name="FedAvg")
    state = method.init(START)
    method.dispatch(state, Round(1, 0, (0, 1), 1, 8, 2))
    state.foreign.chain[0].aggregate_train = lambda *_: (None, None)
    upload = Upload(0, 0, {**MODEL, "w": np.ones(2, np.float32)}, {}, 1, {}, Task(0, 0, MODEL))
    assert method.aggregate(state, Round(1, 0, (0, 1), 1, 8, 2), [upload]) == {"flower_skipped": 1.0}
    assert method.global_model(state)["w"].tolist() == [0, 0]
