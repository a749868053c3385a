"""A method as Flower's Strategy: ``start``, and its two hooks driven by somebody else's loop, in virtual time."""

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp.strategy import Result

from fedcross.core.errors import ConfigError, FederationError
from fedcross.strategies.defence.rules import Defence
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.fedexp import FedExP
from fedcross.strategies.wire.protocol import reply
from fedcross.strategies.wire.records import encode
from tests.support.virtual import Clock, VirtualGrid, answers, fails, goes, silent

MODEL = {"w": np.arange(3, dtype=np.float32)}
INITIAL = encode(MODEL)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def federation(clock, scripts=None, **rules):
    """Return a method with three slots that has not begun, and its grid of six clients."""
    settled = {"clients_per_round": 3, "nonce": True, "deadline_s": 100, "run": "r", **rules}
    return FedCross(selection="in_order", alpha=0.75, **settled), VirtualGrid(clock, 6, scripts or {})


def drawn(number=1):
    return federation(None)[0].sample(number, range(6))


def rows(method):
    return method.pool.rows.tolist()


class Log:
    """A reply log in memory that also tells what it was asked to keep."""

    def __init__(self, accepted=(), over=False):
        self.kept, self._accepted, self._over = [], list(accepted), over

    def available(self, number):
        return None

    def widths(self, number):
        return None

    def draw(self, number, available, widths=None):
        self.kept.append(("draw", number))

    def accepted(self, current):
        return self._accepted

    def accept(self, current, upload):
        self.kept.append(("reply", current.number, upload.slot, upload))

    def is_over(self, current):
        return self._over

    def end(self, current):
        self.kept.append(("end", current.number))

    def told(self):
        return sorted(entry[:3] for entry in self.kept)


def by_hand(method, grid, rounds=1, wait_s=50):
    """Drive `rounds` rounds as Flower's loop does: send, wait for at most `wait_s` seconds, hand in."""
    made = None
    for number in range(1, rounds + 1):
        waiting = set(grid.push_messages(method.configure_train(number, INITIAL, ConfigRecord({}), grid)))
        replies, until = [], grid.clock.now + wait_s
        while waiting and grid.clock.now < until:
            grid.clock.sleep(0.5)
            replies += grid.pull_messages(waiting)
            waiting -= {reply.metadata.reply_to_message_id for reply in replies}
        made = method.aggregate_train(number, replies)
    return made


def in_our_loop(method, grid, rounds=1):
    method.begin(MODEL)
    for number in range(1, rounds + 1):
        method.run_round(number, grid)


# ---- start ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "timeout", "ends"), [(5, None, 5), (5, 7, 7), (9, 2, 2)])
def test_a_round_ends_at_the_methods_own_deadline_unless_start_is_told_another(clock, own, timeout, ends):
    method, grid = federation(clock, {drawn()[0]: silent}, deadline_s=own)
    method.start(grid, INITIAL, num_rounds=1, timeout=timeout)
    assert clock.now == pytest.approx(ends, abs=0.01)
    assert method.federation.deadline_s == ends


@pytest.mark.parametrize(("own", "asked", "done"), [({}, None, 3), ({"rounds": 2}, None, 2), ({"rounds": 2}, 4, 4)])
def test_how_many_rounds(clock, own, asked, done):
    method, grid = federation(clock, **own)
    result = method.start(grid, INITIAL, num_rounds=asked)
    assert list(result.train_metrics_clientapp) == list(range(1, done + 1))
    assert method.federation.rounds == done


NORMED = {
    "w": np.zeros(3, np.float32),
    "norm.weight": np.ones(3, np.float32),
    "norm.running_mean": np.zeros(3, np.float32),
    "norm.running_var": np.full(3, 1.5, np.float32),
}


def through_start(method, grid, model, **options):
    method.start(grid, encode(model), num_rounds=1, **options)


def through_hooks(method, grid, model):
    method.configure_train(1, encode(model), ConfigRecord({}), grid)


@pytest.mark.parametrize("drive", [through_start, through_hooks])
def test_statistics_of_batch_normalisation_are_not_trained(clock, drive):
    method, grid = federation(clock)
    drive(method, grid, NORMED)
    assert method.parameter_names == ("w", "norm.weight")


