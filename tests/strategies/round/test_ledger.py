"""When the errors of clients end a run."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, FederationError, UploadError
from fedcross.strategies.method import Round, Task, Upload
from fedcross.strategies.round.ledger import Ledger
from fedcross.strategies.round.settings import RoundSettings
from tests.support.replies import payload_of

LOCAL, NETWORK = RoundSettings(nonce=True), RoundSettings(nonce=True, networked=True)


def told(ledger, words, *clients):
    for client in clients:
        ledger.reject(client, UploadError("client_error", words), Counter())


def test_a_logged_reply_counts_as_a_request_of_its_client():
    """What privacy reports follows from this number."""
    task = Task(3, 0, {"w": np.zeros(1, np.float32)})
    replies = SimpleNamespace(accepted=lambda place: [Upload(3, 0, task.arrays, {}, 1, {})])
    ledger = Ledger(LOCAL)
    ledger.clients.requests[3] = 4
    assert ledger.logged(replies, Round(1, 0, (3,), 0), [payload_of(task)]).keys() == {0}
    assert ledger.clients.requests == {3: 5}


def test_all_local_clients_that_fail_alike_end_a_run():
    ledger = Ledger(LOCAL)
    told(ledger, "code 2: NameError: name 'x' is not defined", 1, 2)
    with pytest.raises(FederationError, match="NameError"):
        ledger.end_if_common({1, 2}, 1, 4, answered=False)


@pytest.mark.parametrize("case", ["network", "others trained", "one silent", "other types"])
def test_other_failures_do_not(case):
    ledger = Ledger(NETWORK if case == "network" else LOCAL)
    ledger.heard = case == "others trained"
    told(ledger, "NameError: x", 1)
    told(ledger, "ValueError: x" if case == "other types" else "NameError: y", 2)
    ledger.end_if_common({1, 2, 3} if case == "one silent" else {1, 2}, 1, 4, answered=False)


def test_two_devices_that_refuse_the_configuration_end_a_run_and_one_does_not():
    ledger = Ledger(NETWORK)
    told(ledger, "ConfigError: no model", 3)
    ledger.end_if_common({3}, 1, 4, answered=False)
    told(ledger, "ConfigError: no model", 1)
    with pytest.raises(ConfigError, match="no model"):
        ledger.end_if_common({1}, 2, 4, answered=False)


def test_after_an_answer_most_connected_devices_must_refuse():
    ledger = Ledger(NETWORK)
    ledger.end_if_common({1}, 1, 4, answered=True)
    told(ledger, "ConfigError: bad", 1, 2)
    ledger.end_if_common({1, 2}, 2, 4, answered=False)
    told(ledger, "ConfigError: bad", 1, 2)
    with pytest.raises(ConfigError):
        ledger.end_if_common({1, 2}, 3, 3, answered=False)


def test_the_error_of_an_earlier_round_is_forgotten():
    """Each of the two failed once, but never both in one round."""
    ledger = Ledger(LOCAL)
    for client in (1, 2):
        told(ledger, "NameError: x", client)
        ledger.end_if_common({1, 2}, client, 4, answered=False)
