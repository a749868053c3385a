import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from fedcross.strategies import clusamp
from fedcross.strategies.clusamp import CluSamp, angles, cut, distributions, ward
from fedcross.strategies.fedavg import FedAvg
from fedcross.strategies.method import Round, Upload
from tests.support.bench import forgetful
from tests.support.by_hand import softmax
from tests.support.federation import run, same
from tests.support.game import Game
from tests.support.rivals import begin, linear, work

#: 33 examples for each of 6 clients
EQUAL = ("method=clusamp", "task.limit=198")


def begun(width=2, **own):
    method = Game(
        CluSamp,
        {"w": np.zeros(width, np.float32), "steps": np.array(0, np.int64)},
        {"w"},
        **{"clients_per_round": 2, **own},
    )
    method.times = Counter(range(4))
    return method


def upload(client, w, examples=10):
    arrays = {"w": np.array(w, np.float32), "steps": np.array(1, np.int64)}
    return Upload(client, client, arrays, {}, examples, {})


def tree(merges):
    """Return a linkage of these merges, of growing heights."""
    return np.array([[*pair, height, 2] for height, pair in enumerate(merges)], np.float64)


def test_angles_by_hand():
    rows = np.array([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0], [-1.0, 0.0], [0.0, 0.0]], np.float32)
    quarter = math.pi / 4
    expected = np.array(
        [
            [0, 2 * quarter, quarter, 4 * quarter, 0],
            [2 * quarter, 0, quarter, 2 * quarter, 0],
            [quarter, quarter, 0, 3 * quarter, 0],
            [4 * quarter, 2 * quarter, 3 * quarter, 0, 0],
            [0, 0, 0, 0, 0],
        ]
    )
    np.testing.assert_allclose(angles(rows), expected, atol=1e-7)


@pytest.mark.parametrize(
    ("distance", "expected"),
    [
        ("L1", [[0, 3, 2.5, 3], [3, 0, 0.5, 0], [2.5, 0.5, 0, 0.5], [3, 0, 0.5, 0]]),
        ("L2", [[0, 5, 4.25, 5], [5, 0, 0.25, 0], [4.25, 0.25, 0, 0.25], [5, 0, 0.25, 0]]),
    ],
)
def test_distances_by_hand_count_from_0_for_clients_not_seen(distance, expected):
    """Updates (1, -2) and (0.5, 0), apart by (0.5, -2), and two clients that were never there; L2 is squared."""
    method = begun(distance=distance)
    method.aggregate(Round(1, 0, (0, 2), 0), [upload(0, [1, -2]), upload(2, [0.5, 0])])
    np.testing.assert_allclose(method.method.distances(method.state, [0, 1, 2, 3]), expected, atol=1e-6)


def test_two_pairs_of_alike_clients_make_two_urns():
    """Equal sizes, K = 2, an urn holds two clients; updates 0 and 2 agree, 1 and 3 agree: urns {0, 2} and {1, 3}."""
    rows = np.array([[1.0, 0.1], [-1.0, 0.0], [1.0, 0.0], [-1.0, 0.1]])
    urns = distributions(ward(angles(rows)), np.ones(4), 2)
    assert sorted(urns.tolist()) == [[0.0, 0.5, 0.0, 0.5], [0.5, 0.0, 0.5, 0.0]]


def test_groups_are_poured_into_the_room_that_is_left():
    """Sizes 3, 1, 2, 2; K = 2: masses 6, 2, 4, 4, an urn holds 8. The tree joins 0 with 1 (8) and 2 with 3 (8).

    Had it joined 0 with 2 first (10, too much), all would be single: 0 and 2 open urns (6 and 4), 3 is poured: 2 into
    the first, 2 into the second, then 1: its 2 into the second.
    """
    sizes = np.array([3.0, 1.0, 2.0, 2.0])
    fits = distributions(tree([[0, 1], [2, 3], [4, 5]]), sizes, 2)
    np.testing.assert_allclose(fits, [[6 / 8, 2 / 8, 0, 0], [0, 0, 1 / 2, 1 / 2]])
    split = distributions(tree([[0, 2], [4, 3], [5, 1]]), sizes, 2)
    np.testing.assert_allclose(split, [[6 / 8, 0, 0, 2 / 8], [0, 2 / 8, 4 / 8, 2 / 8]])


