import json
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from fedcross.client.app import app as client_app
from fedcross.core.errors import ConfigError
from fedcross.engines.grid import LocalGrid
from fedcross.strategies.flwr import Flwr
from fedcross.strategies.wire.protocol import Round, Upload
from fedcross.strategies.wire.records import encode
from tests.support.federation import run, same, session
from tests.support.rivals import begin, check_resume, linear, losing, softmax, work

MODEL = 4 * 4810  # bytes of the digits MLP


@pytest.fixture(autouse=True)
def _a_server():
    """Flower's messages can be made in a server only; a grid makes this process one."""
    LocalGrid(client_app, 1, {})


def upload(client, w, examples=10, steps=1, variance=1.0):
    return Upload(client, client, model(w, steps, variance), {}, examples, {})


def model(w, steps=0, variance=1.0):
    return {
        "w": np.array([w], np.float32),
        "variance": np.array([variance], np.float32),
        "steps": np.array(steps, np.int64),
    }


def begun(name, start=0.0, clients=2, **options):
    method = Flwr(name=name, options=options, clients_per_round=clients)
    method.begin(model(start), {"w"})
    return method


def rounds(method, *uploads):
    for number, received in enumerate(uploads, start=1):
        method.aggregate(Round(number, 0, (0, 1), 0), received)
    return float(method.global_model()["w"][0])


@pytest.mark.slow
def test_fedavg_is_ours(tmp_path):
    theirs = run(tmp_path / "a", "method=flwr", "method.name=FedAvg").method.global_model()
    ours = run(tmp_path / "b", "method=fedavg").method.global_model()
    assert list(theirs) == list(ours)
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_fedavgm_without_momentum_is_ours(tmp_path):
    theirs = run(tmp_path / "a", "method=flwr", "method.name=FedAvgM").method.global_model()
    ours = run(tmp_path / "b", "method=fedavg").method.global_model()
    for name in ours:
        np.testing.assert_allclose(theirs[name], ours[name], rtol=0, atol=1e-6)


def test_a_model_that_all_clients_get_is_coded_once():
    """It is one stream, whoever is drawn; a strategy that gives each its own model has one for each slot."""
    method = Flwr(name="FedAvg", clients_per_round=3, nonce=True, compression={"down": "int8"})
    method.begin(model(1.0), {"w"})
    first, second, _ = method.payloads(Round(1, 0, (4, 5, 6), 0))
    assert first.arrays is second.arrays
    assert list(method._compressor.residuals) == ["global"]
    real = method._configure

    def apart(current):
        messages = real(current)
        for message in messages.values():
            own = {name: array for name, array in model(2.0).items() if name in method.handed}
            message.content = RecordDict({"arrays": encode(own), "config": ConfigRecord()})
        return messages

    method._configure = apart
    assert [payload.stream for payload in method.dispatch(Round(1, 0, (4, 5), 0))] == ["", ""]


def test_momentum_by_hand():
    """FedAvgM, rate .5, momentum .9, from 1. Mean 2: pseudo-gradient 1 - 2 = -1, w = 1.5.

    Mean 2 again: gradient -.5, velocity .9 * -1 - .5 = -1.4, w = 1.5 + .7 = 2.2.
    """
    method = begun("FedAvgM", 1.0, server_learning_rate=0.5, server_momentum=0.9)
    same_mean = [upload(0, 1.0), upload(1, 3.0)]
    assert rounds(method, same_mean) == pytest.approx(1.5)
    method.aggregate(Round(2, 0, (0, 1), 0), same_mean)
    assert method.global_model()["w"][0] == pytest.approx(2.2)


def test_adam_by_hand():
    """FedAdam from 0, step 1 of round 1: d = 2, m = .1 d, v = .01 d^2; Flower corrects with exponent round + 1.

    rate = eta sqrt(1 - .99^2) / (1 - .9^2); w = rate m / (sqrt(v) + tau).
    """
    rate = 0.1 * (1 - 0.99**2) ** 0.5 / (1 - 0.9**2)
    w = rounds(begun("FedAdam", eta=0.1), [upload(0, 1.0), upload(1, 3.0)])
    assert w == pytest.approx(rate * 0.2 / (0.2 + 1e-3), rel=1e-6)


def test_yogi_and_adagrad_by_hand():
    """From 0, d = 2, eta .1, tau .001. Yogi: v = 0 - .01 d^2 sign(0 - d^2) = .04, m = .2. Adagrad: v = 4, m = 2."""
    received = [upload(0, 1.0), upload(1, 3.0)]
    assert rounds(begun("FedYogi", eta=0.1), received) == pytest.approx(0.1 * 0.2 / 0.201, rel=1e-6)
    assert rounds(begun("FedAdagrad", eta=0.1), received) == pytest.approx(0.1 * 2 / 2.001, rel=1e-6)


