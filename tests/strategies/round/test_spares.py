"""Slots that another client takes over, in virtual time: reassigned, hedged, lost on the way."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import Error, Message

from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.solo import Solo
from fedcross.strategies.wire.protocol import Round, Upload
from tests.support.slots import drawn, federation, spares
from tests.support.virtual import answers, deaf_once, fails, goes, trained


def test_a_failed_slot_goes_to_a_spare_within_the_deadline(clock):
    method, grid = federation(clock, {}, reassign=1)
    first, spare = drawn(method)[0], spares(method)[0]
    grid.scripts = {first: fails(5)}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, report.spares) == (4, 0, 1)
    again = grid.asked[3]
    assert again[1:] == (spare, 0)
    assert again[0] == pytest.approx(5, abs=0.6)
    assert spare in method.accepted
    assert first not in method.accepted
    # Every slot was trained: (0 + 1) everywhere, and mixing equal models changes nothing.
    assert (method.pool.rows == 1).all()


@pytest.mark.parametrize(("reassign", "asked"), [(0, 3), (1, 4), (2, 5), (9, 6)])
def test_a_slot_is_reassigned_as_often_as_allowed_and_spares_last(clock, reassign, asked):
    method, grid = federation(clock, {}, reassign=reassign)
    grid.scripts = dict.fromkeys({drawn(method)[1], *spares(method)}, fails(1))
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped) == (asked, 1)
    assert sorted(client for _, client, _ in grid.asked) == sorted({client for _, client, _ in grid.asked})


def test_a_rejected_reply_reassigns_too(clock):
    method, grid = federation(clock, {}, reassign=1)
    grid.scripts = {drawn(method)[2]: answers(1, value=np.nan)}
    report = method.run_round(1, grid)
    assert (dict(report.rejected), report.dropped, report.spares) == ({"non_finite": 1}, 0, 1)


def test_a_client_that_is_gone_before_the_request_is_replaced_at_once(clock):
    method, grid = federation(clock, {}, reassign=1)
    gone = drawn(method)[0]
    goes(method, gone)
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, report.spares) == (3, 0, 1)
    assert gone not in [client for _, client, _ in grid.asked]


def test_the_stalest_slots_are_hedged_and_the_first_valid_reply_wins(clock):
    method, grid = federation(clock, {}, hedge=2)
    method.queue = [2, 0, 1]  # slot 2 has waited longest
    one, two = spares(method)[:2]
    grid.scripts = {drawn(method)[2]: answers(50), one: answers(3, value=5.0), two: answers(3, value=7.0)}
    report = method.run_round(1, grid)
    assert [(client, slot) for _, client, slot in grid.asked[3:]] == [(one, 2), (two, 0)]
    assert (report.clients, report.dropped, report.spares) == (5, 0, 2)
    # Slot 2 was won by its spare after 3 s, slot 0 by its own client after 1 s: nobody waited for the slow ones.
    assert set(method.accepted) == {drawn(method)[0], drawn(method)[1], one}
    assert clock.now < 4
    # alpha 0.5 in order, round 1: slot i takes half of slot i + 1 mod 3 of (1, 1, 5).
    assert method.pool.rows[:, 0].tolist() == [1, 3, 3]


def test_the_loser_of_a_hedged_slot_is_not_believed(clock):
    method, grid = federation(clock, {}, hedge=1)
    grid.scripts = {spares(method)[0]: answers(1, value=9.0)}  # at the same moment as the slot's own client
    report = method.run_round(1, grid)
    assert (dict(report.rejected), report.dropped) == ({"superseded": 1}, 0)
    assert method.pool.rows[0, 0] == 1


def test_a_hedge_answers_for_its_own_request_only(clock):
    """A spare that answers with the nonce of the slot's first request, which it cannot know, is rejected."""
    method, grid = federation(clock, {}, hedge=1)
    seen = {}

    def first(message):
        seen["nonce"] = message.content.config_records["config"]["nonce"]
        return [(2, trained(message))]

    def second(message):
        message.content.config_records["config"]["nonce"] = seen["nonce"]
        return [(1, trained(message, 9.0))]

    grid.scripts = {drawn(method)[0]: first, spares(method)[0]: second}
    report = method.run_round(1, grid)
    assert (dict(report.rejected), report.dropped) == ({"wrong_nonce": 1}, 0)
    assert method.pool.rows[0, 0] == 1


