"""When clients' refusals end a run, and when one client's word is not enough."""

import pytest

from fedcross.core.causes import cause_of
from fedcross.core.errors import ConfigError
from fedcross.strategies.round.client_faults import LONGEST, end_if_common


def test_one_device_that_is_asked_alone_does_not_end_a_run_at_its_first_word():
    said = set()
    end_if_common({3: "call this number"}, {3}, 1, 4, heard=False, said=said)
    end_if_common({2: "something else"}, {2}, 2, 4, heard=False, said=said)
    with pytest.raises(
        ConfigError, match=r"All 1 clients of round 3 refuse: call this number \(their devices' words\)"
    ):
        end_if_common({3: "call this number"}, {3}, 3, 4, heard=False, said=said)


def test_a_second_device_confirms_it():
    said = set()
    end_if_common({3: "no model"}, {3}, 1, 4, heard=False, said=said)
    with pytest.raises(ConfigError, match="All 1 clients of round 2 refuse: no model"):
        end_if_common({1: "no model"}, {1}, 2, 4, heard=False, said=said)


def test_the_same_device_twice_in_one_round_is_one_word():
    said = set()
    for _ in range(2):  # two exchanges of a round
        end_if_common({3: "no model"}, {3}, 1, 4, heard=False, said=said)


def test_after_an_answer_most_connected_devices_must_say_so():
    said = {(0, 1, "bad"), (1, 1, "bad")}
    end_if_common({1: "bad", 2: "bad"}, {1, 2}, 5, 4, heard=True, said=said)
    with pytest.raises(ConfigError):
        end_if_common({1: "bad", 2: "bad"}, {1, 2}, 6, 3, heard=True, said=said)


def test_a_devices_words_are_one_short_line():
    with pytest.raises(ConfigError) as caught:
        end_if_common(dict.fromkeys((1, 2), "a\n\x1b[2J" + "b" * 9999), {1, 2}, 1, 2, heard=False, said=set())
    told = str(caught.value)
    assert told.isprintable()
    assert len(told) < LONGEST + 100
    assert cause_of(told).name == "clients_refuse"
