"""Logged uploads after a crash: each counts as a request, and only what fits is used."""

import numpy as np
import pytest

from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round.logged import answering
from fedcross.strategies.wire.protocol import Payload, Round, Upload


@pytest.mark.parametrize(
    ("upload", "interchangeable", "why"),
    [
        (Upload(4, 1, {"w": np.ones(3)}, {}, 1, {}), False, ""),
        (Upload(4, 2, {"w": np.ones(3)}, {}, 1, {}), True, "no model goes out in this slot now"),
        (Upload(5, 1, {"w": np.ones(3)}, {}, 1, {}), True, ""),
        (Upload(5, 1, {"w": np.ones(3)}, {}, 1, {}), False, "the slot's model goes to client 4 now"),
        (Upload(4, 1, {"w": np.ones(2)}, {}, 1, {}), True, "it has other shapes than the slot's model has now"),
        (Upload(4, 1, {"v": np.ones(3)}, {}, 1, {}), True, "it has other shapes than the slot's model has now"),
        (Upload(4, 1, {"w": np.ones(3)}, {"c": {}}, 1, {}), True, "it has other shapes than the slot's model has now"),
    ],
)
def test_a_logged_reply_counts_only_for_what_its_slot_sends(caplog, upload, interchangeable, why):
    """Where any client may train a slot's model, another one's reply is as good. Each request counts as one."""
    method = FedAvg(clients_per_round=1)
    method.begin({"w": np.zeros(3)})
    method.interchangeable = interchangeable
    logged = type("Log", (), {"accepted": lambda self, place: [upload]})()
    found = list(answering(method, logged, Round(3, 0, (4,), 0), [Payload(4, 1, {"w": np.zeros(3)})]))
    assert found == ([] if why else [upload])
    assert method.requests == {upload.client: 1}
    told = f"round 3: the logged reply of client {upload.client} for slot {upload.slot} is not used: {why}"
    assert (told in caplog.text) == bool(why)
