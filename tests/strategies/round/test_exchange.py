"""Rounds that end, in virtual time: who is asked, who wins a slot, when it is over."""

from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.core.allowance import Refusal
from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.randomness import stream
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.round.exchange import PAUSE_S, is_blocking, poll, receive
from fedcross.strategies.solo import Solo
from fedcross.strategies.wire.protocol import Round, failure
from tests.support.federation import run
from tests.support.virtual import Clock, VirtualGrid, answers, fails, goes, silent, trained

MODEL = {"w": np.zeros(3, np.float32)}


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def federation(clock, scripts, clients=6, kind=FedCross, **rules):
    """Return a method with three slots and its grid."""
    own = {"selection": "in_order", "alpha": 0.5} if kind is FedCross else {}
    method = kind(**own, **{"clients_per_round": 3, "nonce": True, "deadline_s": 100, "run": "r", **rules})
    method.begin(MODEL)
    return method, VirtualGrid(clock, clients, scripts)


def drawn(method):
    return method.sample(1, range(6))


def spares(method):
    """Return the spare clients in the order in which they are asked."""
    free = sorted(set(range(6)) - set(drawn(method)))
    return [free[i] for i in stream(method.federation.seed, "spares", 1, 0).permutation(len(free))]


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


def test_methods_in_which_a_client_is_not_like_another_have_no_spares(clock):
    for kind, spare in ((FedAvg, 1), (Solo, 0)):
        method, grid = federation(clock, {}, kind=kind, reassign=1)
        grid.scripts = {drawn(method)[0]: fails(1)}
        assert method.run_round(1, grid).spares == spare


def test_without_spares_to_ask_nothing_is_drawn(clock):
    """Defaults leave every run as it was: no client is asked twice, none of the others is asked."""
    method, grid = federation(clock, {})
    method.run_round(1, grid)
    assert method._spares(Round(1, 0, drawn(method), 0), []) == []


def test_who_answers_in_anothers_name_takes_nothing_from_it(clock):
    method, grid = federation(clock, {})
    first, second = drawn(method)[:2]
    requests = {}

    def remembered(message):
        requests[first] = message
        return [(3, trained(message))]

    def impostor(message):
        fake = trained(requests[first], 9.0)
        fake.metadata.__dict__["_src_node_id"] = second + 1
        return [(1, fake), (2, trained(message))]

    grid.scripts = {first: remembered, second: impostor}
    report = method.run_round(1, grid)
    assert (dict(report.rejected), report.dropped) == ({"wrong_node": 1}, 0)
    assert (method.pool.rows == 1).all()


def deaf_once():
    """Return a script that ignores its first request."""
    seen = []
    return lambda message: answers(1)(message) if seen else seen.append(1) or []


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


def test_a_spare_that_keeps_silent_is_asked_once_more_too(clock):
    method, grid = federation(clock, {}, resend_s=20, reassign=1)
    first, spare = drawn(method)[0], spares(method)[0]
    grid.scripts = {first: fails(5), spare: deaf_once()}
    report = method.run_round(1, grid)
    assert [client for _, client, _ in grid.asked[3:]] == [spare, spare]
    assert (report.clients, report.dropped, report.spares) == (5, 0, 1)


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


def test_whose_name_was_used_is_asked_again(clock):
    """Flower gives out one reply to a request: after a false one it says that the request is gone."""
    method, grid = federation(clock, {}, resend_s=50)
    first, seen = drawn(method)[0], []

    def used(message):
        if seen:
            return answers(1)(message)
        seen.append(1)
        forged = trained(message, 9.0)
        forged.content.config_records["config"]["nonce"] = "0" * 32
        return [(1, forged), (2, Message(Error(3, "gone"), reply_to=message))]

    grid.scripts = {first: used}
    report = method.run_round(1, grid)
    assert (report.clients, report.dropped) == (4, 0)
    assert dict(report.rejected) == {"wrong_nonce": 1, "client_error": 1}
    assert (method.pool.rows == 1).all()


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


def spoofed(message, error=None):
    """Return an error in the name of the client that `message` went to."""
    return Message(error or Error(2, "not me"), reply_to=message)


def malformed(message):
    """Return a reply without the request's nonce."""
    return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)


@pytest.mark.parametrize(
    "false",
    [
        spoofed,
        malformed,
        lambda m: spoofed(m, Refusal("too_large", "2200 MiB")),
        lambda m: spoofed(m, Refusal("refused", "by the SuperLink: it was made at nan")),
    ],
    ids=["error", "junk", "bomb", "refused by the SuperLink"],
)
def test_an_error_that_anybody_could_have_sent_loses_no_slot(clock, false):
    """Over a network its client is asked once more, because Flower takes one reply to a request."""
    method, grid = federation(clock, {}, networked=True, packed=False)
    victim, seen = drawn(method)[1], []

    def twice(message):
        seen.append(message)
        return [(0.5, false(message))] if len(seen) == 1 else [(1, trained(message))]

    grid.scripts = {victim: twice}
    report = method.run_round(1, grid)
    assert (report.dropped, report.clients) == (0, 4)
    assert report.rejected.total() == 1
    assert len(seen) == 2


