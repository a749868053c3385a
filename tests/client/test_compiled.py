"""A compiled step computes what a called one does."""

from __future__ import annotations

import pytest
import torch

from fedcross.client.batched.stack import slopes_of
from fedcross.client.batched.trainer import train_batched
from fedcross.client.trainer import Compiled, is_compiled, loss_of, train
from fedcross.conf.schema import load
from tests.support.visits import CPU, enter, settings, small_net, visit, work


@pytest.fixture(autouse=True)
def _fresh():
    """Forget what was compiled: dynamo compiles one function at most eight times in a process."""
    torch.compiler.reset()


#: A plain loss, a term in the gradient, a second pass, distillation.
METHODS = ("fedprox", "fedsam", "fedntd")


@pytest.mark.slow
@pytest.mark.parametrize(("method", "norm"), [*((name, False) for name in METHODS), ("fedavg", True)])
def test_one_client(method, norm):
    net, given = small_net(norm=norm), settings()
    objective = load([f"method={method}", "task=digits"]).new_objective()
    one = visit(net, 0, 10)
    prepared = work(net, objective, one).prepared
    enter(net, one)
    called = train(net, objective, one, prepared, given).flat.clone()
    enter(net, one)
    compiled = Compiled(loss_of(net, objective), CPU, backend="aot_eager")
    found = train(net, objective, one, prepared, given, compiled=compiled).flat
    assert not compiled.refused
    assert torch.allclose(called, found, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "fedsam"])
def test_clients_of_unequal_sizes(method):
    net, given = small_net(), settings()
    objective = load([f"method={method}", "task=digits"]).new_objective()
    works = [work(net, objective, visit(net, client, n)) for client, n in ((0, 10), (1, 7), (2, 3))]
    called = train_batched(net, objective, works, given)
    compiled = Compiled(slopes_of(net, objective, padded=True), CPU, backend="aot_eager")
    found = train_batched(net, objective, works, given, compiled=compiled)
    assert not compiled.refused
    for one, other in zip(called, found):
        assert torch.allclose(one.flat, other.flat, atol=1e-10)
        assert one.steps == other.steps
        assert one.loss == pytest.approx(other.loss)


@pytest.mark.slow
def test_what_cannot_be_compiled_is_called():
    compiled = Compiled(lambda x: 2 * x if x.sum() > 0 else x, CPU, backend="aot_eager")
    assert [compiled(torch.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2
    assert compiled.refused
    assert "\n" not in compiled.refused


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("too small"), RuntimeError("CUDA error: illegal access")])
def test_an_error_of_the_device_is_none_of_the_compiler(error):
    def broken(graph, inputs):
        def call(*args):
            raise error

        return call

    compiled = Compiled(lambda x: 2 * x, CPU, backend=broken)
    with pytest.raises(type(error)):
        compiled(torch.ones(2))
    assert not compiled.refused


def test_auto_does_not_compile_on_a_cpu():
    assert not is_compiled("auto", CPU, 1000)
    assert is_compiled(choice=True, device=CPU, rounds=1)
