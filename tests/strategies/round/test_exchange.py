"""One exchange in virtual time: deadline, spare clients, hedges, repeats."""

from flwr.app import Message

from fedcross.conf.schema import load
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.round.settings import RoundSettings
from tests.support.slots import asked, drawn, federation, spares
from tests.support.virtual import answers, deaf_once, fails, silent, trained


def run(clock, scripts, **settings):
    driver, grid = federation(clock, scripts, kind=FedAvg, **settings)
    return driver.run_round(1, grid), grid


def test_the_deadline_ends_an_exchange(clock):
    report, _ = run(clock, {drawn()[1]: silent})
    assert (report.dropped, 100 <= clock.now < 103) == (1, True)


def test_all_replies_end_it_at_once(clock):
    run(clock, {})
    assert clock.now < 2


def test_enough_replies_end_it_without_the_slow(clock):
    report, _ = run(clock, {drawn()[2]: answers(60)}, enough_replies=2)
    assert (report.dropped, clock.now < 2) == (1, True)


def test_a_failed_slot_goes_to_a_spare_client(clock):
    report, grid = run(clock, {drawn()[0]: fails(1)}, reassign=1)
    assert asked(grid) == [*drawn(), spares()[0]]
    assert (report.dropped, report.spares, report.clients) == (0, 1, 4)
    assert (report.bytes_down, report.bytes_up) == (4 * 12, 3 * 12)


def test_no_more_spares_than_allowed(clock):
    report, grid = run(clock, {drawn()[0]: fails(1), spares()[0]: fails(1), spares()[1]: answers(1)}, reassign=1)
    assert (report.dropped, len(asked(grid))) == (1, 4)
    report, grid = run(clock, {drawn()[0]: fails(1), spares()[0]: fails(1)}, reassign=2)
    assert (report.dropped, asked(grid)[3:]) == (0, spares()[:2])


def test_a_spare_that_cannot_be_reached_is_not_counted(clock):
    driver, grid = federation(clock, {drawn()[0]: fails(1)}, kind=FedAvg, reassign=1)
    push = grid.push_messages

    def unreachable(messages):
        clients = [message.content.config_records["config"]["client"] for message in messages]
        return [""] if clients == spares()[:1] else push(messages)

    grid.push_messages = unreachable
    report = driver.run_round(1, grid)
    assert (report.dropped, asked(grid)[3:]) == (0, spares()[1:2])


def test_a_hedged_slot_goes_to_two_and_the_first_reply_wins(clock):
    report, grid = run(clock, {drawn()[0]: answers(30)}, hedge=1)
    assert asked(grid) == [*drawn(), spares()[0]]
    assert (report.spares, report.dropped, clock.now < 3) == (1, 0, True)
    report, _ = run(clock, {}, hedge=1)  # both answer at once
    assert (report.rejected, report.bytes_down, report.bytes_up) == ({"superseded": 1}, 4 * 12, 3 * 12)


def test_a_request_without_a_reply_is_repeated_once(clock):
    report, grid = run(clock, {drawn()[0]: deaf_once()}, resend_s=10)
    assert asked(grid) == [*drawn(), drawn()[0]]
    assert (report.dropped, 10 < clock.now < 15) == (0, True)
    assert (report.clients, report.spares, report.bytes_down) == (4, 0, 4 * 12)
    report, grid = run(clock, {drawn()[0]: silent}, resend_s=10)
    assert (report.dropped, len(asked(grid))) == (1, 4)


def test_on_a_network_a_request_is_repeated_after_a_third_of_the_deadline():
    config = load(["task=digits", "federation.deadline_s=60"])
    assert RoundSettings.of(config, "r", networked=True).resend_s == 20
    assert RoundSettings.of(config, "r", networked=False).resend_s is None
    assert RoundSettings.of(load(["task=digits", "federation.resend_s=5"]), "r", networked=True).resend_s == 5


def test_only_the_first_reply_of_a_client_counts(clock):
    report, _ = run(clock, {drawn()[0]: answers(1, 1.05), drawn()[1]: answers(5)})
    assert (report.rejected["duplicate"], report.dropped) == (1, 0)


def test_a_reply_in_the_name_of_another_device_is_refused_and_the_true_one_counts(clock):
    def spoofed(message):
        poison = trained(message, 1000.0)
        poison.metadata.__dict__["_src_node_id"] = drawn()[1] + 1
        return [(0.5, poison), (1.0, trained(message))]

    report, _ = run(clock, {drawn()[0]: spoofed})
    assert (report.rejected["wrong_node"], report.dropped) == (1, 0)


def test_a_reply_to_an_earlier_request_is_refused(clock):
    old = []

    def replayed(message):
        old.append(trained(message, 1000.0))
        again = [(0.5, Message(old[0].content, reply_to=message))] if len(old) > 1 else []
        return [*again, (1.0, trained(message))]

    driver, grid = federation(clock, dict.fromkeys(range(6), replayed), clients_per_round=6, kind=FedAvg)
    assert driver.run_round(1, grid).rejected["wrong_nonce"] == 5
    report = driver.run_round(2, grid)
    assert (report.rejected["wrong_nonce"], report.dropped) == (6, 0)
