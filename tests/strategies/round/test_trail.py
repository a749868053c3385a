"""How requests ended: one line for each, whatever became of it."""

import re

import numpy as np
import pytest
from flwr.app import Error, Message
from flwr.common.constant import ErrorCode

from fedcross.server.commands.audit import devices
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.round.trail import never_asked
from fedcross.strategies.wire.compression import Compression
from fedcross.strategies.wire.digest import digest
from tests.support.virtual import Clock, VirtualGrid, answers, fails, silent

RULES = {"clients_per_round": 3, "nonce": True, "deadline_s": 30, "run": "r"}


@pytest.fixture
def play(monkeypatch):
    """Return a function that plays a round and returns lines, events and the method."""
    clock = Clock(monkeypatch)

    def one(scripts=None, kind=FedCross, number=1, **rules):
        own = {"selection": "in_order", "alpha": 0.5} if kind is FedCross else {}
        method = kind(**own, **{**RULES, **rules})
        lines, events = [], []
        method.on_ended, method.tell = lines.append, lambda name, fields: events.append((name, fields))
        method.begin({"w": np.zeros(3, np.float32)})
        drawn = method.sample(1, range(6))
        method.run_round(number, VirtualGrid(clock, 6, {drawn[place]: one for place, one in (scripts or {}).items()}))
        return lines, events, drawn

    return one


def test_an_accepted_reply_has_node_digests_and_costs(play):
    lines, events, drawn = play()
    assert [(line["round"], line["exchange"], line["slot"], line["client"]) for line in lines] == [
        (1, 0, slot, client) for slot, client in enumerate(drawn)
    ]
    assert {line["verdict"] for line in lines} == {"accepted"}
    assert {line["sent"] for line in lines} == {digest({"arrays": {"w": np.zeros(3, np.float32)}})}
    assert all(len(line["received"]) == 64 and line["received"] != line["sent"] for line in lines)
    assert [(line["bytes_down"], line["bytes_up"]) for line in lines] == [(12, 12)] * 3
    assert [name for name, _ in events] == ["round_started", *["request_sent"] * 3, *["reply_accepted"] * 3]


def test_a_failed_client_a_silent_one_and_one_that_is_not_connected(play):
    lines, events, drawn = play({0: fails(1), 1: silent})
    verdicts = {line["slot"]: line["verdict"] for line in lines}
    assert verdicts == {0: "client_error", 1: "lost", 2: "accepted"}
    failed = next(line for line in lines if line["slot"] == 0)
    assert failed["client"] == drawn[0]
    assert failed["received"] is None
    assert [fields["reason"] for name, fields in events if name == "slot_lost"] == ["client_error", "lost"]
    [silence] = [line for line in lines if line["slot"] == 1]
    assert re.fullmatch(r"no reply in \d+ s, when the exchange ended", silence["detail"])
    assert never_asked(1, 2)["detail"].startswith("not asked: ")


@pytest.mark.parametrize(("node", "verdict"), [(1, "lost"), (None, "client_error")])
def test_only_the_superlink_says_that_a_request_is_lost(play, node, verdict):
    def gone(message):
        told = Message(Error(ErrorCode.NODE_UNAVAILABLE, "gone"), reply_to=message)
        if node is not None:
            told.metadata.__dict__["_src_node_id"] = node
        return [(1, told)]

    lines, events, _ = play({0: gone})
    line = next(one for one in lines if one["slot"] == 0)
    assert (line["verdict"], line["detail"]) == (verdict, "code 5: gone")
    assert [device.rejected for device in devices([line])] == [int(verdict != "lost")]
    assert ("request_lost" in dict(events), "reply_rejected" in dict(events)) == (verdict == "lost", verdict != "lost")


def test_who_took_over_a_slot_and_who_was_not_needed(play):
    lines, _, drawn = play({0: fails(1)}, reassign=1)
    of_slot = [(line["client"] == drawn[0], line["verdict"]) for line in lines if line["slot"] == 0]
    assert sorted(of_slot) == [(False, "accepted"), (True, "client_error")]
    lines, _, drawn = play({0: answers(20)}, hedge=1)
    verdicts = sorted(line["verdict"] for line in lines if line["slot"] == 0)
    assert verdicts == ["accepted", "not_needed"]


def test_uploads_that_do_not_count_in_the_end(play):
    lines, events, _ = play({0: silent, 1: silent}, min_replies=2)
    assert {line["slot"]: line["verdict"] for line in lines} == {0: "lost", 1: "lost", 2: "too_few"}
    assert [fields["slot"] for name, fields in events if name == "slot_lost"] == [0, 1, 2]


def test_a_digest_is_that_of_what_was_sent_also_if_it_is_compressed(play):
    exact, _, _ = play(kind=FedAvg)
    coded, _, _ = play({0: silent, 1: silent, 2: silent}, kind=FedAvg, compression=Compression(down="int8"))
    assert len({line["sent"] for line in exact}) == 1
    assert {line["sent"] for line in coded}.isdisjoint({line["sent"] for line in exact})


def test_without_anybody_who_asks_no_digest_is_computed(monkeypatch):
    monkeypatch.setattr("fedcross.strategies.round.base.digest_of", lambda _: 1 / 0)
    monkeypatch.setattr("fedcross.strategies.round.trail.digest_of", lambda _: 1 / 0)
    method = FedAvg(**RULES, defence=Defence())
    method.begin({"w": np.zeros(3, np.float32)})
    assert method.run_round(1, VirtualGrid(Clock(monkeypatch), 6, {})).dropped == 0


def test_a_quarantined_reply_says_what_was_seen(play):
    """Of three updates of length 1 and one of 100, over three values."""
    large = answers(1, value=100.0)
    lines, _, drawn = play({0: large}, defence=Defence(enabled=True))
    [line] = [line for line in lines if line["verdict"] == "quarantined"]
    assert line["client"] == drawn[0]
    assert line["detail"].startswith("update norm ")
    assert ", limit " in line["detail"]
    assert all("detail" not in line for line in lines if line["verdict"] == "accepted")
