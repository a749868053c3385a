"""Random streams: the global generators are seeded inside a block and go on behind it."""

import random

import numpy as np
import torch

from fedcross.core.randomness import global_generators


def drawn():
    return random.random(), np.random.random(), float(torch.rand(()))  # noqa: NPY002


def test_the_global_generators_repeat_inside_and_go_on_behind():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    found = []
    for client in (1, 1, 2):
        with global_generators(3, "foreign", client):
            found.append(drawn())
    assert found[0] == found[1]
    assert all(one != other for one, other in zip(found[0], found[2], strict=True))
    after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    assert before[:2] == after[:2]
    assert torch.equal(before[2], after[2])
