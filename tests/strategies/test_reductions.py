"""What holds for many methods, run as whole federations: reductions, what travels, vmap over clients, resume."""

from __future__ import annotations

import numpy as np
import pytest

from fedcross.strategies.centralized import Centralized
from fedcross.strategies.feddecorr import Decorrelated, FedDecorrParams
from fedcross.strategies.fedlc import Calibrated, FedLCParams
from fedcross.strategies.fedntd import FedNTDParams, NotTrue
from fedcross.strategies.fedproc import FedProcParams, Prototypical
from fedcross.strategies.fedprox import FedProxParams, Proximal
from fedcross.strategies.heterofl import HeteroFLParams, Masked
from fedcross.strategies.moon import Contrast, MoonParams
from fedcross.strategies.scaffold import Controlled, ScaffoldParams
from tests.support.bench import check_batched, check_resume
from tests.support.federation import run, same

MODEL = 4 * 4810  # bytes of the digits MLP: 64*64+64 + 64*10+10 float32 weights
#: FedGen's with 8 + 10 inputs, 16 hidden units (4 normalisation numbers each), embedding 64.
GENERATOR = 4 * ((8 + 10) * 16 + 16 + 4 * 16 + 16 * 64 + 64)
ONE = "partition.clients=1 clients_per_round=1"
UNLIKE = "clients_per_round=6 partition=dirichlet partition.beta=0.1 partition.min_size=5"
MOON = "method=moon method.projection=false"
SMALL_HEAD = "method.hidden=8 method.width=4"
FEDGEN = "method=fedgen method.hidden=16 method.noise=8 method.generator_steps=3"
FUSION = (
    "method=fedfusion model=fedfusion_mnist task.limit=48 task.limit_test=40 partition.clients=3 clients_per_round=2 "
    "train.momentum=0.9"
)


@pytest.fixture(scope="module")
def model_of(tmp_path_factory):
    """Return the global model of a run with these settings; every run is done once."""
    known = {}

    def find(settings):
        if settings not in known:
            known[settings] = run(tmp_path_factory.mktemp("run"), *settings.split()).driver.global_model()
        return known[settings]

    return find


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "where", "unlike"),
    [
        ("method=fedprox method.mu=0", "", "method=fedprox method.mu=1"),
        ("method=fedlc method.tau=0", "", "method=fedlc"),
        ("method=fedntd method.beta=0", "", "method=fedntd"),
        ("method=feddecorr method.beta=0", "", "method=feddecorr"),
        (
            "method=moon method.projection=false method.mu=0",
            "clients_per_round=6",
            "method=moon method.projection=false",
        ),
        ("method=fednova", "", ""),  # 33 or 34 digits each, so equal steps
        ("method=fedexp method.last_two=false method.most=1", UNLIKE, "method=fedexp method.last_two=false"),
        ("method=ima method.start=1", "", "method=ima method.start=0"),
        ("method=ima method.start=0 method.window=1 method.lr_decay=1", "", ""),
        ("method=centralized", ONE, ""),
        (f"{FEDGEN} method.alpha=0 method.beta=0", "", FEDGEN),
    ],
)
def test_a_method_is_fedavg_to_the_bit(model_of, settings, where, unlike):
    plain = model_of(f"method=fedavg {where}")
    assert same(model_of(f"{settings} {where}"), plain)
    assert not unlike or not same(model_of(f"{unlike} {where}"), plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ("method=daisychain method.average=1", "clients_per_round=6"),
        ("method=masterpull method.alpha=0", ""),
        ("method=fedmut method.radius=0", ""),
        ("method=heterofl method.widths=[1.0] method.masked=false", ""),
    ],
)
def test_a_method_is_fedavg_with_equal_weights(model_of, settings, where):
    plain, ours = (model_of(f"{one} {where}") for one in ("method=fedavg method.weighting=uniform", settings))
    for name in plain:
        np.testing.assert_allclose(ours[name], plain[name], rtol=0, atol=2e-6)