def test_a_client_too_large_for_an_urn_gets_urns_of_its_own():
    """Sizes 7, 1, 1, 1; K = 3: masses 21, 3, 3, 3, an urn holds 10. Two urns for 0, its last 1 joins the others."""
    merges = tree([[1, 2], [3, 4], [0, 5]])
    urns = distributions(merges, np.array([7.0, 1.0, 1.0, 1.0]), 3)
    np.testing.assert_allclose(urns, [[1, 0, 0, 0], [1, 0, 0, 0], [0.1, 0.3, 0.3, 0.3]], atol=1e-12)


def test_cut_takes_the_largest_subtrees_that_fit():
    merges = tree([[0, 1], [2, 3], [4, 5]])
    assert cut(merges, np.array([1.0, 1.0, 1.0, 1.0]), 4.0) == [[0, 1, 2, 3]]
    assert cut(merges, np.array([1.0, 1.0, 1.0, 2.0]), 4.0) == [[0, 1], [2, 3]]
    assert cut(merges, np.array([1.0, 1.0, 3.0, 2.0]), 4.0) == [[0, 1], [2], [3]]
    assert cut(merges, np.array([1.0, 0.0, 3.0, 2.0]), 4.0) == [[0], [2], [3]]


@pytest.mark.slow
@given(st.data(), st.integers(1, 12))
def test_every_client_is_drawn_in_proportion_to_its_size(data, n):
    """Rows are distributions, column i sums to K n_i / sum n: the sampling is unbiased whatever the tree."""
    sizes = np.array(data.draw(st.lists(st.integers(1, 400), min_size=n, max_size=n)), np.float64)
    count = data.draw(st.integers(1, n))
    rows = np.array(data.draw(st.lists(st.lists(st.integers(-3, 3), min_size=3, max_size=3), min_size=n, max_size=n)))
    urns = distributions(ward(angles(rows.astype(np.float64))), sizes, count)
    assert (urns >= 0).all()
    np.testing.assert_allclose(urns.sum(1), 1, rtol=1e-12)
    np.testing.assert_allclose(urns.sum(0), count * sizes / sizes.sum(), rtol=1e-9)


def test_two_clients_two_steps_by_hand():
    """Linear model V [x; 1], plain cross-entropy: V <- V - .5 mean (p - e_y) [x; 1], twice.

    Client 0 was drawn twice, client 1 once: G = (2 V_0 + V_1) / 3, whatever the numbers of examples.
    """
    method, net = begin(CluSamp, linear([[0.2], [-0.1]], [0.0, 0.3]), clients_per_round=3)
    method.times = Counter({0: 2, 1: 1})
    data = [([[1.0], [-1.0]], [0, 1]), ([[3.0]], [0])]

    def by_hand(x, y):
        v = np.array([[0.2, 0.0], [-0.1, 0.3]])
        for _ in range(2):
            points = [np.array([row[0], 1.0]) for row in x]
            g = sum(np.outer(softmax(v @ p) - np.eye(2)[label], p) for p, label in zip(points, y)) / len(x)
            v = v - 0.5 * g
        return v

    current = Round(1, 0, (0, 1), 0)
    uploads = [work(method, net, payload, *data[payload.client]) for payload in method.dispatch(current)]
    method.aggregate(current, uploads)
    expected = (2 * by_hand(*data[0]) + by_hand(*data[1])) / 3
    np.testing.assert_allclose(method.global_model()["classifier.weight"][:, 0], expected[:, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.global_model()["classifier.bias"], expected[:, 1], rtol=0, atol=1e-12)


def test_examples_weight_a_draw_once_more():
    """Client 0 twice with 10, client 1 once with 40: (20 * 1 + 40 * 4) / 60 = 3."""
    method = begun(weighting="examples", width=1)
    method.times = Counter({0: 2, 1: 1})
    metrics = method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, [1], 10), upload(1, [4], 40)])
    assert method.global_model()["w"] == np.float32(3)
    assert metrics == {"distinct_clients": 2}


