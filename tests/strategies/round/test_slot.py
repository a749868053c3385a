"""How each request ended, as events tell it."""

import numpy as np
import pytest

from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round.slot import Events
from tests.support.replies import reply
from tests.support.slots import drawn, federation, spares
from tests.support.virtual import answers, fails, silent


def ended(clock, scripts, **settings):
    """Return client -> the verdict, the bytes down and up of its request in round 1, and slot -> why it was lost."""
    told = []
    driver, grid = federation(clock, scripts, kind=FedAvg, packed=False, **settings)
    driver.ledger.events = Events(lambda *event: told.append(event), audits=True)
    driver.run_round(1, grid)
    lines = [line for name, line in told if name == "request_ended"]
    found = {line["client"]: (line["verdict"], line["bytes_down"], line["bytes_up"]) for line in lines}
    assert len(found) == len(lines)
    assert {line["bytes_up"] for name, line in told if name == "reply_accepted"} == {12}
    return found, {line["slot"]: line["reason"] for name, line in told if name == "slot_lost"}


def test_the_slower_of_two_clients_of_a_slot_was_not_needed(clock):
    found, lost = ended(clock, {drawn()[0]: answers(30)}, hedge=1)
    won = dict.fromkeys([*drawn()[1:], spares()[0]], ("accepted", 12, 12))
    assert found == {drawn()[0]: ("not_needed", 12, 0)} | won
    assert lost == {}


@pytest.mark.parametrize(("script", "why"), [(silent, "lost"), (fails(1), "client_error")])
def test_a_lost_request_loses_its_slot_unless_a_spare_client_answers(clock, script, why):
    client, others = drawn()[0], dict.fromkeys(drawn()[1:], ("accepted", 12, 12))
    found, lost = ended(clock, {client: script})
    assert found == {client: (why, 12, 0)} | others
    assert lost == {0: why}
    if script is not silent:
        found, lost = ended(clock, {client: script}, reassign=1)
        assert found == {client: (why, 12, 0), spares()[0]: ("accepted", 12, 12)} | others
        assert lost == {}


def test_replies_that_are_too_few_are_told_apart_from_the_one_that_failed(clock):
    found, lost = ended(clock, {drawn()[0]: fails(1)}, min_replies=3)
    assert [found[client][0] for client in drawn()] == ["client_error", "too_few", "too_few"]
    assert lost == {0: "client_error", 1: "too_few", 2: "too_few"}


def test_a_refused_reply_has_the_bytes_that_came(clock):
    """Five values of four bytes in place of three, and what the format adds."""

    def wrong(message):
        return [(1, reply(message, {"w": np.zeros(5, np.float32)}, {}, 10, {}))]

    verdict, down, up = ended(clock, {drawn()[0]: wrong})[0][drawn()[0]]
    assert (verdict, down, up >= 20) == ("wrong_shape", 12, True)
