"""Rounds that end: replies that are late, come twice or belong elsewhere."""

import pytest

from fedcross.client.app import app as client_app
from fedcross.conf.compose import join
from fedcross.conf.schema import load
from fedcross.engines.grid import LocalGrid
from fedcross.server.session import Session
from tests.support.federation import SMALL, Quiet, same


class Slow(LocalGrid):
    """A grid like a network: replies may be held back past the round, or come more than once."""

    blocking = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.hold = None  # (client, round) whose reply is held back
        self.late = []  # replies to hand out before anything else
        self.twice = False

    def pull_messages(self, message_ids):
        if self.late:
            out, self.late = self.late, []
            return out
        replies = []
        for reply in super().pull_messages(message_ids):
            asked = reply.content.config_records["config"]
            if (asked["client"], asked["round"]) == self.hold:
                self.held = reply
            else:
                replies += [reply, reply] if self.twice else [reply]
        return replies


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a session over a slow grid; a round ends after 2 s."""

    def open_session(name, *more):
        settled = [*SMALL, *more, "method.selection=in_order", "federation.deadline_s=2", f"output={tmp_path / name}"]
        session = Session(load(settled), Slow(client_app, 6, {"overrides": join(settled)}), Quiet())
        return session, session.method, session.grid

    return open_session


def test_a_round_ends_without_who_is_missing_and_its_slot_stays(opened):
    _, method, grid = opened("a")
    drawn = method.sample(1, list(range(6)))
    grid.hold = (drawn[1], 1)
    before = method.pool.rows[1].copy()
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, dict(report.rejected)) == (3, 1, {})
    assert (method.pool.rows[1] == before).all()
    assert (method.pool.rows[0] != before).any()
    assert drawn[1] not in method.accepted


def test_a_late_reply_is_nobodys(opened):
    _, method, grid = opened("a")
    _, reference, other = opened("b")
    drawn = method.sample(1, list(range(6)))
    for a_method, a_grid in ((method, grid), (reference, other)):
        a_grid.hold = (drawn[1], 1)
        a_method.run_round(1, a_grid)
    grid.late = [grid.held]
    late = method.run_round(2, grid)
    reference.run_round(2, other)
    assert dict(late.rejected) == {"unknown": 1}
    assert late.dropped == 0
    assert same(method.global_model(), reference.global_model())


def test_an_old_reply_under_an_open_request_is_a_replay(opened):
    _, method, grid = opened("a")
    drawn = method.sample(1, list(range(6)))
    grid.hold = (drawn[1], 1)
    method.run_round(1, grid)
    push = grid.push_messages

    def replaying(messages):
        ids = push(messages)
        grid.held.metadata.__dict__["_reply_to_message_id"] = ids[0]
        grid.held.metadata.__dict__["_src_node_id"] = next(iter(messages)).metadata.dst_node_id
        grid.late = [grid.held]
        return ids

    grid.push_messages = replaying
    report = method.run_round(2, grid)
    assert report.rejected["wrong_nonce"] == 1
    assert (
        report.clients - report.dropped >= 2
    )  # the two other slots, and the third if its own reply was still asked for


def test_the_first_of_two_replies_wins(opened):
    _, method, grid = opened("a")
    _, reference, other = opened("b")
    grid.twice = True
    report = method.run_round(1, grid)
    reference.run_round(1, other)
    assert dict(report.rejected) == {"duplicate": 3}
    assert report.dropped == 0
    assert same(method.global_model(), reference.global_model())
