"""HeteroFL: each client trains the widest slice that it can hold; means over the uploads that have a weight.

The masked loss: classes that a client lacks score 0 in its loss, and a class's row is the mean of those that have it.
"""

from __future__ import annotations

import copy
import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict
from safetensors.numpy import load_file

from fedcross.client import workshop
from fedcross.client.flat_model import ModuleNet
from fedcross.client.trainer import train
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.server.commands.export import export
from fedcross.server.slices import check_run
from fedcross.strategies.heterofl import HeteroFL, HeteroFLParams, Masked
from fedcross.strategies.parts.objective import Objective
from fedcross.strategies.wire.protocol import Payload, Round, Upload
from fedcross.strategies.wire.records import encode
from fedcross.tasks.models.slicing import FULL, Size, cut, plan_of
from fedcross.tasks.models.slicing.plan import Group, Plan, Segment
from tests.strategies.pool.test_sliced import PLAN, full
from tests.support.bench import TWO_STEPS, check_batched, open_visit, two_layers
from tests.support.federation import SMALL, run, same
from tests.support.slices import THREE

WIDTHS = [1.0, 0.66, 0.3]
RUN = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]")


def begun(kind=HeteroFL, budgets=(1.0, 0.66, 0.3), **values):
    method = kind(clients_per_round=len(budgets), **{"widths": WIDTHS, **values})
    method.plan, method.budgets = PLAN, dict(enumerate(budgets))
    method.begin(full(), {"in", "out", "bias"})
    return method


def upload(method, slot, start, count=0, examples=1):
    size = method._slots[slot]
    return Upload(slot, slot, PLAN.corner(full(start, count), size), {}, examples, {})


def test_everybody_gets_the_widest_slice_that_it_can_hold():
    method = begun(budgets=(0.5, 1.0, 0.66))
    payloads = method.dispatch(Round(1, 0, (0, 1, 2), 0))
    assert [payload.config for payload in payloads] == [{"width": 0.3}, {}, {"width": 0.66}]
    assert "clients_without_a_model" not in method.report.metrics
    assert method.global_model()["in"].shape == (3, 2)
    assert [payload.arrays["in"].shape for payload in payloads] == [(1, 2), (3, 2), (2, 2)]
    assert [method.upload_model(payload)["out"][0] for payload in payloads] == [(1, 1), (1, 3), (1, 2)]


def test_three_widths_aggregated_by_hand():
    """Starts 0 (wide), 20 (middle), 40 (narrow), plain means: unit 0: 20, unit 1: 10 + its number, unit 2: the wide."""
    method = begun()
    method.dispatch(Round(1, 0, (0, 1, 2), 0))
    sent = [(0, 0, 1, 100), (1, 20, 2, 1), (2, 40, 3, 1)]
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [upload(method, *one) for one in sent])
    assert method.model["in"].tolist() == [[20, 21], [12, 13], [4, 5]]
    assert method.model["out"].tolist() == [[30, 21, 12]]
    assert method.model["bias"].tolist() == [120]
    models = method.slice_models()
    assert [m["mean"].tolist() for m in models.values()] == [[0, 1, 2], [20, 21], [40]]
    assert [int(m["n"]) for m in models.values()] == [1, 2, 3]
    assert list(models) == [FULL, Size(0.66), Size(0.3)]
    assert models[Size(0.3)]["in"].tolist() == [[20, 21]]


def test_weights_that_no_upload_has_stay():
    method = begun()
    method.dispatch(Round(1, 0, (0, 1, 2), 0))
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [upload(method, 2, 40)])
    assert method.model["in"].tolist() == [[40, 41], [2, 3], [4, 5]]
    assert method.slice_models()[FULL]["mean"].tolist() == [0, 1, 2]
    before = {name: array.copy() for name, array in method.model.items()}
    method.aggregate(Round(2, 0, (0, 1, 2), 0), [])
    assert same(method.model, before)


def test_a_device_that_can_hold_no_width_is_not_asked():
    method = begun(budgets=(1.0, 0.2, 0.3))
    assert [payload.slot for payload in method.dispatch(Round(1, 0, (0, 1, 2), 0))] == [0, 2]
    assert method.report.metrics["clients_without_a_model"] == 1


