"""The driver: a round by hand, lost slots, exchanges, checkpoints."""

from dataclasses import dataclass, replace

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, StorageError
from fedcross.core.settings import Settings
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.fedcross import FedCross
from fedcross.strategies.method import Method, Start, Task
from fedcross.strategies.round.clock import Devices, VirtualClock
from fedcross.strategies.round.run import open_run
from fedcross.strategies.round.settings import RoundSettings
from tests.support.slots import MODEL, asked, drawn, federation
from tests.support.virtual import VirtualGrid, answers, fails, scores, silent, trained


def test_a_round_by_hand(clock):
    """Clients add 1, 2 and 6, with 10 examples each: the mean is 3."""
    scripts = {client: answers(1, value=value) for client, value in zip(drawn(), (1, 2, 6))}
    driver, grid = federation(clock, scripts, kind=FedAvg)
    report = driver.run_round(1, grid)
    assert driver.global_model()["w"].tolist() == [3, 3, 3]
    assert asked(grid) == drawn()
    assert (report.clients, report.dropped, report.exchanges, report.train_loss) == (3, 0, 1, 1.0)
    assert (report.bytes_down, report.bytes_up) == (3 * 12, 3 * 12)


def test_a_lost_slot_keeps_its_model_and_the_others_mix(clock):
    """Two of three uploads are 2: each mixes with the other. The lost slot stays 0, and its client is counted."""
    lost = drawn()[0]
    driver, grid = federation(clock, {c: fails(1) if c == lost else answers(1, value=2) for c in range(6)})
    report = driver.run_round(1, grid)
    assert sorted(row[0] for row in driver.state.pool.rows.tolist()) == [0, 2, 2]
    assert report.dropped == 1
    assert report.rejected["client_error"] == 1


class Doubled(FedAvg):
    """Sends slot 0 to two clients."""

    def dispatch(self, state, round):
        return [replace(task, slot=0) for task in super().dispatch(state, round)]


def test_two_tasks_for_one_slot_name_the_method(clock):
    driver, grid = federation(clock, {}, kind=Doubled)
    with pytest.raises(ConfigError, match="Doubled"):
        driver.run_round(1, grid)


def test_a_round_without_replies_changes_nothing(clock):
    driver, grid = federation(clock, dict.fromkeys(range(6), silent), kind=FedAvg, deadline_s=50)
    report = driver.run_round(1, grid)
    assert (report.dropped, report.train_loss) == (3, None)
    assert driver.global_model()["w"].tolist() == [0, 0, 0]
    assert 50 <= clock.now < 55


def test_fewer_replies_than_min_replies_count_as_none(clock):
    driver, grid = federation(clock, {drawn()[0]: fails(1)}, kind=FedAvg, min_replies=3)
    report = driver.run_round(1, grid)
    assert report.rejected["too_few"] == 2
    assert driver.global_model()["w"].tolist() == [0, 0, 0]
    assert (report.dropped, report.bytes_down, report.bytes_up, report.train_loss) == (3, 36, 0, None)
    assert driver.ledger.clients.accepted == {}  # none of them goes on from what it has just stored


def test_as_many_replies_as_min_replies_count(clock):
    driver, grid = federation(clock, {drawn()[0]: fails(1)}, kind=FedAvg, min_replies=2)
    assert driver.run_round(1, grid).rejected["too_few"] == 0
    assert driver.global_model()["w"].tolist() == [1, 1, 1]


@dataclass
class TwiceState:
    model: dict[str, np.ndarray]
    exchanges: list[tuple[int, int, int]]


class Twice(Method[Settings, TwiceState]):
    """Two exchanges a round; the second one goes to one client only."""

    def init(self, start: Start) -> TwiceState:
        return TwiceState(dict(start.arrays), [])

    def dispatch(self, state, round):
        return [Task(c, i, state.model) for i, c in enumerate(round.clients[: 3 - 2 * round.exchange])]

    def aggregate(self, state, round, uploads):
        state.exchanges.append((round.number, round.exchange, len(uploads)))
        return {}

    def global_model(self, state):
        return state.model

    def exchanges(self, clients_per_round):
        return 2


def test_exchanges_of_a_round(clock):
    driver, grid = federation(clock, kind=Twice)
    report = driver.run_round(1, grid)
    assert driver.state.exchanges == [(1, 0, 3), (1, 1, 1)]
    assert (report.exchanges, report.clients) == (2, 4)
    assert asked(grid) == [*drawn(), drawn()[0]]


def test_a_round_lasts_as_long_as_the_slowest_client_of_each_exchange(clock):
    """Client i has i + 1 examples, a second each; the second exchange asks the first client alone."""
    seconds = VirtualClock(Devices(seconds_per_example=(1,)), 0, 6, range(1, 7))
    driver, grid = federation(clock, kind=Twice, seconds=seconds)
    for number in (1, 2):
        report, clients = driver.run_round(number, grid), drawn(number)
        assert report.metrics["virtual_seconds"] == (max(clients) + 1) + (clients[0] + 1)


