import pytest

from benchmarks.step import REST, row_of


@pytest.mark.parametrize(
    ("operation", "row"),
    [
        ("aten::convolution_backward", "convolutions, backward"),
        ("aten::convolution", "convolutions, forward"),
        ("aten::max_pool2d_with_indices", "max-pool, forward"),
        ("aten::max_pool2d_with_indices_backward", "max-pool, backward"),
        ("_Pool", "max-pool, forward"),
        ("_PoolBackward", "max-pool, backward"),
        ("aten::addmm", "fully connected layers"),
        ("Optimizer.step#SGD.step", REST),
    ],
)
def test_operations_are_counted_where_they_belong(operation, row):
    assert row_of(operation) == row
