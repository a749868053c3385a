"""The asynchronous driver: order of virtual time, lost visits, restarts, the real clock."""

import copy

import pytest

from fedcross.core.errors import ConfigError, FederationError
from fedcross.server.reply_log import WriteAheadLog
from fedcross.strategies.fedasync import FedAsync
from fedcross.strategies.fedcross_async import FedCrossAsync
from fedcross.strategies.round.clock import Devices, RealClock, ReplayClock, VirtualClock
from tests.support.federation import run, same
from tests.support.slots import federation
from tests.support.virtual import answers, fails, scores, silent


class Seconds(VirtualClock):
    """Client i always takes ``durations[i]`` seconds."""

    def __init__(self, *durations, deadline_s=None):
        super().__init__(Devices(), 0, len(durations), deadline_s=deadline_s)
        self.durations = durations

    def seconds(self, client, visit, nbytes, epochs=None):
        return self.durations[client]


class First(FedAsync):
    """Asks the idle clients with the smallest numbers."""

    def sample(self, state, round, available):
        return tuple(available[: len(round.slots)])


def begun(clock, seconds, scripts=None, kind=First, clients=None, **values):
    ended = []
    count = clients or len(getattr(seconds, "durations", (0,) * 3))
    values = {"clients_per_round": 2, "rounds": 50, **values}
    driver, grid = federation(clock, scripts, count, kind, seconds=seconds, ended=ended, **values)
    return driver, grid, ended


def told(ended, *names):
    return [tuple(line[name] for name in names) for line in ended]


def test_slow_clients_hold_up_their_own_slot_only(clock):
    """Client 0 takes 5 s, the others 1 s: slot 1 ends five visits while slot 0 has one, four uploads late."""
    driver, grid, ended = begun(clock, Seconds(5.0, 1.0, 1.0))
    for number in (1, 2, 3):
        driver.run_round(number, grid)
    assert told(ended, "slot", "client", "finish", "staleness") == [
        (1, 1, 1.0, 0), (1, 1, 2.0, 0), (1, 1, 3.0, 0), (1, 1, 4.0, 0), (0, 0, 5.0, 4), (1, 1, 5.0, 0),
    ]  # fmt: skip


def test_each_visit_of_a_client_draws_and_stores_under_a_number_of_its_own(clock):
    """Client 1 is asked twice in the later rounds."""
    seen = []

    def noted(message):
        seen.append(tuple(message.content.config_records["config"][name] for name in ("round", "exchange", "visit")))
        return answers(1)(message)

    driver, grid, _ = begun(clock, Seconds(5.0, 1.0, 1.0), {1: noted})
    for number in (1, 2, 3):
        driver.run_round(number, grid)
    assert [(number, exchange) for number, exchange, _ in seen[:5]] == [(1, 0), (2, 0), (2, 1), (3, 0), (3, 1)]
    assert len({visit for *_, visit in seen}) == len(seen)


def test_a_client_is_told_the_number_of_its_last_accepted_visit(clock):
    """Client 0's first visit begins in round 1 and ends in round 3."""
    seen = []

    def noted(message):
        seen.append([message.content.config_records["config"][name] for name in ("visit", "state")])
        return answers(1)(message)

    driver, grid, _ = begun(clock, Seconds(5.0, 1.0, 1.0), {0: noted})
    for number in (1, 2, 3, 4):
        driver.run_round(number, grid)
    assert [state for _, state in seen] == [0, seen[0][0]]


def test_the_order_is_that_of_virtual_time_not_of_the_machine(clock):
    found = []
    for scripts in ({}, {i: answers(seconds) for i, seconds in enumerate((90.0, 5.0, 1.0))}):
        driver, grid, ended = begun(clock, Seconds(1.0, 2.0, 4.0), scripts, clients_per_round=3)
        driver.run_round(1, grid)
        found.append((told(ended, "client", "finish"), driver.global_model()))
    assert found[0][0] == found[1][0] == [(0, 1.0), (0, 2.0), (1, 2.0)]
    assert same(found[0][1], found[1][1])


