"""The optimisers against torch.optim, and the methods that refuse them."""

from __future__ import annotations

import pytest
import torch

from fedcross.client.batched.trainer import train_batched
from fedcross.client.cache import RunCache
from fedcross.client.request import examples, one_thread
from fedcross.client.trainer import Moments, batches, step, train
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.core.randomness import stream
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Objective, as_arrays
from fedcross.strategies.parts.averaging import weighted_mean
from tests.support.federation import SMALL, run, same, session
from tests.support.visits import enter, settings, small_net, visit, work


@pytest.mark.parametrize(("name", "theirs"), [("adam", torch.optim.Adam), ("adamw", torch.optim.AdamW)])
def test_ten_rounds_of_averaging_equal_those_of_torch(name, theirs):
    given = settings(optimizer=name, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-7)
    draw = torch.Generator().manual_seed(1)
    ours = torch.randn(30, generator=draw, dtype=torch.float64)
    reference = ours.clone()
    for _ in range(10):
        grown, expected = [], []
        for _ in range(3):
            gradients = torch.randn(5, 30, generator=draw, dtype=torch.float64)
            flat, moments = ours.clone(), Moments.of(ours, given)
            parameter = torch.nn.Parameter(reference.clone())
            other = theirs([parameter], lr=0.01, betas=(0.8, 0.99), eps=1e-7, weight_decay=0.1)
            for number, gradient in enumerate(gradients):
                step(flat, gradient.clone(), moments, 0.01, given, number)
                parameter.grad = gradient
                other.step()
            grown.append(flat)
            expected.append(parameter.detach())
        ours, reference = torch.stack(grown).mean(0), torch.stack(expected).mean(0)
    assert (ours - reference).abs().max() < 1e-6


ADAMW = ("method=fedavg", "train.optimizer=adamw", "train.lr=0.01", "train.weight_decay=0.1", "train.epochs=2")


@pytest.mark.slow
def test_a_run_equals_a_loop_with_torchs_adamw_to_the_bit(tmp_path):
    """Ten rounds at torch's own eps, which divides a small gradient by a number like it."""
    ready = session(tmp_path, *ADAMW, "rounds=10")
    reference = {name: array.copy() for name, array in ready.driver.global_model().items()}
    ready.execute()
    cache = RunCache(load([*SMALL, *ADAMW, "rounds=10"]))
    with one_thread(cache.device):
        for number in range(1, 11):
            models, sizes = [], []
            for client in stream(1, "sample", number).choice(6, size=3, replace=False).tolist():
                inputs, y = examples(cache, cache.net, client, number)
                module = cache.config.network(cache.data.task)[0]
                module.load_state_dict({name: torch.from_numpy(array) for name, array in reference.items()})
                other = torch.optim.AdamW(module.parameters(), lr=0.01, weight_decay=0.1)
                one = visit(cache.net, client, len(y), inputs=inputs, y=y, round=number, seed=1)
                for x, labels, _ in batches(one, 2, 16):
                    other.zero_grad()
                    torch.nn.functional.cross_entropy(module(x), labels).backward()
                    other.step()
                models.append(as_arrays(module.state_dict()))
                sizes.append(len(y))
            reference = weighted_mean(models, sizes)
    assert same(ready.driver.global_model(), reference)


@pytest.mark.slow
def test_resuming_a_run_with_adamw_is_exact(tmp_path):
    whole = run(tmp_path / "whole", *ADAMW, "rounds=4").driver.global_model()
    run(tmp_path / "cut", *ADAMW, "rounds=2")
    again = run(tmp_path / "cut", *ADAMW, "rounds=4", f"resume={tmp_path / 'cut'}").driver.global_model()
    assert same(again, whole)


@pytest.mark.parametrize("name", ["adam", "adamw"])
def test_the_batched_trainer_takes_the_same_steps(name):
    net, objective, given = small_net(), Objective(Settings()), settings(optimizer=name, lr=0.01)
    visits = [visit(net, client, n) for client, n in ((0, 10), (1, 7))]
    together = train_batched(net, objective, [work(net, objective, one) for one in visits], given)
    for one, found in zip(visits, together):
        enter(net, one)
        alone = train(net, objective, one, {}, given)
        assert torch.allclose(alone.flat, found.flat, atol=1e-9)


@pytest.mark.parametrize("method", ["scaffold", "fednova", "feddyn"])
def test_methods_that_assume_sgd_say_so(method):
    with pytest.raises(ConfigError, match="assume SGD"):
        load([f"method={method}", "task=digits", "train.optimizer=adamw"])