def test_no_step_takes_a_variance_below_zero(clock):
    """FedExP's step is of parameters alone. Half the clients answer with 1, half with -1, all with a variance of .5."""

    def model(value, variance):
        return {"w": np.full(3, value, np.float32), "norm.running_var": np.full(3, variance, np.float32)}

    method = FedExP(clients_per_round=4, nonce=True, run="r")
    signs = dict(zip(method.sample(1, range(6)), (1.0, -1.0, 1.0, -0.9)))

    def sends(sign):
        return lambda message: [(1, reply(message, model(sign, 0.5), {}, 10, {}))]

    scripts = {client: sends(sign) for client, sign in signs.items()}
    result = method.start(VirtualGrid(clock, 6, scripts), encode(model(0, 1)), num_rounds=1)
    assert method.report.metrics["server_step"] > 2  # it would lead 1 - 2 (1 - .5) below 0
    assert result.arrays["norm.running_var"].numpy().tolist() == [0.5] * 3


def test_the_caller_can_name_what_is_trained(clock):
    method, grid = federation(clock)
    through_start(method, grid, NORMED, parameters={"w", "norm.running_mean"})
    assert method.parameter_names == ("w", "norm.running_mean")
    with pytest.raises(ConfigError, match="the initial model has no 'v'"):
        through_start(*federation(clock), NORMED, parameters={"w", "v"})


def test_the_initial_model_is_evaluated_as_round_0(clock):
    method, grid = federation(clock)
    seen = []

    def evaluate(number, arrays):
        seen.append((number, arrays["w"].numpy().copy()))
        return MetricRecord({"sum": float(arrays["w"].numpy().sum())}) if number != 1 else None

    result = method.start(grid, INITIAL, num_rounds=2, evaluate_fn=evaluate)
    assert [number for number, _ in seen] == [0, 1, 2]
    assert (seen[0][1] == MODEL["w"]).all()
    assert (seen[2][1] == result.arrays["w"].numpy()).all()
    assert {n: m["sum"] for n, m in result.evaluate_metrics_serverapp.items()} == {0: 3.0, 2: 9.0}
    assert result.evaluate_metrics_clientapp == {}


def test_no_rounds_are_evaluated_once_and_leave_the_result_as_flower_does(clock):
    method, grid = federation(clock)
    result = method.start(grid, INITIAL, num_rounds=0, evaluate_fn=lambda number, _: MetricRecord({"at": number}))
    assert list(result.evaluate_metrics_serverapp) == [0]
    assert result.arrays == Result().arrays
    assert grid.asked == []


def test_a_start_in_which_no_reply_was_accepted_is_an_error_and_one_reply_is_enough(clock):
    method, grid = federation(clock, dict.fromkeys(range(6), fails(1)))
    with pytest.raises(FederationError, match="2 rounds and not one accepted reply"):
        method.start(grid, INITIAL, num_rounds=2)
    method, grid = federation(clock, {client: fails(1) for client in range(6) if client != drawn()[0]})
    assert list(method.start(grid, INITIAL, num_rounds=2).train_metrics_clientapp) == [1, 2]


@pytest.mark.parametrize("left", [1, 0])
def test_clients_that_are_gone_before_the_request_are_lost_and_one_reply_is_enough(clock, left):
    """Three slots; the clients of all, or of all but one, go before they are asked."""
    method, grid = federation(clock)
    for client in drawn()[left:]:
        goes(method, client)
    if left:
        method.start(grid, INITIAL, num_rounds=1)
    else:
        with pytest.raises(FederationError, match=r"^1 round and not one accepted reply"):
            method.start(grid, INITIAL, num_rounds=1)
    assert (method.report.clients, method.report.dropped) == (left, 3 - left)


def test_start_is_run_round_to_the_bit(clock):
    scripts = {client: answers(1, value=0.1 + client) for client in range(6)}
    method, grid = federation(clock, scripts, rounds=3)
    result = method.start(grid, INITIAL)
    other, grid = federation(clock, scripts, rounds=3)
    in_our_loop(other, grid, 3)
    assert rows(method) == rows(other)
    assert (result.arrays["w"].numpy() == other.global_model()["w"]).all()


# ---- configure_train and aggregate_train ----------------------------------------------------------------------------


def facts(report):
    """Return what a report says, without its seconds."""
    return {name: value for name, value in vars(report).items() if not name.startswith("seconds")}