@pytest.mark.slow
def test_one_urn_per_client_is_a_uniform_mean_to_the_bit(tmp_path, monkeypatch):
    """All six clients, equal sizes: everyone fills one urn and is drawn once a round."""
    ours = run(tmp_path / "a", *EQUAL, "clients_per_round=6")
    monkeypatch.setattr(FedAvg, "sample", lambda self, state, current, available: tuple(available))
    plain = run(tmp_path / "b", "task.limit=198", "clients_per_round=6", "method=fedavg", "method.weighting=uniform")
    assert same(ours.driver.global_model(), plain.driver.global_model())


def test_a_client_drawn_twice_is_asked_once():
    """Client 0 claims nearly all examples, so it owns two of three urns."""
    ready = begun(clients_per_round=3)
    ready.sizes = {0: 900, 1: 50, 2: 50}
    drawn = ready.sample(1, [0, 1, 2])
    assert ready.times[0] >= 2
    assert sum(ready.times.values()) == 3
    assert len(drawn) == len(set(drawn)) <= 2


def test_a_client_that_was_not_seen_counts_as_the_mean_of_those_seen():
    """So all four count alike, and each owns one of four urns."""
    ready = begun(clients_per_round=4)
    ready.sizes = {0: 10, 1: 10}
    for number in range(1, 6):
        assert sorted(ready.sample(number, [0, 1, 2, 3])) == [0, 1, 2, 3]


@pytest.mark.slow
def test_a_lost_client_keeps_its_row_and_leaves_the_mean(tmp_path):
    method = begun(width=1)
    method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, [1]), upload(1, [3])])
    method.aggregate(Round(2, 0, (0, 1), 0), [upload(1, [5])])
    assert method.global_model()["w"] == np.float32(5)
    assert method.rows[0].tolist() == [1]  # 1 - 0, from round 1
    assert method.rows[1].tolist() == [3]  # 5 - 2
    lossy = run(tmp_path / "a", *EQUAL, app=forgetful(lambda client, number: number == 3))
    short = run(tmp_path / "b", *EQUAL, "rounds=2")
    assert same(lossy.driver.checkpoint().arrays, short.driver.checkpoint().arrays)


def test_a_sketch_keeps_the_angles():
    """Updates of 20,000 numbers of size 1e-6, angles about 90, 60 and 45 degrees."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 20_000)) * 1e-6
    method = begun(width=20_000, sketch=4096)
    updates = [a, b, a + 3**0.5 * b, a + b]
    method.aggregate(Round(1, 0, (0, 1, 2, 3), 0), [upload(i, u) for i, u in enumerate(updates)])
    exact = angles(np.stack(updates))
    np.testing.assert_allclose(method.method.distances(method.state, [0, 1, 2, 3]), exact, atol=0.12)
    assert method.rows[0].shape == (4096,)


def test_a_sketch_adds_every_number_with_a_sign_to_one_place():
    method = begun(width=400, sketch=16, distance="L2")
    updates = np.random.default_rng(3).normal(size=(2, 400))
    method.aggregate(Round(1, 0, (0, 1), 0), [upload(i, u) for i, u in enumerate(updates)])
    buckets, signs = clusamp.projection(0, 16, 400)
    assert set(buckets.tolist()) == set(range(16))
    assert set(signs.tolist()) == {-1.0, 1.0}
    sums = [sum(signs[i] * updates[0][i] for i in range(400) if buckets[i] == place) for place in range(16)]
    np.testing.assert_allclose(method.rows[0], sums, rtol=1e-4, atol=1e-4)
    apart = ((method.rows[0] - method.rows[1]).astype(np.float64) ** 2).sum()
    assert method.method.distances(method.state, [0, 1])[0, 1] == pytest.approx(apart, rel=1e-5)


def test_a_sketch_of_l1_distances_is_refused():
    with pytest.raises(ValidationError, match="L1"):
        CluSamp.Params(distance="L1", sketch=16)
