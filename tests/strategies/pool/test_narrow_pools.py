"""Collaborators of narrow pools: float32 chooses what float64 chooses."""

import numpy as np
import pytest

from fedcross.strategies.pool.mixing import SELECTIONS, Question, cosine
from fedcross.strategies.pool.pool import Layout, Pool

K, D, DRAWS = 10, 62_006, 50


@pytest.mark.slow
@pytest.mark.parametrize("spread", [0.01, 0.003, 0.001])
def test_a_narrow_pool_has_the_collaborators_of_float64(spread):
    """A Gram matrix of the models themselves errs by 4e-6 in the cosine: five of six collaborators at .001."""
    pool = Pool(Layout.of({"w": np.zeros(D, np.float32)}), K)
    choose = SELECTIONS["lowest_similarity"]
    for seed in range(DRAWS):
        draw = np.random.default_rng(seed)
        centre = draw.normal(size=D)
        pool.rows[...] = centre + spread * draw.normal(size=(K, D))
        exact = pool.rows.astype(np.float64)
        expected = choose(Question(K, 1, 0, cosine(exact @ exact.T)))
        assert (choose(Question(K, 1, 0, cosine(pool.gram()))) == expected).all()
