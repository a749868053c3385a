"""Rounds that end, in virtual time: who is asked and how often, when a round is over."""

from types import SimpleNamespace

import pytest
from flwr.app import Error, Message

from fedcross.core.errors import FederationError
from fedcross.strategies.round.exchange import PAUSE_S, is_blocking, poll, receive
from tests.support.federation import run
from tests.support.slots import drawn, federation
from tests.support.virtual import VirtualGrid, answers, deaf_once, fails, silent


def test_an_undisturbed_round_ends_with_its_last_reply(clock):
    method, grid = federation(clock, {})
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, report.spares) == (3, 0, 0)
    assert 1 <= clock.now < 2


def test_the_deadline_ends_a_round_to_the_second(clock):
    method, grid = federation(clock, {}, deadline_s=30)
    grid.scripts = {drawn(method)[0]: silent, drawn(method)[1]: answers(31)}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped) == (3, 2)
    assert clock.now == pytest.approx(30, abs=0.01)
    late = method.run_round(2, grid)  # the late reply arrives now and is nobody's
    assert dict(late.rejected) == {"unknown": 1}


class Counted(VirtualGrid):
    """A grid that counts the polls."""

    polls = 0

    def pull_messages(self, message_ids):
        self.polls += 1
        return super().pull_messages(message_ids)


@pytest.mark.parametrize(
    ("length", "least", "most", "late"), [(5, 30, 45, 0.2), (100, 160, 190, 2), (3600, 1900, 2100, 2)]
)
def test_the_longer_a_round_lasts_the_less_often_it_asks(clock, length, least, most, late):
    """Five times a second at first, then at a fiftieth of the wait, at last every two seconds."""
    method, _ = federation(clock, {}, deadline_s=10_000)
    counted = Counted(clock, 6, {drawn(method)[0]: answers(length)})
    assert method.run_round(1, counted).dropped == 0
    assert least <= counted.polls <= most
    assert length <= clock.now <= length + late


class OneAtATime:
    """A grid with one reply to each poll."""

    def __init__(self, blocking):
        self.blocking, self.partitions = blocking, {}

    def pull_messages(self, message_ids):
        return [SimpleNamespace(metadata=SimpleNamespace(reply_to_message_id=min(message_ids)))]


@pytest.mark.parametrize(("blocking", "slept"), [(True, 0.0), (False, PAUSE_S)])
def test_between_two_polls_is_a_pause_unless_the_grid_waits_itself(clock, blocking, slept):
    """One pause between two replies, and none behind the last."""
    grid, open_ids = OneAtATime(blocking), ["a", "b"]
    assert is_blocking(grid) is blocking
    for _ in poll(grid, lambda: open_ids, 10.0):
        open_ids.pop()
    assert clock.now == slept
    clock.now = 100.0
    assert [reply.metadata.reply_to_message_id for reply in receive(grid, ["a", "b", ""], 10.0)] == ["a", "b"]


def test_all_lost_is_a_round_without_change(clock):
    method, grid = federation(clock, dict.fromkeys(range(6), fails(1)))
    before = method.pool.rows.copy()
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, dict(report.rejected)) == (3, 3, {"client_error": 3})
    assert (method.pool.rows == before).all()
    assert clock.now < 3  # it does not wait for the deadline when nobody is left


def test_enough_replies_end_a_round(clock):
    method, grid = federation(clock, {}, enough_replies=2)
    grid.scripts = {drawn(method)[0]: answers(80)}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped) == (3, 1)
    assert clock.now < 2


class Forgetting(VirtualGrid):
    """A grid that drops what it is told to forget; nobody asks for that again."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.forgotten = []

    def forget(self, message_ids):
        self.forgotten.append(sorted(message_ids))
        self._coming = [one for one in self._coming if one[2].metadata.reply_to_message_id not in message_ids]

    def pull_messages(self, message_ids):
        assert not set(message_ids) & {one for ids in self.forgotten for one in ids}
        return super().pull_messages(message_ids)


@pytest.mark.parametrize(
    ("rules", "first", "asked", "late"),
    [
        ({"enough_replies": 2}, answers(80), 3, 1),
        ({"deadline_s": 30}, answers(31), 3, 1),
        ({"hedge": 1}, answers(50), 4, 1),
        ({"reassign": 1}, fails(5), 4, 0),
    ],
    ids=["enough", "deadline", "hedge", "reassign"],
)
def test_at_its_end_an_exchange_forgets_its_open_requests_and_no_others(clock, rules, first, asked, late):
    """A grid that cannot forget brings the late reply in the next round, where it is nobody's."""
    for kind, unknown in ((Forgetting, 0), (VirtualGrid, late)):
        method, _ = federation(clock, {}, **rules)
        grid = kind(clock, 6, {drawn(method)[0]: first})
        assert method.run_round(1, grid).dropped == (asked == 3)
        grid.scripts = {}
        clock.now += 100.0
        assert method.run_round(2, grid).rejected["unknown"] == unknown
        if isinstance(grid, Forgetting):
            assert grid.forgotten[0]
            assert not grid._coming


