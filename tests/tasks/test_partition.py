"""Partitions: every procedure, by hand on tiny tasks and as properties."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.partition import classes, dirichlet, iid, indices, local, natural, permuted, quantity_skew, shards
from fedcross.tasks.reading.params import token_ids


def toy(labels, classes=10, users=None, test_labels=None, test_users=None, x=None, test_x=None) -> Task:
    y = np.asarray(labels, np.int64)
    y_test = np.asarray([0] if test_labels is None else test_labels, np.int64)
    return Task(
        name="toy",
        train=Examples(np.zeros((len(y), 1), np.uint8) if x is None else x, y, users),
        test=Examples(np.zeros((len(y_test), 1), np.uint8) if test_x is None else test_x, y_test, test_users),
        classes=classes,
        shape=(1,),
        prepare=token_ids,
    )


def is_disjoint_cover(partition: Partition, n: int) -> bool:
    return sorted(np.concatenate(partition.train).tolist()) == list(range(n))


@settings(deadline=None)
@given(st.integers(1, 60), st.integers(0, 40), st.integers(0, 2**31))
def test_iid_deals_equal_sets(clients, more, seed):
    n = clients + more
    partition = iid.split(iid.Params(clients=clients), toy([0] * n), seed)
    sizes = [len(part) for part in partition.train]
    assert is_disjoint_cover(partition, n)
    assert max(sizes) - min(sizes) <= 1


def test_same_seed_same_partition_other_seed_another():
    task = toy(np.arange(200) % 10)
    for module, params in (
        (iid, iid.Params(clients=4)),
        (dirichlet, dirichlet.Params(clients=4, beta=1.0, min_size=1)),
    ):
        a, b, c = (module.split(params, task, seed) for seed in (7, 7, 8))
        assert all(np.array_equal(p, q) for p, q in zip(a.train, b.train))
        assert not all(np.array_equal(p, q) for p, q in zip(a.train, c.train))


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 12), st.sampled_from([0.3, 1.0, 100.0]), st.integers(0, 1000))
def test_dirichlet_covers_and_keeps_the_minimum(clients, beta, seed):
    task = toy(np.arange(600) % 10)
    partition = dirichlet.split(dirichlet.Params(clients=clients, beta=beta, min_size=5), task, seed)
    assert is_disjoint_cover(partition, 600)
    assert min(len(part) for part in partition.train) >= 5


def test_dirichlet_large_beta_is_nearly_even_and_small_beta_is_skewed():
    task = toy(np.arange(5000) % 10)

    def largest_share(beta):
        partition = dirichlet.split(dirichlet.Params(clients=10, beta=beta), task, 3)
        counts = np.array([np.bincount(task.train.y[part], minlength=10) for part in partition.train])
        return float(np.mean(counts.max(axis=1) / counts.sum(axis=1)))

    assert largest_share(1e6) < 0.11  # an even client holds one tenth of each class
    assert largest_share(0.1) > 0.4


class _Scripted:
    """A generator whose draws are given: identity permutations, and these Dirichlet rows in turn."""

    def __init__(self, rows):
        self.rows = list(rows)

    def permutation(self, items):
        return np.array(items)

    def dirichlet(self, concentration):
        assert concentration.tolist() == [0.5] * 3
        return np.array(self.rows.pop(0))


def test_dirichlet_capacity_rule_by_hand():
    # 12 examples, 3 clients: capacity 12 / 3 = 4.
    # Class 0 (ids 0..5), p = (.7, .2, .1): cuts floor(4.2, 5.4) = 4, 5 -> sizes 4, 1, 1. Client 0 is full.
    # Class 1 (ids 6..11), p = (.5, .25, .25) -> (0, .25, .25) -> (0, .5, .5): cuts floor(0, 3) -> 0, 3, 3.
    members = [np.arange(6), np.arange(6, 12)]
    parts = dirichlet._draw(members, 3, 0.5, _Scripted([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 6, 7, 8], [5, 9, 10, 11]]


def test_dirichlet_draw_without_room_is_refused():
    # All of p sits on the client that is full after class 0: nothing can be renormalised, so the draw is repeated.
    members = [np.arange(6), np.arange(6, 12)]
    assert dirichlet._draw(members, 3, 0.5, _Scripted([[1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])) is None


def test_dirichlet_gives_up_with_a_clear_error():
    task = toy([0] * 40, classes=1)
    with pytest.raises(DataError, match=r"20 draws with beta=0\.01 .* 10 clients with at least 4 each \(best: \d\)"):
        dirichlet.split(dirichlet.Params(clients=10, beta=0.01, min_size=4, max_draws=20), task, 0)


def test_too_many_clients_is_found_before_drawing():
    with pytest.raises(DataError, match="10 clients with at least 5 examples each need 50, but there are 40"):
        dirichlet.split(dirichlet.Params(clients=10, min_size=5), toy([0] * 40), 0)
    with pytest.raises(DataError, match="need 41, but there are 40"):
        iid.split(iid.Params(clients=41), toy([0] * 40), 0)


@pytest.mark.parametrize("wrong", [{"beta": 0.0}, {"beta": -1.0}, {"clients": 0}, {"min_size": 0}, {"beta": np.nan}])
def test_dirichlet_settings_are_checked(wrong):
    with pytest.raises(ValueError):
        dirichlet.Params(**{"clients": 3, **wrong})


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(0, 99))
def test_shards_cover_with_equal_sizes(clients, per, seed):
    # clients * per shards of 10 * clients * per examples: 10 examples each
    task = toy(np.repeat(np.arange(10), clients * per))
    partition = shards.split(shards.Params(clients=clients, classes_per_client=per), task, seed)
    assert is_disjoint_cover(partition, 10 * clients * per)
    assert {len(part) for part in partition.train} == {10 * per}


def test_shards_give_two_labels_each():
    # 20 examples of each of 10 labels, 10 clients x 2 shards = 20 shards of 10: two shards per label exactly
    partition = shards.split(shards.Params(clients=10), toy(np.arange(200) % 10), 5)
    labels = [set(np.arange(200)[part] % 10) for part in partition.train]
    assert max(len(found) for found in labels) <= 2
    with pytest.raises(DataError, match="10 clients with at least 3 examples each need 30"):
        shards.split(shards.Params(clients=10, classes_per_client=3), toy([0] * 29), 0)


def pictures(n, channels=1, side=3):
    return np.arange(n * channels * side * side, dtype=np.uint16).reshape(n, channels, side, side)


def picture_task(n_train=6, n_test=5, channels=2):
    base = toy(
        [0] * n_train, test_labels=[0] * n_test, x=pictures(n_train, channels), test_x=pictures(n_test, channels)
    )
    return replace(base, shape=(channels, 3, 3))


def test_permuted_moves_pixels_and_nothing_else():
    task = picture_task()
    partition = permuted.split(permuted.Params(clients=2), task, 9)
    order = permuted.permutation(9, 1, 9)
    assert sorted(order) == list(range(9))
    out = partition.transform(1, task.train.x)
    assert out.shape == task.train.x.shape
    for image, moved in zip(task.train.x, out):
        for channel, moved_channel in zip(image, moved):  # every channel in the same order
            assert moved_channel.ravel().tolist() == channel.ravel()[order].tolist()
    assert not np.array_equal(partition.transform(0, task.train.x), out)


def test_permuted_test_set_goes_round_the_clients():
    task = picture_task()
    partition = permuted.split(permuted.Params(clients=2), task, 9)
    assert [part.tolist() for part in partition.test] == [[0, 2, 4], [1, 3]]
    indices = np.array([3, 4, 0])
    out = partition.test_transform(indices, task.test.x[indices])
    expected = [partition.transform(client, task.test.x[[i]])[0] for i, client in ((3, 1), (4, 0), (0, 0))]
    assert np.array_equal(out, np.stack(expected))


def test_permuted_travels_to_workers_and_needs_pictures():
    partition = permuted.split(permuted.Params(clients=2), picture_task(), 9)
    copy = pickle.loads(pickle.dumps(partition))
    assert np.array_equal(copy.transform(1, pictures(2)), partition.transform(1, pictures(2)))
    with pytest.raises(ConfigError, match=r"needs pictures; task toy has inputs of shape \(1,\)"):
        permuted.split(permuted.Params(clients=2), toy([0, 0]), 0)


def users_task():
    # user 0: rows 1, 4; user 1: none; user 2: rows 0, 2, 3, tests 0 and 1; user 3: row 5, test 2
    return toy([0] * 6, users=np.array([2, 0, 2, 2, 0, 3]), test_labels=[0, 0, 0], test_users=np.array([2, 2, 3]))


def test_natural_by_hand():
    partition = natural.split(natural.Params(), users_task(), 0)
    assert [part.tolist() for part in partition.train] == [[1, 4], [0, 2, 3], [5]]
    assert [part.tolist() for part in partition.test] == [[], [0, 1], [2]]
    assert [p.tolist() for p in natural.split(natural.Params(min_samples=2), users_task(), 0).train] == [
        [1, 4],
        [0, 2, 3],
    ]


def test_natural_counts_test_examples_too_where_asked():
    # Training and test examples: 2 + 0, 3 + 2, 1 + 1. Users without training examples never take part.
    def sizes(least, count):
        params = natural.Params(min_samples=least, count=count)
        return [len(part) for part in natural.split(params, users_task(), 0).train]

    assert (sizes(2, "train"), sizes(2, "all"), sizes(5, "all")) == ([2, 3], [2, 3, 1], [3])
    with pytest.raises(DataError, match="0 of 4 users of toy have at least 6 examples, 0 are"):
        natural.split(natural.Params(min_samples=6, count="all"), users_task(), 0)


def test_natural_draws_users():
    drawn = {len(natural.split(natural.Params(clients=1), users_task(), seed).train[0]) for seed in range(20)}
    assert drawn == {1, 2, 3}


def test_natural_faults():
    with pytest.raises(DataError, match="task toy has no users"):
        natural.split(natural.Params(), toy([0]), 0)
    with pytest.raises(DataError, match="2 of 4 users of toy have at least 2 training examples, 3 are asked for"):
        natural.split(natural.Params(clients=3, min_samples=2), users_task(), 0)
    with pytest.raises(DataError, match="0 of 4 users"):
        natural.split(natural.Params(min_samples=9), users_task(), 0)


@settings(deadline=None)
@given(st.integers(1, 10), st.sampled_from([0.5, 5.0]), st.integers(0, 99))
def test_quantity_skew_covers_and_keeps_the_minimum(clients, beta, seed):
    params = quantity_skew.Params(clients=clients, beta=beta, min_size=3)
    partition = quantity_skew.split(params, toy([0] * 400), seed)
    assert is_disjoint_cover(partition, 400)
    assert min(len(part) for part in partition.train) >= 3


def test_quantity_skew_gives_up():
    params = quantity_skew.Params(clients=10, beta=0.01, min_size=9, max_draws=3)
    with pytest.raises(DataError, match=r"3 draws with beta=0\.01"):
        quantity_skew.split(params, toy([0] * 100), 0)


def from_json(tmp_path, content, n=6):
    file = tmp_path / "clients.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return indices.split(indices.Params(file=file), toy([0] * n, test_labels=[0, 0]), 0)


@pytest.mark.parametrize(
    "content",
    [
        [[2, 0], [5]],
        {"0": [2, 0], "1": [5]},
        {"1": [5], "0": [0, 2]},
        {"train_data": {"0": [2, 0], "1": [5]}},  # the FedCross authors' files
        {"train": [[2, 0], [5]], "test": [[], [1]]},
    ],
)
def test_indices_layouts(tmp_path, content):
    partition = from_json(tmp_path, content)
    assert [part.tolist() for part in partition.train] == [[0, 2], [5]]
    expected = [[], [1]] if "test" in content else None
    assert (partition.test and [part.tolist() for part in partition.test]) == expected


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[[1,", "not readable as JSON"),
        ([], "expected a list of index lists"),
        (5, "expected a list of index lists"),
        ({"0": [1], "2": [2]}, "2 clients but no client '1'"),
        ([[1], []], "client 1 has no training examples"),
        ([[1], [6]], r"client 1: index 6 is not in 0\.\.5"),
        ([[1], [-1]], "client 1: index -1"),
        ([[1], ["2"]], "client 1: training indices must be a list of integers"),
        ([[1], [True]], "client 1: training indices must be a list of integers"),
        ([[1], 2], "client 1: training indices must be a list of integers"),
        ([[1], [2, 1]], "client 1: training example 1 already belongs to client 0"),
        ([[1, 1]], "client 0: a training index appears twice"),
        ({"train": [[1]], "test": [[2]]}, r"client 0: index 2 is not in 0\.\.1, the test set"),
        ({"train": [[1]], "test": [[0], [1]]}, "1 clients in the training part but 2 in the test part"),
    ],
)
def test_indices_faults_name_file_and_client(tmp_path, content, says):
    with pytest.raises(DataError, match=rf"clients\.json: {says}"):
        from_json(tmp_path, content)


def test_indices_missing_file(tmp_path):
    with pytest.raises(DataError, match="no such file"):
        indices.split(indices.Params(file=tmp_path / "none.json"), toy([0]), 0)


def test_local_owns_everything():
    partition = local.split(local.Params(), toy([0] * 4, test_labels=[0, 0]), 0)
    assert [part.tolist() for part in partition.train] == [[0, 1, 2, 3]]
    assert [part.tolist() for part in partition.test] == [[0, 1]]


def test_classes_even_and_odd():
    task = toy(np.arange(40) % 10, test_labels=np.arange(10))
    partition = classes.split(classes.Params(groups=((0, 2, 4, 6, 8), (1, 3, 5, 7, 9))), task, 0)
    assert [part.tolist() for part in partition.train] == [list(range(0, 40, 2)), list(range(1, 40, 2))]
    assert [part.tolist() for part in partition.test] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def test_classes_shared_label_is_divided():
    task = toy([0, 0, 0, 0, 1, 2], classes=3)
    partition = classes.split(classes.Params(groups=((0, 1), (0,))), task, 0)
    assert [len(part) for part in partition.train] == [3, 2]  # two zeros each, and the one; label 2 is left out
    assert not set(partition.train[0]) & set(partition.train[1])


def test_classes_faults():
    task = toy([0, 1], classes=3)
    with pytest.raises(ConfigError) as caught:
        classes.split(classes.Params(groups=((0, 3), (1, 1))), task, 0)
    assert "groups[0]: label 3 is not in 0..2" in caught.value.faults[0]
    assert "groups[1]=[1, 1]: a label is named twice" in caught.value.faults[1]
    with pytest.raises(DataError, match="client 1 has no training examples"):
        classes.split(classes.Params(groups=((0,), (2,))), task, 0)


def test_owned_indices_are_read_only_and_sorted():
    partition = iid.split(iid.Params(clients=2), toy([0] * 10), 0)
    for part in partition.train:
        assert part.dtype == np.int64
        assert np.all(np.diff(part) > 0)
        assert not part.flags.writeable
