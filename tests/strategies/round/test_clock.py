"""Durations: GitFL's mixes, measured rates, dealing of classes, and records of visits that cannot be read."""

import numpy as np
import pytest

from fedcross.conf.compose import compose
from fedcross.core.errors import ConfigError, StorageError
from fedcross.strategies.method import Round, Task
from fedcross.strategies.round import clock as clocks
from fedcross.strategies.round.clock import ClockSettings, Devices, ReplayClock, VirtualClock, clock_of, deal
from fedcross.strategies.round.slot import Slot
from tests.support.replies import payload_of
from tests.support.slots import MODEL


def test_a_tenth_of_ten_clients_is_one_and_the_rest_goes_by_largest_remainder():
    generator = np.random.default_rng(1)
    assert np.bincount(deal((0.1, 0.15, 0.5, 0.15, 0.1), 100, generator)).tolist() == [10, 15, 50, 15, 10]
    assert np.bincount(deal((0.4, 0.1, 0.0, 0.1, 0.4), 10, generator), minlength=5).tolist() == [4, 1, 0, 1, 4]
    assert sorted(deal((1 / 3, 1 / 3, 1 / 3), 4, generator)) == [0, 0, 1, 2]


def test_classes_and_durations_depend_on_the_seed_and_the_visit_alone():
    raw = compose(["devices=uniform"])["devices"]
    one, same, other = (VirtualClock(Devices(**raw), seed, 100) for seed in (1, 1, 2))
    assert one.processors == same.processors != other.processors
    assert one.processors != one.links
    assert one.seconds(5, 3, 0) == same.seconds(5, 3, 10**9)
    assert one.seconds(5, 3, 0) != one.seconds(5, 4, 0)


def test_durations_of_a_class_have_gitfls_mean_and_never_fall_below_the_least():
    """The slowest class: 500 + 80 seconds; with a mean of 1 and a deviation of 50 half of the draws are cut at 1."""
    devices = Devices(shares=(1.0,), training=((500, 50),), communication=((80, 10),))
    clock = VirtualClock(devices, 1, 1)
    drawn = [clock.seconds(0, visit, 0) for visit in range(400)]
    assert np.mean(drawn) == pytest.approx(580, abs=10)
    assert np.std(drawn) == pytest.approx((50**2 + 10**2) ** 0.5, rel=0.15)
    wild = VirtualClock(Devices(training=((1, 50),)), 1, 1)
    assert min(wild.seconds(0, visit, 0) for visit in range(50)) == 1.0


def test_measured_durations_by_hand():
    """30 examples, 2 epochs, .5 seconds each, and 100 bytes at 10 a second: 30 + 10."""
    devices = Devices(seconds_per_example=(0.5,), bytes_per_second=(10,))
    assert VirtualClock(devices, 1, 2, [30, 7], 2).seconds(0, 1, 100) == 40
    assert VirtualClock(devices, 1, 2, [30, 7], 2).seconds(1, 1, 100) == 17


def test_a_clients_link_is_dealt_apart_from_its_processor():
    """One second of training, and 100 bytes at 10 or at 100 a second."""
    clock = VirtualClock(Devices(shares=(0.5, 0.5), seconds_per_example=(1, 1), bytes_per_second=(10, 100)), 1, 20)
    assert [clock.seconds(client, 1, 100) for client in range(20)] == [11 if link == 0 else 2 for link in clock.links]
    assert clock.links != clock.processors


def test_equal_devices_take_one_second_and_a_deadline_frees_the_slot():
    assert VirtualClock(Devices(**compose(["devices=equal"])["devices"]), 1, 3).plan(0, 1, 1, 4.0, 10**9) == (5.0, True)
    strict = VirtualClock(Devices(training=((20, 0),)), 1, 3, deadline_s=7)
    assert strict.plan(0, 1, 1, 4.0, 0) == (11.0, False)


def test_no_clock_and_no_deadline_for_whole_rounds():
    assert clock_of(ClockSettings(), Devices(), 1, [3], 1) is None
    settings = ClockSettings(name="virtual", deadline_s=5)
    assert clock_of(settings, Devices(), 1, [3], 1, asynchronous=False).deadline_s is None
    assert clock_of(settings, Devices(), 1, [3], 1).deadline_s == 5


GOOD = '{"visit": 0, "slot": 0, "client": 4, "start": 0.0, "finish": 2.0, "accepted": true}\n'


@pytest.mark.parametrize("text", ["", None, "[1]\n", '{"visit": 0}\n', "{", GOOD + "[1]\n"])
def test_a_record_that_is_none_is_refused(tmp_path, text):
    path = tmp_path / "visits.jsonl"
    if text is not None:
        path.write_text(text)
    with pytest.raises(StorageError, match=r"visits\.jsonl"):
        ReplayClock.read(path)


def test_a_record_of_another_run_is_refused(tmp_path):
    path = tmp_path / "visits.jsonl"
    path.write_text(GOOD)
    settings = ClockSettings(name="replay", events=str(path))
    assert clock_of(settings, Devices(), 1, [3] * 5, 1).plan(0, 4, 1, 2.0, 0) == (2.0, True)
    with pytest.raises(ConfigError, match=r"visit 0 of the record ended after 2 s, and begins here after 2\.5 s"):
        clock_of(settings, Devices(), 1, [3] * 5, 1).plan(0, 4, 1, 2.5, 0)


def test_a_round_of_slots_with_their_own_epochs_and_bytes_both_ways():
    """10 examples at .5 seconds, 3 epochs and not the usual 2: 15; 12 bytes down and 12 up at 12 a second: 2."""
    clock, arrays = VirtualClock(Devices(seconds_per_example=(0.5,), bytes_per_second=(12,)), 1, 2, [10, 10], 2), MODEL
    place = Round(1, 0, (0, 1), 0)
    slots = [
        Slot(payload_of(Task(i, i, arrays, config=own)), place, place) for i, own in enumerate(({}, {"epochs": 3}))
    ]
    assert clock.longest(slots) == 17
    assert clock.longest(slots[:1]) == 12
    assert clock.longest([]) == 0


def test_the_real_clock_goes_on_from_the_last_event_and_never_stands(clock):
    real = clocks.RealClock()
    assert real.now(7.0) > 7
    clock.now += 3
    assert real.now(8.0) == 10
    assert real.now(10.0) > 10


def test_the_class_of_a_processor_decides_the_width():
    devices = Devices(shares=(0.5, 0.5), widths=(1.0, 0.4))
    processors = VirtualClock(devices, 3, 10).processors
    assert clocks.budgets_of(devices, 3, 10) == {client: (1.0, 0.4)[one] for client, one in enumerate(processors)}
    assert clocks.budgets_of(Devices(), 3, 10) == {}