@pytest.mark.slow
def test_a_fedfan_that_never_opens_is_fedavg_with_an_average(model_of, tmp_path, monkeypatch):
    """So heavy a tail leaves the last mean alone."""
    monkeypatch.setattr("fedcross.strategies.fedfan.TAIL", 1e12)
    closed = run(tmp_path, "method=fedfan", "method.alpha=0", "method.push=0", "method.correct=false")
    plain = model_of("method=fedavg method.weighting=uniform")
    for name, array in closed.driver.global_model().items():
        np.testing.assert_allclose(array, plain[name], rtol=0, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "down", "up"),
    [
        *((f"method={name}", MODEL, MODEL) for name in ("fedavg", "fedprox", "fedexp", "ima", "solo", "centralized")),
        ("method=clusamp task.limit=198", MODEL, MODEL),
        ("method=fednova", MODEL, MODEL + 8),
        ("method=scaffold", 2 * MODEL, 2 * MODEL),
        # 10 prototypes of 64 float32 each way, and 10 int64 counts up
        ("method=fedproc method.projection=false", MODEL + 4 * 640, MODEL + 4 * 640 + 8 * 10),
        (f"method=moon {SMALL_HEAD}", 4 * (4160 + 520 + 36 + 50), 4 * (4160 + 520 + 36 + 50)),
        (FEDGEN, MODEL, MODEL + 10 * 8),
        (f"{FEDGEN} rounds=2", MODEL + GENERATOR + 10, MODEL + 10 * 8),
    ],
)
def test_the_bytes_that_travel_for_each_client(tmp_path, settings, down, up):
    report = run(tmp_path, "rounds=1", *settings.split()).driver.report
    assert (report.bytes_down, report.bytes_up) == (report.clients * down, report.clients * up)


NAMES = {"features.0.weight": (6, 4), "features.0.bias": (6,), "classifier.weight": (3, 6), "classifier.bias": (3,)}
DRAWN = {name: np.random.default_rng(1).normal(size=shape) for name, shape in NAMES.items()}
CONTROL = {"extras": {"control": DRAWN}}
PROTOTYPES = np.random.default_rng(1).normal(size=(3, 6))


@pytest.mark.parametrize(
    ("objective", "visits"),
    [
        (Proximal(FedProxParams(mu=0.3)), [{}, {}]),
        (Calibrated(FedLCParams()), [{}, {}]),
        (NotTrue(FedNTDParams(beta=0.7, tau=2.0)), [{}, {}]),
        (Decorrelated(FedDecorrParams(beta=0.2)), [{}, {}]),
        (Masked(HeteroFLParams()), [{}, {}]),
        (Centralized().objective(), [{}, {}]),
        (Contrast(MoonParams(mu=3.0)), [{}, {"state": DRAWN}]),
        (
            Controlled(ScaffoldParams()),
            [{"extras": {"control": DRAWN}}, {"extras": {"control": DRAWN}, "state": DRAWN}],
        ),
        (
            Prototypical(FedProcParams()),
            [
                {"round": 3, "rounds": 4, "extras": {"prototypes": {"mean": PROTOTYPES}}},
                {"extras": {"prototypes": {"mean": 0 * PROTOTYPES}}},
            ],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_clients_batch(objective, visits):
    check_batched(objective, visits)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        "method=scaffold",
        f"method=moon {SMALL_HEAD} clients_per_round=5",
        "method=fedcross method.k=5 method.independent_start=true",
        "method=clusamp method.sketch=64 partition=dirichlet method.distance=L2",
        "method=fedct method.base=moon method.mu=2 method.hidden=16 method.width=8 partition.clients=3",
        f"{FUSION} method.operator=multi method.momentum=keep",
    ],
)
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, settings):
    check_resume(tmp_path, *settings.split())