def test_every_exchange_has_a_number_of_its_own(clock):
    seen, names = [], ("round", "exchange", "visit", "client", "state", "keep")

    def noted(message):
        seen.append([message.content.config_records["config"][name] for name in names])
        return answers(1)(message)

    driver, grid = federation(clock, dict.fromkeys(range(6), noted), kind=Twice, clients_per_round=6)
    for number in (1, 2):
        driver.run_round(number, grid)
    assert [one[:3] for one in seen] == [[1, 0, 1]] * 3 + [[1, 1, 2]] + [[2, 0, 3]] * 3 + [[2, 1, 4]]
    for i, (*_, client, state, keep) in enumerate(seen):  # of the client's last accepted visit
        assert state == keep == max([one[2] for one in seen[:i] if one[3] == client], default=0)


def test_losses_count_by_examples_and_accuracies_alike_where_they_are_due(clock):
    """(10 x 1 + 20 x 2 + 30 x 6) / 60; (.2 + .4 + .9) / 3 = .5."""
    told = [(10, 1.0, 0.2), (20, 2.0, 0.4), (30, 6.0, 0.9)]
    driver, grid = federation(clock, kind=FedAvg)
    driver.local_due = lambda number: number == 2
    for number in (1, 2):
        grid.scripts.update({client: scores(*one) for client, one in zip(drawn(number), told)})
        report = driver.run_round(number, grid)
        assert report.train_loss == pytest.approx(230 / 60)
        assert report.metrics.get("local_accuracy") == (pytest.approx(0.5) if number == 2 else None)


def test_what_the_defence_refuses_costs_but_does_not_count(clock):
    """Updates of 1, 2 and 9, the median 2: 9 is beyond 3 x 2; of 1, 2 and 3 the last is cut to 2."""
    for last, expected in ((9, (1, 0, 24)), (3, (0, 1, 36))):
        scripts = {client: answers(1, value=value) for client, value in zip(drawn(), (1, 2, last))}
        driver, grid = federation(clock, scripts, kind=FedAvg, defence={"enabled": True})
        report = driver.run_round(1, grid)
        assert (report.dropped, report.clipped, report.bytes_up) == expected
        assert (report.rejected["quarantined"], report.bytes_down) == (report.dropped, 36)
        assert len(driver.ledger.clients.accepted) == 3 - report.dropped
        assert driver.global_model()["w"] == pytest.approx([1.5 if last == 9 else 5 / 3] * 3)


def test_a_resumed_run_goes_on_to_the_bit(clock):
    scripts = {client: answers(1, value=0.1 * (client + 1)) for client in range(6)}
    whole, grid = federation(clock, scripts, alpha=0.9)
    for number in (1, 2):
        whole.run_round(number, grid)
    packed = whole.checkpoint()
    packed.arrays = {name: array.copy() for name, array in packed.arrays.items()}
    other, _ = federation(clock, scripts, alpha=0.9)
    other.restore(packed)
    assert other.ledger.clients == whole.ledger.clients
    for driver in (whole, other):
        driver.run_round(3, grid)
    assert other.state.pool.rows.tobytes() == whole.state.pool.rows.tobytes()


def test_a_checkpoint_of_another_model_or_method_is_refused(clock):
    driver, _ = federation(clock)
    packed = driver.checkpoint()
    with pytest.raises(StorageError, match="FedCross"):
        federation(clock, kind=FedAvg)[0].restore(packed)
    other = Start({"v": np.zeros(2, np.float32)}, ("v",), 3)
    with pytest.raises(StorageError, match="model"):
        open_run(FedCross(), other, RoundSettings(clients_per_round=3)).restore(packed)


def test_a_state_that_cannot_be_stored_is_named_before_the_first_round(clock):
    class Odd(Twice):
        def init(self, start):
            return TwiceState(dict(start.arrays), [object()])

    with pytest.raises(ConfigError, match="exchanges"):
        federation(clock, kind=Odd)
    assert MODEL["w"].tolist() == [0, 0, 0]


def test_clients_keep_what_the_oldest_checkpoint_needs(clock):
    """Two checkpoints are kept. In round 3 those of rounds 1 and 2 are on disk: visit 1 may still be asked for."""
    told = []

    def noting(message):
        told.append(message.content.config_records["config"]["keep"])
        return [(1.0, trained(message))]

    settings = RoundSettings(clients_per_round=1, nonce=True, deadline_s=100, run="r")
    driver = open_run(FedAvg(), Start(MODEL, tuple(MODEL), 1), settings, keep=2)
    grid = VirtualGrid(clock, 1, {0: noting})
    for number in (1, 2, 3, 4):
        driver.run_round(number, grid)
        driver.saved()
    assert told == [0, 0, 1, 2]
