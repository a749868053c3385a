"""Layout: where each entry lies, views without copies, checked writes."""

import numpy as np
import pytest

from fedcross.core.errors import ConfigError, UploadError
from fedcross.strategies.pool.pool import Layout


def empty(layout):
    """Return a float row and an integer row for a model of this layout."""
    return np.empty(layout.size, layout.dtype), np.empty(layout.integer_size, np.int64)


def model(scale=1.0, dtype=np.float32):
    """A linear layer after a batch normalisation, in state_dict order."""
    return {
        "norm.weight": np.array([1, 2], dtype) * dtype(scale),
        "norm.running_mean": np.array([3, 4], dtype) * dtype(scale),
        "norm.num_batches_tracked": np.array(7, np.int64),
        "head.weight": np.array([[5, 6]], dtype) * dtype(scale),
    }


PARAMETERS = ["head.weight", "norm.weight"]


def test_parameters_come_first_then_buffers_and_integers_lie_apart():
    layout = Layout.of(model(), PARAMETERS)
    row, integers = empty(layout)
    layout.write(model(), row, integers)
    assert row.tolist() == [1, 2, 5, 6, 3, 4]  # norm.weight, head.weight | running_mean
    assert integers.tolist() == [7]
    assert (layout.size, layout.parameter_size, layout.integer_size) == (6, 4, 1)
    assert layout.dtype == np.float32
    assert [entry.is_parameter for entry in layout.entries] == [True, False, False, True]
    assert layout.columns("parameters") == slice(0, 4)
    assert layout.columns("state") == slice(0, 6)


def test_views_are_the_row_itself_in_state_dict_order():
    layout = Layout.of(model(), PARAMETERS)
    row, integers = empty(layout)
    layout.write(model(), row, integers)
    views = layout.views(row, integers)
    assert list(views) == list(layout.names) == list(model())
    for name, array in model().items():
        np.testing.assert_array_equal(views[name], array)
        assert (views[name].shape, str(views[name].dtype)) == (array.shape, str(array.dtype)) == layout.spec[name]
    views["head.weight"][0, 1] = 60
    views["norm.num_batches_tracked"][...] = 70
    assert (row[3], integers[0]) == (60, 70)


def test_without_names_every_float_entry_is_a_parameter():
    layout = Layout.of(model(dtype=np.float64))
    assert layout.parameter_size == layout.size == 6
    assert layout.dtype == np.float64
    row, integers = empty(layout)
    layout.write(model(dtype=np.float64), row, integers)
    assert row.tolist() == [1, 2, 3, 4, 5, 6]


def test_narrow_integers_and_booleans_keep_their_dtype():
    arrays = {"w": np.ones(1, np.float32), "mask": np.array([True, False]), "n": np.array([-3], np.int32)}
    layout = Layout.of(arrays)
    row, integers = empty(layout)
    layout.write(arrays, row, integers)
    views = layout.views(row, integers)
    assert integers.tolist() == [1, 0, -3]
    for name, array in arrays.items():
        assert views[name].dtype == array.dtype
        np.testing.assert_array_equal(views[name], array)


def test_all_faults_of_a_model_are_reported_at_once():
    arrays = {"a": np.ones(1, np.float32), "b": np.ones(1, np.float64), "c": np.ones(1, np.complex64)}
    with pytest.raises(ConfigError) as error:
        Layout.of(arrays, ["a", "no_such"])
    text = "\n".join(error.value.faults)
    assert len(error.value.faults) == 3
    assert "'c' has dtype complex64" in text
    assert "mixes float dtypes: float32 ('a'), float64 ('b')" in text
    assert "'no_such'" in text
    with pytest.raises(ConfigError, match="no float entry"):
        Layout.of({"n": np.array(1)})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.pop("head.weight"), "wrong_names"),
        (lambda m: m.update(extra=np.ones(1)), "wrong_names"),
        (lambda m: m.update({"head.weight": np.ones((2, 1), np.float32)}), "wrong_shape"),
        (lambda m: m.update({"head.weight": np.ones((1, 2), np.float64)}), "wrong_dtype"),
    ],
)
def test_a_write_that_does_not_fit_changes_nothing(change, reason):
    layout = Layout.of(model(), PARAMETERS)
    row, integers = np.zeros(6, np.float32), np.zeros(1, np.int64)
    wrong = model()
    change(wrong)
    with pytest.raises(UploadError) as error:
        layout.write(wrong, row, integers)
    assert error.value.reason == reason
    assert not row.any()
    assert not integers.any()


def test_a_write_matches_by_name_not_by_position():
    layout = Layout.of(model(), PARAMETERS)
    row, integers = empty(layout)
    layout.write(dict(reversed(model().items())), row, integers)
    assert row.tolist() == [1, 2, 5, 6, 3, 4]
