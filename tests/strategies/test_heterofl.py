"""HeteroFL: each client trains the widest slice that it can hold; means over the uploads that have a weight.

The masked loss: classes that a client lacks score 0 in its loss, and a class's row is the mean of those that have it.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from fedcross.client import cache
from fedcross.client.flat_model import ModuleNet
from fedcross.client.request import carry_out
from fedcross.client.trainer import train
from fedcross.conf.schema import load
from fedcross.core.errors import ConfigError
from fedcross.strategies.heterofl import HeteroFL, HeteroFLParams, Masked
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Objective
from fedcross.strategies.wire.records import encode
from fedcross.tasks.models.width import FULL, Corners, Width, kept
from tests.strategies.pool.test_widths import PLAN, full
from tests.support.bench import TWO_STEPS, open_visit, two_layers
from tests.support.federation import SMALL, run, same
from tests.support.game import Game
from tests.support.slices import THREE

WIDTHS = [1.0, 0.66, 0.3]
RUN = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]")


def begun(kind=HeteroFL, budgets=(1.0, 0.66, 0.3), **values):
    method = Game(
        kind,
        full(),
        {"in", "out", "bias"},
        clients_per_round=len(budgets),
        corners=PLAN,
        **{"widths": WIDTHS, **values},
    )
    method.__dict__["budgets"] = dict(enumerate(budgets))
    return method


def send(method, number=1):
    return method.dispatch(method.round(number, range(len(method.budgets)), budgets=method.budgets))


def of_every_width(method):
    return method.method.evaluation(method.state).widths


def upload(method, slot, start, count=0, examples=1):
    return Upload(slot, slot, PLAN.corner(full(start, count), method.tasks[slot].width), {}, examples, {})


def test_everybody_gets_the_widest_slice_that_it_can_hold():
    method = begun(budgets=(0.5, 1.0, 0.66))
    payloads = send(method)
    assert [payload.width.ratio for payload in payloads] == [0.3, 1, 0.66]
    assert method.global_model()["in"].shape == (3, 2)
    assert [payload.arrays["in"].shape for payload in payloads] == [(1, 2), (3, 2), (2, 2)]


def test_three_widths_aggregated_by_hand():
    """Starts 0 (wide), 20 (middle), 40 (narrow), plain means: unit 0: 20, unit 1: 10 + its number, unit 2: the wide."""
    method = begun()
    send(method)
    sent = [(0, 0, 1, 100), (1, 20, 2, 1), (2, 40, 3, 1)]
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [upload(method, *one) for one in sent])
    assert method.global_model()["in"].tolist() == [[20, 21], [12, 13], [4, 5]]
    assert method.global_model()["out"].tolist() == [[30, 21, 12]]
    assert method.global_model()["bias"].tolist() == [120]
    models = of_every_width(method)
    assert [m["mean"].tolist() for m in models.values()] == [[0, 1, 2], [20, 21], [40]]
    assert [int(m["n"]) for m in models.values()] == [1, 2, 3]
    assert list(models) == [FULL, Width(0.66), Width(0.3)]
    assert models[Width(0.3)]["in"].tolist() == [[20, 21]]


def test_the_statistics_of_a_width_are_weighted_by_its_own_clients_shares():
    """A narrow model's mean: 0 with one share and 40 with three is 30, whatever the wide client has."""
    method = begun(budgets=(1.0, 0.3, 0.3))
    send(method)
    sent = [upload(method, slot, start) for slot, start in enumerate((100, 0, 40))]
    for one in sent:
        one.task = method.tasks[one.slot]
    method.state.model.merge(sent, [9.0, 1.0, 3.0])
    assert of_every_width(method)[Width(0.3)]["mean"].tolist() == [30]


def test_weights_that_no_upload_has_stay():
    method = begun()
    send(method)
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [upload(method, 2, 40)])
    assert method.global_model()["in"].tolist() == [[40, 41], [2, 3], [4, 5]]
    assert of_every_width(method)[FULL]["mean"].tolist() == [0, 1, 2]
    before = {name: array.copy() for name, array in method.global_model().items()}
    method.aggregate(Round(2, 0, (0, 1, 2), 0), [])
    assert same(method.global_model(), before)


def test_a_device_that_can_hold_no_width_is_not_asked():
    method = begun(budgets=(1.0, 0.2, 0.3))
    assert [payload.slot for payload in send(method)] == [0, 2]
    assert method.aggregate(Round(1, 0, (0, 1, 2), 0), [])["clients_without_a_model"] == 1


def two(width):
    """Two hidden units, two classes, one input; a model of width .5 has one hidden unit."""
    hidden = kept(2, width.ratio)
    return {"in": (hidden, 1), "classifier.weight": (2, hidden), "classifier.bias": (2,)}


def headed(**own):
    model = {"in": np.zeros((2, 1)), "classifier.weight": np.full((2, 2), 7.0), "classifier.bias": np.full(2, 7.0)}
    method = Game(HeteroFL, model, set(model), corners=Corners(two, (2,)), widths=[1.0, 0.5], **own)
    method.__dict__["budgets"] = {0: 1.0, 1: 1.0, 2: 0.5}
    send(method)
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
    assert method.global_model()["classifier.weight"].tolist() == [[3, 1.5], [2, 2]]
    assert method.global_model()["classifier.bias"].tolist() == [3, 2]
    assert method.global_model()["in"].tolist() == [[3], [1.5]]  # no layer of classes: every upload counts


