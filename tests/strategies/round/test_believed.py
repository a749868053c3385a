"""Whose word counts in a round: replies in another's name, errors that anybody could send, errors that all send."""

import pytest
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.constant import ErrorCode

from fedcross.core.allowance import Refusal
from fedcross.core.errors import ConfigError
from fedcross.strategies.wire.protocol import failure
from tests.support.slots import drawn, federation
from tests.support.virtual import VirtualGrid, answers, fails, silent, trained


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
