"""A checkpoint that does not fit the run, or is not there, is refused by name."""

import numpy as np
import pytest

from fedcross.core.errors import StorageError
from fedcross.server.checkpoint import Checkpoints
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Start
from fedcross.strategies.round.packing import Packed
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings


def driver(kind=FedCross, size=3):
    settings = RoundSettings(clients_per_round=3, run="r")
    start = Start({"w": np.full(size, 2, np.float32)}, ("w",), 3, settings.rounds, settings.seed)
    return open_run(kind(), start, settings)


def test_a_state_of_the_same_method_is_restored(tmp_path):
    written, found = driver().checkpoint(), driver()
    written.arrays = {name: a + 1 if a.dtype.kind == "f" else a for name, a in written.arrays.items()}
    Checkpoints(tmp_path).restore(found, written, 1)
    assert found.global_model()["w"].tolist() == [3, 3, 3]


@pytest.mark.parametrize("kind", ["method", "size", "single", "pool", "nothing"])
def test_a_state_of_another_method_or_network_is_refused(tmp_path, kind):
    written = {"method": driver(FedAvg).checkpoint(), "size": driver(size=4).checkpoint(), "nothing": Packed({}, {})}
    written |= {"single": driver(FedAvg, size=4).checkpoint(), "pool": driver().checkpoint()}
    written["pool"].arrays["method.pool.rows"] = np.zeros((3, 5), np.float32)
    with pytest.raises(StorageError, match=r"round-000001\.safetensors"):
        Checkpoints(tmp_path).restore(driver(FedAvg if kind == "single" else FedCross), written[kind], 1)


def test_where_nothing_was_written_nothing_is_found(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.identity() is None
    with pytest.raises(StorageError, match="no such file"):
        checkpoints.load(1)
    with pytest.raises(StorageError, match="no readable checkpoint"):
        checkpoints.latest()
