"""A visit's parts alone: what a message asks for, what stays in memory, and which model it starts from."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from fedcross.client import request
from fedcross.client.flat_model import ModuleNet
from fedcross.conf.schema import Privacy, Train
from fedcross.core.errors import ProtocolError
from fedcross.strategies.objective import Outcome
from fedcross.tasks.models.dropout import Dropout
from tests.support.federation import run

CPU = torch.device("cpu")


@pytest.fixture
def arrivals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What :func:`request.receive` was given in a small run."""
    given: list[Any] = []

    receive = request.receive

    def noted(*one: Any) -> request.Request:
        given.append(one)
        return receive(*one)

    with monkeypatch.context() as patch:
        patch.setattr(request, "receive", noted)
        run(tmp_path, "rounds=1")
    return given


def test_another_base_than_the_servers_is_refused(arrivals: list[Any]) -> None:
    loaded, content = arrivals[0]
    asked = content.config_records["config"]
    loaded.base = "a" * 64
    for base in ("", "a" * 64):
        asked["base"] = base
        request.receive(loaded, content)
    asked["base"] = "b" * 64
    with pytest.raises(ProtocolError, match=r"SHA-256 is a{16}\.\.\. here and b{16}\.\.\. at the server"):
        request.receive(loaded, content)


def test_dropout_is_drawn_anew_for_every_round_and_client(arrivals: list[Any]) -> None:
    loaded, content = arrivals[0]
    module = copy.deepcopy(loaded.net.module)
    module.add_module("drop", Dropout(0.5))
    loaded.full = ModuleNet(module, CPU), loaded.full[1]
    asked = content.config_records["config"]
    states = []
    for number, client in ((1, 0), (2, 0), (1, 1), (1, 0)):
        asked["round"], asked["client"] = number, client
        arrived = request.receive(loaded, content)
        assert list(arrived.scratch) == ["drop.state"]
        states.append(int(arrived.scratch["drop.state"]))
    assert len(set(states)) == 3
    assert states[3] == states[0]


def test_a_visit_starts_from_the_model_of_its_message(arrivals: list[Any]) -> None:
    loaded, content = arrivals[0]
    sent = {name: array.numpy() for name, array in content.array_records["arrays"].items()}
    loaded.net.flat.fill_(7)
    arrived = request.receive(loaded, content)
    assert all((arrived.visit.params[name].numpy() == sent[name]).all() for name in arrived.visit.params)
    assert not any((array == 7).all() for array in arrived.received.values())


def test_a_message_may_ask_for_other_epochs_and_another_rate(arrivals: list[Any]) -> None:
    loaded, content = arrivals[0]
    usual = loaded.config.train.model_dump()
    content.config_records["config"].update({"epochs": 7, "lr": 0.25})
    arrived = request.receive(loaded, content)
    assert (arrived.settings.epochs, arrived.settings.lr, arrived.visit.lr) == (7, 0.25, 0.25)
    assert arrived.settings.batch == usual["batch"]
    assert loaded.config.train.model_dump() == usual  # the next message is as before


def test_the_learning_rate_decays_from_the_second_round_down_to_its_least() -> None:
    settings = Train(lr=0.5, lr_decay=0.5, lr_min=0.1, epochs=1, batch=1)
    assert [request.learning_rate(settings, number) for number in (1, 2, 3, 4)] == [0.5, 0.25, 0.125, 0.1]


@pytest.mark.parametrize(("keeps", "state"), [(True, None), (False, {})])
def test_a_state_and_its_declaration_must_agree(keeps: bool, state: Any) -> None:
    objective = SimpleNamespace(keeps=keeps, finish=lambda *_: SimpleNamespace(state=state))
    arrived = SimpleNamespace(visit=None, prepared=None, content=RecordDict())
    with pytest.raises(ProtocolError, match="finish and `keeps` disagree"):
        request.reply(SimpleNamespace(config=None, objective=objective), arrived, None)  # type: ignore[arg-type]


def test_a_private_client_sends_nothing_beside_its_model_whatever_is_asked() -> None:
    """Clients of FedExg can make prototypes, and a server that is not honest could ask for them."""
    objective = SimpleNamespace(keeps=False, finish=lambda *_: Outcome({"prototypes": {}}))
    loaded = SimpleNamespace(config=SimpleNamespace(privacy=Privacy(enabled=True)), objective=objective)
    arrived = SimpleNamespace(visit=None, prepared=None)
    with pytest.raises(ProtocolError, match="prototypes asked for, which no noise protects"):
        request.reply(loaded, arrived, None)  # type: ignore[arg-type]
