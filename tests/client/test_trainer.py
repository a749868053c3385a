from dataclasses import replace

import numpy as np
import torch
from torch import nn

from fedcross.client.flat_model import ModuleNet
from fedcross.client.request import one_thread
from fedcross.client.trainer import Moments, augmentation_stream, batches, later, step, train
from fedcross.conf.schema import Train
from fedcross.core.settings import Settings
from fedcross.strategies.objective import Objective, Visit
from fedcross.tasks.inputs import Inputs


class Line(nn.Module):
    """Two logits from one input, weights zero at first."""

    def __init__(self):
        super().__init__()
        self.features = nn.Identity()
        self.classifier = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(self.classifier.weight)

    def forward(self, x):
        return self.classifier(self.features(x))


def visit_of(net, x, y, lr=0.5, momentum=None):
    return Visit(
        net=net,
        params={n: p.detach().clone() for n, p in net.params.items()},
        buffers={},
        extras={},
        config={},
        state={},
        inputs=Inputs(x),
        y=y,
        client=0,
        round=1,
        rounds=1,
        seed=0,
        classes=2,
        lr=lr,
        momentum=momentum,
    )


def test_two_steps_with_momentum_and_weight_decay_by_hand():
    # One example x = 1, y = 0; logits w0, w1. dL/dw0 = p0 - 1, dL/dw1 = p1.
    # Step 1: w = 0, p = (.5, .5), g = (-.5, .5), decay adds 0; m = g; w = -.5 g = (.25, -.25).
    # Step 2: p0 = 1/(1 + e^-.5) = .62246; g = (-.37754, .37754) + .1 (.25, -.25) = (-.35254, .35254);
    #   m = .9 (-.5, .5) + g = (-.80254, .80254); w = (.25, -.25) - .5 m = (.65127, -.65127).
    net = ModuleNet(Line(), torch.device("cpu"))
    x, y = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    settings = Train(lr=0.5, momentum=0.9, weight_decay=0.1, epochs=2, batch=1)
    trained = train(net, Objective(Settings()), visit_of(net, x, y), {}, settings)
    assert trained.steps == 2
    np.testing.assert_allclose(trained.flat.numpy(), [0.65127, -0.65127], atol=1e-5)
    np.testing.assert_allclose(trained.momentum.numpy(), [-0.80254, 0.80254], atol=1e-5)
    # mean loss: (ln 2 + ln(1 + e^-.5)) / 2
    np.testing.assert_allclose(trained.loss, (np.log(2) + np.log1p(np.exp(-0.5))) / 2, rtol=1e-6)


def test_the_loss_is_the_mean_over_examples_also_of_a_short_last_batch_and_of_none():
    net, settings = ModuleNet(Line(), torch.device("cpu")), Train(lr=0.5, epochs=1, batch=2)
    for n, loss in ((3, np.log(2)), (1, np.log(2)), (0, 0)):
        x, y = torch.ones(n, 1), torch.zeros(n, dtype=torch.int64)
        trained = train(net, Objective(Settings()), visit_of(net, x, y, lr=0.0), {}, settings)
        assert trained.steps == n - n // 2
        np.testing.assert_allclose(trained.loss, loss, rtol=1e-6)


