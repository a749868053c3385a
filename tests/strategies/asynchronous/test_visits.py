"""The asynchronous loop: order, free slots, lost visits, restarts, the real clock."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message

from fedcross.client.app import app as client_app
from fedcross.client.app import together
from fedcross.conf.compose import join
from fedcross.core.errors import ConfigError, FederationError
from fedcross.core.randomness import stream
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.engines.workers import WorkersGrid
from fedcross.server.reply_log import WriteAheadLog
from fedcross.server.session import Session
from fedcross.strategies.asynchronous import asking
from fedcross.strategies.fedasync import FedAsync
from fedcross.strategies.fedbuff import FedBuff
from fedcross.strategies.fedcross_async import FedCrossAsync
from fedcross.strategies.gitfl import GitFL
from fedcross.strategies.round import clock as clocks
from fedcross.strategies.round.clock import Devices, RealClock, ReplayClock, VirtualClock
from fedcross.strategies.wire.protocol import failure
from tests.support.bench import forgetful
from tests.support.federation import Quiet, run, same, session, settle
from tests.support.virtual import Clock, VirtualGrid, answers, fails, silent

ASYNC = ("method=fedcross_async", "method.selection=in_order", "devices=uniform")


def visits(folder):
    return [json.loads(line) for line in (folder / "visits.jsonl").read_text().splitlines()]


class Seconds(VirtualClock):
    """Client i always takes ``durations[i]`` seconds."""

    def __init__(self, *durations, deadline_s=None):
        super().__init__(Devices(), 0, len(durations), deadline_s=deadline_s)
        self.durations = durations

    def seconds(self, client, visit, nbytes):
        return self.durations[client]


def small(clock, k=2, kind=FedCrossAsync, **values):
    """Return a method of k slots with one number each, and the list of its visits as they end."""
    own = {"alpha": 0.75, "selection": "in_order"} if kind is FedCrossAsync else {}
    method = kind(clients_per_round=k, **{**own, "rounds": 50, **values})
    method.clock, ended = clock, []
    method.on_visit = ended.append
    method.begin({"w": np.zeros(1, np.float32)}, {"w"})
    return method, ended


@pytest.fixture
def grid(monkeypatch):
    """Return a function that makes a grid of n clients with scripts, whose seconds nobody waits for."""
    ticking = Clock(monkeypatch)
    monkeypatch.setattr(asking, "time", ticking)
    monkeypatch.setattr(clocks, "time", ticking)
    return lambda n, **scripts: VirtualGrid(ticking, n, {int(name[1:]): script for name, script in scripts.items()})


def told(ended, *names):
    return [tuple(line[name] for name in names) for line in ended]


def test_slow_clients_hold_up_their_own_slot_only(grid):
    """Client 0 takes 5 s, the others 1 s: five visits of the other slot end first, at 1 to 5 s with the slow one."""
    method, ended = small(Seconds(5.0, 1.0, 1.0))
    method.choose = lambda number, group, slots, idle: [0, 1] if len(slots) == 2 and 0 in idle else idle[-len(slots) :]
    network = grid(3)
    for number in (1, 2, 3):
        method.run_round(number, network)
    assert told(ended, "slot", "client", "finish", "staleness") == [
        (1, 1, 1.0, 0), (1, 2, 2.0, 0), (1, 2, 3.0, 0), (1, 2, 4.0, 0), (0, 0, 5.0, 4), (1, 2, 5.0, 0),
    ]  # fmt: skip
    assert told(ended, "round", "group")[-2:] == [(3, 0), (3, 0)]


def test_the_order_is_that_of_virtual_time_not_of_the_machine(grid):
    """Real replies come in the opposite order; what was early waits for its time."""
    fast_really = {f"c{i}": answers(seconds) for i, seconds in enumerate((90.0, 5.0, 1.0))}
    method, ended = small(Seconds(1.0, 2.0, 4.0), k=3)
    method.run_round(1, grid(3, **fast_really))
    other, again = small(Seconds(1.0, 2.0, 4.0), k=3)
    other.run_round(1, grid(3))
    assert told(ended, "client", "finish") == told(again, "client", "finish")
    assert same(method.global_model(), other.global_model())


@pytest.mark.parametrize(("up", "nbytes"), [("float32", 4 + 4), ("float16", 4 + 2), ("int8", 4 + 1 + 4)])
def test_a_visit_takes_as_long_as_its_bytes_down_and_up(grid, up, nbytes):
    """One value, one second of work, one byte a second."""
    method, ended = small(
        VirtualClock(Devices(bytes_per_second=(1.0,)), 0, 2), nonce=True, run="r", compression={"up": up}
    )
    method.run_round(1, grid(2))
    assert told(ended, "finish") == [(1.0 + nbytes,)] * 2


def test_a_visit_over_the_deadline_is_never_trained_and_its_slot_goes_to_another_client(grid):
    method, ended = small(Seconds(9.0, 2.0, 2.0, deadline_s=3.0))
    method.choose = lambda number, group, slots, idle: idle[: len(slots)]
    network = grid(3)
    report = method.run_round(1, network)
    assert told(ended, "client", "finish", "accepted") == [(1, 2.0, True), (0, 3.0, False)]
    assert (report.dropped, report.clients) == (1, 2)
    assert 0 not in {client for _, client, _ in network.asked}
    method.run_round(2, network)  # client 0 rests, client 1 is busy
    assert told(ended, "client", "slot", "start")[-1] == (2, 0, 3.0)


def test_who_failed_rests_until_an_upload_is_accepted(grid):
    method, ended = small(Seconds(1.0, 1.5, 4.0))
    method.choose = lambda number, group, slots, idle: idle[: len(slots)]
    network = grid(3, c0=fails(0.1))
    for number in (1, 2):
        method.run_round(number, network)
    assert told(ended, "client", "slot", "finish", "accepted") == [
        (0, 0, 1.0, False), (1, 1, 1.5, True), (0, 1, 2.5, False), (1, 1, 4.0, True),
    ]  # fmt: skip
    assert [(visit.slot, visit.client, visit.start) for visit in method.open.values()] == [(0, 2, 1.0)]


def test_a_rejected_reply_counts_in_the_round_in_which_its_visit_does(grid):
    method, _ = small(Seconds(1.0, 5.0))
    network = grid(2, c1=fails(0.1))
    reports = [method.run_round(number, network) for number in (1, 2, 3)]
    assert [(one.dropped, one.rejected["client_error"]) for one in reports] == [(0, 0), (0, 0), (1, 1)]


def visited(ended):
    return Counter(line["client"] for line in ended)


def test_a_client_that_answers_at_once_does_not_take_the_whole_run(grid):
    """Client 0 has its slot back at once: 9 visits, then 3 more for each visit of the median, of 5, 7 and 11 s."""
    method, ended = small(Seconds(0.01, 5.0, 7.0, 11.0), k=4)
    network, other = grid(4), grid(4)
    for number in range(1, 16):
        method.run_round(number, network)
    made = visited(ended)
    assert 3 * (made[2] + 2) <= made[0] <= 3 * (made[2] + 3)  # the lower median of four
    assert min(made.values()) >= 5
    assert {line["finish"] for line in ended if line["client"] == 1} == {5.0 * i for i in range(1, made[1] + 1)}
    free, again = small(Seconds(0.01, 5.0, 7.0, 11.0), k=4, lead=None)
    for number in range(1, 16):
        free.run_round(number, other)
    assert visited(again) == {0: 60}


def test_who_waits_is_not_drawn_beside_others_either(grid):
    """A fifth client is always idle, so client 0 would be drawn in every second visit."""
    method, ended = small(Seconds(0.01, 5.0, 5.5, 6.0, 6.5), k=4)
    network = grid(5)
    for number in range(1, 21):
        method.run_round(number, network)
    made = visited(ended)
    assert made[0] <= 3 * (sorted(made.values())[2] + 3)


def test_where_visits_take_equally_long_nobody_waits_and_nothing_changes(grid):
    """Whoever is drawn often stays so: nothing is under way when the slots go out together."""
    both = []
    for lead in (1.0, None):
        method, ended = small(Seconds(*[1.0] * 9), k=2, lead=lead)
        network = grid(9)
        for number in range(1, 41):
            method.run_round(number, network)
        both.append(ended)
    assert both[0] == both[1]
    assert max(visited(both[0]).values()) > 9


def test_on_the_real_clock_too_who_is_ahead_waits(grid):
    method, ended = small(RealClock(), k=3)
    network = grid(3, c0=answers(0.5), c1=answers(40.0), c2=answers(50.0))
    for number in range(1, 9):
        method.run_round(number, network)
    made = visited(ended)
    assert made[2] >= 2
    assert 9 < made[0] <= 3 * (made[1] + 3)


def test_a_client_is_held_up_by_dead_ones_until_their_first_deadline_only(grid):
    """Clients 1 and 2 never answer: client 0 makes 9 visits and waits until 100 s; then nobody is there to wait for."""
    method, ended = small(RealClock(deadline_s=100.0), k=3)
    network = grid(3, c0=answers(3.0), c1=silent, c2=silent)
    for number in range(1, 7):
        method.run_round(number, network)
    assert set(told(ended, "client", "accepted")[9:11]) == {(1, False), (2, False)}
    own = [line["start"] for line in ended if line["client"] == 0]
    assert own[9] == pytest.approx(100, abs=4.0)
    assert np.diff(own[9:]) == pytest.approx(3, abs=2.0)


def test_a_resumed_run_lets_the_same_clients_wait(grid):
    """Also from a checkpoint of a version that did not count: everybody begins at 0."""
    seconds = (0.01, 5.0, 7.0, 11.0)
    whole, ended = small(Seconds(*seconds), k=4)
    network, other = grid(4), grid(4)
    for number in range(1, 13):
        whole.run_round(number, network)
        if number == 5:
            saved = whole.checkpoint()
            saved.values = json.loads(json.dumps(saved.values))
    again, rest = small(Seconds(*seconds), k=4)
    again.resume(saved)
    for number in range(6, 13):
        again.run_round(number, other)
    assert rest == ended[20:]
    assert again.checkpoint().values == whole.checkpoint().values
    del saved.values["_visits"]["lead"]
    older, _ = small(Seconds(*seconds), k=4)
    older.resume(saved)
    assert not older.lead.made


def test_a_replay_lets_the_same_clients_wait(grid):
    method, ended = small(Seconds(0.01, 5.0, 7.0, 11.0), k=4)
    network, other = grid(4), grid(4)
    for number in range(1, 9):
        method.run_round(number, network)
    again, repeated = small(ReplayClock({line["visit"]: line for line in ended}), k=4)
    for number in range(1, 9):
        again.run_round(number, other)
    assert repeated == ended


@pytest.mark.parametrize("away", [{1: [2, 3], 6: []}, {4: [3]}, {1: [3], 5: [2], 9: []}], ids=["join", "leave", "both"])
def test_a_replay_is_the_run_whoever_was_there_when(grid, away):
    """Who rests, waits or is away decides when a slot goes out: the record says that."""
    network = grid(4)
    method, ended = small(Seconds(0.1, 1.0, 1.5, 0.5), k=4, min_clients=1)
    for number in range(1, 12):
        if number in away:
            network.online = [node for node, client in network.partitions.items() if client not in away[number]]
        method.run_round(number, network)
    again, repeated = small(ReplayClock({line["visit"]: line for line in ended}), k=4)
    other = grid(4)
    for number in range(1, 12):
        again.run_round(number, other)
    assert repeated == ended
    assert same(again.global_model(), method.global_model())


def drawing(message):
    """Add what depends on the random draws of the visit, as training does."""
    config = message.content.config_records["config"]
    drawn = stream(0, "test", *(int(config[name]) for name in ("client", "round", "exchange")))
    return answers(1, value=float(drawn.normal()))(message)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(FedCrossAsync, {}), (GitFL, {}), (FedAsync, {}), (FedBuff, {"buffer": 2})],
    ids=["fedcross_async", "gitfl", "fedasync", "fedbuff"],
)
def test_a_replay_draws_nobody_for_a_visit_that_never_ended(grid, kind, settings):
    """Its client is not in the record, and the one that would be drawn may have the next visit of the dispatch."""
    missing = set()
    for seed in range(40):
        method, ended = small(Seconds(1.0, 1.1, 1e9, 1.3, 1.0), k=4, kind=kind, seed=seed, **settings)
        network = grid(5, **{f"c{client}": drawing for client in range(5)})
        for number in range(1, 6):
            method.run_round(number, network)
        missing |= {*range(max(line["visit"] for line in ended))} - {line["visit"] for line in ended}
        again, repeated = small(
            ReplayClock({line["visit"]: line for line in ended}), k=4, kind=kind, seed=seed, **settings
        )
        other = grid(5, **{f"c{client}": drawing for client in range(5)})
        for number in range(1, 6):
            again.run_round(number, other)
        assert repeated == ended
        assert same(again.global_model(), method.global_model()), seed
    assert {0, 1, 2, 3} <= missing


def test_a_record_of_a_run_with_other_slots_is_refused(grid):
    method, ended = small(Seconds(1.0, 2.0, 3.0), k=3)
    network = grid(3)
    for number in range(1, 4):
        method.run_round(number, network)
    again, _ = small(ReplayClock({line["visit"]: line for line in ended}), k=2)
    with pytest.raises(ConfigError, match=r"visit 2 of the record cannot begin here after 1 s in its slot"):
        again.run_round(1, grid(3))


def test_a_record_that_lacks_a_line_is_refused(grid):
    """Visit 2 has no end and needs a slot, and the later lines need them both."""
    method, ended = small(Seconds(1.0, 1.0), k=2)
    network = grid(2)
    for number in range(1, 5):
        method.run_round(number, network)
    again, _ = small(ReplayClock({line["visit"]: line for line in ended if line["visit"] != 2}), k=2)
    other = grid(2)
    with pytest.raises(ConfigError, match=r"visit 2 of the record cannot begin here after 1 s in its slot"):
        for number in range(1, 5):
            again.run_round(number, other)


def test_a_record_that_ends_too_early_says_what_may_lack(grid):
    """The last two visits that ended are left out: those of the slots that are under way then never end."""
    method, ended = small(Seconds(1.0, 1.0), k=2)
    network = grid(2)
    for number in range(1, 4):
        method.run_round(number, network)
    again, _ = small(ReplayClock({line["visit"]: line for line in ended[:-2]}), k=2)
    other = grid(2)
    with pytest.raises(FederationError, match=r"ended 4 visits.*Lower rounds or clients_per_round.*lines.*missing"):
        for number in range(1, 4):
            again.run_round(number, other)


def test_visits_that_take_for_ever_are_not_the_records_fault(grid):
    method, _ = small(Seconds(float("inf"), float("inf")), k=2)
    with pytest.raises(FederationError, match="No visit of round 1 ever ends: lower the seconds of devices"):
        method.run_round(1, grid(2))


def test_if_everybody_fails_the_rounds_end_and_nothing_changes(grid):
    method, ended = small(Seconds(1.0, 1.0))
    report = method.run_round(1, grid(2, c0=fails(0.1), c1=fails(0.1)))
    assert (report.dropped, dict(report.rejected)) == (2, {"client_error": 2})
    assert method.global_model()["w"] == 0
    assert [line["accepted"] for line in ended] == [False, False]


def test_second_late_and_foreign_replies_are_nobodys(grid):
    method, _ = small(Seconds(1.0, 2.0, 3.0))
    network = grid(3, c0=answers(0.1, 0.2, 400.0), c1=answers(0.1, 0.1))
    reports = [method.run_round(number, network) for number in range(1, 6)]
    rejected = sum((report.rejected for report in reports), reports[0].rejected.__class__())
    assert sum(report.dropped for report in reports) == 0
    assert set(rejected) <= {"unknown", "superseded", "duplicate"}
    assert rejected


def test_the_real_clock_takes_what_comes_and_gives_up_at_the_deadline(grid):
    """Client 2 never answers: its slot is free again after 10 s, and the other slot has had three visits by then."""
    method, ended = small(RealClock(deadline_s=10.0))
    method.choose = lambda number, group, slots, idle: [2, 0] if not ended else idle[: len(slots)]
    network = grid(3, c0=answers(3.0), c1=answers(3.0), c2=silent)
    for number in (1, 2, 3):
        method.run_round(number, network)
    assert told(ended, "client", "accepted") == [
        (0, True), (0, True), (0, True), (2, False), (0, True), (1, True),
    ]  # fmt: skip
    assert [line["finish"] for line in ended] == pytest.approx([3, 6, 9, 10, 12, 13], abs=2.0)
    assert [line["finish"] for line in ended] == sorted(line["finish"] for line in ended)


def test_a_visit_that_has_ended_is_forgotten_and_one_under_way_is_not(grid):
    """As above: the request of client 2, which never answers, and not those of visits under way."""
    method, ended = small(RealClock(deadline_s=10.0))
    method.choose = lambda number, group, slots, idle: [2, 0] if not ended else idle[: len(slots)]
    network, forgotten = grid(3, c0=answers(3.0), c1=answers(3.0), c2=silent), []
    network.forget = forgotten.extend
    for number in (1, 2, 3):
        method.run_round(number, network)
    assert (len(forgotten), len(ended)) == (1, 6)
    assert not any(visit.knows(one) for visit in method.open.values() for one in forgotten)


@pytest.mark.parametrize("crash", [1, 2, 3, 5])
def test_after_a_crash_on_the_real_clock_the_logged_arrivals_come_first(tmp_path, grid, crash):
    """The resumed server meets clients of other speeds; what was in the log keeps its order and its time."""
    method, ended = small(RealClock(), k=2)
    method.log = WriteAheadLog(tmp_path, "run", 0)
    real_accept = method.log.accept
    accepted = []

    def accept(current, upload):
        real_accept(current, upload)
        accepted.append(upload)
        if len(accepted) == crash:
            raise RuntimeError("power cut")

    method.log.accept = accept
    network = grid(4, c0=answers(3.0), c1=answers(2.0), c2=answers(1.0), c3=fails(0.5))
    with pytest.raises(RuntimeError, match="power cut"):
        for number in range(1, 5):
            method.run_round(number, network)
    method.log.close()
    again, repeated = small(RealClock(), k=2)
    again.log = WriteAheadLog(tmp_path, "run", 0)
    other = grid(4, c0=answers(1.0), c1=answers(7.0), c2=answers(3.0))
    for number in range(1, 5):
        again.run_round(number, other)
    assert repeated[: len(ended)] == ended
    again.log.close()
    assert len(again.log.order()) >= crash
    third, _ = small(ReplayClock({line["visit"]: line for line in repeated}), k=2)
    fresh = grid(4)
    for number in range(1, 5):
        third.run_round(number, fresh)
    assert same(third.global_model(), again.global_model())


@pytest.mark.parametrize("crash", [1, 2, 3])
def test_after_a_crash_a_logged_visit_counts_in_the_round_in_which_it_ends(tmp_path, grid, crash):
    """Client 0 answers first, and its visit is the last one to end, in round 3."""

    def rounds(log):
        method, ended = small(Seconds(5.0, 1.0, 1.0))
        method.choose = lambda number, group, slots, idle: [0, 1] if len(slots) == 2 and 0 in idle else idle[-1:]
        method.log, network = log, grid(3, c0=answers(0.1))
        reports = [method.run_round(number, network) for number in (1, 2, 3)]
        assert ended[4]["client"] == 0
        return [(report.clients, report.bytes_down, report.bytes_up) for report in reports]

    cut = WriteAheadLog(tmp_path, "run", 0)
    accept, left = cut.accept, list(range(crash))

    def last(current, upload):
        accept(current, upload)
        left.pop()
        if not left:
            raise RuntimeError("power cut")

    cut.accept = last
    with pytest.raises(RuntimeError, match="power cut"):
        rounds(cut)
    cut.close()
    again = WriteAheadLog(tmp_path, "run", 0)
    assert rounds(again) == rounds(None)
    again.close()


def test_a_client_that_joins_in_the_middle_is_drawn_from_the_next_round_on(grid):
    method, ended = small(Seconds(1.0, 1.5, 2.0))
    method.federation = method.federation.model_copy(update={"min_clients": 2})
    network = grid(3)
    network.online = [1, 2]
    method.run_round(1, network)
    network.online = [1, 2, 3]
    for number in range(2, 6):
        method.run_round(number, network)
    assert 2 not in {line["client"] for line in ended if line["round"] == 1}
    assert 2 in {line["client"] for line in ended}


def test_flowers_own_loop_is_refused_with_what_to_do():
    method, _ = small(None)
    with pytest.raises(FederationError, match="start"):
        method.configure_train(1, ArrayRecord(), ConfigRecord(), SimpleNamespace())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a finished run of five rounds with unequal devices, in this process."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, run(folder, *ASYNC, "rounds=5").method


@pytest.mark.slow
def test_the_number_of_workers_and_batches_change_nothing(tmp_path, whole):
    folder, one = whole
    for name in ("workers", "batched"):
        config, settled = settle(tmp_path / name, *ASYNC, "rounds=5")
        text = {"overrides": join(settled)}
        if name == "workers":
            grid = WorkersGrid(client_app, 6, text, 2)
        else:
            grid = BatchedGrid(client_app, 6, text, together, Params())
        try:
            ready = Session(config, grid, Quiet())
            ready.execute()
        finally:
            grid.close()
        assert visits(tmp_path / name) == visits(folder)
        if name == "workers":
            assert same(ready.method.global_model(), one.global_model())
        for entry, array in one.global_model().items():
            np.testing.assert_allclose(ready.method.global_model()[entry], array, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_the_record_of_visits_can_be_replayed(tmp_path, whole):
    folder, one = whole
    again = run(tmp_path / "again", *ASYNC, "rounds=5", "clock=replay", f"clock.events={folder}/visits.jsonl").method
    assert same(again.global_model(), one.global_model())
    assert visits(tmp_path / "again") == visits(folder)
    with pytest.raises(FederationError, match="Lower rounds"):
        run(tmp_path / "longer", *ASYNC, "rounds=7", "clock=replay", f"clock.events={folder}/visits.jsonl")


def test_a_replay_says_which_settings_are_not_the_recorded_ones(tmp_path, whole, caplog):
    events = f"clock.events={whole[0]}/visits.jsonl"
    run(tmp_path / "same", *ASYNC, "rounds=1", "clock=replay", events, "devices=equal")
    assert "not the settings" not in caplog.text
    run(tmp_path / "other", *ASYNC, "rounds=1", "clock=replay", events, "method.alpha=0.7")
    assert "so the model is another: method.alpha was 0.99, and is 0.7." in caplog.text
    alone = tmp_path / "visits.jsonl"
    alone.write_bytes((whole[0] / "visits.jsonl").read_bytes())
    caplog.clear()
    run(tmp_path / "alone", *ASYNC, "rounds=1", "clock=replay", f"clock.events={alone}", "method.alpha=0.7")
    assert "not the settings" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("log", ["true", "false"])
def test_a_run_resumed_at_a_round_is_the_uninterrupted_one(tmp_path, whole, log):
    folder, one = whole
    run(tmp_path, *ASYNC, "rounds=2", f"checkpoint.log={log}")
    two = run(tmp_path, *ASYNC, "rounds=5", f"resume={tmp_path}", f"checkpoint.log={log}").method
    assert same(two.global_model(), one.global_model())
    assert two.checkpoint().values == one.checkpoint().values
    assert visits(tmp_path) == visits(folder)


@pytest.mark.slow
def test_lost_visits_are_lost_again_after_a_replay(tmp_path):
    app = forgetful(lambda client, number: (client + number) % 4 == 0)
    a = run(tmp_path / "a", *ASYNC, "rounds=4", app=app).method
    events = f"clock.events={tmp_path}/a/visits.jsonl"
    b = run(tmp_path / "b", *ASYNC, "rounds=4", "clock=replay", events).method
    assert any(not line["accepted"] for line in visits(tmp_path / "a"))
    assert same(a.global_model(), b.global_model())


def test_metrics_have_virtual_seconds_for_both_kinds_of_methods(tmp_path, whole):
    lines = [json.loads(line) for line in (whole[0] / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["virtual_seconds"] for line in lines) == pytest.approx(visits(whole[0])[-1]["finish"])
    assert all(line["clients"] >= 1 for line in lines)
    ready = session(tmp_path, "method=fedavg", "clock=virtual", "devices=uniform", "rounds=1")
    ready.execute()
    [line] = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    drawn = ready.method.sample(1, range(6))
    assert line["virtual_seconds"] == max(ready.method.clock.seconds(client, 1, 0) for client in drawn)


def test_a_configuration_that_all_clients_refuse_ends_the_run(grid):
    def refuses(message):
        return [(1, Message(failure(message.content, ConfigError("bad")), reply_to=message))]

    method, _ = small(Seconds(1.0, 1.0), nonce=True, run="r")
    with pytest.raises(ConfigError, match="All 2 clients of round 1 refuse: bad"):
        method.run_round(1, grid(2, c0=refuses, c1=refuses))
    method, ended = small(Seconds(1.0, 1.0), nonce=True, run="r")
    method.run_round(1, grid(2, c0=refuses))
    assert len(ended) == 2