def test_it_goes_on_from_a_checkpoint():
    one, other = begun(), begun()
    one.dispatch(Round(1, 0, (0, 1, 2), 0))
    one.aggregate(Round(1, 0, (0, 1, 2), 0), [upload(one, slot, 10 * slot, slot) for slot in range(3)])
    other.resume(one.checkpoint())
    assert all(same(a, b) for a, b in zip(one.slice_models().values(), other.slice_models().values()))


@pytest.mark.slow
def test_full_widths_are_fedavg_with_equal_weights(tmp_path):
    plain = (*THREE[:2], "train.lr=0.1")
    one = run(tmp_path / "heterofl", *plain, "method=heterofl", "method.widths=[1.0]", "method.masked=false")
    mean = run(tmp_path / "fedavg", *plain, "method=fedavg", "method.weighting=uniform")
    for name, array in mean.method.global_model().items():
        np.testing.assert_allclose(one.method.global_model()[name], array, rtol=1e-5, atol=1e-6)


#: Two hidden units, two classes, one input; a slice of width .5 has one hidden unit.
HEADED = Plan(
    (Group(2),),
    {"in": ((Segment(0, 1),), None), "classifier.weight": (None, (Segment(0, 1),))},
    {"in": (2, 1), "classifier.weight": (2, 2)},
)


def headed(**own):
    method = HeteroFL(clients_per_round=3, widths=[1.0, 0.5], **own)
    method.plan, method.budgets = HEADED, {0: 1.0, 1: 1.0, 2: 0.5}
    model = {"in": np.zeros((2, 1)), "classifier.weight": np.full((2, 2), 7.0), "classifier.bias": np.full(2, 7.0)}
    method.begin(model, set(model))
    method.dispatch(Round(1, 0, (0, 1, 2), 0))
    return method


def told(slot, value, width, held):
    arrays = {"in": np.full((width, 1), value), "classifier.weight": np.full((2, width), value)}
    arrays["classifier.bias"] = np.full(2, value)
    return Upload(slot, slot, arrays, {"labels": {"held": np.array(held, np.uint8)}}, 1, {})


def test_a_class_is_the_mean_of_the_clients_that_have_it_by_hand():
    """Client 0 has class 0, client 1 both, client 2 (half a model) class 0: class 0 of unit 0 is (1 + 2 + 6) / 3."""
    method = headed()
    sent = [told(0, 1.0, 2, [1, 0]), told(1, 2.0, 2, [1, 1]), told(2, 6.0, 1, [1, 0])]
    method.aggregate(Round(1, 0, (0, 1, 2), 0), sent)
    assert method.model["classifier.weight"].tolist() == [[3, 1.5], [2, 2]]
    assert method.model["classifier.bias"].tolist() == [3, 2]
    assert method.model["in"].tolist() == [[3], [1.5]]  # no layer of classes: every upload counts


def test_a_class_that_nobody_has_keeps_its_row():
    method = headed()
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [told(0, 1.0, 2, [1, 0]), told(2, 6.0, 1, [0, 0])])
    assert method.model["classifier.weight"].tolist() == [[1, 1], [7, 7]]
    assert method.model["classifier.bias"].tolist() == [1, 7]


def test_only_clients_with_a_masked_loss_are_asked_for_their_classes():
    (first, *_) = headed().dispatch(Round(1, 0, (0, 1, 2), 0))
    assert headed().upload_extras(first) == {"labels": {"held": ((2,), "uint8")}}
    assert headed(masked=False).upload_extras(first) == {}
    assert begun().upload_extras(Payload(0, 0, full())) == {}  # no layer called classifier


def test_one_masked_step_by_hand():
    """Scores 1, 2 and 5 of which the last class is absent: p = softmax(1, 2, 0); its row gets no gradient."""
    net = ModuleNet(two_layers(None, [[1.0], [2.0], [5.0]]), torch.device("cpu"))
    visit = open_visit(net, [[1.0], [1.0]], [0, 1], config={"held": True})
    objective = Masked(HeteroFLParams())
    prepared = objective.prepare(visit)
    trained = train(net, objective, visit, prepared, TWO_STEPS.model_copy(update={"epochs": 1}))
    p = np.exp([1.0, 2.0, 0.0]) / np.exp([1.0, 2.0, 0.0]).sum()
    expected = [1 - 0.5 * (p[0] - 0.5), 2 - 0.5 * (p[1] - 0.5), 5]
    assert net.read()["classifier.weight"][:, 0] == pytest.approx(expected, abs=1e-12)
    assert trained.loss == pytest.approx(-(np.log(p[0]) + np.log(p[1])) / 2)
    assert objective.finish(visit, trained, prepared).extras["labels"]["held"].tolist() == [1, 1, 0]
    scores = objective.predict(net, visit.params, {}, torch.ones(1, 1).double(), prepared)
    assert scores.tolist() == [[1, 2, 0]]  # local accuracy has the mask too


