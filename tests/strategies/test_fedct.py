import math

import numpy as np
import pytest
import torch

from fedcross.strategies.fedct import FedCT
from fedcross.strategies.fedexg import GROUP
from fedcross.strategies.method import Round, Upload
from fedcross.strategies.objective import Batch
from fedcross.tasks.models._split import Split
from tests.support.federation import run, same, session
from tests.support.game import Game
from tests.support.plain import PlainNet

F64 = torch.float64
AXES = {"host": torch.ones(()), "vectors": torch.eye(2, dtype=F64), "present": torch.tensor([True, True])}


def batch(rows, labels):
    return Batch(torch.tensor(rows, dtype=F64), torch.tensor(labels))


def loss(params, data, prepared=AXES):
    return FedCT.Objective(params).loss(PlainNet(), {"scale": torch.tensor(1.0, dtype=F64)}, {}, data, prepared)


def entropy(logits, label):
    return math.log(sum(math.exp(z) for z in logits)) - logits[label]


# ---- the losses ---------------------------------------------------------------------------------------------------


def test_apcl_by_hand():
    # f = (0, 2), class 0, u_0 = (1, 0), hard = .5: f_hy = (0, 2) + .5 (-1, 2) = (-.5, 3), norm sqrt(9.25).
    # Cosines -.5 / sqrt(9.25) and 3 / sqrt(9.25), temperature .5.
    norm = math.sqrt(9.25)
    expected = entropy((-0.5 / norm / 0.5, 3 / norm / 0.5), 0)
    params = FedCT.Params(hard=0.5, temperature=0.5)
    value = FedCT.Objective(params).apcl(torch.tensor([[0.0, 2.0]], dtype=F64), torch.tensor([0]), AXES)
    assert value.item() == pytest.approx(expected)


def test_mixing_by_hand():
    # f_1 = (2, 0) of class 0 and f_2 = (0, 1) of class 1, m = .75; features are logits here.
    # mix_1 = (1.5, .25) against 0 (weight .75) and 1 (.25); mix_2 = .75 f_2 + .25 f_1 = (.5, .75) against 1 and 0.
    first = 0.75 * entropy((1.5, 0.25), 0) + 0.25 * entropy((1.5, 0.25), 1)
    second = 0.75 * entropy((0.5, 0.75), 1) + 0.25 * entropy((0.5, 0.75), 0)
    data = batch([[2.0, 0.0], [0.0, 1.0]], [0, 1])
    value = FedCT.Objective(FedCT.Params(mix=0.75)).mixed(PlainNet(), {}, {}, data.x, data, AXES)
    assert value.tolist() == pytest.approx([first, second])


def test_mixing_in_prototypes_by_hand():
    # f_1 = (2, 0) of class 0, f_2 = (0, 1) of class 1, m = .75, prototypes u_0 = (4, 4) and none for class 1.
    # Partner of 1 is 2, class 1 without prototype: its own embedding, mix_1 = (1.5, .25). Partner of 2 is 1, class 0:
    # mix_2 = .75 (0, 1) + .25 (4, 4) = (1, 1.75).
    first = 0.75 * entropy((1.5, 0.25), 0) + 0.25 * entropy((1.5, 0.25), 1)
    second = 0.75 * entropy((1.0, 1.75), 1) + 0.25 * entropy((1.0, 1.75), 0)
    views = {"vectors": torch.tensor([[4.0, 4.0], [9.0, 9.0]], dtype=F64), "present": torch.tensor([True, False])}
    data = batch([[2.0, 0.0], [0.0, 1.0]], [0, 1])
    objective = FedCT.Objective(FedCT.Params(mix=0.75, mixing="prototypes"))
    assert objective.mixed(PlainNet(), {}, {}, data.x, data, views).tolist() == pytest.approx([first, second])


def test_gradients_agree_with_finite_differences():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 3, generator=generator, dtype=F64, requires_grad=True)
    y = torch.tensor([0, 1, 2, 1])
    prepared = {
        "host": torch.ones(()),
        "vectors": torch.randn(3, 3, generator=generator, dtype=F64),
        "present": torch.tensor([True, True, False]),
    }
    assert torch.autograd.gradcheck(
        lambda z: loss(FedCT.Params(kappa=2, eta=0.5, hard=0.3, mix=0.3), Batch(z, y), prepared), (x,)
    )


