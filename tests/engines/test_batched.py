"""The batched engine: whole rounds agree with the local engine, for every method whose client half allows it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from torch import Tensor, nn

from fedcross.client.app import app as client_app
from fedcross.client.together import together
from fedcross.conf.compose import CONF, join
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.server.observers import Observer
from fedcross.server.session import Session
from fedcross.strategies.registry import method_class
from tests.support import federation

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow

METHODS = sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
#: Largest difference of a weight after two rounds in float32, weights being of size 1.
SINGLE = 1e-4
SETTINGS = ("partition=dirichlet", "partition.min_size=5", "rounds=2", "train.batch=8")


def batched(folder: Path, *overrides: str, answer: Any = together) -> tuple[Session, dict[str, Any]]:
    config, settled = federation.settle(folder, *SETTINGS, *overrides)
    grid = BatchedGrid(client_app, 6, {"overrides": join(settled)}, answer, Params())
    session = Session(config, grid, Observer())
    return session, session.execute()


@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_the_local_engine(tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    more = {"fedfusion": ["model=fedfusion_mnist"], "fedgen": ["method.generator_steps=3"]}
    own = [f"method={method}", *more.get(method.partition("_")[0], [])]
    many = compared(tmp_path, *own)
    kind = method_class(many.config.modules["method"])
    assert ("cannot be batched" in caplog.text) == (not kind.Objective.batchable)


@pytest.mark.parametrize(
    "own",
    ["model=fedfusion_mnist", "privacy.enabled=true privacy.randomness=seed privacy.noise=0.1 method=fedavg"],
    ids=["dropout", "privacy"],
)
def test_draws_of_a_client_are_those_of_the_local_engine(tmp_path: Path, own: str) -> None:
    compared(tmp_path, *own.split())


def compared(folder: Path, *own: str) -> Session:
    """Run both engines, compare everything that they keep, and return the batched run."""
    alone = federation.run(folder / "local", *SETTINGS, *own)
    many, result = batched(folder / "batched", *own)
    assert result["rounds"] == 2
    a, b = alone.driver.checkpoint().arrays, many.driver.checkpoint().arrays
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=0, atol=SINGLE, err_msg=name)
    return many


def test_two_runs_are_equal_to_the_bit_whatever_order_replies_are_asked_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of message ids has another order in every process, and a client's place decides how its sums round."""
    pull, orders = BatchedGrid.pull_messages, []

    def turned(grid: BatchedGrid, message_ids: Iterable[str]) -> Iterable[Message]:
        ids = sorted(message_ids, key=list(grid._queue).index, reverse=bool(orders))
        return pull(grid, ids)

    def seen(messages: list[Message], *others: Any) -> list[Message]:
        found[-1].append([message.metadata.dst_node_id for message in messages])
        return together(messages, *others)

    monkeypatch.setattr(BatchedGrid, "pull_messages", turned)
    own = ["model=own", "model.path=tests.engines.test_batched:Narrow"]
    found: list[list[list[int]]] = []
    models = []
    for name in ("one", "other"):
        found.append([])
        models.append(batched(tmp_path / name, *own, answer=seen)[0].driver.global_model())
        orders.append(name)
    assert found[0] == found[1] != [[], []]
    assert federation.same(*models)


def test_a_round_that_cannot_be_computed_together_is_trained_one_after_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(messages: list[Message], *_: Any) -> list[Message]:
        raise RuntimeError("no rule for this layer")

    alone = federation.run(tmp_path / "local", *SETTINGS)
    many, _ = batched(tmp_path / "batched", answer=broken)
    assert federation.same(alone.driver.global_model(), many.driver.global_model())
    assert (
        "A round of 3 clients is trained one client after another, as engine=local does: RuntimeError: no rule"
        in caplog.text
    )


class Narrow(nn.Module):
    """A network that cannot train on a batch of one example."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return scores (batch, classes)."""
        scores: Tensor = self.last(self.norm(self.first(x.flatten(1))).relu())
        return scores


def test_one_clients_error_loses_that_client_alone(tmp_path: Path) -> None:
    """Batches of one example at the end of some clients' data: as on the local engine."""
    own = ["model=own", "model.path=tests.engines.test_batched:Narrow", "train.batch=3", "rounds=2"]
    alone = federation.run(tmp_path / "local", *SETTINGS, *own)
    many, _ = batched(tmp_path / "batched", *own)
    lines = [json.loads(line) for line in (tmp_path / "batched" / "metrics.jsonl").read_text().splitlines()]
    plain = [json.loads(line) for line in (tmp_path / "local" / "metrics.jsonl").read_text().splitlines()]
    lost = [line["rejected"]["client_error"] for line in lines]
    assert lost == [line["rejected"]["client_error"] for line in plain]
    assert 0 < sum(lost) < 6
    for name, array in alone.driver.global_model().items():
        np.testing.assert_allclose(many.driver.global_model()[name], array, rtol=0, atol=SINGLE, err_msg=name)