@pytest.mark.slow
def test_robust_means_by_hand():
    """Of 1, 2, 3.5, 4, 90 the median is 3.5, and 9.5/3 the mean without one at each end.

    Krum's scores, squared distances to the two nearest: 7.25, 3.25, 2.5, 4.25 and more. Bulyan has seven values and
    scores for the four nearest: 36.5, 16.25, 11, 14.25, 20.75 (of 5.5), 48.5 (of 7) and more. It keeps the best five,
    whose median is 3.5, and takes the mean of the three nearest to that: 2, 3.5, 4.
    """
    received = [upload(i, w) for i, w in enumerate((1.0, 2.0, 3.5, 4.0, 90.0))]
    assert rounds(begun("FedMedian"), received) == 3.5
    assert rounds(begun("FedTrimmedAvg", beta=0.2), received) == pytest.approx(9.5 / 3)
    assert rounds(begun("Krum", num_malicious_nodes=1), received) == 3.5
    assert rounds(begun("MultiKrum", num_malicious_nodes=1, num_nodes_to_select=4), received) == 2.625
    many = [upload(i, w) for i, w in enumerate((1.0, 2.0, 3.5, 4.0, 5.5, 7.0, 90.0))]
    assert rounds(begun("Bulyan", clients=7, num_malicious_nodes=1), many) == pytest.approx(9.5 / 3)


def test_counters_do_not_decide_who_is_near_whom():
    """Weights 0, .1, 5; the outlier's counter is near the first one's. Krum must still see the weights."""
    received = [upload(0, 0.0, steps=100), upload(1, 0.1, steps=1), upload(2, 5.0, steps=99)]
    assert rounds(begun("Krum"), received) <= 0.1 + 1e-6


@pytest.mark.parametrize("name", ["FedAvg", "FedAdam", "FedMedian", "FedAvgM", "Krum"])
def test_dtypes_and_order_stay_and_counters_stay_integers(name):
    """Counters (10 * 4 + 30 * 9) / 40 = 7.75, truncated to 7."""
    method = begun(name)
    method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, 1.0, 10, 4), upload(1, 2.0, 30, 9)])
    made = method.global_model()
    assert {n: a.dtype.name for n, a in made.items()} == {"w": "float32", "variance": "float32", "steps": "int64"}
    assert list(made) == ["w", "variance", "steps"]
    assert made["steps"] == 7


def test_adam_leaves_running_statistics_alone():
    """Variances fall from 1 to .01. A step of Adam of length 1 would make them about 0 or less; the mean is .01."""
    method = begun("FedAdam", eta=1.0)
    received = [upload(0, 1.0, variance=0.01), upload(1, 1.0, variance=0.01)]
    rounds(method, received, received)
    assert method.global_model()["variance"][0] == pytest.approx(0.01)