def test_the_whole_loss_is_the_weighted_sum():
    data = batch([[2.0, 0.0], [0.0, 1.0]], [0, 1])
    params = FedCT.Params(kappa=2, eta=0.3)
    objective = FedCT.Objective(params)
    plain = (entropy((2.0, 0.0), 0) + entropy((0.0, 1.0), 1)) / 2
    apcl = objective.apcl(data.x, data.y, AXES).mean().item()
    mixed = objective.mixed(PlainNet(), {}, {}, data.x, data, AXES).mean().item()
    assert loss(params, data).item() == pytest.approx(plain + 2 * apcl + 0.3 * mixed)
    assert loss(params.model_copy(update={"kappa": 0.0}), data).item() == pytest.approx(plain + 0.3 * mixed)
    assert loss(params.model_copy(update={"eta": 0.0}), data).item() == pytest.approx(plain + 2 * apcl)
    assert loss(params, data, prepared={}).item() == pytest.approx(plain)  # at home
    both = params.model_copy(update={"kappa": 1.0, "eta": 1.0})
    assert loss(both, data).item() == pytest.approx(plain + apcl + mixed)


# ---- phases II to IV ----------------------------------------------------------------------------------------------

# Three clients with one class-0 and one class-1 prototype each, embeddings of one number; classifiers (w, -w), so that
# v_ij = log(1 + exp(-2 w_i z_j)) for every class k if the prototypes are z_j and -z_j: decreasing in w_i z_j.
SIGNS = (1.0, 2.0, -1.0)  # w_i
SCALES = (1.0, -1.0, 3.0)  # z_j


def held(vectors, present):
    return {"vectors": vectors, "present": present}


def uploads():
    return [
        Upload(
            client=10 + i,
            slot=i,
            arrays={"classifier.weight": np.array([[w], [-w]], np.float32), "x": np.array([float(i)], np.float32)},
            extras={
                GROUP: {"vectors": np.array([[z], [-z]], np.float32), "present": np.array([True, True])},
            },
            num_examples=i + 1,
            metrics={},
        )
        for i, (w, z) in enumerate(zip(SIGNS, SCALES))
    ]


def begun(**values):
    arrays = {"classifier.weight": np.zeros((2, 1), np.float32), "x": np.zeros(1, np.float32)}
    method = Game(FedCT, arrays, clients_per_round=3, seed=1, **values)
    current = Round(1, 0, (10, 11, 12), 1)
    assert [p.config for p in method.dispatch(current)] == [{"prototypes": True}] * 3
    method.aggregate(current, uploads())
    return method


def route(method, exchange=1):
    return method.method.route(method.state, Round(1, exchange, (10, 11, 12), 1))


def hosts(**values):
    return route(begun(**values))


def test_the_consistency_matrix_by_hand():
    method = begun()
    v = method.consistencies(method.state, [10, 11, 12])
    expected = [[math.log(1 + math.exp(-2 * w * z)) for z in SCALES] for w in SIGNS]
    np.testing.assert_allclose(v, expected, rtol=1e-6)


def test_consistency_without_bias_averages_over_present_classes():
    method = begun()
    method.latest[11] = held(np.array([[-1.0], [99.0]], np.float32), np.array([True, False]))
    v = method.consistencies(method.state, [11])
    assert v[0, 0] == pytest.approx(math.log(1 + math.exp(2)))


def test_each_broadcast_rule():
    # w_i z_j: 0: (1, -1, 3), 1: (2, -2, 6), 2: (-1, 1, -3). The two permutations that move everyone:
    # A: 0->1, 1->2, 2->0 has w z = -1, 6, -1: v = 2.127 + 0.000 + 2.127 = 4.254;
    # B: 0->2, 1->0, 2->1 has w z = 3, 2, 1: v = 0.002 + 0.018 + 0.127 = 0.147.
    assert hosts() == {0: 12, 1: 10, 2: 11}
    assert hosts(broadcast="inconsistency") == {0: 11, 1: 12, 2: 10}
    assert hosts(broadcast="random") in ({0: 12, 1: 10, 2: 11}, {0: 11, 1: 12, 2: 10})