def test_methods_in_which_a_client_is_not_like_another_have_no_spares(clock):
    for kind, spare in ((FedAvg, 1), (Solo, 0)):
        method, grid = federation(clock, {}, kind=kind, reassign=1)
        grid.scripts = {drawn(method)[0]: fails(1)}
        assert method.run_round(1, grid).spares == spare


def test_without_spares_to_ask_nothing_is_drawn(clock):
    """Defaults leave every run as it was: no client is asked twice, none of the others is asked."""
    method, grid = federation(clock, {})
    method.run_round(1, grid)
    assert method._spares(Round(1, 0, drawn(method), 0), [], SimpleNamespace(uploads=[])) == []


def test_who_took_a_slot_over_before_a_crash_gets_no_second_one(clock):
    method, grid = federation(clock, {}, reassign=1)
    method.run_round(1, grid)
    current = Round(1, 0, drawn(method), 0)
    free = method._spares(current, [], SimpleNamespace(uploads=[]))
    taken = SimpleNamespace(uploads=[Upload(free[0], 0, {}, {}, 1, {})])
    assert sorted(method._spares(current, [], taken)) == sorted(free[1:])


def test_a_spare_that_keeps_silent_is_asked_once_more_too(clock):
    method, grid = federation(clock, {}, resend_s=20, reassign=1)
    first, spare = drawn(method)[0], spares(method)[0]
    grid.scripts = {first: fails(5), spare: deaf_once()}
    report = method.run_round(1, grid)
    assert [client for _, client, _ in grid.asked[3:]] == [spare, spare]
    assert (report.clients, report.dropped, report.spares) == (5, 0, 1)


def seconds_left(seen, script):
    """Return `script`, which first notes how many seconds its request may take."""

    def noted(message):
        seen.append(message.metadata.ttl)
        return script(message)

    return noted


@pytest.mark.parametrize(("fails_after", "left"), [(5, 25), (29.25, 1)])
def test_a_request_may_take_what_is_left_of_the_deadline_and_a_second_at_least(clock, fails_after, left):
    method, grid = federation(clock, {}, reassign=1, deadline_s=30)
    first, seen = [], []
    grid.scripts = {
        drawn(method)[0]: seconds_left(first, fails(fails_after)), spares(method)[0]: seconds_left(seen, answers(0.25)),
    }  # fmt: skip
    report = method.run_round(1, grid)
    assert (report.dropped, report.spares) == (0, 1)
    assert first == [pytest.approx(30)]
    assert seen == [pytest.approx(left, abs=0.6 if left > 1 else 1e-9)]


def test_a_slot_that_is_won_needs_no_spare_when_its_other_client_fails(clock):
    """Slot 0 is asked twice; its own client wins it after 1 s, the other one fails after 2 s. Slot 1 takes 10 s."""
    method, grid = federation(clock, {}, hedge=1, reassign=1)
    grid.scripts = {spares(method)[0]: fails(2), drawn(method)[1]: answers(10)}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, report.spares) == (4, 0, 1)
    assert dict(report.rejected) == {"superseded": 1}


def test_what_flower_lost_of_a_client_that_is_gone_goes_to_a_spare(clock):
    method, grid = federation(clock, {}, resend_s=50, reassign=1)
    first = drawn(method)[0]

    def last_words(message):
        del method.nodes.online[first]
        return [(3, Message(Error(3, "?"), reply_to=message))]

    grid.scripts = {first: last_words}
    report = method.run_round(1, grid)
    assert [client for _, client, _ in grid.asked[3:]] == [spares(method)[0]]
    assert (report.clients, report.dropped, report.spares) == (4, 0, 1)


def test_a_request_that_cannot_be_sent_goes_to_a_spare(clock):
    """Flower returns an empty id for a message that it could not take."""
    method, grid = federation(clock, {}, reassign=1)
    unreachable, push = drawn(method)[0], grid.push_messages

    def refusing(messages):
        settled = [(message, message.content.config_records["config"]["client"]) for message in messages]
        ids = iter(push([message for message, client in settled if client != unreachable]))
        return ["" if client == unreachable else next(ids) for _, client in settled]

    grid.push_messages = refusing
    report = method.run_round(1, grid)
    assert [(client, slot) for _, client, slot in grid.asked[2:]] == [(spares(method)[0], 0)]
    assert (report.clients, report.dropped, report.spares) == (3, 0, 1)
    assert (method.pool.rows == 1).all()