def test_fedprox_two_clients_two_steps_by_hand():
    """Linear model V [x; 1] from V0: V <- V - .5 (mean (p - e_y) [x; 1] + mu (V - V0)), twice; mean by examples."""
    mu = 0.8
    method = Flwr(name="FedProx", options={"proximal_mu": mu}, clients_per_round=2)
    net = begin(method, linear([[0.2], [-0.1]], [0.0, 0.3]))
    data = [([[1.0], [-1.0]], [0, 1]), ([[3.0]], [0])]
    start = np.array([[0.2, 0.0], [-0.1, 0.3]])

    def by_hand(x, y):
        v = start
        for _ in range(2):
            points = [np.array([row[0], 1.0]) for row in x]
            g = sum(np.outer(softmax(v @ p) - np.eye(2)[label], p) for p, label in zip(points, y)) / len(x)
            v = v - 0.5 * (g + mu * (v - start))
        return v

    current = Round(1, 0, (0, 1), 0)
    uploads = [work(method, net, payload, *data[payload.client]) for payload in method.dispatch(current)]
    method.aggregate(current, uploads)
    expected = (2 * by_hand(*data[0]) + by_hand(*data[1])) / 3
    np.testing.assert_allclose(method.global_model()["classifier.weight"][:, 0], expected[:, 0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(method.global_model()["classifier.bias"], expected[:, 1], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_mu_reaches_the_clients(tmp_path):
    plain = run(tmp_path / "a", "method=flwr", "method.name=FedAvg").method.global_model()
    zero = run(tmp_path / "b", "method=flwr", "method.name=FedProx", "+method.options.proximal_mu=0")
    held = run(tmp_path / "c", "method=flwr", "method.name=FedProx", "+method.options.proximal_mu=1")
    assert same(plain, zero.method.global_model())
    assert not same(plain, held.method.global_model())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["FedAdam", "FedAvgM"])
def test_a_resumed_run_ends_as_one_that_was_left_in_peace(tmp_path, name):
    extra = ["+method.options.server_momentum=0.9"] if name == "FedAvgM" else []
    check_resume(tmp_path, "method=flwr", f"method.name={name}", *extra)


def test_momenta_are_in_the_state():
    method = begun("FedAvgM", server_momentum=0.9)
    rounds(method, [upload(0, 1.0)])
    assert method.state().arrays["momentum_vector.w"].tolist() == [-1.0]
    method = begun("FedYogi")
    rounds(method, [upload(0, 1.0)])
    assert {"m_t.w", "v_t.w"} <= set(method.state().arrays)


def test_lost_clients_leave_the_mean_and_a_lost_round_changes_nothing(tmp_path):
    assert rounds(begun("FedAvg"), [upload(1, 3.0)], []) == 3
    options = ("method=flwr", "method.name=FedAdam")
    lossy = run(tmp_path / "a", *options, app=losing(lambda client, number: number == 3))
    short = run(tmp_path / "b", *options, "rounds=2")
    assert same(lossy.method.state().arrays, short.method.state().arrays)


def test_a_strategy_that_declines_leaves_the_model():
    """Bulyan needs 4 f + 3 uploads."""
    method = begun("Bulyan", 1.0, clients=7, num_malicious_nodes=1)
    assert method.aggregate(Round(1, 0, (0, 1), 0), [upload(0, 5.0), upload(1, 6.0)]) == {"flower_skipped": 1.0}
    assert method.global_model()["w"] == np.float32(1)


def test_wrong_options_are_faults_of_the_configuration(tmp_path):
    with pytest.raises(ConfigError, match="proximal_mu"):
        run(tmp_path, "method=flwr", "method.name=FedProx", "+method.options.proximal_mi=1")
    with pytest.raises(ConfigError, match="FedNova"):
        run(tmp_path, "method=flwr", "method.name=FedNova")
    with pytest.raises(ConfigError, match="FedTrimmedAvg refuses"):
        Flwr(name="FedTrimmedAvg", options={"beta": 0.7})
    with pytest.raises(ConfigError, match="no option 'fraction_train'"):
        Flwr(name="FedAvg", options={"fraction_train": 1})


def losses(*values, examples=10, **more):
    """Return uploads of clients that report these losses; None reports none."""
    told = [{} if value is None else {"train-loss": value} for value in values]
    return [replace(upload(i, 1.0 + i, examples), metrics={**metrics, **more}) for i, metrics in enumerate(told)]


def test_one_client_without_a_loss_takes_it_from_nobody():
    """QFedAvg ends with an error without it, and one client of any could have ended the run so."""
    weighs = begun("QFedAvg", q=0.2, client_learning_rate=0.1)
    told = weighs._replies(losses(1.0, None, 3.0, 2.0))
    assert [reply.content.metric_records["metrics"]["train-loss"] for reply in told] == [1, 2, 3, 2]
    assert np.isfinite(rounds(weighs, losses(1.0, None, 3.0)))
    few = weighs._replies(losses(1.0, None, None, 2.0))
    assert all("train-loss" not in reply.content.metric_records["metrics"] for reply in few)


@pytest.mark.parametrize(
    ("told", "believed"),
    [
        ((1.0, 2.0, 3.0, 1e9), (1, 2, 3, 6)),
        ((1.0, 2.0, 3.0, -1.0), (1, 2, 3, 1 / 3)),
        ((1.0, 2.0, 3.0, None), (1, 2, 3, None)),
        ((-1.0, -2.0, -3.0, 1.0), (-1, -2, -3, 1)),  # an app's own loss may be below zero
        ((None, None, None), (None, None, None)),
    ],
)
def test_the_defence_bounds_a_loss_that_a_strategy_may_weigh_by(told, believed):
    given = losses(*told, norm_bit=7.0)
    found = begun("FedAvg").judge_extras(given)
    assert tuple(u.metrics.get("train-loss") for u in found.uploads) == believed
    assert all(u.metrics["norm_bit"] == 1 for u in found.uploads)
    assert found.clipped == len(given)
    kept = begun("FedAvg").judge_extras(found.uploads)
    assert (kept.uploads, kept.clipped) == (found.uploads, 0)


@pytest.mark.parametrize("loss", [1e9, -1.0, None])
def test_a_false_loss_does_not_decide_a_run(tmp_path, monkeypatch, loss):
    """Without the mend: -1 leaves a model without numbers, none ends the run in its first round."""
    arguments = ("+method.arguments.q=0.2", "+method.arguments.client_learning_rate=0.1")
    more = ("clients_per_round=4", "rounds=2", "defence.enabled=true")
    ready = session(tmp_path, "method=flwr", "method.name=QFedAvg", *arguments, *more)
    defend = ready.method._defend

    def falsified(uploads):
        metrics = {"train-loss": loss} if loss is not None else {}
        return defend([replace(uploads[0], metrics=metrics), *uploads[1:]])

    monkeypatch.setattr(ready.method, "_defend", falsified)
    ready.execute()
    assert all(np.isfinite(array).all() for array in ready.method.global_model().values())


def test_the_result_names_the_strategy(tmp_path):
    run(tmp_path, "method=flwr", "method.name=FedAdam", "+method.options.eta=0.01", "rounds=1")
    assert json.loads((tmp_path / "result.json").read_text())["method"] == "FedAdam"


def test_wire_is_one_model_each_way(tmp_path):
    report = run(tmp_path, "method=flwr", "method.name=FedMedian", "rounds=1").method._report
    assert report.bytes_down == report.bytes_up == 3 * MODEL
