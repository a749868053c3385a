"""The batched engine: whole rounds agree with the local engine, for every method whose client half allows it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedcross.client.app import app as client_app
from fedcross.client.app import together
from fedcross.conf.compose import CONF, join
from fedcross.conf.schema import load
from fedcross.core.errors import FederationError
from fedcross.engines.batched import BatchedGrid, Params
from fedcross.server.session import Session
from fedcross.strategies.round.registry import method_class
from tests.support import federation
from tests.support.federation import SMALL, Quiet

#: Composes many configurations or trains several federations.
pytestmark = pytest.mark.slow

METHODS = sorted(p.stem for p in (CONF / "method").glob("*.yaml"))
#: Largest difference of a weight after two rounds in float32, weights being of size 1.
SINGLE = 1e-4
SETTINGS = ("partition=dirichlet", "partition.min_size=5", "rounds=2", "train.batch=8")


def batched(folder: Path, *overrides: str, answer: Any = together) -> tuple[Session, dict[str, Any]]:
    settled = [*SMALL, *SETTINGS, *overrides, "engine=batched", f"output={folder}"]
    config = load(settled)
    grid = BatchedGrid(client_app, 6, {"overrides": join(settled)}, answer, Params())
    session = Session(config, grid, Quiet())
    return session, session.execute()


@pytest.mark.parametrize("method", METHODS)
def test_agrees_with_the_local_engine(tmp_path: Path, method: str, caplog: pytest.LogCaptureFixture) -> None:
    own = [f"method={method}", *(["model=fedfusion_mnist"] if method.startswith("fedfusion") else [])]
    alone = federation.run(tmp_path / "local", *SETTINGS, *own)
    many, result = batched(tmp_path / "batched", *own)
    assert result["rounds"] == 2
    kind = method_class(many.config.modules["method"])
    assert ("cannot be batched" in caplog.text) == (not kind.Objective.batchable)
    a, b = alone.method.state().arrays, many.method.state().arrays
    assert list(a) == list(b)
    for name in a:
        np.testing.assert_allclose(b[name], a[name], rtol=0, atol=SINGLE, err_msg=name)


def test_a_fault_is_an_error_reply_of_every_client(tmp_path: Path) -> None:
    def broken(messages: list[Message], *_: Any) -> list[Message]:
        raise RuntimeError("out of memory")

    with pytest.raises(FederationError, match="client_error 3"):  # nothing was trained, so the run fails
        batched(tmp_path, "rounds=1", answer=broken)
    entry = (tmp_path / "metrics.jsonl").read_text()
    assert '"dropped": 3' in entry
    assert '"client_error": 3' in entry