def test_the_hooks_do_what_our_loop_does(clock):
    """A reply that is not finite, a failed client, an oversized update that the defence cuts: two rounds."""
    scripts = {client: answers(1, value=0.25 + client) for client in range(6)}
    scripts |= {drawn()[0]: answers(2, value=np.nan), drawn(2)[1]: fails(1)}
    ours, theirs = Log(), Log()
    method, grid = federation(clock, scripts, defence=Defence(enabled=True), clients_per_round=5)
    other, other_grid = federation(clock, scripts, defence=Defence(enabled=True), clients_per_round=5)
    method.log, other.log = ours, theirs
    watched = []
    method.observer = lambda current, uploads: watched.append(len(uploads))
    found, metrics = by_hand(method, grid, 2)
    in_our_loop(other, other_grid, 2)
    assert rows(method) == rows(other)
    assert (found["w"].numpy() == other.global_model()["w"]).all()
    assert facts(method.report) == facts(other.report)
    assert method.report.clipped > 0
    assert metrics["train-loss"] == 1.0
    assert ours.told() == theirs.told()
    assert {entry[0] for entry in ours.kept} == {"draw", "reply", "end"}
    assert method.accepted == other.accepted
    assert method.requests == other.requests
    assert len(watched) == 2


@pytest.mark.parametrize("broken", [fails(1), answers(1, value=np.nan), silent], ids=["raises", "rejected", "silent"])
def test_a_lost_slot_goes_to_a_spare_when_the_replies_are_handed_in(clock, broken):
    method, grid = federation(clock, {drawn()[0]: broken}, reassign=1)
    by_hand(method, grid, wait_s=10)
    other, other_grid = federation(clock, {drawn()[0]: broken if broken is not silent else fails(1)}, reassign=1)
    in_our_loop(other, other_grid)
    assert rows(method) == rows(other)
    assert (method.report.clients, method.report.dropped, method.report.spares) == (4, 0, 1)
    assert grid.asked[3][1:] == other_grid.asked[3][1:]


def test_past_the_deadline_no_spare_is_asked(clock):
    method, grid = federation(clock, {drawn()[0]: silent}, reassign=1, deadline_s=10)
    by_hand(method, grid, wait_s=11)
    assert (method.report.clients, method.report.dropped, method.report.spares) == (3, 1, 0)


def test_who_has_not_answered_the_caller_is_not_waited_for(clock):
    method, grid = federation(clock, {drawn()[0]: silent})
    by_hand(method, grid, wait_s=10)
    assert method.report.dropped == 1
    assert clock.now == pytest.approx(10, abs=0.6)


def test_who_was_silent_for_long_is_asked_once_more(clock):
    seen = []
    deaf = lambda message: answers(1)(message) if seen else seen.append(1) or []  # noqa: E731
    method, grid = federation(clock, {drawn()[0]: deaf}, resend_s=8)
    by_hand(method, grid, wait_s=10)
    assert (method.report.clients, method.report.dropped) == (4, 0)
    assert grid.asked[3][1:] == (drawn()[0], 0)


def test_clients_that_are_gone_are_replaced_before_the_caller_sends(clock):
    method, grid = federation(clock, reassign=1)
    goes(method, drawn()[0])
    by_hand(method, grid)
    assert (method.report.clients, method.report.dropped, method.report.spares) == (3, 0, 1)
    assert drawn()[0] not in [client for _, client, _ in grid.asked]


def test_the_first_messages_are_to_all_slots_clients_or_spares(clock):
    method, grid = federation(clock, reassign=1)
    goes(method, drawn()[0])
    messages = list(method.configure_train(1, INITIAL, ConfigRecord({}), grid))
    asked = [message.content.config_records["config"] for message in messages]
    assert sorted(one["slot"] for one in asked) == [0, 1, 2]
    assert drawn()[0] not in [one["client"] for one in asked]


def test_what_is_in_the_log_is_not_asked_for_again(clock):
    scripts = {client: answers(1, value=0.25 + client) for client in range(6)}
    whole, grid = federation(clock, scripts)
    whole.log = Log()
    by_hand(whole, grid)
    uploads = [entry[3] for entry in whole.log.kept if entry[0] == "reply"]
    half, grid = federation(clock, scripts)
    half.log = Log(uploads[:2])
    by_hand(half, grid)
    assert len(grid.asked) == 1
    assert rows(half) == rows(whole)
    assert half.report.clients == 3
    over, grid = federation(clock, scripts)
    over.log = Log(uploads[:2], over=True)
    by_hand(over, grid)
    assert grid.asked == []
    assert (over.report.clients, over.report.dropped) == (3, 1)


def test_flowers_calls_count_an_exchange_once(clock):
    method, grid = federation(clock)
    by_hand(method, grid, 2)
    assert method.report.round == 2
    assert method.report.exchanges == 1
    assert list(method.configure_evaluate(1, ArrayRecord({}), ConfigRecord({}), grid)) == []