def test_a_visit_over_the_deadline_is_never_trained(clock):
    driver, grid, ended = begun(clock, Seconds(9.0, 2.0, 2.0, deadline_s=3.0))
    report = driver.run_round(1, grid)
    assert told(ended, "client", "finish", "accepted") == [(1, 2.0, True), (0, 3.0, False)]
    assert (report.dropped, report.clients) == (1, 2)
    assert 0 not in {client for _, client, _ in grid.asked}


def test_a_client_that_failed_rests_until_an_upload_is_accepted(clock):
    driver, grid, ended = begun(clock, Seconds(1.0, 1.5, 4.0), {0: fails(0.1)})
    for number in (1, 2):
        driver.run_round(number, grid)
    assert told(ended, "client", "slot", "finish", "accepted", "staleness") == [
        (0, 0, 1.0, False, 0), (1, 1, 1.5, True, 0), (0, 1, 2.5, False, 0), (1, 1, 4.0, True, 0),
    ]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("method.selection=random", "method.alpha=0.7", "compression.up=int8")])
def test_equal_durations_are_fedcross_to_the_bit(tmp_path, more):
    ours = run(tmp_path / "a", "method=fedcross_async", "devices=equal", *more).driver
    theirs = run(tmp_path / "b", "method=fedcross", *more).driver
    assert same(ours.global_model(), theirs.global_model())
    assert (ours.state.pool.rows == theirs.state.pool.rows).all()


def test_a_resumed_run_continues_the_visits_under_way(clock):
    seconds = Seconds(1.0, 2.5, 4.0, 1.5)
    whole, grid, ended = begun(clock, seconds, kind=FedCrossAsync)
    for number in (1, 2):
        whole.run_round(number, grid)
    again, other, rest = begun(clock, seconds, kind=FedCrossAsync)
    again.restore(copy.deepcopy(whole.checkpoint()))
    done = len(ended)
    whole.run_round(3, grid)
    again.run_round(3, other)
    assert told(rest, "visit", "client", "finish") == told(ended[done:], "visit", "client", "finish")
    assert (again.state.pool.rows == whole.state.pool.rows).all()
    assert again.ledger.clients == whole.ledger.clients  # a visit that was under way has been asked for once
    assert again.report.metrics == whole.report.metrics


def test_a_replay_repeats_the_visits_of_a_run(clock):
    first, grid, ended = begun(clock, Seconds(1.0, 2.5, 4.0, 1.5), {2: silent}, rounds=3)
    for number in (1, 2, 3):
        first.run_round(number, grid)
    replay = ReplayClock({line["visit"]: line for line in ended})
    again, other, repeated = begun(clock, replay, clients=4, rounds=3)
    for number in (1, 2, 3):
        again.run_round(number, other)
    assert told(repeated, "visit", "slot", "client", "finish") == told(ended, "visit", "slot", "client", "finish")
    assert same(again.global_model(), first.global_model())


def test_the_real_clock_takes_what_comes_and_gives_up_at_the_deadline(clock):
    scripts = {0: silent, 1: answers(1.0), 2: answers(7.0)}
    driver, grid, ended = begun(clock, RealClock(deadline_s=5.0), scripts, clients=3)
    for number in (1, 2, 3, 4):
        driver.run_round(number, grid)
    lost = {line["client"] for line in ended if not line["accepted"]}
    assert lost == {0, 2}
    assert all(line["finish"] - line["start"] < 8 for line in ended)


def test_if_everybody_fails_the_rounds_end_and_nothing_changes(clock):
    driver, grid, _ = begun(clock, Seconds(1.0, 1.0), dict.fromkeys((0, 1), silent), deadline_s=20)
    assert [driver.run_round(number, grid).dropped for number in (1, 2)] == [2, 2]
    assert driver.global_model()["w"].tolist() == [0, 0, 0]


