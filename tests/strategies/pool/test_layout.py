"""Layout: where each entry lies, views without copies, odd models refused."""

import numpy as np
import pytest

from fedcross.core.errors import ConfigError
from fedcross.strategies.pool.pool import Layout, Pool

#: A linear layer after a batch normalisation, in state_dict order, and a mask.
MODEL = {
    "norm.weight": np.array([1, 2], np.float32),
    "norm.running_mean": np.array([3, 4], np.float32),
    "norm.num_batches_tracked": np.array(7, np.int64),
    "head.weight": np.array([[5, 6]], np.float32),
    "mask": np.array([True, False]),
}


def pool(model=MODEL, parameters=("head.weight", "norm.weight")):
    made = Pool(Layout.of(model, parameters), 1)
    made.write(0, dict(reversed(model.items())))  # by name, not by position
    return made


def test_parameters_come_first_then_buffers_and_integers_lie_apart():
    made = pool()
    layout = made.layout
    assert made.rows.tolist() == [[1, 2, 5, 6, 3, 4]]  # norm.weight, head.weight | running_mean
    assert made.integers.tolist() == [[7, 1, 0]]
    assert (layout.size, layout.parameter_size, layout.integer_size, layout.dtype) == (6, 4, 3, np.float32)
    assert [entry.is_parameter for entry in layout.entries] == [True, False, False, True, False]
    assert (layout.columns("parameters"), layout.columns("state")) == (slice(0, 4), slice(0, 6))


def test_views_are_the_row_itself_in_state_dict_order():
    made = pool()
    views = made.model(0)
    assert list(views) == list(MODEL)
    for name, array in MODEL.items():
        np.testing.assert_array_equal(views[name], array)
        assert (views[name].shape, views[name].dtype) == (array.shape, array.dtype)
    views["head.weight"][0, 1] = 60
    views["norm.num_batches_tracked"][...] = 70
    assert (made.rows[0, 3], made.integers[0, 0]) == (60, 70)


def test_without_names_every_float_entry_is_a_parameter():
    made = pool({"w": np.arange(3.0), "b": np.array(5.0)}, None)
    assert (made.layout.parameter_size, made.layout.size, made.layout.dtype) == (4, 4, np.float64)
    assert made.rows.tolist() == [[0, 1, 2, 5]]


def test_all_faults_of_a_model_are_reported_at_once():
    arrays = {"a": np.ones(1, np.float32), "b": np.ones(1, np.float64), "c": np.ones(1, np.complex64)}
    with pytest.raises(ConfigError) as error:
        Layout.of(arrays, ["a", "no_such"])
    text = "\n".join(error.value.faults)
    assert len(error.value.faults) == 3
    assert all(word in text for word in ("'c' has dtype complex64", "float64", "'no_such'"))
    with pytest.raises(ConfigError, match="float"):
        Layout.of({"n": np.array(1)})