def test_the_true_reply_wins_after_any_number_of_false_ones(clock):
    method, grid = federation(clock, {}, networked=True, packed=False)
    victim = drawn(method)[1]
    grid.scripts = {victim: lambda message: [*[(0.5, spoofed(message))] * 25, (0.9, trained(message))]}
    report = method.run_round(1, grid)
    assert report.dropped == 0
    assert report.rejected["client_error"] >= 25
    assert set(report.rejected) <= {"client_error", "superseded"}  # the reply to the repeated request may come too late


def test_a_client_that_fails_twice_is_lost_and_asked_no_third_time(clock):
    method, grid = federation(clock, {}, networked=True, packed=False)
    grid.scripts = {drawn(method)[1]: fails(1)}
    report = method.run_round(1, grid)
    assert (report.dropped, report.clients) == (1, 4)


def test_an_error_that_its_client_can_prove_is_believed_at_once(clock):
    method, grid = federation(clock, {}, networked=True, packed=False)
    grid.scripts = {drawn(method)[1]: lambda m: [(1, Message(failure(m.content, ValueError("no")), reply_to=m))]}
    report = method.run_round(1, grid)
    assert (report.dropped, report.clients, dict(report.rejected)) == (1, 3, {"client_error": 1})


def test_what_the_superlink_itself_says_of_a_node_is_believed_at_once(clock):
    def gone(message):
        told = spoofed(message, Error(5, "the node is gone"))
        told.metadata.__dict__["_src_node_id"] = 1
        return [(1, told)]

    method, grid = federation(clock, {}, networked=True, packed=False)
    grid.scripts = {drawn(method)[1]: gone}
    report = method.run_round(1, grid)
    assert (report.dropped, report.clients, dict(report.rejected)) == (1, 3, {})  # it is lost: nobody has replied


class Judged(VirtualGrid):
    """A grid that is told what replies may consist of."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.allowed = {}

    def allow(self, allowances):
        self.allowed.update(allowances)


def test_a_grid_that_judges_replies_is_told_what_each_may_have(clock):
    method, _ = federation(clock, {})
    grid = Judged(clock, 6, {})
    method.run_round(1, grid)
    assert len(grid.allowed) == 3
    for allowance in grid.allowed.values():
        assert allowance.scalars == {"config", "metrics"}
        assert set(allowance.arrays) == {"arrays"}
        assert allowance.arrays["arrays"].count == 1
        assert 12 + 80 <= allowance.nbytes < 5000


def refuses(text, kind=ConfigError):
    """Answer that the configuration cannot be used."""
    return lambda message: [(1, Message(failure(message.content, kind(text)), reply_to=message))]


def test_a_configuration_error_of_all_clients_ends_the_run(clock):
    method, grid = federation(clock, dict.fromkeys(range(6), refuses("resume='/x': no such run folder.")))
    with pytest.raises(ConfigError, match=r"All 3 clients of round 1 refuse: resume='/x': no such run folder\."):
        method.run_round(1, grid)


def test_it_also_does_as_flowers_own_error(clock):
    def raises(message):
        return [(1, spoofed(message, Error(2, "ConfigError: bad")))]

    method, grid = federation(clock, dict.fromkeys(range(6), raises))
    with pytest.raises(ConfigError, match="refuse: bad"):
        method.run_round(1, grid)


@pytest.mark.parametrize("other", [refuses("another"), refuses("bad", ValueError), silent, answers(1)])
def test_it_must_be_the_same_error_of_all(clock, other):
    method, grid = federation(clock, dict.fromkeys(range(6), refuses("bad")))
    grid.scripts[drawn(method)[0]] = other
    method.run_round(1, grid)


def test_when_a_client_has_trained_a_few_others_cannot_end_the_run(clock):
    method, grid = federation(clock, {})
    method.run_round(1, grid)
    grid.scripts = dict.fromkeys(range(6), refuses("bad"))
    assert method.run_round(2, grid).dropped == 3  # three of six
    whole, all_of_them = federation(clock, {}, clients=3)
    whole.run_round(1, all_of_them)
    all_of_them.scripts = grid.scripts
    with pytest.raises(ConfigError, match="All 3 clients of round 2"):
        whole.run_round(2, all_of_them)


def test_a_reply_with_another_nonce_uses_up_the_request_but_not_the_slot(clock):
    """Flower takes one reply to a request; asked for another, it says that there is none."""

    def used_up(message):
        other = trained(message)
        config = other.content.config_records["config"]
        other.content["config"] = ConfigRecord({**config, "nonce": "0" * 32})
        none = spoofed(message, Error(ErrorCode.MESSAGE_UNAVAILABLE, "answered before"))
        none.metadata.__dict__["_src_node_id"] = 1
        return [(0.2, other), (0.4, none)]

    method, grid = federation(clock, {}, networked=True, packed=False)
    seen = []
    grid.scripts = {drawn(method)[1]: lambda m: seen.append(m) or (used_up(m) if len(seen) == 1 else [(1, trained(m))])}
    report = method.run_round(1, grid)
    assert (report.dropped, report.clients) == (0, 4)
    assert report.rejected == {"wrong_nonce": 1}