def test_visits_that_never_end_are_an_error(clock):
    driver, grid, _ = begun(clock, Seconds(float("inf"), float("inf")))
    with pytest.raises(FederationError, match="ever ends"):
        driver.run_round(1, grid)


def test_all_that_have_failed_since_the_last_upload_rest(clock):
    """Clients 0 and 1 fail after 1 and 1.5 s: their slots go to 2 and 3, although 0 has rested for a while."""
    driver, grid, _ = begun(clock, Seconds(1.0, 1.5, 9.0, 9.0), {0: fails(0.1), 1: fails(0.1)})
    driver.run_round(1, grid)
    driver.run_round(2, grid)
    assert [client for _, client, _ in grid.asked][:4] == [0, 1, 2, 3]


def test_what_has_ended_but_is_not_used_outlives_a_checkpoint(clock, tmp_path):
    """Client 0 fails at once, which counts after 50 s: the log, emptied by a checkpoint, says it again."""
    log = WriteAheadLog(tmp_path, "r", 0)
    driver, grid, ended = begun(clock, Seconds(50.0, 1.0), {0: fails(0.1)}, log=log)
    driver.run_round(1, grid)
    assert told(ended, "client", "finish") == [(1, 1.0), (1, 2.0)]
    log.restart(1)
    driver.saved()
    log.close()
    assert WriteAheadLog(tmp_path, "r", 1).order() == [(1, 0, 50.0)]


@pytest.mark.parametrize(
    "setting", [{"defence": {"enabled": True}}, {"compression": {"down": "int8"}}, {"reassign": 1}]
)
def test_what_needs_whole_rounds_is_refused(clock, setting):
    with pytest.raises(ConfigError, match="asynchronous"):
        federation(clock, kind=FedAsync, **setting)


def test_the_report_of_a_round_counts_its_own_visits_alone(clock):
    """Round 3 of the first test: two visits end after 1 s, one of them four uploads late; each model has 12 bytes."""
    driver, grid, _ = begun(clock, Seconds(5.0, 1.0, 1.0))
    found = [driver.run_round(number, grid) for number in (1, 2, 3)]
    assert [report.metrics["virtual_seconds"] for report in found] == [2, 2, 1]
    late = [(report.metrics["staleness_mean"], report.metrics["staleness_max"]) for report in found]
    assert late == [(0, 0), (0, 0), (2, 4)]
    assert [(one.exchanges, one.clients, one.bytes_down, one.bytes_up) for one in found] == [(1, 2, 24, 24)] * 3


def test_a_lost_visit_costs_its_request_and_brings_nothing(clock):
    driver, grid, _ = begun(clock, Seconds(1.0, 1.5, 4.0), {0: fails(0.1)})
    report = driver.run_round(1, grid)
    assert (report.clients, report.dropped, report.bytes_down, report.bytes_up) == (2, 1, 24, 12)
    assert report.rejected == {"client_error": 1}
    assert driver.ledger.clients.accepted.keys() == {1}
    never, other, _ = begun(clock, Seconds(9.0, 2.0, 2.0, deadline_s=3.0))
    report = never.run_round(1, other)
    assert (report.bytes_down, report.bytes_up) == (12, 12)  # nobody was sent the other model


def test_losses_of_visits_count_by_examples_and_accuracies_alike(clock):
    """(10 x 2 + 30 x 4) / 40 = 3.5; (.5 + .9) / 2 = .7."""
    scripts = {0: scores(10, 2.0, 0.5), 1: scores(30, 4.0, 0.9)}
    for due in (True, False):
        driver, grid, _ = begun(clock, Seconds(1.0, 1.0), scripts)
        driver.local_due = lambda number, due=due: due
        report = driver.run_round(1, grid)
        assert report.train_loss == pytest.approx(3.5)
        assert report.metrics.get("local_accuracy") == (pytest.approx(0.7) if due else None)
