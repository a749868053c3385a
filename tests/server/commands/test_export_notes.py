"""Tests of what an exported file says of its inputs."""

import json

import numpy as np
import torch

from fedcross.server.commands.export_notes import notes
from fedcross.tasks.base import Examples, Task
from fedcross.tasks.reading.params import Normalise, token_ids

NOTHING = Examples(np.zeros((0, 2), np.float32), np.zeros(0, np.int64))


def task(prepare, shape, **more):
    return Task("mine", NOTHING, NOTHING, 2, shape, prepare, **more)


def test_numbers_can_be_prepared_from_the_notes_alone():
    prepare = Normalise((10.0, 3.0), (2.0, 4.0), 255.0)
    found = notes(task(prepare, (2,), label_names=("barley", "wheat"), feature_names=("height", "wet")))
    raw = np.array([[510.0, 0.0], [1.0, 255.0]])
    mean, std = (np.array(json.loads(found[name])) for name in ("mean", "std"))
    own = (raw / json.loads(found["scale"]) - mean) / std
    torch.testing.assert_close(torch.from_numpy(own).float(), prepare(raw), rtol=1e-6, atol=1e-6)
    assert found["inputs"] == "float32"
    assert json.loads(found["shape"]) == [2]
    assert json.loads(found["classes"]) == ["barley", "wheat"]
    assert json.loads(found["features"]) == ["height", "wet"]


def test_texts_say_how_many_token_ids_there_are():
    found = notes(task(token_ids, (5,), vocabulary=12))
    assert (found["inputs"], found["vocabulary"], found["number_of_classes"]) == ("int64", "12", "2")
    assert "mean" not in found
    assert "classes" not in found


def test_a_preparation_that_is_not_known_is_not_described():
    assert notes(task(torch.from_numpy, (2,))).keys() == {"task", "shape", "number_of_classes"}