class NotLast(torch.nn.Module):
    """A hidden layer called classifier."""

    def __init__(self, hidden=40):
        super().__init__()
        self.first, self.classifier, self.out = (
            torch.nn.Linear(64, 16),
            torch.nn.Linear(16, hidden),
            torch.nn.Linear(hidden, 10),
        )

    def forward(self, x):
        return self.out(self.classifier(self.first(x.flatten(1)).relu()).relu())


class Pair(torch.nn.Module):
    """A classifier of two layers beside features."""

    def __init__(self):
        super().__init__()
        self.features = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 16), torch.nn.ReLU())
        layers = torch.nn.Linear(16, 12), torch.nn.ReLU(), torch.nn.Linear(12, 10)
        self.classifier, self.embedding = torch.nn.Sequential(*layers), 16

    def forward(self, x):
        return self.classifier(self.features(x))


class Unlike(torch.nn.Module):
    """Hidden layers that the scaler must leave alone: a weight of the network's own, a tied one, one with a tanh."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Parameter(torch.randn(8, 64) / 8)
        self.a, self.b = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
        self.b.weight = self.a.weight
        self.bent, self.plain, self.classifier = Bent(8, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 10)

    def forward(self, x):
        hidden = self.b(self.a(torch.nn.functional.linear(x.flatten(1), self.own)).relu())
        return self.classifier(self.plain(self.bent(hidden.relu())).relu())


class Reused(torch.nn.Module):
    """A layer's weight is used once more beside its own call."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.plain = torch.nn.Linear(64, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.classifier = torch.nn.Linear(8, 10)

    def forward(self, x):
        hidden = self.b(self.a(x.flatten(1)).relu()).relu()
        return self.classifier(self.plain(torch.nn.functional.linear(hidden, self.b.weight).relu()).relu())


