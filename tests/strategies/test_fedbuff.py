"""FedBuff by hand."""

import numpy as np
import pytest

from fedcross.strategies.fedbuff import FedBuff
from fedcross.strategies.method import Upload
from tests.strategies.test_fedasync import arrive, started


def test_nothing_changes_until_the_buffer_is_full():
    """Two updates of 4 and 8 from version 0: a step of .5 6 = 3. Slot 1's, sent before the step: 5 - 0, 1/sqrt 2 of it;
    slot 0's is fresh: 9 - 3 = 6. The mean is (3.5355 + 6)/2, half of it the step.
    """
    method = started(FedBuff, k=3, buffer=2, server_lr=0.5)
    arrive(method, 0, 4.0)
    assert method.global_model()["w"] == 0
    assert method.version == 0
    arrive(method, 2, 8.0)
    assert method.global_model()["w"] == 3
    assert (method.version, method.count) == (1, 0)
    method.send(0)
    arrive(method, 1, 5.0)
    arrive(method, 0, 9.0)
    assert method.global_model()["w"] == pytest.approx(3 + 0.5 * (5 / 2**0.5 + 6) / 2)
    assert method.global_model()["n"] == int(3 + 0.5 * (5 / 2**0.5 + 6) / 2)


def test_a_buffer_of_one_with_fresh_uploads_is_the_last_upload():
    method = started(FedBuff, k=1, buffer=1)
    arrive(method, 0, 4.0)
    arrive(method, 0, 7.0)
    assert method.global_model()["w"] == 7


def test_a_run_that_takes_no_step_says_so_at_its_end(caplog):
    method = started(FedBuff, k=1, buffer=2)
    upload = Upload(0, 0, {"w": np.float32([4]), "n": np.array(4)}, {}, 1, {})
    method.aggregate(method.round(9), [upload])
    assert not caplog.text
    method.state.count = 0
    method.aggregate(method.round(10), [upload])
    assert "has taken no step" in caplog.text


def test_a_run_that_has_taken_a_step_or_goes_on_does_not(caplog):
    """Of three uploads two made a step, and one is left in the buffer; in the other run more visits may end."""
    upload = Upload(0, 0, {"w": np.float32([4]), "n": np.array(4)}, {}, 1, {})
    method, other = (started(FedBuff, k=1, buffer=2) for _ in range(2))
    method.aggregate(method.round(10), [upload] * 3)
    assert (method.version, method.count) == (1, 1)
    other.aggregate(other.round(10, last=False), [upload])
    assert not caplog.text
