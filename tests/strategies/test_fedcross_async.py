"""FedCross without waiting: its synchronous limit, and mixing by hand."""

import json

import numpy as np
import pytest

from fedcross.strategies.fedcross_async import FedCrossAsync
from fedcross.strategies.method import Round, Upload
from tests.support.federation import run, same
from tests.support.game import Game


def begun(k: int = 3, **values):
    """Return a method with k slots, of models with one parameter that starts at 0 and one counter."""
    return Game(
        FedCrossAsync,
        {"w": np.zeros(1, np.float32), "n": np.array(0, np.int64)},
        {"w"},
        clients_per_round=k,
        **{"selection": "in_order", "alpha": 0.75, **values},
    )


def feed(method, **values):
    """Let these uploads arrive at the same time: s0=4.0 is slot 0's."""
    sent = [Upload(0, int(name[1:]), {"w": np.float32([w]), "n": np.array(int(w), np.int64)}, {}, 1, {})
            for name, w in values.items()]  # fmt: skip
    return method.aggregate(Round(1, 0, (), 0, last=False), sent)


def rows(method):
    return method.pool.rows.ravel().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("method.selection=random", "method.alpha=0.7", "compression.up=int8")])
def test_equal_durations_are_fedcross_to_the_bit(tmp_path, more):
    ours = run(tmp_path / "a", "method=fedcross_async", "devices=equal", *more).driver
    theirs = run(tmp_path / "b", "method=fedcross", *more).driver
    assert same(ours.global_model(), theirs.global_model())
    assert (ours.state.pool.rows == theirs.state.pool.rows).all()
    assert {line["staleness"] for line in visits(tmp_path / "a")} == {0}


def visits(folder):
    return [json.loads(line) for line in (folder / "visits.jsonl").read_text().splitlines()]


def test_the_first_upload_mixes_with_nobody_and_the_second_with_the_first():
    """Slot 1: 4. Then slot 0 with 8: .75 8 + .25 4 = 7. Slot 1 is not written again; slot 2 keeps the initial model."""
    method = begun()
    feed(method, s1=4.0)
    assert rows(method) == [0, 4, 0]
    feed(method, s0=8.0)
    assert rows(method) == [7, 4, 0]
    assert method.versions == [1, 1, 0]
    assert method.global_model()["w"] == pytest.approx(11 / 3)
    assert method.uploads.rows.ravel().tolist() == [8, 4, 0]


def test_a_collaborator_that_is_behind_weighs_less():
    """Slot 0's second upload, 8, is one before slot 1's first, 4: 1 - .25/2 = .875 of 8 + .125 of 4 = 7.5."""
    method = begun(2)
    feed(method, s0=2.0, s1=4.0)
    assert rows(method) == [2.5, 3.5]
    feed(method, s0=8.0)
    assert rows(method) == [7.5, 3.5]
    feed(method, s1=8.0)  # level again
    plain = begun(2, gap="none")
    feed(plain, s0=2.0, s1=4.0)
    feed(plain, s0=8.0)
    assert rows(plain) == [7.0, 3.5]


def test_a_schedule_of_alpha_follows_the_uploads_of_a_slot():
    """From .5 to 1 over two uploads. Slot 0 keeps its second upload whole."""
    method = begun(2, alpha={"schedule": "linear", "start": 0.5, "end": 1.0, "rounds": 2})
    feed(method, s0=2.0, s1=4.0)
    first = rows(method)
    feed(method, s0=8.0)
    assert (first, rows(method)) == ([3.0, 3.0], [8.0, 3.0])


def test_how_far_a_collaborator_is_behind_is_counted_among_those_with_an_upload():
    """Slot 0 has had none. Slot 1's second upload, 8, is one before slot 2's first, 4: .875 8 + .125 4 = 7.5."""
    method = begun()
    feed(method, s1=2.0, s2=4.0)
    feed(method, s1=8.0)
    assert rows(method) == [0, 7.5, 3.5]


def test_collaborators_are_chosen_among_all_uploads_of_a_group():
    """Both arrive at once, so both mix with the other's new upload: .75 4 + .25 8 = 5 and 7; counters truncated."""
    method = begun(2)
    feed(method, s0=4.0, s1=8.0)
    assert rows(method) == [5, 7]
    assert method.pool.integers.ravel().tolist() == [5, 7]


def test_slots_that_arrive_together_choose_by_their_own_number_of_uploads():
    """Slot 1 has its second upload, so it takes the next but one, slot 0, which is one behind: .875 16 + .125 8 = 15.

    The others have their first and take the next one: .75 8 + .25 16 = 10 and .75 0 + .25 8 = 2.
    """
    method = begun()
    feed(method, s1=4.0)
    feed(method, s0=8.0, s1=16.0, s2=0.0)
    assert rows(method) == [10, 15, 2]


@pytest.mark.parametrize(("similarity", "expected"), [("cosine", [0.75, 0.25]), ("manhattan", [3.25, 0.0])])
def test_the_measure_decides_whose_upload_is_the_least_similar(similarity, expected):
    """Uploads a = (1, 0), b = (10, 0), c = (0, 1); slot 0 has had none and is nobody's collaborator.

    The cosine of a and c is 0, of a and b 1: a mixes with c. |a - b| is 9, |a - c| is 2: it mixes with b.
    """
    method = Game(
        FedCrossAsync,
        {"w": np.zeros(2, np.float32)},
        {"w"},
        clients_per_round=4,
        selection="lowest_similarity",
        similarity=similarity,
        alpha=0.75,
    )
    values = {1: [1, 0], 2: [10, 0], 3: [0, 1]}
    method.aggregate(
        Round(1, 0, (), 0), [Upload(0, slot, {"w": np.float32(w)}, {}, 1, {}) for slot, w in values.items()]
    )
    assert method.pool.rows[1].tolist() == expected
    assert method.pool.rows[0].tolist() == [0, 0]


def test_alpha_1_mixes_nothing_and_an_empty_group_changes_nothing():
    method = begun(2, alpha=1.0)
    feed(method, s0=4.0, s1=8.0)
    assert rows(method) == [4, 8]
    assert feed(method) == {}
    assert rows(method) == [4, 8]


def test_a_lost_slot_sends_the_same_model_again():
    method = begun(2)
    feed(method, s0=4.0, s1=8.0)
    before = method.send(1).arrays["w"].copy()
    feed(method, s0=6.0)
    assert method.send(1).arrays["w"] == before
