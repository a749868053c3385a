import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcross.tasks.models import counted_random
from fedcross.tasks.models.counted_random import GOLDEN, categorical, mix, normal, uniform

KEY = torch.tensor(12345)


def test_mixing_is_splitmix64():
    # The generator's published test vector: seed 1234567, first three outputs.
    index = torch.arange(1, 4)
    outputs = mix(torch.tensor(1234567) + index * GOLDEN)
    assert [int(z) % 2**64 for z in outputs] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_uniform_numbers_are_uniform():
    u = uniform(KEY, 0, 0, (50_000,), torch.float32)
    assert 0 <= float(u.min()) < 1e-3
    assert 0.999 < float(u.max()) < 1
    assert abs(float(u.double().mean()) - 0.5) < 4 * (1 / 12 / 50_000) ** 0.5


def test_normal_numbers_have_mean_0_and_variance_1():
    z = normal(KEY, 0, 0, (200, 250), torch.float64)
    assert abs(float(z.mean())) < 4 / 50_000**0.5
    assert abs(float(z.var()) - 1) < 4 * (2 / 50_000) ** 0.5


@pytest.mark.slow
@given(st.integers(0, 10**6), st.integers(0, 5))
def test_steps_and_purposes_are_streams_of_their_own(step, purpose):
    here = uniform(KEY, step, purpose, (8,), torch.float64)
    assert torch.equal(here, uniform(KEY, step, purpose, (8,), torch.float64))
    assert not torch.equal(here, uniform(KEY, step + 1, purpose, (8,), torch.float64))
    assert not torch.equal(here, uniform(KEY, step, purpose + 1, (8,), torch.float64))
    assert not torch.equal(here, uniform(KEY + 1, step, purpose, (8,), torch.float64))


def test_leading_rows_do_not_depend_on_the_rows_that_follow():
    assert torch.equal(normal(KEY, 3, 1, (2, 5), torch.float32), normal(KEY, 3, 1, (7, 5), torch.float32)[:2])


@pytest.mark.slow
@given(st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=2, max_size=6).filter(any))
def test_a_weight_of_0_is_never_drawn(weights):
    drawn = categorical(KEY, 0, 0, 200, torch.tensor(weights))
    assert {int(i) for i in drawn} <= {i for i, w in enumerate(weights) if w}


def test_indices_come_in_proportion_to_their_weights():
    drawn = categorical(KEY, 0, 0, 40_000, torch.tensor([1.0, 0.0, 3.0]))
    assert abs(float((drawn == 2).double().mean()) - 0.75) < 4 * (0.75 * 0.25 / 40_000) ** 0.5


def test_under_vmap_every_client_draws_what_it_draws_alone():
    keys = torch.tensor([1, 2, 3])
    weights = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]])
    together = torch.func.vmap(lambda k: normal(k, 5, 0, (4, 3), torch.float64))(keys)
    labels = torch.func.vmap(lambda k, w: categorical(k, 5, 1, 9, w))(keys, weights)
    for i, key in enumerate(keys):
        assert torch.equal(together[i], normal(key, 5, 0, (4, 3), torch.float64))
        assert torch.equal(labels[i], categorical(key, 5, 1, 9, weights[i]))


def test_the_least_number_draws_the_first_index_that_has_a_weight(monkeypatch):
    """0 lies on the bound of an index of weight 0, which is empty."""
    monkeypatch.setattr(counted_random, "uniform", lambda *arguments: torch.zeros(arguments[3], dtype=arguments[4]))
    assert categorical(KEY, 0, 0, 1, torch.tensor([0.0, 0.0, 2.0, 1.0])).tolist() == [2]
