"""When the pool of an asynchronous method is measured."""

import pytest

from tests.strategies.test_fedcross_async import begun


@pytest.mark.parametrize(("every", "due"), [(0, []), (1, [1, 2, 3, 4]), (2, [2, 4])])
def test_the_pool_is_measured_where_due_and_the_versions_always(every, due):
    """Models 3 and -1 point in opposite ways and lie 2 from their mean 1; their slots have had 3 uploads and 1."""
    method = begun(2, diagnostics_every=every)
    method.pool.rows[:] = [[3], [-1]]
    method.versions = [3, 1]
    found = {number: method.measure(number) for number in range(1, 5)}
    assert {one["version_spread"] for one in found.values()} == {2.0}
    assert [number for number, one in found.items() if len(one) > 1] == due
    for number in due:
        assert found[number]["pool_similarity_mean"] == pytest.approx(-1)
        assert found[number]["pool_spread"] == pytest.approx(2)