def test_a_round_on_this_machine_leaves_no_request_behind(tmp_path):
    """With one worker six requests are made and two are answered in each round."""
    finished = run(tmp_path, "method=fedavg", "clients_per_round=6", "federation.enough_replies=2")
    assert finished.grid._queue == {}


def test_too_few_replies_change_nothing(clock):
    method, grid = federation(clock, {}, min_replies=2)
    grid.scripts = dict.fromkeys(drawn(method)[:2], fails(1))
    before = method.pool.rows.copy()
    report = method.run_round(1, grid)
    assert (report.dropped, dict(report.rejected)) == (3, {"client_error": 2, "too_few": 1})
    assert (method.pool.rows == before).all()
    assert method.accepted == {}


def test_twice_the_same_reply_counts_once(clock):
    method, grid = federation(clock, dict.fromkeys(range(6), answers(1, 1)))
    report = method.run_round(1, grid)
    assert (dict(report.rejected), report.dropped) == ({"duplicate": 3}, 0)


def test_waiting_for_clients_is_bounded(clock):
    method, grid = federation(clock, {}, wait_s=20)
    grid.online = [1, 2]
    with pytest.raises(FederationError, match="2 clients are connected after 20 s, 3 are needed"):
        method.run_round(1, grid)
    assert clock.now == pytest.approx(20, abs=1)


def test_a_resumed_round_waits_for_the_clients_that_it_had_drawn(clock):
    method, grid = federation(clock, {}, wait_s=20, min_clients=3)
    wanted = drawn(method)
    grid.online = [client + 1 for client in range(6) if client != wanted[0]]
    assert len(method.nodes.wait_for(grid, 3, 20, wanted)) == 5
    assert clock.now == pytest.approx(20, abs=1)


def test_a_silent_client_is_asked_once_more(clock):
    method, grid = federation(clock, {}, resend_s=20)
    first = drawn(method)[0]
    grid.scripts = {first: deaf_once()}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, report.spares) == (4, 0, 0)
    assert [(client, slot) for _, client, slot in grid.asked[3:]] == [(first, 0)]
    assert grid.asked[3][0] == pytest.approx(20, abs=0.6)
    assert clock.now == pytest.approx(21, abs=1.2)
    assert (method.pool.rows == 1).all()  # as if nothing had happened


def test_a_request_just_as_old_as_allowed_is_repeated(clock):
    """Looks are at 0, 1 and 2 seconds."""
    method, grid = federation(clock, {}, resend_s=2)
    first = drawn(method)[0]
    grid.scripts = {first: deaf_once()}
    clock.sleep = lambda _: setattr(clock, "now", clock.now + 1.0)
    method.run_round(1, grid)
    assert grid.asked[3] == (2.0, first, 0)


def test_it_is_not_asked_a_third_time_and_the_first_answer_wins(clock):
    method, grid = federation(clock, {}, resend_s=20, deadline_s=90)
    slow, dead, _ = drawn(method)
    grid.scripts = {slow: answers(30), dead: silent}
    report = method.run_round(1, grid)
    assert sorted(client for _, client, _ in grid.asked[3:]) == sorted([slow, dead])
    assert (report.clients, report.dropped) == (5, 1)
    assert clock.now == pytest.approx(90, abs=0.01)
    assert dict(report.rejected) == {"superseded": 1}  # slow's second answer, at 50 s


@pytest.mark.parametrize(("code", "lost"), [(3, 0), (4, 0), (2, 1), (5, 1)])
def test_what_flower_lost_on_the_way_is_asked_again_at_once(clock, code, lost):
    method, grid = federation(clock, {}, resend_s=50)
    first, seen = drawn(method)[0], []

    def unlucky(message):
        return answers(1)(message) if seen else seen.append(1) or [(3, Message(Error(code, "?"), reply_to=message))]

    grid.scripts = {first: unlucky}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, dict(report.rejected)) == (4 - lost, lost, {"client_error": 1})
    assert clock.now < 6
    if not lost:
        assert (method.pool.rows == 1).all()


def test_at_the_deadline_itself_nobody_is_asked_any_more(clock):
    """Slot 0 fails at the very end; slot 1 has been silent for exactly `resend_s` then."""
    method, grid = federation(clock, {}, reassign=1, resend_s=30, deadline_s=30)
    grid.scripts = {drawn(method)[0]: fails(30), drawn(method)[1]: silent}
    report = method.run_round(1, grid)
    assert clock.now == 30
    assert dict(report.rejected) == {"client_error": 1}
    assert (report.clients, report.dropped, report.spares) == (3, 2, 0)


def test_what_flower_loses_twice_is_not_asked_for_a_third_time(clock):
    method, grid = federation(clock, {}, resend_s=50)
    grid.scripts = {drawn(method)[0]: lambda message: [(3, Message(Error(3, "?"), reply_to=message))]}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped, dict(report.rejected)) == (4, 1, {"client_error": 2})
    assert clock.now < 8