def test_a_rounds_first_exchange_has_the_streams_of_a_round_with_one():
    net = ModuleNet(Line(), torch.device("cpu"))
    visit = visit_of(net, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
    assert later(visit) == ()
    visit.exchange = 2
    assert later(visit) == (2,)


def test_a_long_gradient_is_shortened_with_the_methods_term_before_decay_and_momentum():
    # As above, g = (-.5, .5) of norm .70711; the term (-2.5, 3.5) makes it (-3, 4) of norm 5; clip 1: (-.6, .8).
    # w = 0, so decay adds nothing; w = -.5 (-.6, .8) = (.3, -.4).
    class Pushed(Objective):
        def gradient(self, flat, prepared):
            return torch.tensor([-2.5, 3.5])

    net = ModuleNet(Line(), torch.device("cpu"))
    x, y = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    settings = Train(lr=0.5, momentum=0.9, weight_decay=0.1, clip=1.0, epochs=1, batch=1)
    trained = train(net, Pushed(Settings()), visit_of(net, x, y), {}, settings)
    np.testing.assert_allclose(trained.flat.numpy(), [0.3, -0.4], atol=1e-6)


def test_a_short_gradient_stays_to_the_bit():
    results = []
    for clip in (None, 100.0):
        net = ModuleNet(Line(), torch.device("cpu"))
        x, y = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
        settings = Train(lr=0.5, momentum=0.9, weight_decay=0.1, clip=clip, epochs=3, batch=1)
        results.append(train(net, Objective(Settings()), visit_of(net, x, y), {}, settings).flat.numpy().tobytes())
    assert results[0] == results[1]


def test_the_steps_are_those_of_torch_sgd():
    torch.manual_seed(0)
    model = nn.Sequential()
    model.features, model.classifier = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)
    net = ModuleNet(model, torch.device("cpu"))
    x, y = torch.randn(23, 4), torch.randint(0, 3, (23,))
    settings = Train(lr=0.1, momentum=0.5, weight_decay=0.01, epochs=3, batch=10)

    twin = nn.Sequential()
    twin.features, twin.classifier = nn.Sequential(nn.Linear(4, 5), nn.Tanh()), nn.Linear(5, 3)
    twin.load_state_dict(model.state_dict())
    optimiser = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.5, weight_decay=0.01)
    for inputs, labels, _ in batches(visit_of(net, x, y), 3, 10):
        optimiser.zero_grad()
        nn.functional.cross_entropy(twin(inputs), labels).backward()
        optimiser.step()

    train(net, Objective(Settings()), visit_of(net, x, y, lr=0.1), {}, settings)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(net.params[name].detach(), value, rtol=1e-5, atol=1e-6)


def test_a_step_of_many_models_is_the_step_of_each():
    # Model 0: g = (3, 4) + (0, 0) of norm 5, clip 1: (.6, .8); w = 0, m = g; w = -.5 (.6, .8).
    # Model 1: g = (0, .5) + (0, .1), short; decay adds .1 (1, 1): (.1, .7); m = .9 (1, 0) + g = (1, .7); w -= .1 m.
    settings = Train(lr=0.5, momentum=0.9, weight_decay=0.1, clip=1.0, epochs=1, batch=1)
    flat, momentum = torch.tensor([[0.0, 0.0], [1.0, 1.0]]), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    none = torch.zeros(2, 0)
    gradient, term = torch.tensor([[3.0, 4.0], [0.0, 0.5]]), torch.tensor([[0.0, 0.0], [0.0, 0.1]])
    alone = [(flat[i].clone(), gradient[i].clone(), momentum[i].clone()) for i in (0, 1)]
    step(flat, gradient, Moments(momentum, none), torch.tensor([[0.5], [0.1]]), settings, 0, term)
    np.testing.assert_allclose(flat, [[-0.3, -0.4], [0.9, 0.93]], atol=1e-6)
    np.testing.assert_allclose(momentum, [[0.6, 0.8], [1.0, 0.7]], atol=1e-6)
    for i, (own, slope, kept) in enumerate(alone):
        step(own, slope, Moments(kept, none[i]), (0.5, 0.1)[i], settings, 0, term[i])
        torch.testing.assert_close(own, flat[i])
        torch.testing.assert_close(kept, momentum[i])


def test_the_rate_of_a_model_on_a_gpu_is_a_tensor_and_changes_no_bit():
    settings = Train(lr=0.1, epochs=1, batch=1)
    one, other = torch.randn(50), torch.randn(50)
    found = []
    for lr in (0.1, torch.tensor(0.1)):
        flat = one.clone()
        step(flat, other.clone(), Moments(torch.zeros(50), torch.zeros(0)), lr, settings)
        found.append(flat)
    assert torch.equal(*found)


def test_the_objective_sets_the_rate_of_each_of_the_planned_steps():
    # As in the first test g = (-.5, .5); rates .5 * .5 and 0: w = -.25 g. Seven examples are three batches an epoch.
    seen = []

    class Slowing(Objective):
        def rate(self, number, steps):
            seen.append((number, steps))
            return 0.5 if number == 0 else 0.0

    for n, batch, steps in ((1, 1, 2), (7, 3, 6)):
        net = ModuleNet(Line(), torch.device("cpu"))
        x, y = torch.ones(n, 1), torch.zeros(n, dtype=torch.int64)
        trained = train(net, Slowing(Settings()), visit_of(net, x, y), {}, Train(lr=0.5, epochs=2, batch=batch))
        np.testing.assert_allclose(trained.flat.numpy(), [0.125, -0.125], atol=1e-6)
        assert seen == [(number, steps) for number in range(steps)]
        seen.clear()