def test_a_class_that_nobody_has_keeps_its_row():
    method = headed()
    method.aggregate(Round(1, 0, (0, 1, 2), 0), [told(0, 1.0, 2, [1, 0]), told(2, 6.0, 1, [0, 0])])
    assert method.global_model()["classifier.weight"].tolist() == [[1, 1], [7, 7]]
    assert method.global_model()["classifier.bias"].tolist() == [1, 7]


def test_only_clients_with_a_masked_loss_are_asked_for_their_classes():
    assert headed().tasks[0].returns == {"labels": {"held": ((2,), "uint8")}}
    assert headed(masked=False).tasks[0].returns == {}
    assert send(begun())[0].returns == {}  # no layer called classifier


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


@pytest.mark.slow
def test_the_scaler_divides_by_the_share_of_the_widest_model():
    """Half of a widest model of .8: what a scaled layer returns is doubled."""
    config = load([*SMALL, "task=digits", "method=heterofl", "devices=three_sizes", "method.widths=[0.8,0.4]"])
    shop = cache.RunCache(config)
    scaled, (plain, _) = shop.network(Width(0.4)), config.network(shop.data.task, width=Width(0.4))
    (name, *_) = config.corners(shop.data.task).scaled
    inputs = torch.ones(2, *plain.get_submodule(name).weight.shape[1:])
    plain.load_state_dict(scaled.state_dict())
    assert torch.equal(scaled.get_submodule(name)(inputs), 2 * plain.get_submodule(name)(inputs))


def test_masked_is_a_setting():
    assert type(HeteroFL().objective()) is Masked
    assert type(HeteroFL(masked=False).objective()) is Objective
    load([*SMALL, "method=heterofl", "method.masked=false", "privacy.enabled=true"])
    with pytest.raises(ConfigError, match="sends more than its model"):
        load([*SMALL, "method=heterofl", "privacy.enabled=true"])


@pytest.mark.slow
def test_where_all_clients_have_all_classes_the_mask_changes_no_bit(tmp_path):
    even = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]", "partition=iid")
    masked = run(tmp_path / "masked", *even)
    plain = run(tmp_path / "plain", *even, "method.masked=false")
    assert all(
        same(a, b)
        for a, b in zip(masked.driver.evaluation().widths.values(), plain.driver.evaluation().widths.values())
    )
    uneven = (*THREE, "method=heterofl", "method.widths=[1.0,0.66,0.4]", "partition=dirichlet", "partition.beta=0.1")
    masked = run(tmp_path / "uneven", *uneven)
    plain = run(tmp_path / "uneven-plain", *uneven, "method.masked=false")
    assert not same(masked.driver.global_model(), plain.driver.global_model())


@pytest.mark.slow
def test_a_run_with_batch_normalisation_evaluates_every_width_and_resumes(tmp_path):
    whole = run(tmp_path / "whole", *RUN, "evaluate_every=3")
    run(tmp_path / "part", *RUN, "evaluate_every=3", "stop_at=2")
    resumed = run(tmp_path / "part", *RUN, "evaluate_every=3", f"resume={tmp_path / 'part'}")
    assert all(
        same(a, b)
        for a, b in zip(whole.driver.evaluation().widths.values(), resumed.driver.evaluation().widths.values())
    )
    lines = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    assert [list(line.get("width_accuracy", ())) for line in lines] == [[], [], ["1", "0.66", "0.4"]]
    assert lines[-1]["test_accuracy"] == lines[-1]["width_accuracy"]["1"]


@pytest.mark.slow
def test_a_device_scores_its_model_as_it_was_trained(tmp_path):
    """A client's own network scales what the server sends; the plain slice has the division in its weights."""
    narrow = ("method=heterofl", "method.widths=[1.0,0.5]", "devices=equal", "devices.widths=[0.5]")
    ready = run(tmp_path, *SMALL, *narrow, "task.limit=600", "train.lr=0.1", "evaluate_clients=true")
    told = json.loads((ready.folder / "metrics.jsonl").read_text().splitlines()[-1])["client_accuracy"]
    shop = cache.RunCache(ready.config)
    plain = ready.evaluator.network(Width(0.5))
    plain.load_state_dict({n: torch.from_numpy(a) for n, a in ready.driver.evaluation().widths[Width(0.5)].items()})
    losses = []
    for client in range(6):
        x, y = shop.data.client_test(client, shop.device)
        scores = plain(torch.as_tensor(x[:])).detach()
        assert told[str(client)] == pytest.approx(float((scores.argmax(1) == y).float().mean()))
        content = {"arrays": encode(ready.driver.evaluation().clients[Width(0.5)])}
        content["config"] = ConfigRecord({"client": client, "width": 0.5})
        found = carry_out(shop, "evaluate", RecordDict(content))["metrics"]["loss"]
        losses.append((found, float(torch.nn.functional.cross_entropy(scores, y))))
    np.testing.assert_allclose(*zip(*losses), rtol=1e-4)  # the argmax alone would let another scale pass