def test_each_matching():
    # Consistency: 0 and 1 both like client 12 best; greedily 0 takes it, 1 takes 10, 2 gets 11.
    assert hosts(matching="greedy") == {0: 12, 1: 10, 2: 11}
    assert hosts(matching="literal") == {0: 12, 1: 12, 2: 11}
    # Inconsistency: 0 is worst at 11, 1 at 10 (11 is its own), 2 at 10 (12 is its own). Greedily 0 takes 11; if 1 took
    # 10, model 2 would be left with its own client: 1 takes 12.
    assert hosts(broadcast="inconsistency", matching="greedy") == {0: 11, 1: 12, 2: 10}
    assert hosts(broadcast="inconsistency", matching="literal") == {0: 11, 1: 10, 2: 10}


def test_a_host_gets_the_fused_view_and_phase_four_weights_by_home():
    method = begun(fusion=0.5)
    current = Round(1, 1, (10, 11, 12), 1)
    payloads = method.dispatch(current)
    # U_g of class 0: (1 - 1 + 3) / 3 = 1; fused with the local 1, -1, 3: 1, 0, 2.
    assert [p.extras[GROUP]["vectors"][:, 0].tolist() for p in payloads] == [[1.0, -1.0], [0.0, 0.0], [2.0, -2.0]]
    assert [(p.slot, p.client) for p in payloads] == [(0, 12), (1, 10), (2, 11)]
    assert all(not p.config for p in payloads)  # nobody needs prototypes after the last exchange
    trained = [
        Upload(p.client, p.slot, {**p.arrays, "x": np.array([10.0 * p.slot], np.float32)}, {}, 50, {}) for p in payloads
    ]
    metrics = method.aggregate(current, trained)
    # (1 * 0 + 2 * 10 + 3 * 20) / 6
    assert method.global_model()["x"] == pytest.approx(80 / 6)
    expected = sum(math.log(1 + math.exp(-2 * wz)) for wz in (3, 2, 1)) / 3
    assert metrics["route_consistency"] == pytest.approx(expected, rel=1e-6)


def test_a_second_exchange_matches_by_what_the_hosts_found():
    method = begun(exchanges=2)
    current = Round(1, 1, (10, 11, 12), 1)
    payloads = method.dispatch(current)
    assert all(p.config == {"prototypes": True} for p in payloads)
    found = [Upload(p.client, p.slot, p.arrays, uploads()[p.client - 10].extras, 5, {}) for p in payloads]
    method.aggregate(current, found)
    again = route(method, 2)
    # Forbidden now: 0->12, 1->10, 2->11. Everyone home: w z = 1, -2, -3; or 0->11, 1->12, 2->10: -1, 6, -1.
    # v: .127 + 4.018 + 6.002 against 2.127 + 0 + 2.127.
    assert again == {0: 11, 1: 12, 2: 10}
    assert method.learners[0].num_examples == 1


@pytest.mark.slow
def test_literal_matching_trains_several_models_at_one_host(tmp_path):
    overrides = ("method=fedct", "method.matching=literal", "partition=dirichlet", "partition.min_size=5", "rounds=2")
    done = run(tmp_path / "a", *overrides, "method.exchanges=2")
    again = run(tmp_path / "b", *overrides, "method.exchanges=2")
    assert done.driver.report.clients == 9
    model = done.driver.global_model()
    assert all((model[name] == again.driver.global_model()[name]).all() for name in model)


