"""How many plain steps a number of steps with momentum is worth."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedcross.strategies.parts.momentum import effective_steps


def test_effective_steps_by_hand():
    """Two steps, momentum .5: the first gradient moves the model by 1 + .5, the second by 1; together 2.5."""
    assert effective_steps(2, 0.5) == pytest.approx(2.5)
    assert effective_steps(7, 0.0) == 7


@given(st.integers(1, 60), st.floats(0, 0.95))
def test_effective_steps_is_the_way_of_a_constant_gradient(steps, momentum):
    way = speed = 0.0
    for _ in range(steps):
        speed = momentum * speed + 1
        way += speed
    assert effective_steps(steps, momentum) == pytest.approx(way, rel=1e-9)