class Transposed(torch.nn.Module):
    """Transposed convolutions, whose weights have the outputs on the second axis: hidden, and as the last layer."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.ConvTranspose2d(1, 6, 2, stride=2, bias=False)
        self.body, self.classifier = torch.nn.Conv2d(6, 8, 16), torch.nn.ConvTranspose2d(8, 10, 1)

    def forward(self, x):
        return self.classifier(self.body(self.first(x).relu()).relu()).flatten(1)


def test_the_scaler_divides_hidden_layers_alone_that_nobody_else_uses():
    for network, scaled in ((Reused(), ("a", "plain")), (Transposed(), ("first", "body")), (Unlike(), ("plain",))):
        assert plan_of(network, load(SMALL).load_data().task).scaled == scaled


class Bent(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x).tanh()


@pytest.mark.slow
@pytest.mark.parametrize("network", ["NotLast", "NotLast model.hidden=10", "Pair", "Unlike", "Reused", "Transposed"])
@pytest.mark.parametrize("widths", ["[1.0,0.66,0.4]", "[0.66,0.4]", "[1.0]"])
def test_networks_of_ones_own_train_and_export_what_they_evaluate(tmp_path, network, widths):
    model = f"model={__name__}:{network}".split()
    own = ["devices=equal"] if widths == "[1.0]" else []
    ready = run(tmp_path / "run", *THREE, *model, "method=heterofl", f"method.widths={widths}", *own)
    (line,) = [json.loads(line) for line in (ready.folder / "metrics.jsonl").read_text().splitlines()][-1:]
    assert not line["rejected"]
    assert line["clients"]
    shop = workshop.Workshop(ready.config)
    x, _ = shop.data.client(0, shop.device)
    for size, arrays in ready.method.slice_models().items():
        net, _ = shop.at(size)
        net.load(ready.method.client_models()[size])
        trained = net.logits(net.params, net.buffers, x[:8], train=False).detach()
        plain = ready.evaluator.network(size)
        plain.load_state_dict({n: torch.from_numpy(a) for n, a in arrays.items()}, strict=False)
        torch.testing.assert_close(plain(torch.as_tensor(x[:8])).detach(), trained, rtol=1e-5, atol=1e-6)


def test_a_network_without_a_classifier_sends_no_classes():
    net = ModuleNet(torch.nn.Sequential(torch.nn.Linear(1, 3)), torch.device("cpu"))
    objective = Masked(HeteroFLParams())
    visit = open_visit(net, [[1.0]], [0], classes=3)  # the server has not asked
    assert objective.finish(visit, None, objective.prepare(visit)).extras == {}


def test_each_client_of_a_batch_has_its_own_mask():
    check_batched(Masked(HeteroFLParams()), [{}, {}], real=1)
    check_batched(Masked(HeteroFLParams()), [{}, {}])


def test_masked_is_a_setting():
    assert type(HeteroFL.client_half(HeteroFLParams())) is Masked
    assert type(HeteroFL.client_half(HeteroFLParams(masked=False))) is Objective
    load([*SMALL, "method=heterofl", "method.masked=false", "privacy.enabled=true"])
    with pytest.raises(ConfigError, match="sends more than its model"):
        load([*SMALL, "method=heterofl", "privacy.enabled=true"])


@pytest.mark.slow
def test_where_all_clients_have_all_classes_the_mask_changes_no_bit(tmp_path):
    even = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]", "partition=iid")
    masked = run(tmp_path / "masked", *even)
    plain = run(tmp_path / "plain", *even, "method.masked=false")
    assert all(same(a, b) for a, b in zip(masked.method.slice_models().values(), plain.method.slice_models().values()))
    uneven = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]", "partition=dirichlet", "partition.beta=0.1")
    masked = run(tmp_path / "uneven", *uneven)
    plain = run(tmp_path / "uneven-plain", *uneven, "method.masked=false")
    assert not same(masked.method.global_model(), plain.method.global_model())


@pytest.mark.slow
def test_a_run_with_batch_normalisation_evaluates_every_width_and_resumes(tmp_path):
    whole = run(tmp_path / "whole", *RUN, "evaluate_every=3")
    run(tmp_path / "part", *RUN, "evaluate_every=3", "stop_at=2")
    resumed = run(tmp_path / "part", *RUN, "evaluate_every=3", f"resume={tmp_path / 'part'}")
    assert all(same(a, b) for a, b in zip(whole.method.slice_models().values(), resumed.method.slice_models().values()))
    lines = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert [list(line.get("width_accuracy", ())) for line in lines] == [[], [], ["1", "0.66", "0.4"]]


def test_the_scaler_is_on_unless_told_otherwise():
    def scores(*own):
        config = load([*SMALL, "method=heterofl", "method.widths=[1.0,0.5]", *own])
        shop = workshop.Workshop(config)
        net, _ = shop.at(Size(0.5))
        x, _ = shop.data.client(0, shop.device)
        return net.logits(net.params, net.buffers, x[:4]).detach().numpy()

    scaled, plain = scores(), scores("method.scaler=false")
    assert not np.allclose(scaled, plain)
    config = load([*SMALL, "method=heterofl", "method.widths=[1.0,0.5]"])
    assert workshop.asked(ConfigRecord({"width": 0.5})) == Size(0.5)
    assert config.method.scaler


def test_a_narrow_model_is_deployed_as_it_was_trained():
    """The plain slice with the server's weights scores what a client's network with the scaler does."""
    config = load([*SMALL, "method=heterofl", "method.widths=[1.0,0.5]"])
    shop = workshop.Workshop(config)
    network, plan = shop._network, plan_of(shop._network, shop.data.task)
    method = HeteroFL(config.method)
    method.plan = plan
    arrays = {name: tensor.numpy() for name, tensor in network.state_dict().items()}
    method.begin(arrays, set(dict(network.named_parameters())))
    narrow, full = Size(0.5), copy.deepcopy(network)
    net, _ = shop.at(narrow)
    x, _ = shop.data.client(0, shop.device)
    net.load(method.client_models()[narrow])
    trained = net.logits(net.params, net.buffers, x[:8], train=False).detach()
    plain = cut(full, plan, narrow).eval()
    plain.load_state_dict({n: torch.from_numpy(a) for n, a in method.slice_models()[narrow].items()})
    torch.testing.assert_close(plain(torch.as_tensor(x[:8])).detach(), trained, rtol=1e-5, atol=1e-6)
    assert same(method.global_model(), arrays)  # the full model has no scaler
    method.params = HeteroFLParams(widths=(1.0, 0.5), scaler=False)
    assert same(method.slice_models()[narrow], method.client_models()[narrow])


def test_an_exported_narrow_model_is_the_evaluated_one(tmp_path):
    ready = run(tmp_path / "run", *SMALL, "method=heterofl", "method.widths=[1.0,0.5]", "rounds=1")
    file = export(ready.folder, width=0.5)
    found = load_file(file)
    assert same({name: found[name] for name in ready.method.spec}, ready.method.slice_models()[Size(0.5)])
    assert not same(ready.method.slice_models()[Size(0.5)], ready.method.client_models()[Size(0.5)])


@pytest.mark.slow
def test_a_device_scores_its_model_as_it_was_trained(tmp_path):
    """A client's own network scales what the server sends; the plain slice has the division in its weights."""
    narrow = ("method=heterofl", "method.widths=[1.0,0.5]", "devices=equal", "devices.widths=[0.5]")
    ready = run(tmp_path, *SMALL, *narrow, "task.limit=600", "train.lr=0.1", "evaluate_clients=true")
    told = json.loads((ready.folder / "metrics.jsonl").read_text().splitlines()[-1])["client_accuracy"]
    shop = workshop.Workshop(ready.config)
    plain = ready.evaluator.network(Size(0.5))
    plain.load_state_dict({n: torch.from_numpy(a) for n, a in ready.method.slice_models()[Size(0.5)].items()})
    losses = []
    for client in range(6):
        x, y = shop.data.client_test(client, shop.device)
        scores = plain(torch.as_tensor(x[:])).detach()
        assert told[str(client)] == pytest.approx(float((scores.argmax(1) == y).float().mean()))
        content = {"arrays": encode(ready.method.client_models()[Size(0.5)])}
        content["config"] = ConfigRecord({"client": client, "width": 0.5})
        found = shop.evaluate(RecordDict(content))["metrics"]["loss"]
        losses.append((found, float(torch.nn.functional.cross_entropy(scores, y))))
    np.testing.assert_allclose(*zip(*losses), rtol=1e-4)  # the argmax alone would let another scale pass