def test_every_batch_is_augmented_with_the_visits_own_stream():
    # The input 0 has no gradient; as 1 it has (-.5, .5), and w = -.5 g.
    drawn = []

    def augment(x, generator):
        drawn.append(torch.rand(2, generator=generator))
        return x + 1

    net = ModuleNet(Line(), torch.device("cpu"))
    visit = visit_of(net, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    trained = train(net, Objective(Settings()), visit, {}, Train(lr=0.5, epochs=1, batch=1), augment)
    np.testing.assert_allclose(trained.flat.numpy(), [0.25, -0.25], atol=1e-6)
    assert [one.tolist() for one in drawn] == [torch.rand(2, generator=augmentation_stream(visit)).tolist()]


def test_an_objective_that_takes_the_gradient_elsewhere_by_hand():
    # w = 0, elsewhere w = (ln 3, 0): p = (.75, .25), g = (-.25, .25), w = -.5 g. Without a way: g = (-.5, .5) at 0.
    class Elsewhere(Objective):
        way = torch.tensor([np.log(3.0), 0.0], dtype=torch.float32)

        def ascent(self, flat, gradient, prepared):
            return self.way

    for way, expected in ((Elsewhere.way, 0.125), (None, 0.25)):
        net, objective = ModuleNet(Line(), torch.device("cpu")), Elsewhere(Settings())
        objective.way = way
        visit = visit_of(net, torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))
        trained = train(net, objective, visit, {}, Train(lr=0.5, epochs=1, batch=1))
        np.testing.assert_allclose(trained.flat.numpy(), [expected, -expected], atol=1e-6)


def test_a_short_last_batch_is_kept_and_every_example_is_seen_once_an_epoch():
    net = ModuleNet(Line(), torch.device("cpu"))
    x, y = torch.arange(7.0).reshape(7, 1), torch.zeros(7, dtype=torch.int64)
    sizes = [len(labels) for _, labels, _ in batches(visit_of(net, x, y), 2, 3)]
    assert sizes == [3, 3, 1, 3, 3, 1]
    seen = torch.cat([inputs for inputs, _, _ in batches(visit_of(net, x, y), 1, 3)]).ravel()
    assert sorted(seen.tolist()) == list(range(7))


def test_the_order_depends_on_seed_round_client_and_epoch_only():
    net = ModuleNet(Line(), torch.device("cpu"))
    x, y = torch.arange(50.0).reshape(50, 1), torch.zeros(50, dtype=torch.int64)

    def order(**changes):
        visit = visit_of(net, x, y)
        for name, value in changes.items():
            setattr(visit, name, value)
        return torch.cat([inputs for inputs, _, _ in batches(visit, 1, 50)]).ravel().tolist()

    assert order() == order()
    assert order() != order(round=2)
    assert order() != order(client=1)
    assert order() != order(seed=1)
    first, second = [inputs.ravel().tolist() for inputs, _, _ in batches(visit_of(net, x, y), 2, 50)]
    assert first == order() != second


def test_momentum_can_be_carried_over():
    net = ModuleNet(Line(), torch.device("cpu"))
    x, y = torch.ones(1, 1), torch.zeros(1, dtype=torch.int64)
    settings = Train(lr=0.5, momentum=0.9, epochs=1, batch=1)
    start = torch.tensor([1.0, -1.0])
    # m = .9 (1, -1) + (-.5, .5) = (.4, -.4); w = -.5 m.
    trained = train(net, Objective(Settings()), visit_of(net, x, y, momentum=start), {}, settings)
    np.testing.assert_allclose(trained.flat.numpy(), [-0.2, 0.2], atol=1e-7)
    assert start.tolist() == [1.0, -1.0]


def test_threads_are_put_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread(torch.device("cpu")):
            assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_augmentation_is_drawn_anew_for_every_visit():
    net = ModuleNet(Line(), torch.device("cpu"))
    one = visit_of(net, torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64))
    visits = [replace(one, **changes) for changes in ({}, {"exchange": 1}, {"round": 4}, {"client": 1}, {"seed": 2})]
    assert len({float(torch.rand(1, generator=augmentation_stream(visit))) for visit in visits}) == len(visits)
