"""The FedCross authors' client sets: their procedure written down once more, plainly, and their published sizes."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedcross.core.errors import DataError
from fedcross.tasks.partition import dirichlet
from tests.tasks.test_partition import toy

ROOT = Path(os.environ.get("FEDCROSS_DATA", ""))

#: Smallest, median and largest client of their lists for CIFAR-10 and 100 clients (files of repository FedMut).
PUBLISHED = {0.1: (15, 357.5, 2848), 0.5: (125, 510.5, 1007), 1.0: (230, 508.5, 735)}


def plainly(labels: list[int], classes: int, clients: int, beta: float, smallest: int) -> list[set[int]]:
    """Return the sets by the steps of the procedure, one example and one client at a time."""
    numpy = np.random.RandomState(1)
    while True:
        sets: list[list[int]] = [[] for _ in range(clients)]
        for label in range(classes):
            own = np.array([i for i, y in enumerate(labels) if y == label])
            numpy.shuffle(own)
            p = numpy.dirichlet(np.repeat(beta, clients))
            p = np.array([0.0 if len(sets[j]) >= len(labels) / clients else p[j] for j in range(clients)])
            p = p / p.sum()
            ends = [int(share) for share in np.cumsum(p) * len(own)]
            ends[-1] = len(own)
            begin = 0
            for j in range(clients):
                sets[j] += [int(i) for i in own[begin : ends[j]]]
                begin = ends[j]
        if min(len(s) for s in sets) >= smallest:
            return [set(s) for s in sets]


@pytest.mark.parametrize(("beta", "clients", "smallest"), [(0.1, 20, 3), (0.5, 20, 10), (1.0, 7, 10)])
def test_it_is_the_authors_procedure(beta, clients, smallest):
    labels = np.random.default_rng(5).integers(0, 10, 2000).tolist()
    params = dirichlet.Params(clients=clients, beta=beta, min_size=smallest, sampler="authors")
    for seed in (1, 2):  # the run's seed changes nothing
        found = [set(part.tolist()) for part in dirichlet.split(params, toy(labels), seed).train]
        assert found == plainly(labels, 10, clients, beta, smallest)


def test_every_draw_continues_the_same_generator():
    # Were it made anew for each draw, every draw would be the first one and none could be accepted later.
    task = toy(np.arange(400) % 10)
    own = {"clients": 10, "beta": 0.1, "min_size": 10, "sampler": "authors"}
    found = dirichlet.split(dirichlet.Params(**own, max_draws=2), task, 1).train
    assert [set(part.tolist()) for part in found] == plainly((np.arange(400) % 10).tolist(), 10, 10, 0.1, 10)
    with pytest.raises(DataError, match="1 draws with"):
        dirichlet.split(dirichlet.Params(**own, max_draws=1), task, 1)


@pytest.mark.data
@pytest.mark.skipif("FEDCROSS_DATA" not in os.environ, reason="FEDCROSS_DATA does not name the folder of real data")
@pytest.mark.parametrize("beta", PUBLISHED)
def test_cifar10_gives_their_published_sizes(beta, tmp_path, monkeypatch):
    from fedcross.tasks import cifar10

    monkeypatch.setenv("FEDCROSS_CACHE", str(tmp_path))
    task = cifar10.load(cifar10.Params(root=ROOT))
    params = dirichlet.Params(clients=100, beta=beta, sampler="authors")
    parts = dirichlet.split(params, task, 1).train
    sizes = [len(part) for part in parts]
    assert (min(sizes), float(np.median(sizes)), max(sizes)) == PUBLISHED[beta]
    assert sorted(np.concatenate(parts).tolist()) == list(range(50000))
