"""Partitions: every procedure, by hand on tiny tasks and as properties."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, DataError
from fedcross.tasks.base import Examples, Partition, Task
from fedcross.tasks.partition import (
    classes,
    dirichlet,
    dirichlet_equal,
    iid,
    indices,
    natural,
    permuted,
    quantity_skew,
    shards,
)
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


@pytest.mark.parametrize(
    ("module", "params"),
    [
        (iid, iid.Params(clients=7)),
        (shards, shards.Params(clients=7, classes_per_client=3)),
        (dirichlet, dirichlet.Params(clients=7, beta=0.3, min_size=5)),
        (dirichlet_equal, dirichlet_equal.Params(clients=12, beta=0.5)),
        (quantity_skew, quantity_skew.Params(clients=7, beta=0.5, min_size=5)),
    ],
)
@pytest.mark.parametrize("seed", [0, 1, 2**31])
def test_sets_are_disjoint_cover_everything_and_follow_from_the_seed(module, params, seed):
    task = toy(np.arange(600) % 10)
    first, again, other = (module.split(params, task, s) for s in (seed, seed, seed + 1))
    assert is_disjoint_cover(first, 600)
    assert all(map(np.array_equal, first.train, again.train))
    assert not all(map(np.array_equal, first.train, other.train))
    sizes = [len(part) for part in first.train]
    assert min(sizes) >= 5
    assert module not in (iid, shards, dirichlet_equal) or max(sizes) - min(sizes) <= 3


@pytest.mark.parametrize(
    ("module", "params", "word"),
    [
        (iid, iid.Params(clients=41), "need 41, but there are 40"),
        (dirichlet, dirichlet.Params(clients=10, beta=0.01, min_size=4, max_draws=20), "20 draws with beta=0.01"),
        (quantity_skew, quantity_skew.Params(clients=10, beta=0.01, min_size=4, max_draws=3), "3 draws with beta"),
        (natural, natural.Params(), "has no users"),
        (classes, classes.Params(groups=((0, 10),)), "groups"),
        (classes, classes.Params(groups=((0,), (2,))), "client 1 has no training examples"),
        (permuted, permuted.Params(clients=2), "needs pictures"),
    ],
)
def test_what_cannot_be_divided_is_told(module, params, word):
    with pytest.raises((DataError, ConfigError), match=word):
        module.split(params, toy([0] * 40), 0)


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
    parts = dirichlet.dealt(members, 3, 0.5, _Scripted([[0.7, 0.2, 0.1], [0.5, 0.25, 0.25]]))
    assert [part.tolist() for part in parts] == [[0, 1, 2, 3], [4, 6, 7, 8], [5, 9, 10, 11]]


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
    assert [part.tolist() for part in partition.test] == [[0, 2, 4], [1, 3]]
    seen = partition.test_transform(np.array([3, 4]), task.test.x[3:])  # by clients 1 and 0
    assert np.array_equal(seen[0], partition.transform(1, task.test.x[3:4])[0])
    assert np.array_equal(seen[1], partition.transform(0, task.test.x[4:])[0])


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
    "content",
    [
        "[[1,",
        [],
        5,
        [[1], []],
        [[1], [6]],
        [[1], ["2"]],
        [[1], [2, 1]],
        [[1, 1]],
        {"train": [[1]], "test": [[2]]},
        {"train": [[1]], "test": [[0], [1]]},
    ],
)
def test_indices_faults_name_the_file(tmp_path, content):
    with pytest.raises(DataError, match=r"clients\.json"):
        from_json(tmp_path, content)


def test_classes_shared_label_is_divided():
    task = toy([0, 0, 0, 0, 1, 2], classes=3, test_labels=[0, 1, 2, 0])
    partition = classes.split(classes.Params(groups=((0, 1), (0,))), task, 0)
    assert [len(part) for part in partition.train] == [3, 2]  # two zeros each, and the one; label 2 is left out
    assert not set(partition.train[0]) & set(partition.train[1])
    assert [part.tolist() for part in partition.test] == [[0, 1, 3], [0, 3]]


def test_groups_of_dirichlet_equal_draw_apart(monkeypatch):
    """Two groups with 200 examples of one label each: the same draws would give both the same sizes."""
    sizes = []

    def noted(*arguments):
        parts = dirichlet.dealt(*arguments)
        sizes.append(sorted(map(len, parts)))
        return parts

    monkeypatch.setattr(dirichlet_equal, "dealt", noted)
    dirichlet_equal.split(dirichlet_equal.Params(clients=20, beta=100.0), toy([0] * 400), 0)
    assert len(sizes) == 2
    assert sizes[0] != sizes[1]


def test_names_of_natural_clients_are_those_of_their_users():
    task = replace(users_task(), user_names=("ann", "bob", "cid", "dan"))
    for seed in range(5):
        partition = natural.split(natural.Params(clients=2), task, seed)
        owners = [task.user_names[int(task.train.users[part[0]])] for part in partition.train]
        assert list(partition.names) == owners