def test_a_shared_hosts_prototypes_are_the_mean_of_its_models():
    # Models 0 and 1 trained at client 12: classes (present in both, in the first, in the second) = (1+3)/2, 5, 7.
    method = begun()
    method.method.exchanges = lambda _: 3

    def trained(slot, vectors, present):
        group = {"vectors": np.array(vectors, np.float32), "present": np.array(present)}
        return Upload(12, slot, method.learners[slot].arrays, {"prototypes": group}, 4, {})

    first = trained(0, [[1, 1], [5, 5], [0, 0]], [True, True, False])
    second = trained(1, [[3, 3], [0, 0], [7, 7]], [True, False, True])
    for uploads in ([first, second], [second, first]):
        method.aggregate(Round(1, 1, (10, 11, 12), 1), uploads)
        assert method.latest[12]["vectors"].tolist() == [[2, 2], [5, 5], [7, 7]]
        assert method.latest[12]["present"].all()
    assert method.learners[0].extras["prototypes"]["vectors"][0].tolist() == [1, 1]  # a model's own view stays its own
    method.aggregate(Round(1, 1, (10, 11, 12), 1), [first])
    assert method.latest[12]["vectors"].tolist() == [[1, 1], [5, 5], [0, 0]]


# ---- MOON as the base loss ----------------------------------------------------------------------------------------

MOON = ("method=fedct", "method.base=moon", "method.mu=2", "method.hidden=16", "method.width=8", "partition.clients=3")


def test_the_loss_at_home_is_moons():
    # f = (1, 0) of scale 1 are the logits, class 0: CE = log(1 + 1/e). The global model scales by 1 (cosine 1), the
    # previous one by -1 (cosine -1): contrast log(1 + exp((-1 - 1) / .5)).
    prepared = {
        "global": ({"scale": torch.tensor(1.0, dtype=F64)}, {}),
        "previous": ({"scale": torch.tensor(-1.0, dtype=F64)}, {}),
        "met": torch.tensor(1.0, dtype=F64),
    }
    value = loss(FedCT.Params(base="moon", mu=3, tau=0.5), batch([[1.0, 0.0]], [0]), prepared).item()
    assert value == pytest.approx(math.log(1 + math.exp(-1)) + 3 * math.log(1 + math.exp(-4)))


def test_only_with_moon_there_is_a_projection_head():
    model = Split(torch.nn.Identity(), torch.nn.Linear(3, 2))
    assert FedCT().network(model) is model
    projected = FedCT(base="moon", hidden=5, width=4).network(model)
    assert projected.classifier.in_features == 4


@pytest.mark.slow
def test_with_moon_the_first_round_has_no_negative_and_later_ones_do(tmp_path):
    with_moon = run(tmp_path / "a", *MOON, "rounds=1").driver.global_model()
    without = run(tmp_path / "b", *MOON, "method.mu=0", "rounds=1").driver.global_model()
    assert same(with_moon, without)
    later = run(tmp_path / "c", *MOON, "rounds=2").driver.global_model()
    assert not same(later, run(tmp_path / "d", *MOON, "method.mu=0", "rounds=2").driver.global_model())


@pytest.mark.slow
def test_the_model_from_home_outlives_the_visit_as_a_host(tmp_path, monkeypatch):
    kept = []
    prepare = FedCT.Objective.prepare

    def watched(self, visit):
        kept.append((visit.round, visit.exchange, visit.client, visit.state.get("classifier.weight")))
        return prepare(self, visit)

    monkeypatch.setattr(FedCT.Objective, "prepare", watched)
    ready = session(tmp_path, *MOON, "rounds=2")
    homes = {}
    real = ready.driver.method.aggregate

    def aggregate(state, current, uploads):
        if (current.number, current.exchange) == (1, 0):
            homes.update({u.client: u.arrays["classifier.weight"] for u in uploads})
        return real(state, current, uploads)

    ready.driver.method.aggregate = aggregate
    ready.execute()
    in_round_two = {client: state for number, exchange, client, state in kept if (number, exchange) == (2, 0)}
    assert len(in_round_two) == 3
    assert all((in_round_two[client] == homes[client]).all() for client in homes)


def test_with_weight_host_a_model_weighs_as_its_last_host():
    """Models 0, 10 and 20, hosts with 4, 1 and 5 examples: (10 + 100) / 10."""
    method, current = begun(weight="host"), Round(1, 1, (10, 11, 12), 1)
    sent = method.dispatch(current)
    trained = [
        Upload(p.client, p.slot, {**p.arrays, "x": np.float32([10 * p.slot])}, {}, (4, 1, 5)[p.slot], {}) for p in sent
    ]
    method.aggregate(current, trained)
    assert method.global_model()["x"] == pytest.approx(11)