def test_a_device_gives_the_full_network_up_and_builds_it_anew_with_the_same_weights():
    shop = workshop.Workshop(load([*SMALL, "method=heterofl", "method.widths=[1.0,0.5]"]))
    before = {name: tensor.clone() for name, tensor in shop._network.state_dict().items()}
    narrow, _ = shop.at(Size(0.5))
    assert shop._network is None
    wide, _ = shop.at(Size(1.0))
    assert all((wide.module.state_dict()[name] == tensor).all() for name, tensor in before.items())
    assert shop.at(Size(0.5))[0] is narrow


def test_a_width_that_no_device_trains_is_named():
    assert begun(budgets=(1.0, 0.66, 0.3)).budget_remarks() == []
    (said,) = begun(budgets=(1.0, 0.4, 0.4)).budget_remarks()
    assert said.startswith("method.widths=[0.66]: no device trains these, because each can hold a wider one, or none")
    wide, few = begun(budgets=(0.66, 0.1, 0.1)).budget_remarks()[::-1][:2][::-1], begun(budgets=(0.4, 0.4, 0.4))
    assert wide[0].startswith("method.widths=[1.0]: no device can hold these, so a part of the global model is never")
    assert wide[1].startswith("method.widths=[0.3]: no device trains these")
    (said,) = few.budget_remarks()
    assert said.startswith("method.widths=[1.0, 0.66]: no device can hold these")
    assert said.endswith("Raise a device's width; the widest is 0.4 (devices.widths).")


def test_a_round_in_which_nobody_can_train_says_so(caplog):
    method = begun(budgets=(0.1, 0.2, 1.0))
    assert method.dispatch(Round(1, 0, (0, 1), 0)) == []
    assert "round 1: nobody trains, since no drawn device can hold a model" in caplog.text


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (["method.widths=[]"], "give at least one"),
        (["method.widths=[0.5,0.5]"], "there twice"),
        (["devices=equal", "devices.widths=[0.01]"], "no device can hold it"),
        (["train.only=['*fc1*']"], "a part of a model cannot be sliced"),
    ],
)
def test_wrong_settings_are_refused(own, said):
    with pytest.raises(ConfigError) as caught:
        config = load([*SMALL, "method=heterofl", *own])
        task = config.load_data().task
        network, _ = config.network(task)
        check_run(config, network, task, 6)
    assert said in str(caught.value)
